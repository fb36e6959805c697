"""A pytest plugin for mlx-lm's own tests: models of the families that are fused run fused, and no model is downloaded.

Of the environment: QFUSE_UPSTREAM_MODEL is the folder that stands for every checkpoint of the hub. With
QFUSE_UPSTREAM_REPORT models are fused, and that file says at the end what ran; without, they are upstream's own.
QFUSE_UPSTREAM_OPTIONS has more arguments for fuse(), as JSON.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from functools import wraps
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_5, qwen3_next

from qfuse import Fusion, fuse

REPORT = os.environ.get("QFUSE_UPSTREAM_REPORT")
OPTIONS: dict[str, Any] = json.loads(os.environ.get("QFUSE_UPSTREAM_OPTIONS", "{}"))
calls: Counter[str] = Counter()


def found_here(path_or_repo: str, *args: Any, **kwargs: Any) -> Path:
    """What stands in for mlx-lm's download."""
    path = Path(path_or_repo)
    return path if path.exists() else Path(os.environ["QFUSE_UPSTREAM_MODEL"])


class Fused:
    """A model's fusion, made anew whenever the model has other arrays than those it was made from."""

    def __init__(self) -> None:
        self.fusion: Fusion | None = None
        self.arrays: list[mx.array] = []

    def renew(self, model: Any) -> None:
        arrays = [array for _, array in tree_flatten(model.parameters())]
        if len(arrays) == len(self.arrays) and all(a is b for a, b in zip(arrays, self.arrays, strict=True)):
            return
        self.close()
        model.eval()  # the tests that make a model leave it in training mode, which is not fused
        self.fusion, self.arrays = fuse(model, **OPTIONS), arrays

    def close(self) -> None:
        if self.fusion is None:
            return
        report = self.fusion.report()
        for layer in report.layers:
            calls["layers"] += 1
            calls.update({f"refused: {layer.reason}": 1} if layer.reason else {})
            calls.update(layer.calls)
        calls.update({f"segments across layers: {name}": n for name, n in report.chain.items()})
        self.fusion.remove()
        self.fusion = None


made: list[tuple[Any, Fused]] = []


def fuse_at_call(cls: type) -> None:
    """Have every model of this class, and of those that inherit its ``__call__``, fused when it is called."""
    own = cls.__call__

    @wraps(own)  # mlx-lm reads its signature
    def __call__(self: Any, *args: Any, **kwargs: Any) -> mx.array:
        fused = next((fused for model, fused in made if model is self), None)
        if fused is None:
            fused = Fused()
            made.append((self, fused))
        fused.renew(self)
        return own(self, *args, **kwargs)

    cls.__call__ = __call__


def without_a_mask_for_no_layer() -> None:
    """Let upstream's text model have attention alone: it asks its first layer's cache for the other kind's mask."""
    own = qwen3_5.Qwen3_5TextModel.__init__

    @wraps(own)
    def __init__(self: Any, args: Any) -> None:
        own(self, args)
        if not any(layer.is_linear for layer in self.layers):
            self.ssm_idx = None

    qwen3_5.Qwen3_5TextModel.__init__ = __init__


def pytest_configure() -> None:
    mlx_lm.utils._download = found_here
    without_a_mask_for_no_layer()
    if REPORT:
        for module in (qwen3_5, qwen3_next):
            fuse_at_call(module.Model)


def pytest_runtest_teardown(item: Any, nextitem: Any) -> None:
    # A test that fails may leave its own caches behind for the others of its class.
    if model := getattr(item.cls, "model", None):
        vars(model).pop("make_cache", None)
    # Models live as long as their test class; those of a test that is over are few and narrow.
    if nextitem is None and REPORT:
        for _, fused in made:
            fused.close()
        Path(REPORT).write_text(json.dumps(calls))
