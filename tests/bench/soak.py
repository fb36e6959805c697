"""Many steps of mlx-lm's BatchGenerator with rows that join and leave at random, without qfuse and with it.

    python tests/bench/soak.py [STEPS]

The same seed gives every run the same rows at the same steps, so tokens must be equal row by row. Sampled on the way:
MLX's active memory, the process's resident memory where /proc tells it, and how many primitives wait unevaluated behind
the caches, which would grow if a step kept what went before it.
"""

from __future__ import annotations

import io
import random
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator

from qfuse import fuse, models, tiny

ROWS = 8
RUNS = {"mlx-lm": None, "qfuse": {}, "qfuse, segments": {"segments": True}}


class Sample(NamedTuple):
    """Bytes, and primitives, after so many steps."""

    step: int
    rows: int
    active: int
    resident: int
    waiting: int


def soak(
    model: nn.Module, steps: int, every: int, seed: int = 0, longest: int = 120
) -> tuple[dict[int, list[int]], list[Sample]]:
    """Tokens by row, and a sample after every so many steps and at the end, when no row is left.

    longest: of a row, in tokens; some prompts are twice that.
    """
    draw, vocabulary = random.Random(seed), models.vocabulary(model)
    batch = BatchGenerator(model, completion_batch_size=ROWS, prefill_batch_size=3)
    tokens: dict[int, list[int]] = {}
    alive: set[int] = set()
    samples = []

    def step() -> None:
        for each in batch.next()[1]:
            tokens[each.uid].append(each.token)
            if each.finish_reason:
                alive.discard(each.uid)

    for number in range(1, steps + 1):
        if len(alive) < ROWS and draw.random() < 0.2:
            length = draw.randint(1, 2 * longest if draw.random() < 0.1 else longest // 4)
            (uid,) = batch.insert([[draw.randrange(vocabulary) for _ in range(length)]], [draw.randint(1, longest)])
            tokens[uid] = []
            alive.add(uid)
        if len(alive) > 1 and draw.random() < 0.02:
            gone = draw.choice(sorted(alive))
            batch.remove([gone])
            alive.discard(gone)
        step()
        if number % every == 0:
            samples.append(_sample(number, len(alive), batch))
    while alive:
        step()
    samples.append(_sample(steps, 0, batch))
    batch.close()
    return tokens, samples


def _sample(step: int, rows: int, batch: BatchGenerator) -> Sample:
    states = [
        x for c in batch._generation_batch.prompt_cache for _, x in tree_flatten(c.state) if isinstance(x, mx.array)
    ]
    graph = io.StringIO()
    mx.export_to_dot(graph, *states)
    mx.synchronize()
    mx.clear_cache()
    statm = Path("/proc/self/statm")
    resident = int(statm.read_text().split()[1]) * 4096 if statm.exists() else 0
    return Sample(step, rows, mx.get_active_memory(), resident, graph.getvalue().count("shape=rectangle"))


def model() -> nn.Module:
    """Random weights, in f32: no token is as good as certain, and a wrong state is seen."""
    net = models.new_model(tiny.CONFIG)
    tiny.randomise(net, 0)
    tiny.settle(net, bits=8, group=64, dtype=mx.float32)
    return net


def main(steps: int) -> None:
    print(f"mlx {metadata.version('mlx')}, mlx-lm {metadata.version('mlx-lm')}, {steps} steps, up to {ROWS} rows")
    net, wanted = model(), {}
    for name, options in RUNS.items():
        fusion = None if options is None else fuse(net, **options)
        start = time.perf_counter()
        tokens, samples = soak(net, steps, max(1, steps // 8))
        spent = time.perf_counter() - start
        wanted = wanted or tokens
        rows, count = len(tokens), sum(map(len, tokens.values()))
        same = sum(tokens[uid] == wanted[uid] for uid in wanted)
        print(f"\n{name}: {rows} rows, {count} tokens, {spent:.0f} s; {same} rows of {len(wanted)} equal to mlx-lm's")
        for each in samples:
            print(f"  step {each.step:6}  rows {each.rows}  active {each.active / 1e6:7.2f} MB  "
                  f"resident {each.resident / 1e6:7.1f} MB  waiting {each.waiting}")  # fmt: skip
        if fusion is not None:
            print(fusion.report())
            fusion.remove()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
