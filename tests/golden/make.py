"""Golden logits of transformers' Qwen3.5-MoE on torch, f32, for tests/test_golden.py.

    pip install torch transformers && python tests/golden/make.py

Nothing of transformers is changed: both formulas agree, each eps included. Writes tests/golden/transformers.npz: the
logits of every token of the prompt and of each decode step, the versions, and a digest of the weights.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from checkpoint import GOLDEN, PROMPT, STEPS, TEXT, digest, tokens, weights, write

NEAR_TIE = 1e-4


def run(folder: Path) -> tuple[np.ndarray, float]:
    """Logits [PROMPT + STEPS, V] f32, and the least distance of the last expert chosen to the first left out.

    The distance is one of router logits; an f32 rounding is near 1e-6.
    """
    model, found = transformers.Qwen3_5MoeForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if any(found.values()):
        raise SystemExit(f"[golden] wants every weight loaded and no other, got {found}")
    model.eval()
    ids, k = torch.from_numpy(tokens()), TEXT["num_experts_per_tok"]
    cache, logits, gap = None, [], float("inf")
    with torch.no_grad():
        for part in (ids[:PROMPT], *ids[PROMPT:].split(1)):
            out = model(part[None], cache=cache, use_cache=True, output_router_logits=True)
            cache = out.cache
            logits.append(out.logits[0].numpy())
            best = torch.cat(out.router_logits).topk(k + 1).values
            gap = min(gap, (best[:, k - 1] - best[:, k]).min().item())
    return np.concatenate(logits), gap


def main() -> None:
    drawn = weights()
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work, "checkpoint")
        write(folder, drawn)
        logits, gap = run(folder)
    if gap < NEAR_TIE:
        raise SystemExit(f"[golden] wants experts that are {NEAR_TIE} apart, got {gap:.1e}: take another seed")
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}, numpy {np.__version__}"
    np.savez(GOLDEN, logits=logits, versions=versions, weights=digest(drawn))
    print(f"{versions}: {PROMPT} tokens and {STEPS} steps, largest {np.abs(logits).max():.3f}, experts {gap:.1e} apart")


if __name__ == "__main__":
    main()
