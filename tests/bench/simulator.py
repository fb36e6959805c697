"""How fast the simulator runs a GEMV of 2048 columns and 1024 rows, in GPU threads a second.

    python tests/bench/simulator.py

The kernel is o_proj_router at 8 bits, B = 1. Each call is timed from arrays to arrays: a process is started, its memory
filled and read back. Medians.
"""

from __future__ import annotations

import statistics
import time

from qfuse import REGISTRY
from qfuse.backends.kernel import Lowered
from qfuse.backends.sim import SimBackend
from qfuse.testing import sample


def measure(*, full: bool = False, rounds: int = 20) -> float:
    """Threads a second."""
    op, arguments = sample(REGISTRY["o_proj_router"], B=1, H=1024, Ka=2048, E=32)
    weights = {name: x for name, x in arguments.items() if name in op.weights()}
    call = Lowered(SimBackend(full=full), op, weights, op.schedule("sim"))
    inputs = [arguments.get(name) for name in op.inputs()]
    threads = call.prepare(*inputs).grid[0]
    call(*inputs)
    spent = []
    for _ in range(rounds):
        start = time.perf_counter()
        call(*inputs)
        spent.append(time.perf_counter() - start)
    return threads / statistics.median(spent)


if __name__ == "__main__":
    for full in (False, True):
        print(f"{'full' if full else 'fast'}: {measure(full=full) / 1e6:.2f} million threads a second")
