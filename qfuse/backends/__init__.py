"""Backends: each turns one op into a callable. ``get("metal")`` finds one by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import mlx.core as mx

from ..op import Op
from ..spec import QArray

Weights = Mapping[str, mx.array | QArray]


class Backend(Protocol):
    """What a backend offers. ``lower`` is called once per node, its result once per token.

    probes: whether fuse() checks each distinct op on it before it is used, as it does where kernels are compiled.
    prefill: whether a prompt's recurrence goes to its gdn_step, where upstream has no kernel and loops over time, and
        its experts to qfuse.models.TiledExperts, where MLX multiplies each row by itself.
    """

    name: str
    probes: bool
    prefill: bool

    def unavailable(self) -> str | None:
        """Why nothing can run here, or None."""

    def refuses(self, op: Op) -> str | None:
        """Why this op cannot be lowered, or None."""

    def lower(self, op: Op, weights: Weights) -> Callable[..., Any]:
        """A callable of the op's inputs in spec order (an absent optional one is None), with its weights bound.

        It returns the output, or a tuple of outputs in spec order.
        """


from . import cuda, metal, reference, sim  # noqa: E402 (the protocol above is what a backend module imports)

BACKENDS: dict[str, Backend] = {
    "reference": reference.ReferenceBackend(),
    "metal": metal.MetalBackend(),
    "cuda": cuda.CudaBackend(),
    "sim": sim.SimBackend(),
}


def find(name: str | Backend) -> Backend:
    """The backend called ``name``, whether it can run here or not; a backend is itself.

    Raises ValueError on an unknown name.
    """
    if not isinstance(name, str):
        return name
    if name not in BACKENDS:
        raise ValueError(f"[backend] wants one of {', '.join(BACKENDS)}, got {name}")
    return BACKENDS[name]


def get(name: str | Backend, *, full: bool = False) -> Backend:
    """The backend called ``name``, or a backend as it is. full: the one of that name that looks for every fault it can.

    Raises ValueError on an unknown name or one without full checks, RuntimeError where it cannot run.
    """
    backend = find(name)
    if reason := backend.unavailable():
        raise RuntimeError(f"[backend] wants one that runs here, got {backend.name}: {reason}")
    if full and not isinstance(backend, sim.SimBackend):
        raise ValueError(f"[backend] wants sim for full checks, got {backend.name}, which has none")
    return sim.SimBackend(full=True) if full else backend


def default() -> tuple[str, ...]:
    """The backends that fuse() tries when none are named: metal or cuda where there is a device, else the reference.

    No Metal device has run the texts yet. That they are chosen is safe because fuse() probes each distinct op against
    its reference when a model is loaded, and one that fails is left to the reference.
    """
    return next(((name,) for name in ("metal", "cuda") if BACKENDS[name].unavailable() is None), ("reference",))
