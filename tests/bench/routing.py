"""How often each way of routing chooses other experts than the same layer in f32, at the widths of Qwen3.5-35B-A3B.

    python tests/bench/routing.py

Random bf16 activations and weights, 8-bit in groups of 64, over several layers. Sums are exact and rounded where the
kernels of a GPU round: upstream's output projection, residual, norm and router logits to bf16; moe_5's h and h·w_norm;
moe_4's folded weights M1 and Wf, and nothing after. The gap is between the k-th and the next logit of the f32 layer, in
units of the logits' standard deviation: the largest among the sets that differ says how near a tie they all were.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from qfuse import models
from qfuse.compare import Exact
from qfuse.spec import QArray, Quant

H, Ka, E, K = 2048, 4096, 256, 8
EPS = 1e-6


def layer(seed: int) -> dict[str, QArray | mx.array]:
    """One layer's weights."""
    random = np.random.default_rng(seed)

    def linear(rows: int, columns: int, gain: float) -> QArray:
        w = mx.array(random.standard_normal((rows, columns), np.float32)) * (gain * columns**-0.5)
        return QArray(
            *[part.astype(mx.bfloat16) if i else part for i, part in enumerate(mx.quantize(w, 64, 8))], Quant()
        )

    w_norm = mx.array(1 + 0.1 * random.standard_normal(H), mx.bfloat16)
    w_o, w_router = linear(H, Ka, 1.0), linear(E, H, 4.0)
    named = {"o_proj_router.w_o": w_o, "o_proj_router.w_norm": w_norm, "norm_router.w_router": w_router}
    M1, Wf = models._fold(named)
    return {"w_o": w_o, "w_router": w_router, "w_norm": w_norm, "M1": M1, "Wf": Wf}


def logits(w: dict, a: mx.array, x: mx.array) -> dict[str, mx.array]:
    """The router's logits of each way, f32 [rows, E]."""
    w_o, w_router = (Exact(q.weight, q.scales, q.biases, q.quant) for q in (w["w_o"], w["w_router"]))
    f32 = mx.float32
    wide = x.astype(f32) + w_o.linear(a.astype(f32))
    rms = mx.rsqrt((wide**2).mean(axis=-1, keepdims=True) + EPS)
    h = x + w_o.linear(a)
    normed = mx.fast.rms_norm(h, w["w_norm"], EPS)
    r = mx.rsqrt((h.astype(f32) ** 2).mean(axis=-1, keepdims=True) + EPS)
    dot = a.astype(f32) @ w["M1"].astype(f32).T + x.astype(f32) @ w["Wf"].astype(f32).T
    return {
        "f32": w_router.linear(wide * rms * w["w_norm"].astype(f32)),
        "upstream": w_router.linear(normed).astype(f32),
        "moe_4": r * dot,
        "moe_5": r * w_router.linear((h * w["w_norm"]).astype(f32)),
    }


def chosen(values: mx.array) -> np.ndarray:
    return np.sort(np.array(mx.argsort(-values, axis=-1)[:, :K]), axis=-1)


def measure(layers: int = 4, rows: int = 1024) -> dict[str, dict[str, float]]:
    """By way: the share of rows whose set differs from f32's, and the largest gap among those."""
    differs: dict[str, list[np.ndarray]] = {}
    gaps = []
    for seed in range(layers):
        random = np.random.default_rng(100 + seed)
        a, x = (mx.array(random.standard_normal((rows, n), np.float32)).astype(mx.bfloat16) for n in (Ka, H))
        found = logits(layer(seed), a, x)
        ordered = np.sort(np.array(found["f32"]), axis=-1)
        gaps.append((ordered[:, -K] - ordered[:, -K - 1]) / ordered.std(axis=-1))
        sets = {name: chosen(values) for name, values in found.items()}
        for name in ("upstream", "moe_4", "moe_5"):
            differs.setdefault(name, []).append((sets[name] != sets["f32"]).any(axis=-1))
        differs.setdefault("moe_4 against upstream", []).append((sets["moe_4"] != sets["upstream"]).any(axis=-1))
    gap = np.concatenate(gaps)
    result = {}
    for name, parts in differs.items():
        which = np.concatenate(parts)
        result[name] = {"rows": len(which), "differ": float(which.mean()), "gap": float(gap[which].max(initial=0))}
    result["any"] = {"rows": len(gap), "differ": 1.0, "gap": float(np.median(gap))}
    return result


if __name__ == "__main__":
    for name, row in measure().items():
        print(f"{name:24} {row['differ']:8.4f} of {row['rows']} rows, gap at most {row['gap']:.4f}")
