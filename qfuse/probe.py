"""Probe: each distinct op of a model is run once against its reference, as the model is fused, before it is trusted."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import mlx.core as mx

from . import backends
from .compare import compare, run, sample
from .graphs import Node

SAMPLES = ("production", "small")
"""The samples that give the dims of the call: one row, as most decode steps have, and two."""


class Probe:
    """Why kernels are not to be used, each distinct one checked at first sight and remembered.

    Ops are the same where their fields, optional inputs, weight shapes and dtypes are, so that a model of 40 layers is
    checked as fast as one of two. Inputs are small and random; weights are the layer's own, which costs no memory.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, str | None] = {}

    def __call__(
        self, backend: backends.Backend, node: Node, weights: backends.Weights, *, dtype: str = "bf16"
    ) -> str | None:
        """Why ``backend`` is not to run a node, or None: what it says itself, or how its result differs.

        weights: by spec name. dtype: of the activations. A launch or a compilation that fails is a reason too.
        """
        if reason := backend.refuses(node.op):
            return reason
        if not backend.probes:
            return None
        key = (backend.name, distinct(node, weights, dtype))
        if key not in self._known:
            self._known[key] = _fault(backend, node, weights, dtype)
        return self._known[key]


def distinct(node: Node, weights: backends.Weights, dtype: str) -> Hashable:
    """What tells the op of one node from that of another, whatever the values of their weights are."""
    return node.op, dtype, frozenset(node.inputs), tuple((array.shape, array.dtype) for array in weights.values())


def draw(node: Node, weights: backends.Weights, name: str, dtype: str) -> dict[str, Any]:
    """Random arguments for the op of a node, with the weights as they are and the optional inputs that it is given."""
    _, arguments = sample(node.op, name, dtype=dtype, weights=weights)
    return {arg: x for arg, x in arguments.items() if arg in node.inputs or arg in weights}


def _fault(backend: backends.Backend, node: Node, weights: backends.Weights, dtype: str) -> str | None:
    try:
        for name in SAMPLES:
            arguments = draw(node, weights, name, dtype)
            compare(node.op, run(node.op, arguments, backend), arguments)
    except AssertionError as error:
        return f"probe: {'; '.join(str(error).splitlines())}"
    except Exception as error:  # whatever a compiler or a driver raises, it is this op that cannot be used
        return f"probe: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    finally:
        mx.clear_cache()  # what the check took goes back, not only to MLX's own pool
    return None
