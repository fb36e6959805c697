"""The sim backend: the text as it is, compiled for the CPU and run by a simulator of Metal that checks what it does."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from .kernel import KernelBackend, KernelText


class SimBackend(KernelBackend):
    """Any machine with a C++ compiler. For tests: it checks bounds, races and barriers, and is slow."""

    name = "sim"
    lines = True

    def unavailable(self) -> str | None:
        try:
            sim = import_module("qfuse.backends.sim")
        except ImportError:
            return "the simulator is not part of this version"
        reason = getattr(sim, "unavailable", lambda: None)()
        return None if reason is None else str(reason)

    def compile(self, text: KernelText) -> Callable[..., Any]:
        kernel: Callable[..., Any] = import_module("qfuse.backends.sim").Kernel(
            name=text.name,
            input_names=list(text.inputs),
            output_names=list(text.outputs),
            source=text.source,
            header=text.header,
        )
        return kernel
