"""Models without weights: arrays of any shape that hold one element in memory, for what only asks for shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from .models import conversion, new_model


def zeros(shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """Zeros of this shape, all of them one element in memory."""
    return mx.broadcast_to(mx.zeros((), dtype), tuple(shape))


def model_of(config: Mapping[str, Any], *, bits: int, group: int, dtype: mx.Dtype) -> nn.Module:
    """A model of any size with hollow weights, cast and quantised as mlx-lm's convert does it."""
    model = new_model(config)
    keep, quantised = conversion(model)
    parameters = tree_flatten(model.parameters())
    model.update(tree_unflatten([(name, x.astype(dtype) if keep(name) else x) for name, x in parameters]))
    nn.quantize(model, group, bits, class_predicate=quantised)
    empty(model)
    model.eval()
    return model


def empty(model: nn.Module) -> None:
    """Put hollow arrays in place of a model's weights; nothing that was not read from disk is read."""
    model.update(tree_map(lambda x: zeros(x.shape, x.dtype), model.parameters()))
    mx.eval(model.parameters())
