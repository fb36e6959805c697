"""From an op and its literal Metal text to a launch: what the metal, sim and cuda backends share.

The text that a compiler sees is a prelude of constants and the stripped ``NAME.metal``, with the ``.h`` files that it
includes put before it as the header. Only constants that the text mentions are written, so that it stays short.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import mlx.core as mx

from .. import tune
from ..op import Op, Schedule
from ..spec import DTYPE_NAMES, DTYPES, Quant, Spec, parse, parts
from . import Weights

METAL_TYPES = {"f32": "float", "bf16": "bfloat16_t", "f16": "half", "i32": "int", "u32": "uint", "bool": "bool"}
SHARED = Path(__file__).parent.parent / "ops"
"""Where an include is looked for that is not beside its text: the device code that ops from elsewhere may use."""
SIMD = 32
MAX_THREADS = 512
MAX_LAUNCHES = 256


WORD, ALIGNED = 4, 4
"""Bytes of a word, and the words that a part of an array starts at a multiple of: 16 bytes, the widest load."""


class Place(NamedTuple):
    """Where in an array of words, uint32 [n], a tensor is. offset: in words."""

    offset: int
    shape: tuple[int, ...]
    dtype: mx.Dtype


class Part(NamedTuple):
    """A tensor within an array of words that one launch wrote, as Place has it."""

    array: mx.array
    offset: int
    shape: tuple[int, ...]
    dtype: mx.Dtype


@attrs.frozen
class KernelText:
    """What a compiler is given. name: the op's with a digest of the text, so that no two texts share one.

    threads: of a threadgroup, which some compilers must know.
    """

    name: str
    header: str
    source: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    threads: int = SIMD


@attrs.frozen
class Launch:
    """One prepared launch: everything but the arrays.

    parts: for each output of the op its place in the last array written, or None where it is an array of its own.
    """

    kernel: Callable[..., Any]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[mx.Dtype, ...]
    parts: tuple[Place | None, ...] = ()


def render(
    op: Op,
    env: Mapping[str, Any],
    present: frozenset[str],
    schedule: Schedule,
    *,
    lines: bool = False,
    places: Mapping[str, tuple[str, Place]] = {},
) -> KernelText:
    """The text of ``op`` for the dims and dtype tokens in ``env``.

    present: optional inputs that are given; others become ``#define HAS_NAME 0``.
    lines: keep line numbers, with ``#line`` directives naming the files.
    places: of inputs and outputs that are parts of an array, its name and where in it. Such arrays come after the other
    inputs, and after the other outputs.
    """
    path = op.source()
    header, body = _load(path, lines)
    outputs = [name for name in op.select("out") if name not in places]
    outputs += dict.fromkeys(places[name][0] for name in op.select("out") if name in places)
    given = [name for name, spec in op.inputs().items() if not spec.optional or name in present]
    inputs = [name for name in given if name not in places]
    inputs += dict.fromkeys(places[name][0] for name in given if name in places)
    for name, spec in op.weights().items():
        inputs += [name, f"{name}_scales", f"{name}_biases"] if spec.kind == "qweight" else [name]
    prelude = _prelude(op, env, present, whole_words(op, schedule), body)
    for name, (array, place) in places.items():
        kind = f"{'' if name in op.select('out') else 'const '}device {METAL_TYPES[DTYPE_NAMES[place.dtype]]}*"
        prelude.append(f"{kind} {name}=reinterpret_cast<{kind}>({array}+{place.offset});")
        if f"{name}_shape" in body:
            prelude.append(f"constexpr int {name}_shape[]={{{','.join(map(str, place.shape))}}};")
    source = "\n".join([*prelude, f'#line 1 "{path.name}"', body] if lines else [*prelude, body]) + "\n"
    threads = SIMD * schedule.simdgroups
    digest = sha256(f"{header}{source}{threads}".encode()).hexdigest()[:8]
    return KernelText(f"{op.name}_{digest}", header, source, tuple(inputs), tuple(outputs), threads)


def whole_words(op: Op, schedule: Schedule) -> Schedule:
    """The schedule, with as many inputs taken at a time as fill whole words of every weight: 32 of 3 bits, 16 of 2."""
    widths = [value.bits for value in op.constants().values() if isinstance(value, Quant) and value.bits]
    return attrs.evolve(schedule, take=max([schedule.take, *[32 // math.gcd(bits, 32) for bits in widths]]))


def _prelude(op: Op, env: Mapping[str, Any], present: frozenset[str], schedule: Schedule, body: str) -> list[str]:
    """The constants, types and macros that the body mentions, a line a kind."""
    types: list[str] = []
    defined: dict[str, list[str]] = {}

    def define(kind: str, name: str, value: Any) -> None:
        if re.search(rf"\b{name}\b", body):
            defined.setdefault(kind, []).append(f"{name}={value}")

    for name, value in {**env, **attrs.asdict(schedule)}.items():
        if name in op.dynamic:
            continue
        if isinstance(value, Quant):
            for part, number in attrs.asdict(value).items():
                define("constexpr int", f"{name}_{part}", number)
        elif isinstance(value, bool):
            define("constexpr bool", name, str(value).lower())
        elif isinstance(value, int):
            define("constexpr int", name, value)
        elif isinstance(value, float):
            define("constexpr float", name, f"{value!r}f")
        elif value in METAL_TYPES and re.search(rf"\b{name}\b", body):
            types.append(f"using {name}={METAL_TYPES[value]};")
    lines = types + [f"{kind} {','.join(terms)};" for kind, terms in defined.items()]
    macros = {f"HAS_{name.upper()}": int(name in present) for name, spec in op.inputs().items() if spec.optional}
    return lines + [f"#define {name} {value}" for name, value in macros.items() if re.search(rf"\b{name}\b", body)]


@cache
def _load(path: Path, lines: bool) -> tuple[str, str]:
    """Header and body of a ``.metal`` file: includes resolved once each, comments and spaces gone."""
    headers: dict[str, str] = {}

    def read(file: Path) -> str:
        kept = []
        for line in file.read_text("ascii").splitlines():
            line = line.split("//")[0].strip()
            include = re.fullmatch(r'#include "(.+)"', line)
            if include and include[1] not in headers:
                headers[include[1]] = ""
                beside = file.with_name(include[1])
                text = read(beside if beside.is_file() else SHARED / include[1])
                del headers[include[1]]  # after what it includes itself
                headers[include[1]] = f'#line 1 "{include[1]}"\n{text}' if lines else text
            kept.append("" if include else line)
        return "\n".join(kept if lines else _fill(map(tighten, filter(None, kept))))

    body = read(path)
    return "".join(f"{text}\n" for text in headers.values()), body


def tighten(line: str) -> str:
    """A line without the spaces that part no two words and no two operators."""
    spare = r"(?<=\w) (?=[^\w\s])|(?<=[^\w\s]) (?=\w)|(?<=[(){}\[\];,]) | (?=[(){}\[\];,])"
    return line if line.startswith("#") else re.sub(spare, "", line)


def _fill(lines: Iterable[str]) -> list[str]:
    """Lines joined where one ends in a bracket, comma or semicolon, to a width that a compiler's error can quote."""
    filled: list[str] = []
    for line in lines:
        last = filled[-1] if filled else "#"
        if last[-1] in "(){};,>" and "#" not in (last[0], line[0]) and len(last + line) <= 120:
            filled[-1] += line
        else:
            filled.append(line)
    return filled


class KernelBackend:
    """Base of the backends that compile a kernel's text.

    A subclass gives ``name``, ``compile`` and, where it differs, ``unavailable``.
    """

    name: str
    probes = True
    lines = False
    prefill = False

    def __init__(self) -> None:
        self._compiled: dict[str, Callable[..., Any]] = {}

    def compile(self, text: KernelText) -> Callable[..., Any]:
        """A callable with the keyword arguments of a kernel made by mx.fast.metal_kernel."""
        raise NotImplementedError

    def unavailable(self) -> str | None:
        return None

    def refuses(self, op: Op) -> str | None:
        if not op.source().is_file():
            return f"no {op.source().name}"
        return op.unmet()

    def lower(self, op: Op, weights: Weights) -> Callable[..., Any]:
        return Lowered(self, op, weights)

    def kernel(self, text: KernelText) -> Callable[..., Any]:
        """The compiled kernel of a text, made once."""
        if text.name not in self._compiled:
            self._compiled[text.name] = self.compile(text)
        return self._compiled[text.name]


class Lowered:
    """One node on one backend: prepares a launch for each set of input shapes it meets, then only launches.

    An input may be a Part of what another launch wrote. schedule: by default the one tuned for those shapes on this
    device, or else the op's own for the backend. packed: outputs to give as parts of one array.
    """

    def __init__(
        self,
        backend: KernelBackend,
        op: Op,
        weights: Weights,
        schedule: Schedule | None = None,
        packed: Iterable[str] = (),
    ) -> None:
        self.backend = backend
        self.op = op
        self.weights = dict(weights)
        self.schedule = schedule
        self.packed = frozenset(packed)
        self._arrays = [part for array in weights.values() for part in parts(array)]
        self._names = tuple(op.inputs())
        self._single = len(op.select("out")) == 1
        self._launches: dict[tuple[Any, ...], Launch] = {}

    def packing(self, outputs: Iterable[str]) -> Lowered:
        """The same node, giving these outputs as parts of one array: MLX spends microseconds on each array."""
        return Lowered(self.backend, self.op, self.weights, self.schedule, outputs)

    def __call__(self, *inputs: mx.array | Part | None) -> Any:
        arrays: list[Any] = [x for x in inputs if x is not None]
        key: tuple[Any, ...] = tuple([None if x is None else (x.shape, x.dtype) for x in inputs])
        if Part in map(type, arrays):
            arrays, packs = _split(inputs)
            key += tuple([(x.offset, _number(x, packs)) if isinstance(x, Part) else None for x in inputs])
            arrays += packs
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = self.prepare(*inputs)
            if len(self._launches) > MAX_LAUNCHES:  # a length that grows with every token would fill it
                self._launches.pop(next(iter(self._launches)))
        out = launch.kernel(
            inputs=arrays + self._arrays,
            grid=launch.grid,
            threadgroup=launch.threadgroup,
            output_shapes=launch.shapes,
            output_dtypes=launch.dtypes,
        )
        if self.packed:
            own = iter(out)
            return tuple([next(own) if part is None else Part(out[-1], *part) for part in launch.parts])
        return out[0] if self._single else out

    def prepare(self, *inputs: mx.array | Part | None) -> Launch:
        """Check the arguments, render and compile for their shapes. Raises SpecError on arguments that do not fit."""
        env = self._env([mx.zeros(x.shape, x.dtype) if isinstance(x, Part) else x for x in inputs])
        schedule = self.schedule or self.op.schedule(self.backend.name)
        text = self._render(env, schedule, inputs)
        if self.schedule is None and (tuned := tune.best(self.backend.name, text.name)):
            schedule, text = tuned, self._render(env, tuned, inputs)
        tiles = max(1, parse(self.op.tiles).value({**env, **attrs.asdict(schedule)}))
        groups = min(tiles, schedule.cap) if schedule.cap else tiles
        threads = SIMD * schedule.simdgroups
        shapes: list[tuple[int, ...]] = []
        dtypes: list[mx.Dtype] = []
        placed: dict[str, Place] = {}
        size = 0
        for name, spec in self.op.select("out").items():
            shape, dtype = tuple(dim.value(env) for dim in spec.dims), _dtype(spec, env)
            if name in self.packed:
                placed[name] = Place(size, shape, dtype)
                size += -(-math.prod(shape) * dtype.size // (WORD * ALIGNED)) * ALIGNED
            else:
                shapes.append(shape)
                dtypes.append(dtype)
        if placed:
            shapes.append((size,))
            dtypes.append(mx.uint32)
        _, packs = _split(inputs)
        places = {name: ("packed", place) for name, place in placed.items()} | {
            name: (f"pack{_number(x, packs)}", Place(*x[1:]))
            for name, x in zip(self._names, inputs, strict=True)
            if isinstance(x, Part)
        }
        if places:
            text = self._render(env, schedule, inputs, places)
        return Launch(
            self.backend.kernel(text),
            (groups * threads, 1, 1),
            (threads, 1, 1),
            tuple(shapes),
            tuple(dtypes),
            tuple(map(placed.get, self.op.select("out"))),
        )

    def text(self, schedule: Schedule, *inputs: mx.array | None) -> KernelText:
        """The text for the inputs' shapes under a schedule, every tensor an array of its own."""
        return self._render(self._env(inputs), schedule, inputs)

    def _env(self, inputs: Sequence[mx.array | None]) -> dict[str, Any]:
        return self.op.bind(dict(zip(self._names, inputs, strict=True)) | self.weights)

    def _render(
        self,
        env: Mapping[str, Any],
        schedule: Schedule,
        inputs: Sequence[mx.array | Part | None],
        places: Mapping[str, tuple[str, Place]] = {},
    ) -> KernelText:
        present = frozenset(name for name, x in zip(self._names, inputs, strict=True) if x is not None)
        return render(self.op, env, present, schedule, lines=self.backend.lines, places=places)


def _split(inputs: Iterable[mx.array | Part | None]) -> tuple[list[mx.array], list[mx.array]]:
    """Inputs that are arrays of their own, and the arrays that the others are parts of, each once."""
    arrays: list[mx.array] = []
    packs: list[mx.array] = []
    for x in inputs:
        if isinstance(x, Part):
            if not any(x.array is pack for pack in packs):
                packs.append(x.array)
        elif x is not None:
            arrays.append(x)
    return arrays, packs


def _number(part: Part, packs: Sequence[mx.array]) -> int:
    return next(i for i, pack in enumerate(packs) if pack is part.array)


def _dtype(spec: Spec, env: Mapping[str, Any]) -> mx.Dtype:
    return DTYPES[env.get(spec.dtype, spec.dtype)]
