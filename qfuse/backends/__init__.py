"""Backends: each turns one op into a callable. ``get("metal")`` finds one by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import mlx.core as mx

from ..op import Op
from ..spec import QArray

Weights = Mapping[str, mx.array | QArray]


class Backend(Protocol):
    """What a backend offers. ``lower`` is called once per node, its result once per token."""

    name: str
    prefill: bool
    """Whether a prompt's recurrence goes to its gdn_step: where upstream has no kernel and loops over time."""

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


def find(name: str) -> Backend:
    """The backend called ``name``, whether it can run here or not. Raises ValueError on an unknown name."""
    if name not in BACKENDS:
        raise ValueError(f"[backend] wants one of {', '.join(BACKENDS)}, got {name}")
    return BACKENDS[name]


def get(name: str) -> Backend:
    """The backend called ``name``. Raises ValueError on an unknown name, RuntimeError where it cannot run."""
    backend = find(name)
    if reason := backend.unavailable():
        raise RuntimeError(f"[backend] wants one that runs here, got {name}: {reason}")
    return backend


def default() -> tuple[str, ...]:
    """The backends tried when none are named: the reference, which is right everywhere.

    A GPU's is not chosen by itself: its texts agree with the references in the simulator, but no Metal device has run
    them yet, and nothing checks them when a model is loaded.
    """
    return ("reference",)
