"""The sim backend: the very Metal text, compiled as C++ behind a shim and run on the CPU, one fiber a thread.

What it sees: wrong results, outputs never written (they start as NaN), reads and writes up to 1 MiB past the end of a
buffer, threads that do not all reach a barrier or a SIMD operation, crashes and endless loops. It does not look for
races or uninitialised reads, and does not check address spaces. x86-64 Linux or Mac, with a C++ compiler.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import platformdirs

from .kernel import KernelBackend, KernelText

TYPES = {
    mx.float32: "float",
    mx.bfloat16: "bfloat16_t",
    mx.float16: "half",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
    mx.bool_: "bool",
}
ATTRIBUTES = {
    "thread_index_in_simdgroup": ("uint", "sim::current % 32"),
    "simdgroup_index_in_threadgroup": ("uint", "sim::current / 32"),
    "threadgroup_position_in_grid": ("uint3", "uint3{position, 0, 0}"),
    "threadgroups_per_grid": ("uint3", "uint3{groups, 1, 1}"),
    "threads_per_grid": ("uint3", "uint3{groups * sim::count, 1, 1}"),
    "thread_position_in_threadgroup": ("uint3", "uint3{uint(sim::current), 0, 0}"),
    "thread_position_in_grid": ("uint3", "uint3{position * sim::count + sim::current, 0, 0}"),
}
PAGE = mmap.PAGESIZE
GUARD = 1 << 20


class SimulationError(RuntimeError):
    """A kernel that does not compile, crashes, or does not end; the text says which and why."""


class Kernel:
    """A Metal kernel on the CPU. Takes the arguments of mx.fast.metal_kernel, one-dimensional grids only.

    seconds: the longest that a call may take. Raises SimulationError when the text does not compile, and at a call
    that crashes or does not end.
    """

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        *,
        seconds: int = 120,
    ) -> None:
        self.name = name
        self.input_names = tuple(input_names)
        self.output_names = tuple(output_names)
        self.source = source
        self.header = header
        self.seconds = seconds
        self._libraries: dict[tuple[mx.Dtype, ...], Any] = {}

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        """Run and return the outputs. The threadgroup divides the grid."""
        threads = min(grid[0], threadgroup[0])
        if grid[1:] != (1, 1) or grid[0] % threads or threads % 32 or threads > 512:
            raise SimulationError(f"[{self.name}] wants a 1-D grid of whole threadgroups, got {grid} by {threadgroup}")
        library = self._library(tuple(x.dtype for x in inputs), tuple(output_dtypes))
        buffers = []
        for name, x in zip(self.input_names, inputs, strict=True):
            buffers.append(Guarded(_bytes(x)))
            if f"{name}_shape" in self.source:
                buffers.append(Guarded(np.array(x.shape or (0,), np.int32)))
        outputs = [
            Guarded(np.full(int(np.prod(shape, dtype=np.int64)), _nan(dtype)))
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]
        addresses = (ctypes.c_void_p * len(buffers + outputs))(*[buffer.address for buffer in buffers + outputs])
        self._in_a_child(lambda: library.launch(addresses, grid[0] // threads, threads))
        return [
            _array(buffer.read(), shape, dtype)
            for buffer, shape, dtype in zip(outputs, output_shapes, output_dtypes, strict=True)
        ]

    def _in_a_child(self, work: Callable[[], Any]) -> None:
        """Run ``work`` in a forked process that shares the buffers, so that no fault of a kernel ends this one."""
        with tempfile.TemporaryFile() as said:
            child = os.fork()
            if child == 0:
                os.dup2(said.fileno(), 2)
                faulthandler.disable()  # what it would print is this process's, not the kernel's
                ctypes.CDLL(None).alarm(self.seconds)
                work()
                os._exit(0)
            _, status = os.waitpid(child, 0)
            if status:
                said.seek(0)
                text = said.read().decode(errors="replace").strip() or f"it ended with status {status}"
                signals = {
                    11: "a read or write out of bounds",
                    7: "a misaligned access",
                    14: f"{self.seconds} s passed",
                }
                reason = signals.get(os.WTERMSIG(status), text) if os.WIFSIGNALED(status) else text
                raise SimulationError(f"[{self.name}] wants a run to its end, got: {reason}")

    def _library(self, inputs: tuple[mx.Dtype, ...], outputs: tuple[mx.Dtype, ...]) -> Any:
        key = inputs + outputs
        if key not in self._libraries:
            self._libraries[key] = ctypes.CDLL(str(_build(self.name, self.text(inputs, outputs))))
        return self._libraries[key]

    def text(self, inputs: tuple[mx.Dtype, ...], outputs: tuple[mx.Dtype, ...]) -> str:
        """The C++ that is compiled, for inputs and outputs of these dtypes."""
        parameters: list[tuple[str, str]] = []
        for name, dtype in zip(self.input_names, inputs, strict=True):
            parameters.append((f"const {TYPES[dtype]}*", name))
            if f"{name}_shape" in self.source:
                parameters.append(("const int*", f"{name}_shape"))
        parameters += [(f"{TYPES[dtype]}*", name) for name, dtype in zip(self.output_names, outputs, strict=True)]
        used = {name: value for name, value in ATTRIBUTES.items() if name in self.source}
        declared = [f"{kind} {name}" for kind, name in parameters] + [
            f"{kind} {name}" for name, (kind, _) in used.items()
        ]
        given = [f"({kind})buffers[{i}]" for i, (kind, _) in enumerate(parameters)] + [
            value for _, value in used.values()
        ]
        return "\n".join([
            '#include "sim_shim.h"',
            self.header,
            f"static void kernel({', '.join(declared)}) {{",
            self.source,
            "}",
            "static void** buffers;",
            "static uint position, groups;",
            f"static void entry() {{ kernel({', '.join(given)}); sim::leave(); }}",
            'extern "C" void launch(void** all, int n, int threads) {',
            "  buffers = all, groups = n;",
            "  for (position = 0; position < groups; ++position) sim::run(threads, entry);",
            "}",
        ]) + "\n"  # fmt: skip


class Guarded:
    """A copy of an array in shared memory, with inaccessible memory right after its end (16-byte aligned)."""

    def __init__(self, data: np.ndarray[Any, Any]) -> None:
        self.dtype, self.size = data.dtype, data.size
        room = -(-max(data.nbytes, 1) // 16) * 16
        pages = -(-room // PAGE)
        self._map = mmap.mmap(-1, pages * PAGE + GUARD)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._start = pages * PAGE - room
        self.address = base + self._start
        self._map[self._start : self._start + data.nbytes] = data.tobytes()
        if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(base + pages * PAGE), GUARD, 0):
            raise OSError(ctypes.get_errno(), "mprotect")

    def read(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(self._map, self.dtype, self.size, self._start).copy()


def compiler() -> str | None:
    """The C++ compiler: $CXX, c++, g++ or clang++, whichever is there first."""
    return next(filter(None, map(shutil.which, filter(None, [os.environ.get("CXX"), "c++", "g++", "clang++"]))), None)


def _build(name: str, text: str) -> Path:
    shim = Path(__file__).with_name("sim_shim.h")
    command = [compiler() or "c++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{shim.parent}", "-x", "c++"]
    digest = sha256("\0".join([*command, shim.read_text(), text]).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("QFUSE_CACHE_DIR") or platformdirs.user_cache_dir("qfuse")) / "sim"
    library = folder / f"{name}-{digest}.so"
    if not library.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".tmp", delete=False) as scratch:
            done = subprocess.run([*command, "-", "-o", scratch.name], input=text, capture_output=True, text=True)
        if done.returncode:
            Path(scratch.name).unlink()
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip())
            raise SimulationError(f"[{name}] wants a text that compiles, got: {first}")
        Path(scratch.name).rename(library)
    return library


def _bytes(x: mx.array) -> np.ndarray[Any, Any]:
    return np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x).ravel()


def _nan(dtype: mx.Dtype) -> Any:
    half = {mx.bfloat16: 0xFFF0, mx.float16: 0xFFF0}
    return np.uint16(half[dtype]) if dtype in half else np.uint32(0xFFF0FFF0)


def _array(data: np.ndarray[Any, Any], shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    return mx.array(data).view(dtype).reshape(shape)


class SimBackend(KernelBackend):
    """Any x86-64 machine with a C++ compiler. For tests: slow, and every launch is evaluated at once."""

    name = "sim"
    lines = True

    def unavailable(self) -> str | None:
        if platform.machine() not in ("x86_64", "AMD64"):
            return f"the simulator switches stacks on x86-64 only, this is {platform.machine()}"
        return None if compiler() else "no C++ compiler"

    def compile(self, text: KernelText) -> Callable[..., Any]:
        return Kernel(text.name, text.inputs, text.outputs, text.source, text.header)
