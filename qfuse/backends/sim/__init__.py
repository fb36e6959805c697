"""The sim backend: the very Metal text, compiled as C++ and run on the CPU, one fiber a thread.

``Kernel`` takes the arguments of mx.fast.metal_kernel, so that any kernel of any program can be run and checked where
there is no Metal. docs/simulator.md says what it finds and what it does not model. Linux on x86-64 or aarch64, with a
C++ compiler.
"""

from __future__ import annotations

import mmap
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
from mlx.core.fast import metal_kernel

from ..kernel import KernelBackend, KernelText
from . import build
from .text import Finding, MetalText, cpp, exported, lint

__all__ = ["Finding", "Kernel", "SimBackend", "SimulationError"]

PAGE = 1 << 16
MAX_THREADS = 1024
SEEDS = (0, 1, 2)  # of the orders in which a full check runs threads; an odd one fills memory with other values


class SimulationError(RuntimeError):
    """A kernel with an error in it. findings: all that was found, the errors first."""

    def __init__(self, name: str, findings: Sequence[Finding]) -> None:
        self.findings = sorted(findings, key=lambda finding: finding.severity)
        super().__init__(f"[{name}] wants a kernel without a fault, got: " + "; ".join(map(str, self.findings)))


@attrs.frozen
class Buffer:
    """One parameter's memory. kind: i an input, o an output, w an output with values in it before the launch."""

    name: str
    kind: str
    data: np.ndarray[Any, Any]


@attrs.frozen
class Program:
    """A compiled kernel, the text it was made of, and what was found in the text."""

    text: MetalText
    path: Path
    findings: tuple[Finding, ...]


class Kernel:
    """A Metal kernel on the CPU. Takes the arguments of mx.fast.metal_kernel.

    full: look for races, missing fences, reads of what nobody wrote, outputs nobody wrote, accesses out of bounds or
        misaligned, pointers that change their address space. Without, five to ten times faster, it finds only what a
        run cannot go past.
    seconds: the longest that one run of the kernel may take.
    findings: the warnings of the last call.

    Raises SimulationError, at a call, when the text does not compile or has an error in it.
    """

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
        compile_options: Any = None,
        *,
        full: bool = True,
        seconds: int = 60,
    ) -> None:
        self.name = name
        self.input_names = tuple(input_names)
        self.output_names = tuple(output_names)
        self.atomic_outputs = atomic_outputs
        self.full = full
        self.seconds = seconds
        self.findings: list[Finding] = []
        self._kernel: Any = metal_kernel(
            name=name,
            input_names=list(input_names),
            output_names=list(output_names),
            source=_numbered(source, f"{name}.metal"),
            header=_numbered(header, f"{name}.h") if header else "",
            ensure_row_contiguous=ensure_row_contiguous,
            atomic_outputs=atomic_outputs,
            compile_options=compile_options,
        )
        self._programs: dict[Any, Program] = {}

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        template: Sequence[tuple[str, Any]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,  # noqa: ARG002 (there is one only)
    ) -> list[mx.array]:
        """Run and return the outputs, evaluated."""
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        threads = [min(a, b) for a, b in zip(grid, threadgroup, strict=True)]
        if min(grid) < 1 or min(threads) < 1 or threads[0] * threads[1] * threads[2] > MAX_THREADS:
            message = f"at least 1 thread and at most {MAX_THREADS} a threadgroup, not {grid} by {threadgroup}"
            raise SimulationError(self.name, [Finding("geometry", "error", message)])
        call = {
            "grid": tuple(grid),
            "threadgroup": tuple(threadgroup),
            "template": list(template or ()),
            "output_shapes": [tuple(shape) for shape in output_shapes],
            "output_dtypes": list(output_dtypes),
        }
        program = self._program(arrays, call)
        if verbose:
            print(program.text.signature + program.text.body + "}")
        outputs = [
            (int(np.prod(shape, dtype=np.int64)), dtype)
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]
        runs = []
        self.findings = list(program.findings)
        for seed in SEEDS if self.full else SEEDS[:1]:
            filled = [_filled(size, dtype, seed, init_value) for size, dtype in outputs]
            buffers = self._buffers(program.text, arrays, filled, init_value is not None)
            runs.append(self._run(program, buffers, grid, threadgroup, seed))
        if not self.atomic_outputs:
            self._compare(runs)
        return [
            mx.array(data).view(dtype).reshape(shape)
            for data, shape, dtype in zip(runs[0], output_shapes, output_dtypes, strict=True)
        ]

    def cpp(self, inputs: Sequence[mx.array], *, types: bool = False, **call: Any) -> str:
        """The C++ that stands for the kernel in this call. types: the form whose address spaces clang checks."""
        return cpp(exported(self._kernel, inputs, **call), types=types)

    def _program(self, arrays: Sequence[mx.array], call: dict[str, Any]) -> Program:
        inputs = tuple((x.dtype, min(x.size, 8), min(x.ndim, 1)) for x in arrays)
        key = (inputs, tuple(call["template"]), tuple(call["output_dtypes"]))
        if key not in self._programs:
            text = exported(self._kernel, arrays, **call)
            found = tuple(lint(text))
            if any(finding.severity == "error" for finding in found):
                raise SimulationError(self.name, found)
            try:
                self._programs[key] = Program(text, build.program(self.name, cpp(text), full=self.full), found)
                if self.full:
                    build.check_types(cpp(text, types=True))
            except build.CompileError as error:
                raise SimulationError(self.name, error.findings) from None
        return self._programs[key]

    def _buffers(
        self, text: MetalText, arrays: Sequence[mx.array], filled: Sequence[np.ndarray[Any, Any]], init: bool
    ) -> list[Buffer]:
        values: dict[str, Buffer] = {}
        for name, x in zip(self.input_names, arrays, strict=True):
            strides = [int(np.prod(x.shape[i + 1 :], dtype=np.int64)) for i in range(x.ndim)]
            values[name] = Buffer(name, "i", _bytes(x))
            values[f"{name}_shape"] = Buffer(f"{name}_shape", "i", np.array(x.shape, np.int32))
            values[f"{name}_strides"] = Buffer(f"{name}_strides", "i", np.array(strides, np.int64))
            values[f"{name}_ndim"] = Buffer(f"{name}_ndim", "i", np.array([x.ndim], np.int32))
        for name, data in zip(self.output_names, filled, strict=True):
            values[name] = Buffer(name, "w" if init else "o", data)
        return [values[parameter.name] for parameter in text.parameters if parameter.buffer is not None]

    def _run(
        self, program: Program, buffers: Sequence[Buffer], grid: Sequence[int], threadgroup: Sequence[int], seed: int
    ) -> list[np.ndarray[Any, Any]]:
        """Run once; the outputs' bits. Raises SimulationError, and adds warnings to ``findings``."""
        words = [str(n) for n in (self.seconds, seed, int(self.full), *grid, *threadgroup)]
        places, total = [], 0
        for buffer in buffers:
            room = -(-buffer.data.nbytes // 16) * 16
            pages = max(-(-room // PAGE), 1) * PAGE
            words += [buffer.name, buffer.kind, str(total), str(buffer.data.nbytes), str(buffer.data.itemsize)]
            places.append(total + pages - room)
            total += pages
        with _scratch() as file:
            file.truncate(total)
            with mmap.mmap(file.fileno(), total) as memory:
                for buffer, place in zip(buffers, places, strict=True):
                    memory[place : place + buffer.data.nbytes] = buffer.data.tobytes()
                done = subprocess.run(
                    [str(program.path), str(file.fileno()), *words],
                    capture_output=True, text=True, errors="replace", pass_fds=[file.fileno()],
                )  # fmt: skip
                found = _findings(program.path, done.stdout)
                if done.returncode and not found:
                    message = done.stderr.strip() or f"it ended with status {done.returncode}"
                    found = [Finding("crash", "error", message)]
                self.findings += [finding for finding in found if finding not in self.findings]
                if any(finding.severity == "error" for finding in found):
                    raise SimulationError(self.name, self.findings)
                return [
                    np.frombuffer(memory[place : place + buffer.data.nbytes], buffer.data.dtype)
                    for buffer, place in zip(buffers, places, strict=True)
                    if buffer.kind != "i"
                ]

    def _compare(self, runs: Sequence[Sequence[np.ndarray[Any, Any]]]) -> None:
        for name, *found in zip(self.output_names, *runs, strict=True):
            for other in found[1:]:
                differ = np.flatnonzero(found[0] != other)
                if differ.size:
                    message = f"{name}[{differ[0]}] and {differ.size - 1} more depend on the order of threads"
                    raise SimulationError(self.name, [*self.findings, Finding("order of threads", "error", message)])


def _scratch() -> Any:
    """A file that lives in memory where the system has such files."""
    shared = Path("/dev/shm")
    return tempfile.TemporaryFile(dir=shared if shared.is_dir() else None)


def _findings(program: Path, said: str) -> list[Finding]:
    addresses = sorted(set(re.findall(r"@([0-9a-f]+)", said)))
    places = build.lines_of(program, addresses)

    def name(match: re.Match[str]) -> str:
        file, line = places.get(match[1], ("an unknown line", 0))
        return f"{file}:{line}" if line else file

    found = []
    for line in said.splitlines():
        kind, severity, file, number, message = line.split("\t")
        if file.startswith("@"):  # where it is, and where the kernel last touched memory if that is in the runtime
            place = next((places[address] for address in file[1:].split("@") if address in places), ("", 0))
        else:
            place = (Path(file).name, max(int(number), 0))
        found.append(Finding(kind, severity, re.sub(r"@([0-9a-f]+)", name, message), *place))
    return list(dict.fromkeys(found))


def _numbered(text: str, file: str) -> str:
    """The text with a #line before it, unless it has its own."""
    return text if "#line" in text else f'#line 1 "{file}"\n{text}'


def _bytes(x: mx.array) -> np.ndarray[Any, Any]:
    return np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x).reshape(-1)


def _filled(size: int, dtype: mx.Dtype, seed: int, init_value: float | None) -> np.ndarray[Any, Any]:
    """An output before the launch: of NaNs, with an odd seed of a finite value."""
    if init_value is not None:
        return _bytes(mx.full((size,), init_value, dtype))
    return np.full(size * dtype.size, 0x7B if seed & 1 else 0xFF, np.uint8).view(f"u{dtype.size}")


class SimBackend(KernelBackend):
    """The simulator as a backend, for tests: slow, and every launch is evaluated at once.

    full: as of Kernel. findings: what the launches so far were warned of, by kernel.
    """

    name = "sim"
    lines = True

    def __init__(self, *, full: bool = False) -> None:
        super().__init__()
        self.full = full
        self.findings: list[Finding] = []

    def unavailable(self) -> str | None:
        if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "aarch64"):
            return f"the simulator runs on Linux on x86-64 and aarch64, this is {sys.platform} on {platform.machine()}"
        return None if build.compiler() else "no C++ compiler"

    def compile(self, text: KernelText) -> Callable[..., Any]:
        kernel = Kernel(text.name, text.inputs, text.outputs, text.source, text.header, full=self.full)

        def launch(**call: Any) -> list[mx.array]:
            outputs = kernel(**call)
            self.findings += [finding for finding in kernel.findings if finding not in self.findings]
            return outputs

        return launch
