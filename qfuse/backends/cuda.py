"""The cuda backend: the same Metal text, through mx.fast.cuda_kernel behind a shim that defines Metal's words.

One thread block a threadgroup, one warp a simdgroup. NVRTC compiles a text at a kernel's first launch in each process,
in about a second. MLX hashes what it is given at every launch, so that is a line which includes the text from a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import mlx.core as mx

from .kernel import KernelBackend, KernelText, tighten

ATTRIBUTES = {
    "thread_index_in_simdgroup": "const uint {} = threadIdx.x % 32;",
    "simdgroup_index_in_threadgroup": "const uint {} = threadIdx.x / 32;",
    "thread_position_in_threadgroup": "const uint3 {} = threadIdx;",
    "threadgroup_position_in_grid": "const uint3 {} = blockIdx;",
    "threadgroups_per_grid": "const uint3 {} = {{gridDim.x, 1, 1}};",
    "threads_per_grid": "const uint3 {} = {{gridDim.x * blockDim.x, 1, 1}};",
    "thread_position_in_grid": "const uint3 {} = {{blockIdx.x * blockDim.x + threadIdx.x, 0, 0}};",
}
"""What Metal gives a kernel as parameters, for a one-dimensional grid of whole threadgroups."""

BOUND = 256
"""Threads of which each can have all the registers that there are for one; with more, NVRTC must be told the number."""


class CudaBackend(KernelBackend):
    """NVIDIA GPUs, by MLX's CUDA build. Plans can be built without one; running them needs it."""

    name = "cuda"
    prefill = True

    def unavailable(self) -> str | None:
        return None if mx.cuda.is_available() else "MLX has no CUDA device on this machine"

    def compile(self, text: KernelText) -> Callable[..., Any]:
        header, source = given(text)
        kernel = mx.fast.cuda_kernel(
            name=text.name,
            input_names=list(text.inputs),
            output_names=list(text.outputs),
            source=source,
            header=header,
        )
        return cast(Callable[..., Any], kernel)


def given(text: KernelText) -> tuple[str, str]:
    """Header and source for MLX: each includes a file that holds what translate() gives.

    MLX looks for the names of shapes in the source itself, so those that the text has stand in a comment.
    """
    header, source = translate(text)
    shapes = [f"{name}_shape" for name in text.inputs if f"{name}_shape" in source]
    return _included(f"{text.name}.h", header), f"// {' '.join(shapes)}{_included(f'{text.name}.cu', source)}"


def _included(name: str, text: str) -> str:
    file = Path(_folder().name, name)
    file.write_text(text, "ascii")
    return f'\n#include "{file}"\n'


@cache
def _folder() -> TemporaryDirectory[str]:
    """A folder of this process's own; it goes when the process ends."""
    return TemporaryDirectory(prefix="qfuse-")


def translate(text: KernelText) -> tuple[str, str]:
    """Header and source for CUDA: the text as it is, with the shim's words and the launch's positions before it."""
    words = set(re.findall(r"\w+", text.header + text.source))
    positions = [line.format(name) for name, line in ATTRIBUTES.items() if name in words]
    words.update(re.findall(r"\w+", "".join(positions)))
    taken: list[str] = []
    for name, line in reversed(_shim()):  # a line may need words of those before it
        if name in words:
            taken.append(line)
            words.update(re.findall(r"\w+", line))
    bounds = []
    if text.threads > BOUND:  # MLX writes the kernel's signature after the header
        bounds = ["#undef __global__", f"#define __global__ __attribute__((global)) __launch_bounds__({text.threads})"]
    header = "".join(f"{line}\n" for line in [*reversed(taken), text.header, *bounds])
    return header, "\n".join([*positions, text.source])


@cache
def _shim() -> list[tuple[str, str]]:
    """Each line of the shim by the word that it defines."""
    lines = Path(__file__).with_name("cuda_shim.h").read_text("ascii").splitlines()
    found = []
    for line in lines[1:]:
        match = re.search(r"(?:#define|using|enum class) (\w+)|(\w+)\(", line)
        assert match is not None, line
        found.append((match[1] or match[2], tighten(line)))
    return found
