"""Compile a kernel's C++ with the machine's compiler, check its types with clang, and tell lines from addresses."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from pathlib import Path

from ... import cache as kept
from .text import Finding

HERE = Path(__file__).parent
FAST = ("-std=c++17", "-O1", "-w", "-fno-pie", "-g1")
FULL = (*FAST, "-fsanitize=thread,alignment,null,bounds,shift,integer-divide-by-zero")


class CompileError(Exception):
    """A text that does not compile; ``findings`` says where."""

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__("\n".join(map(str, findings)))
        self.findings = findings


def compiler() -> str | None:
    """The C++ compiler: $CXX, c++, g++ or clang++, whichever is there first."""
    return next(filter(None, map(shutil.which, filter(None, [os.environ.get("CXX"), "c++", "g++", "clang++"]))), None)


@cache
def clang() -> tuple[str, ...] | None:
    """The clang that checks address spaces, from the package ziglang; None without it."""
    return (sys.executable, "-m", "ziglang", "clang") if importlib.util.find_spec("ziglang") else None


def program(name: str, text: str, *, full: bool) -> Path:
    """The program that runs a kernel's C++, from the cache where it was built before. Raises CompileError."""
    flags = FULL if full else FAST
    compiled = compiler() or "c++"
    digest = sha256("\0".join([compiled, *flags, _shim(), text]).encode()).hexdigest()[:16]
    made = _folder() / f"{name}-{digest}"
    if not made.is_file():
        runtime = _runtime(compiled)
        with tempfile.TemporaryDirectory(dir=_folder()) as scratch:
            command = [compiled, *flags, f"-I{HERE}", "-c", "-x", "c++", "-", "-o", f"{scratch}/kernel.o"]
            done = subprocess.run(command, input=text, capture_output=True, text=True)
            if done.returncode:
                raise CompileError(_errors(done.stderr))
            _run([compiled, "-no-pie", f"{scratch}/kernel.o", str(runtime), "-lm", "-o", f"{scratch}/program"])
            os.replace(f"{scratch}/program", made)
    return made


def check_types(text: str) -> None:
    """Check ``text`` (the form for types) with clang: pointers keep their address space. Raises CompileError.

    What clang found once in a text it need not look for again, so a clean one is remembered.
    """
    found = clang()
    if found is None:
        return
    mark = _folder() / f"types-{sha256((_shim() + text).encode()).hexdigest()[:16]}"
    if mark.is_file():
        return
    command = [*found, "-fsyntax-only", "-std=c++17", "-w", f"-I{HERE}", "-x", "c++", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise CompileError(_errors(done.stderr, "address space"))
    mark.touch()


def lines_of(program: Path, addresses: Iterable[str]) -> dict[str, tuple[str, int]]:
    """File and line of the code at each hexadecimal address: the innermost that is not the shim's own."""
    wanted = list(addresses)
    tool = shutil.which("addr2line")
    if not wanted or not tool:
        return {}
    places: dict[str, tuple[str, int]] = {}
    for address in wanted:
        done = subprocess.run([tool, "-i", "-e", str(program), address], capture_output=True, text=True)
        for line in done.stdout.splitlines():
            file, _, number = line.split(" (")[0].rpartition(":")
            if number.isdigit() and Path(file).name not in ("shim.h", "runtime.cpp"):
                places[address] = (Path(file).name, int(number))
                break
    return places


@cache
def _shim() -> str:
    return (HERE / "shim.h").read_text() + (HERE / "runtime.cpp").read_text()


def _folder() -> Path:
    folder = kept.root() / "sim"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _runtime(compiled: str) -> Path:
    made = _folder() / f"runtime-{sha256((compiled + _shim()).encode()).hexdigest()[:16]}.o"
    if not made.is_file():
        with tempfile.TemporaryDirectory(dir=_folder()) as scratch:
            source = str(HERE / "runtime.cpp")
            _run([compiled, "-std=c++17", "-O2", "-w", "-fno-pie", "-c", source, "-o", f"{scratch}/runtime.o"])
            os.replace(f"{scratch}/runtime.o", made)
    return made


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CompileError([Finding("build", "error", done.stderr.strip() or f"{command[0]} failed")])


def _errors(said: str, kind: str = "compile") -> list[Finding]:
    found = []
    for match in re.finditer(r"^(?:(.*?):(\d+):(?:\d+:)? )?(?:fatal )?error: (.*)$", said, re.MULTILINE):
        found.append(Finding(kind, "error", match[3], Path(match[1] or "").name, int(match[2] or 0)))
    return found or [Finding(kind, "error", said.strip())]
