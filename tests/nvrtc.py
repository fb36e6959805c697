"""MLX's CUDA program around a kernel's text, compiled by NVRTC with MLX's own options. No GPU is needed.

As mlx/backend/cuda/custom_kernel.cpp and jit_module.cpp of MLX 0.32.4 build it; of MLX's own header, which is inside
its CUDA library, only what a text can use stands in.
"""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import mlx.core as mx
import pytest

from qfuse.backends.cuda import given, translate
from qfuse.backends.kernel import KernelText

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: pip install '.[nvrtc]'")
cu13 = Path(pytest.importorskip("nvidia", reason="NVRTC's headers are not installed").__path__[0], "cu13", "include")

TYPES = {
    mx.float32: "float",
    mx.bfloat16: "__nv_bfloat16",
    mx.float16: "__half",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
    mx.bool_: "bool",
}
UTILS = """\
#pragma once
#include <cuda/std/array>
#include <cuda/std/cmath>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
namespace mlx::core::cu {
using Shape = cuda::std::array<int32_t, 10>;
}
"""
START = '#include "mlx/backend/cuda/device/utils.cuh"\n#include <cooperative_groups.h>\n'


@attrs.frozen
class Resources:
    """What ptxas says of one kernel: registers a thread, bytes of its arrays outside them and of spills, and bytes of
    shared memory a block."""

    registers: int
    stack: int
    spills: int
    shared: int


def function(text: KernelText, inputs: list[mx.array], outputs: list[mx.Dtype], *, inline: bool = True) -> str:
    """Header and kernel as MLX writes them, without the includes at the start. inline: with the text in them."""
    header, source = translate(text) if inline else given(text)
    parameters = []
    for name, x in zip(text.inputs, inputs, strict=True):
        parameters.append(f"const {TYPES[x.dtype]}* {name}")
        if f"{name}_shape" in source:
            parameters.append(f"const __grid_constant__ Shape {name}_shape")
    parameters += [f"{TYPES[dtype]}* {name}" for name, dtype in zip(text.outputs, outputs, strict=True)]
    return (
        f"{header}namespace mlx::core::cu {{\nnamespace cg = cooperative_groups;\n"
        f"__global__ void custom_kernel_{text.name}({', '.join(parameters)}) {{\n{source}\n}}\n}}\n"
    )


def compile_together(functions: list[str], arch: str) -> dict[str, Resources]:
    """Compile kernels in one program, each in a namespace of its own, and return what each takes by name."""
    apart = [f"namespace unit_{i} {{\nusing ::mlx::core::cu::Shape;\n{f}}}\n" for i, f in enumerate(functions)]
    return compile_program(START + "".join(apart), arch)


def compile_program(program: str, arch: str) -> dict[str, Resources]:
    """Compile; what each kernel takes by name. Raises AssertionError with the compiler's first error."""
    name = b"mlx/backend/cuda/device/utils.cuh"
    _, handle = nvrtc.nvrtcCreateProgram(program.encode(), b"kernel.cu", 1, [UTILS.encode()], [name])
    options = [
        "--device-as-default-execution-space",
        f"--gpu-architecture={arch}",
        f"--include-path={cu13 / 'cccl'}",
        f"--include-path={cu13}",
        "--ptxas-options=-v",
    ]
    (status,) = nvrtc.nvrtcCompileProgram(handle, len(options), [option.encode() for option in options])
    log = b" " * nvrtc.nvrtcGetProgramLogSize(handle)[1]
    nvrtc.nvrtcGetProgramLog(handle, log)
    nvrtc.nvrtcDestroyProgram(handle)
    said = log.decode().strip("\0 ")
    assert int(status) == 0, next((line for line in said.splitlines() if "error" in line), said)
    found = {}
    for part in said.split("Compiling entry function '")[1:]:
        kernel = re.search(r"custom_kernel_(\w+?_[0-9a-f]{8})", part)
        registers, shared = re.search(r"Used (\d+) registers", part), re.search(r"(\d+) bytes smem", part)
        stack = re.search(r"(\d+) bytes stack frame", part)
        spills = sum(map(int, re.findall(r"(\d+) bytes spill", part)))
        assert kernel is not None, part
        assert registers is not None, part
        assert stack is not None, part
        found[kernel[1]] = Resources(int(registers[1]), int(stack[1]), spills, int(shared[1]) if shared else 0)
    return found
