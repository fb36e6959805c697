"""The metal backend: the text as it is, through mx.fast.metal_kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx

from .kernel import KernelBackend, KernelText


class MetalBackend(KernelBackend):
    """Apple GPUs. Plans can be built and traced without one; running them needs it."""

    name = "metal"

    def unavailable(self) -> str | None:
        return None if mx.metal.is_available() else "MLX has no Metal device on this machine"

    def compile(self, text: KernelText) -> Callable[..., Any]:
        kernel = mx.fast.metal_kernel(
            name=text.name,
            input_names=list(text.inputs),
            output_names=list(text.outputs),
            source=text.source,
            header=text.header,
        )
        return cast(Callable[..., Any], kernel)
