"""An op against its reference: random arguments from its declarations, a tolerance without tuning, one comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from . import backends
from .backends.kernel import KernelBackend, Lowered
from .op import Op, Schedule
from .spec import DTYPES, QArray, Quant, Spec, SpecError, bind, interval, parts

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
    weights: Mapping[str, Any] | None = None,
    **dims: Any,
) -> tuple[Op, Arguments]:
    """An op and random arguments for it, by name, from its specs' dims, dtypes and domains.

    target: a class, made with the fields of its sample ``name``, or an op as it is. dims: fields and dims of the call
    that replace the sample's. dtype: of everything that is not fixed, or by dtype token or tensor, ``""`` for the rest.
    quant: of all linear layers, or by tensor; a group that does not divide a row is halved until it does.
    optional: give optional inputs too. weights: arrays in place of drawn ones.

    Raises SpecError on an op with a handle, or where a dim is not to be known.
    """
    given = dict(target.samples.get(name, {})) | dims
    dtypes = {"": dtype} if isinstance(dtype, str) else {"": "bf16", **dtype}
    if handles := target.select("handle"):
        raise SpecError(f"[{target.name}] wants no handle where arguments are drawn, got {', '.join(handles)}")
    op = target if isinstance(target, Op) else _make(target, name, given, dtypes, quant)
    env = {**given, **op.constants()}
    random = np.random.default_rng(seed)
    arguments: Arguments = dict(weights or {})
    for key, spec in (op.inputs() | op.weights()).items():
        if key in arguments or (spec.optional and not optional):
            continue
        for dim in spec.dims:
            if not dim.names <= env.keys():
                raise SpecError(f"[{op.name}.{key}] wants a sample with all dims of ({dim}), got {name} with {given}")
        kind = dtypes.get(key) or dtypes.get(spec.dtype) or (spec.dtype if spec.dtype in DTYPES else dtypes[""])
        arguments[key] = _draw(op, key, spec, DTYPES[kind], env, random)
    mx.eval([parts(x) for x in arguments.values()])
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
        mask = random.random(shape) < 0.7
        mask.flat[0] = True  # with nothing but false ones there would be nothing to compare
        return mx.array(mask)
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
    """How far a result is from the oracle. ratio: its RMS error over that allowed; at most 1 passes."""

    ratio: float
    allowed: float
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
        return Closeness(0.0 if not error.any() else math.inf, 0.0, worst, *at)
    allowed = max(2 * _rms(allowed_error), floor * _rms(want))
    size = float(np.sqrt(np.mean(error**2))) if error.size else 0.0
    return Closeness(size / allowed if allowed else (math.inf if size else 0.0), allowed, worst, *at)


def _numbers(x: mx.array) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x).astype(np.float64)


def _rms(x: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    x = x[np.isfinite(x)]
    return float(np.sqrt(np.mean(x**2))) if x.size else 0.0


class Exact(QArray):
    """A linear layer that sums in f64 and rounds once: MLX on a CPU sums bf16 in bf16, which would excuse anything."""

    def linear(self, x: mx.array) -> mx.array:
        """As QArray.linear, in the dtype of x."""
        with mx.stream(mx.cpu):
            return (x.astype(mx.float64) @ self._wide().swapaxes(-1, -2)).astype(x.dtype)

    def gather(self, x: mx.array, indices: mx.array) -> mx.array:
        """As QArray.gather, in the dtype of x."""
        with mx.stream(mx.cpu):
            chosen = self.map(lambda part: part[indices])  # in f64, all of a large model's experts would take GBs
            rows = chosen._wide().swapaxes(-1, -2)
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
    """FLOOR, or what f32 itself may differ by.

    2^-24·√length in a sum as long as the op's longest row, by the order of its terms; 2^-24·position in an angle.
    """
    rows = [x.shape[-1] for x in arguments.values() if x.shape]
    angle = arguments["position"].max().item() if "position" in arguments else 0
    return max(FLOOR, 2**-24 * max(rows, default=1) ** 0.5, 2**-24 * angle)


def run(
    op: Op, arguments: Arguments, backend: str | backends.Backend, schedule: Schedule | None = None
) -> dict[str, mx.array]:
    """The outputs of the op on a backend by name, evaluated. schedule: in place of the backend's own.

    A library op has its reference only, as in a plan. Raises SpecError where the backend refuses the op.
    """
    found = backends.get("reference" if op.library else backend)
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


class MismatchError(AssertionError):
    """Results too far off: op, output, worst index, both values and ratio of each. found: of all outputs."""

    def __init__(self, text: str, found: Mapping[str, Closeness]) -> None:
        super().__init__(text)
        self.found = found


def compare(op: Op, got: Mapping[str, mx.array], arguments: Arguments, place: str = "") -> dict[str, Closeness]:
    """The closeness of each output.

    Raises SpecError on a result of another shape or dtype than declared, MismatchError on one that is too far off.
    """
    bind(op.name, op.select("out").items(), got, op.bind(arguments))
    near, true, floor = reference(op, arguments), oracle(op, arguments), floor_of(arguments)
    found = {name: closeness(got[name], near[name], true[name], floor) for name in got}
    bad = [f"[{op.name}.{name}]{place and f' {place}'} {c}" for name, c in found.items() if not c.ratio <= 1]
    if bad:
        raise MismatchError("\n".join(bad), found)
    return found


def _parts(x: QArray) -> tuple[Any, ...]:
    return (x.weight, x.scales, x.biases, x.quant)
