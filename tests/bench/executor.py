"""Python's cost of building one token's graph: vanilla mlx-lm against the executor with its ops replaced by stubs.

    python tests/bench/executor.py

Vanilla and fused steps alternate in one process; nothing is evaluated inside the clock. A stub returns arrays made
beforehand, so what is left is the executor's own work: adapters, slots, caches. Medians, and the ratio pair by pair.
"""

from __future__ import annotations

import statistics
import time

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from qfuse import fuse, tiny


def stub_out(fusion) -> None:
    """Replace every kernel op's call by one that returns the arrays of an earlier step."""
    for layer in fusion.layers.values():
        for plan in layer._qfuse._plans.values():
            hot = []
            for (call, reads, writes), step in zip(plan._hot, plan.steps, strict=True):
                hot.append((call if step.node.op.name == "kv_update" else _remember(call), reads, writes))
            plan._hot = tuple(hot)


def _remember(call):
    kept = []

    def stub(*inputs):
        if not kept:
            kept.append(call(*inputs))
            mx.eval(kept)
        return kept[0]

    return stub


def build_time(model, cache) -> float:
    """Seconds to build one token's graph."""
    token = mx.array([[65]])
    mx.eval([c.state for c in cache])
    start = time.perf_counter()
    logits = model(token, cache=cache)
    spent = time.perf_counter() - start
    mx.eval(logits)
    return spent


def measure(rounds: int = 60) -> dict[str, float]:
    """Medians in microseconds per token, and the median ratio of fused to vanilla."""
    vanilla, fused = tiny.tiny_model(), tiny.tiny_model()
    fusion = fuse(fused, backends="reference", strict=True)
    caches = []
    for model in (vanilla, fused):
        cache = make_prompt_cache(model)
        model(mx.array([[65, 66, 67]]), cache=cache)
        caches.append(cache)
    stub_out(fusion)
    pairs = []
    for _ in range(rounds + 5):
        pairs.append((build_time(vanilla, caches[0]), build_time(fused, caches[1])))
    pairs = pairs[5:]
    return {
        "vanilla_us": 1e6 * statistics.median(a for a, _ in pairs),
        "executor_us": 1e6 * statistics.median(b for _, b in pairs),
        "ratio": statistics.median(b / a for a, b in pairs),
    }


if __name__ == "__main__":
    import platform

    result = measure()
    print(f"mlx {mx.__version__}, {platform.machine()}, Python {platform.python_version()}, tiny model, 4 layers")
    print(f"vanilla mlx-lm  {result['vanilla_us']:8.0f} µs a token")
    print(f"executor alone  {result['executor_us']:8.0f} µs a token")
    print(f"ratio           {result['ratio']:8.2f}")
