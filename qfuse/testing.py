"""Testing ops, ours and anyone's: random arguments from an op's declarations, a tolerance without tuning, and checks.

>>> op, arguments = sample(MyOp, "small", dtype="bf16")  # doctest: +SKIP
>>> opcheck(op, arguments, "sim")  # doctest: +SKIP
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from . import backends
from .backends.kernel import MAX_THREADS, SIMD, KernelBackend, Lowered
from .op import Op, Schedule
from .plan import Primitive, _primitive
from .spec import DTYPES, QArray, Quant, Spec, SpecError, bind, interval

Arguments = dict[str, Any]
EIGHT = Quant(8, 64)
FLOOR = 1e-6
"""Of the oracle's RMS: the error that anything may have, unless sums are so long that f32 itself has more."""


def sample(
    target: type[Op] | Op,
    name: str = "small",
    *,
    dtype: str | Mapping[str, str] = "bf16",
    quant: Quant | Mapping[str, Quant] = EIGHT,
    optional: bool = True,
    seed: int = 0,
    **dims: Any,
) -> tuple[Op, Arguments]:
    """An op and random arguments for it, by name, from its specs' dims, dtypes and domains.

    target: a class, made with the fields of its sample ``name``, or an op as it is. dims: fields and dims of the call
    that replace the sample's. dtype: of everything that is not fixed, or by dtype token or tensor, ``""`` for the rest.
    quant: of all linear layers, or by tensor; a group that does not divide a row is halved until it does.
    optional: give optional inputs too. Raises SpecError on an op with a handle, or where a dim is not to be known.
    """
    given = dict(target.samples.get(name, {})) | dims
    dtypes = {"": dtype} if isinstance(dtype, str) else {"": "bf16", **dtype}
    if handles := target.select("handle"):
        raise SpecError(f"[{target.name}] wants no handle where arguments are drawn, got {', '.join(handles)}")
    op = target if isinstance(target, Op) else _make(target, name, given, dtypes, quant)
    env = {**given, **op.constants()}
    random = np.random.default_rng(seed)
    arguments: Arguments = {}
    for key, spec in (op.inputs() | op.weights()).items():
        if spec.optional and not optional:
            continue
        for dim in spec.dims:
            if not dim.names <= env.keys():
                raise SpecError(f"[{op.name}.{key}] wants a sample with all dims of ({dim}), got {name} with {given}")
        kind = dtypes.get(key) or dtypes.get(spec.dtype) or (spec.dtype if spec.dtype in DTYPES else dtypes[""])
        arguments[key] = _draw(op, key, spec, DTYPES[kind], env, random)
    mx.eval(*[part for x in arguments.values() for part in (x.parts() if isinstance(x, QArray) else [x])])
    return op, arguments


def _make(
    cls: type[Op], name: str, given: Arguments, dtypes: Mapping[str, str], quant: Quant | Mapping[str, Quant]
) -> Op:
    fields = {field.name: field for field in attrs.fields(cls)}  # type: ignore[arg-type]
    values = {key: value for key, value in given.items() if key in fields}
    for key, field in fields.items():
        if field.default is attrs.NOTHING and key not in values:
            raise SpecError(f"[{cls.name}] wants a sample with {key}, got {name} with {given}")
    env = {key: field.default for key, field in fields.items()} | values
    for key, spec in cls.select("qweight").items():
        wanted = quant if isinstance(quant, Quant) else quant.get(key, quant.get("", EIGHT))
        group, width = wanted.group, spec.dims[-1].value(env)
        while wanted.bits and width % group:
            group //= 2
        values.setdefault(key, Quant(wanted.bits, group))
    if "T" in fields:
        values.setdefault("T", dtypes.get("T") or dtypes[""])
    return cls(**values)


def _draw(op: Op, name: str, spec: Spec, dtype: mx.Dtype, env: Arguments, random: np.random.Generator) -> Any:
    shape = tuple(dim.value(env) for dim in spec.dims)
    if dtype == mx.bool_:
        return mx.array(random.random(shape) < 0.7)
    if spec.domain:
        low, high = interval(spec.domain, env)
        if not mx.issubdtype(dtype, mx.floating):
            return mx.array(random.integers(int(low), int(high), shape)).astype(dtype)
        return mx.array(random.uniform(low, high, shape).astype(np.float32)).astype(dtype)
    values = mx.array(random.standard_normal(shape, dtype=np.float32))
    if spec.kind == "weight" and len(shape) == 1:
        values = 1 + 0.1 * values
    elif spec.kind != "in":
        values = values * shape[-1 if spec.kind == "qweight" else 1] ** -0.5
    if spec.kind != "qweight":
        return values.astype(dtype)
    quant: Quant = op.constants()[name]
    if not quant.bits:
        return QArray(values.astype(dtype))
    codes, scales, biases = mx.quantize(values, quant.group, quant.bits)
    return QArray(codes, scales.astype(dtype), biases.astype(dtype), quant)


@attrs.frozen
class Closeness:
    """How far a result is from the oracle. ratio: its error over the error allowed; at most 1 passes."""

    ratio: float
    worst: tuple[int, ...]
    got: float
    wanted: float

    def __str__(self) -> str:
        return f"at {list(self.worst)} wants {self.wanted:.9g}, got {self.got:.9g}; error / allowed = {self.ratio:.3g}"


def closeness(got: mx.array, working: mx.array, oracle: mx.array, floor: float = FLOOR) -> Closeness:
    """Compare a result with the oracle, the reference in f32.

    The RMS error may be twice that of ``working``, the reference in the dtype at hand, or ``floor`` times the oracle's
    RMS.
    Integers must be equal. An infinity must be the same one; a NaN never passes.
    """
    have, want = _numbers(got), _numbers(oracle)
    with np.errstate(invalid="ignore"):
        error = np.where(have == want, 0.0, np.abs(have - want))
        allowed_error = _numbers(working) - want
    error = np.where(np.isnan(error), np.inf, error)
    worst = tuple(int(i) for i in np.unravel_index(int(error.argmax()), error.shape)) if error.size else ()
    at = (float(have[worst]), float(want[worst])) if error.size else (0.0, 0.0)
    if not mx.issubdtype(got.dtype, mx.floating):
        return Closeness(0.0 if not error.any() else math.inf, worst, *at)
    allowed = max(2 * _rms(allowed_error), floor * _rms(want))
    size = float(np.sqrt(np.mean(error**2))) if error.size else 0.0
    return Closeness(size / allowed if allowed else (math.inf if size else 0.0), worst, *at)


def _numbers(x: mx.array) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x).astype(np.float64)


def _rms(x: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    x = x[np.isfinite(x)]
    return float(np.sqrt(np.mean(x**2))) if x.size else 0.0


class Exact(QArray):
    """A linear layer that sums in f64 and rounds once: MLX on a CPU sums bf16 in bf16, which would excuse anything.

    On the CPU's stream alone, as :func:`reference` runs it: no GPU has f64.
    """

    def linear(self, x: mx.array) -> mx.array:
        """As QArray.linear, in the dtype of x."""
        return (x.astype(mx.float64) @ self._wide().swapaxes(-1, -2)).astype(x.dtype)

    def gather(self, x: mx.array, indices: mx.array) -> mx.array:
        """As QArray.gather, in the dtype of x."""
        rows = self._wide()[indices].swapaxes(-1, -2)
        return (x.astype(mx.float64)[..., None, :] @ rows).squeeze(-2).astype(x.dtype)

    def _wide(self) -> mx.array:
        if self.scales is None:
            return self.weight.astype(mx.float64)
        return self.astype(mx.float32).dense().astype(mx.float64)


def reference(op: Op, arguments: Arguments) -> dict[str, mx.array]:
    """The outputs of the op's reference by name, its linear layers summed exactly.

    On the CPU: MLX multiplies f32 matrices on an NVIDIA GPU in TF32, with 10 bits.
    """
    exact = {name: Exact(*_parts(x)) if isinstance(x, QArray) else x for name, x in arguments.items()}
    names = op.inputs() | op.weights()
    with mx.stream(mx.cpu):
        results = op.as_tuple(op.reference(**{n: exact.get(n) for n in names}))
    return dict(zip(op.select("out"), results, strict=True))


def oracle(op: Op, arguments: Arguments) -> dict[str, mx.array]:
    """The outputs of the op's reference with every float argument in f32."""
    wide = {
        name: x.astype(mx.float32) if isinstance(x, QArray) or mx.issubdtype(x.dtype, mx.floating) else x
        for name, x in arguments.items()
    }
    same = attrs.evolve(op, T="f32") if "T" in op.constants() else op  # type: ignore[misc]
    return reference(same, wide)


def floor_of(arguments: Arguments) -> float:
    """FLOOR, or what f32 sums as long as the op's longest row differ by when their order does: 2^-24·√length."""
    rows = [x.shape[-1] for x in arguments.values() if x.shape]
    return max(FLOOR, 2**-24 * max(rows, default=1) ** 0.5)


def run(
    op: Op, arguments: Arguments, backend: str | backends.Backend, schedule: Schedule | None = None
) -> dict[str, mx.array]:
    """The outputs of the op on a backend by name, evaluated. schedule: in place of the backend's own.

    Raises SpecError where the backend refuses the op.
    """
    found = backends.get(backend) if isinstance(backend, str) else backend
    if reason := found.refuses(op):
        raise SpecError(f"[{op.name}] {reason}")
    weights = {name: x for name, x in arguments.items() if name in op.weights()}
    if schedule and isinstance(found, KernelBackend):
        call: Callable[..., Any] = Lowered(found, op, weights, schedule)
    else:
        call = found.lower(op, weights)
    outs = op.as_tuple(call(*[arguments.get(name) for name in op.inputs()]))
    mx.eval(*outs)
    return dict(zip(op.select("out"), outs, strict=True))


@attrs.frozen
class ErrorInput:
    """Arguments that an op must refuse. match: a regular expression for the message."""

    what: str
    arguments: Arguments
    match: str


def error_inputs(op: Op, arguments: Arguments) -> Iterator[ErrorInput]:
    """Arguments made wrong in one way each: one missing, of another rank, size or dtype, or unknown."""
    yield ErrorInput("unknown", {**arguments, "nonsense": mx.zeros(1)}, rf"^\[{op.name}\] wants .*, got nonsense$")
    for name, spec in (op.inputs() | op.weights()).items():
        if name not in arguments:
            continue
        x, match = arguments[name], rf"^\[{op.name}\.\w+\] wants .*, got \("
        if not spec.optional:
            missing = {n: v for n, v in arguments.items() if n != name}
            yield ErrorInput(f"no {name}", missing, rf"^\[{op.name}\.\w+\] wants .*, got ")
        yield ErrorInput(f"rank of {name}", {**arguments, name: _each(x, lambda a: a[None])}, match)
        if len(spec.dims) > 1 and spec.dims[-2].names <= op.constants().keys():
            yield ErrorInput(f"size of {name}", {**arguments, name: _each(x, lambda a: a[..., 1:, :])}, match)
        elif spec.dims and spec.dims[-1].names <= op.constants().keys() and not isinstance(x, QArray):
            yield ErrorInput(f"size of {name}", {**arguments, name: x[..., 1:]}, match)
        if spec.dtype in DTYPES:
            other = mx.float16 if spec.dtype != "f16" else mx.float32
            yield ErrorInput(f"dtype of {name}", {**arguments, name: x.astype(other)}, match)
        elif not spec.dtype and isinstance(x, mx.array):
            yield ErrorInput(f"dtype of {name}", {**arguments, name: x.astype(mx.int32)}, match)


def compare(op: Op, got: Mapping[str, mx.array], arguments: Arguments, place: str = "") -> dict[str, Closeness]:
    """The closeness of each output. Raises AssertionError that names op, output, worst index, both values and ratio."""
    near, true, floor = reference(op, arguments), oracle(op, arguments), floor_of(arguments)
    found = {name: closeness(got[name], near[name], true[name], floor) for name in got}
    bad = [f"[{op.name}.{name}]{place and f' {place}'} {c}" for name, c in found.items() if not c.ratio <= 1]
    assert not bad, "\n".join(bad)
    return found


def opcheck(op: Op, arguments: Arguments, backend: str | backends.Backend = "sim") -> dict[str, Closeness]:
    """Check one op on one backend, and return how close each output is.

    Declared shapes and dtypes; agreement with the reference; the same result twice, with arguments as they were; rows
    of a batch as each alone; geometry within limits; one kernel in the trace; wrong arguments refused. A checking
    backend such as sim reports what it finds in the kernel itself. Raises AssertionError on the first that fails.
    """
    chosen = backends.get(backend) if isinstance(backend, str) else backend
    before = {name: _copies(x) for name, x in arguments.items()}
    got = run(op, arguments, chosen)
    bind(f"{op.name} {chosen.name}", op.select("out").items(), got, op.bind(arguments))
    found = compare(op, got, arguments)

    again = run(op, arguments, chosen)
    for name, x in got.items():
        assert _same(x, again[name]), f"[{op.name}.{name}] wants the same result twice, got two"
    for name, x in arguments.items():
        for old, new in zip(before[name], _copies(x), strict=True):
            assert _same(old, new), f"[{op.name}.{name}] wants an argument left alone, got one changed"

    batch = op.bind(arguments).get("B", 1)
    if batch > 1:
        alone = [run(op, row, chosen) for row in _rows(op, arguments, batch)]
        compare(op, {name: mx.concatenate([one[name] for one in alone]) for name in got}, arguments, "row by row")

    if isinstance(chosen, KernelBackend) and not op.library:
        check_launch(op, arguments, chosen)
    for wrong in error_inputs(op, arguments):
        said = _refusal(op, wrong.arguments)
        assert re.search(wrong.match, said), f"[{op.name}] {wrong.what}: wants {wrong.match}, got {said}"
    return found


def _refusal(op: Op, arguments: Arguments) -> str:
    try:
        op.bind(arguments)
    except SpecError as error:
        return str(error)
    return "no error"


def check_launch(op: Op, arguments: Arguments, backend: KernelBackend) -> None:
    """Geometry within every GPU's limits, and one kernel with nothing beside it in what MLX would record for Metal."""
    weights = {name: x for name, x in arguments.items() if name in op.weights()}
    launch = Lowered(backend, op, weights, op.schedule(backend.name)).prepare(*[arguments.get(n) for n in op.inputs()])
    (grid, *rest), (group, *others) = launch.grid, launch.threadgroup
    assert rest == others == [1, 1], f"[{op.name}] wants one dimension, got {launch.grid} by {launch.threadgroup}"
    assert group <= MAX_THREADS, f"[{op.name}] wants at most {MAX_THREADS} threads a threadgroup, got {group}"
    assert group % SIMD == 0, f"[{op.name}] wants a multiple of {SIMD} threads, got {group}"
    assert grid % group == 0, f"[{op.name}] wants whole threadgroups, got {grid} threads by {group}"
    names = [primitive.name for primitive in trace(op, arguments)]
    assert names == ["CustomKernel"], f"[{op.name}] wants one kernel in the trace, got {names}"


def trace(op: Op, arguments: Arguments) -> list[Primitive]:
    """What MLX records when the op is lowered for Metal: no GPU is needed, and nothing runs."""
    weights = {name: x for name, x in arguments.items() if name in op.weights()}
    call = backends.BACKENDS["metal"].lower(op, weights)
    names = [name for name in op.inputs() if name in arguments]
    found: list[Primitive] = []

    def record(event: dict[str, Any]) -> None:
        if event["type"] == "primitive":
            found.append(_primitive(event))

    def function(*values: mx.array) -> list[mx.array]:
        given = dict(zip(names, values, strict=True))
        return list(op.as_tuple(call(*[given.get(name) for name in op.inputs()])))

    mx.export_function(record, function, *[arguments[name] for name in names])
    return found


def _rows(op: Op, arguments: Arguments, batch: int) -> Iterator[Arguments]:
    """Arguments of each batch row alone; the first dim of an input, where it is read from the call, is B or T·B."""
    batched = {n for n, spec in op.inputs().items() if spec.dims and spec.dims[0].names - op.constants().keys()}
    for row in range(batch):
        yield {
            name: x[row * (x.shape[0] // batch) : (row + 1) * (x.shape[0] // batch)] if name in batched else x
            for name, x in arguments.items()
        }


def _parts(x: QArray) -> tuple[Any, ...]:
    return (x.weight, x.scales, x.biases, x.quant)


def _each(x: Any, change: Callable[[mx.array], mx.array]) -> Any:
    if isinstance(x, mx.array):
        return change(x)
    parts = {name: change(getattr(x, name)) for name in ("weight", "scales", "biases") if getattr(x, name) is not None}
    return attrs.evolve(x, **parts)


def _copies(x: Any) -> list[np.ndarray[Any, Any]]:
    return [_bits(part).copy() for part in (x.parts() if isinstance(x, QArray) else [x])]


def _bits(x: mx.array) -> np.ndarray[Any, Any]:
    return np.array(mx.view(x, mx.uint16) if x.dtype == mx.bfloat16 else x)


def _same(a: Any, b: Any) -> bool:
    x, y = (_bits(v) if isinstance(v, mx.array) else v for v in (a, b))
    return x.shape == y.shape and x.tobytes() == y.tobytes()
