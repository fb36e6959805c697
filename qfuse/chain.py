"""Chain: a decode step of all layers as one plan, so that what MLX compiles reaches across their borders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from . import graphs, models
from .models import RefusedError
from .plan import Plan

if TYPE_CHECKING:
    from .fuse import FusedLayer


class Chain:
    """The layers of a fused text model as one plan, which is built at the first step of its kind.

    calls: how many steps ran as one, under ``"fused"``, and how many upstream's loop over the layers took, under the
    reason.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._plans: dict[Hashable, Plan] = {}

    def __call__(
        self, text: nn.Module, tokens: mx.array, cache: Sequence[Any] | None, embeddings: mx.array | None
    ) -> mx.array | None:
        """What the text model gives for one token a row, [B, 1, H], or None where upstream's loop has to run."""
        x = models.embedded(text, tokens, embeddings)
        try:
            out = self._step(text, x, cache)
        except RefusedError as error:
            self.calls[str(error)] += 1
            return None
        except BaseException as error:
            self.calls[raised(error)] += 1
            raise
        self.calls["fused"] += 1
        return models.normed(text, out)

    def _step(self, text: nn.Module, x: mx.array, cache: Sequence[Any] | None) -> mx.array:
        layers = [_whole(layer) for layer in text.pipeline_layers]
        calls = [(fused, *call) for fused, call in zip(layers, models.layer_calls(text, x, cache), strict=True)]
        kinds = []
        for fused, layer, mask, held in calls:
            if reason := fused.refuses(layer, x, held) or fused.adapter.refuses(x, mask, held):
                raise RefusedError(reason)
            models.whole_steps(held)
            kinds.append((mask is not None, fused.adapter.long(held)))
        plan = self._plans.get(key := (x.dtype, *kinds))
        if plan is None:
            plan = self._plans[key] = _joined(layers, x.dtype, kinds)
        given: list[Any] = [x.reshape(x.shape[0], -1)]
        for fused, _, mask, held in calls:
            given += fused.adapter.inputs(x, mask, held)[1:]
        out, *rest = plan.run(*given)
        states = iter(rest)
        for fused, _, _, held in calls:
            fused.adapter.keep(held, *islice(states, fused.adapter.states))
            fused.calls["fused"] += 1
        return out.reshape(x.shape)


def raised(error: BaseException) -> str:
    """What a report calls a step that did not end."""
    return f"raised {type(error).__name__}: {error}"[:200].removesuffix(": ")


def _whole(layer: nn.Module) -> FusedLayer:
    # A wrapper that hands out its inner layer's attributes does work of its own, so only what is the layer's counts.
    fused = vars(layer).get("_qfuse")
    if fused is None or fused.adapter.part != "layer":
        raise RefusedError("a layer is not fused as a whole")
    return fused


def _joined(layers: Sequence[FusedLayer], dtype: mx.Dtype, kinds: Sequence[tuple[bool, bool]]) -> Plan:
    graph = graphs.chain([fused.graph(dtype, *kind) for fused, kind in zip(layers, kinds, strict=True)])
    weights = {f"{i}.{name}": x for i, fused in enumerate(layers) for name, x in fused.adapter.weights.items()}
    return layers[0].fusion.build(graph, weights, dtype, segments=True)
