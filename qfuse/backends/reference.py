"""The reference backend: every op by its own pure-MLX reference. What the other backends are checked against."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..op import Op
from . import Weights


class ReferenceBackend:
    """Runs anywhere MLX does; correct rather than fast."""

    name = "reference"
    probes = False
    prefill = False

    def unavailable(self) -> str | None:
        return None

    def refuses(self, op: Op) -> str | None:  # noqa: ARG002 (a reference takes whatever its op takes)
        return None

    def lower(self, op: Op, weights: Weights) -> Callable[..., Any]:
        return partial(op.reference, **weights) if weights else op.reference
