"""An estimate of the time of a token, from its bytes and dispatches and two constants of a device.

    seconds = bytes / memory + dispatches · dispatch

It knows nothing of how well a kernel uses the memory, of what overlaps, or of the time that Python takes.
docs/graphs.md holds it against what was measured.
"""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class Device:
    """Two constants and where they are from.

    memory: bytes per second. dispatch: seconds that one small GPU launch adds to a chain of them, through MLX.
    gpu: metal or cuda, which decides what MLX launches.
    """

    title: str
    gpu: str
    memory: float
    memory_source: str
    dispatch: float
    dispatch_source: str

    def seconds(self, dispatches: int, bytes: int) -> float:  # noqa: A002 (what it is)
        """The estimate."""
        return bytes / self.memory + dispatches * self.dispatch

    def sources(self) -> str:
        """Both constants with their sources, in one sentence."""
        return (
            f"{self.title}: {self.memory / 1e9:,.0f} GB/s ({self.memory_source}), "
            f"{self.dispatch * 1e6:g} µs a dispatch ({self.dispatch_source})"
        )


@attrs.frozen(kw_only=True)
class Measured:
    """A decode step of vanilla mlx-lm that was timed: milliseconds, lowest and highest of several runs.

    bits: of the weights, the router's being 8. rows: decoded together. keys: in the kv caches.
    """

    device: str
    config: str
    bits: int
    rows: int
    keys: int
    low: float
    high: float


_CHAIN = (
    "8.8 ms for a chain of 3,200 small dependent kernels on an M3 Ultra, MLX 0.32.2: "
    "https://github.com/ml-explore/mlx/issues/4521"
)
_M4 = "Apple: https://www.apple.com/newsroom/2024/10/apple-introduces-m4-pro-and-m4-max/"

DEVICES: dict[str, Device] = {
    "h200": Device(
        title="NVIDIA H200",
        gpu="cuda",
        memory=4.3e12,
        memory_source="measured copy speed; the data sheet says 4,800",
        dispatch=8.6e-6,
        dispatch_source="measured: a tiny kernel with two inputs, not compiled, MLX 0.32.4 on CUDA 13",
    ),
    "m3-ultra": Device(
        title="Apple M3 Ultra",
        gpu="metal",
        memory=819e9,
        memory_source="Mac Studio's specification: https://support.apple.com/en-us/122211",
        dispatch=2.75e-6,
        dispatch_source=_CHAIN,
    ),
    "m4-max": Device(
        title="Apple M4 Max",
        gpu="metal",
        memory=546e9,
        memory_source=_M4,
        dispatch=2.75e-6,
        dispatch_source=f"not measured on this chip; {_CHAIN}",
    ),
    "m4-pro": Device(
        title="Apple M4 Pro",
        gpu="metal",
        memory=273e9,
        memory_source=_M4,
        dispatch=2.75e-6,
        dispatch_source=f"not measured on this chip; {_CHAIN}",
    ),
}


SETTING = (
    "one NVIDIA H200, MLX 0.32.4 on CUDA 13, mlx-lm 0.32.2, vanilla, random weights at full size, wall-clock of a step"
)
_STEPS = ((8, 1, 64, 14.2, 17.5), (8, 1, 4096, 23.1, 23.1), (8, 1, 32768, 24.5, 24.5), (8, 4, 64, 20.9, 20.9),
          (8, 8, 64, 21.4, 21.4), (4, 1, 64, 22.0, 26.0), (4, 4, 64, 34.0, 34.0), (4, 8, 64, 36.0, 36.0))  # fmt: skip
MEASURED = tuple(
    Measured(device="h200", config="qwen3.5-35b-a3b", bits=bits, rows=rows, keys=keys, low=low, high=high)
    for bits, rows, keys, low, high in _STEPS
)
"""Steps timed in SETTING."""

EMPTY = (380, 6.6)
"""Launches of this design's kernels with their real inputs, up to 18 arrays, and empty bodies; milliseconds for all,
not compiled, in the same setting. Twice what the constant says, which is of a kernel with two inputs."""

COMMITTED = {0: 222, 1: 126, 2: 44}
"""Kernels by mode in the graphs that MLX committed there for a step of 3 GDN and 1 GQA layers of 35B-A3B in 8 bit, with
embedding and output, 3 keys before it; see qfuse.committed."""


def find(name: str) -> Device:
    """The device called ``name``. Raises ValueError on an unknown name."""
    if name not in DEVICES:
        raise ValueError(f"[device] wants one of {', '.join(DEVICES)}, got {name}")
    return DEVICES[name]
