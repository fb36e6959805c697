"""Testing ops, ours and anyone's: random arguments from an op's declarations, a tolerance without tuning, and checks.

>>> op, arguments = sample(MyOp, "small", dtype="bf16")  # doctest: +SKIP
>>> opcheck(op, arguments)  # doctest: +SKIP
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from . import backends
from .backends.kernel import MAX_THREADS, SIMD, KernelBackend, Lowered
from .compare import Arguments, Closeness, closeness, compare, oracle, reference, run, sample
from .op import Op
from .plan import Primitive, _primitive
from .spec import DTYPES, QArray, SpecError, parts

__all__ = [
    "Arguments", "Closeness", "ErrorInput", "check_launch", "closeness", "compare", "error_inputs", "opcheck", "oracle",
    "reference", "run", "sample", "trace",
]  # fmt: skip


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


def opcheck(op: Op, arguments: Arguments, backend: str | backends.Backend = "sim") -> dict[str, Closeness]:
    """Check one op on one backend, and return how close each output is.

    Declared shapes and dtypes; agreement with the reference; the same result twice, with arguments as they were; rows
    of a batch as each alone; geometry within limits; one kernel in the trace; wrong arguments refused. "sim" is the
    simulator with its full checks, which finds faults in the kernel itself, see docs/simulator.md; a SimBackend is
    taken as it is. Raises AssertionError on the first that fails or that the simulator warns of, SimulationError on an
    error that it finds.
    """
    chosen = backends.get(backend, full=backend == "sim")
    already = len(getattr(chosen, "findings", ()))
    before = {name: _copies(x) for name, x in arguments.items()}
    got = run(op, arguments, chosen)
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
    findings = getattr(chosen, "findings", ())[already:]
    assert not findings, f"[{op.name}] wants a kernel with nothing found in it, got {'; '.join(map(str, findings))}"
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


def _each(x: Any, change: Callable[[mx.array], mx.array]) -> Any:
    return x.map(change) if isinstance(x, QArray) else change(x)


def _copies(x: Any) -> list[np.ndarray[Any, Any]]:
    return [_bits(part).copy() for part in parts(x)]


def _bits(x: mx.array) -> np.ndarray[Any, Any]:
    return np.array(mx.view(x, mx.uint16) if x.dtype == mx.bfloat16 else x)


def _same(a: Any, b: Any) -> bool:
    x, y = (_bits(v) if isinstance(v, mx.array) else v for v in (a, b))
    return x.shape == y.shape and x.tobytes() == y.tobytes()
