"""Plan: a graph flattened for the hot path, with no networkx in it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import attrs
import mlx.core as mx

from . import backends
from .backends.kernel import Lowered
from .graphs.graph import Graph, Node
from .spec import QArray, SpecError, bind, parts

# Primitives that launch nothing: they only describe a buffer in another way.
# fmt: off
VIEWS = frozenset({
    "AsStrided", "Broadcast", "Copy", "Depends", "ExpandDims", "Flatten", "Reshape", "Slice", "Split", "Squeeze",
    "StopGradient", "Transpose", "Unflatten", "View",
})
# fmt: on


@attrs.frozen
class Step:
    """One node of a plan: what runs it and, where that is not the first backend asked for, why."""

    node: Node
    backend: str
    call: Callable[..., Any] = attrs.field(repr=False)
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    refusals: Mapping[str, str]


class Traced(NamedTuple):
    """An array of a trace; ``id`` tells it from the others."""

    id: str
    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.size


@attrs.frozen
class Primitive:
    """One primitive that MLX records while a plan is traced.

    name: MLX's name. kernel: the kernel's name for a CustomKernel. source: its full generated text.
    arguments: its state, as MLX gives it.
    """

    name: str
    kernel: str = ""
    source: str = attrs.field(default="", repr=False)
    grid: tuple[int, int, int] | None = None
    threadgroup: tuple[int, int, int] | None = None
    inputs: tuple[Traced, ...] = ()
    outputs: tuple[Traced, ...] = ()
    arguments: tuple[Any, ...] = attrs.field(default=(), repr=False)

    @property
    def is_view(self) -> bool:
        """Whether it launches nothing on a GPU."""
        return self.name in VIEWS


class Plan:
    """Runs the nodes of one graph in order. Made by :func:`build`.

    inputs, outputs: names, in the order that :meth:`run` takes and gives them. steps: one per node.
    segments: run what lies between two nodes with a handle as one function compiled by MLX, in which those outputs of
    a kernel that only kernels read are parts of one array.
    """

    def __init__(
        self,
        graph: Graph,
        steps: Sequence[Step],
        inputs: Sequence[str],
        outputs: Mapping[str, int],
        *,
        segments: bool = False,
    ) -> None:
        self.graph = graph
        self.steps = tuple(steps)
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self._output_slots = tuple(outputs.values())
        size = 1 + max([len(inputs), *(slot for step in steps for slot in step.writes)])
        self._spare = [None] * (size - len(inputs))
        self._runs = _runs(self.steps) if segments else [[step] for step in self.steps]
        calls = _segments(self._runs, {*outputs.values()}) if segments else [_call(step) for step in self.steps]
        self._hot = tuple((call, reads, writes if len(writes) > 1 else writes[0]) for call, reads, writes in calls)

    def run(self, *inputs: Any) -> tuple[Any, ...]:
        """Run every node on ``inputs`` (in the order of ``self.inputs``; an absent optional one is None).

        Arguments are not checked here, this is once per layer and token; :meth:`debug` checks them.
        """
        slots = [*inputs, *self._spare]
        try:
            for call, reads, writes in self._hot:
                result = call(*[slots[i] for i in reads])
                if isinstance(writes, int):
                    slots[writes] = result
                else:
                    for slot, value in zip(writes, result, strict=True):
                        slots[slot] = value
        except Exception as error:
            error.add_note(self._place(call))
            raise
        return tuple([slots[i] for i in self._output_slots])

    def _place(self, call: Callable[..., Any]) -> str:
        run = self._runs[[each for each, _, _ in self._hot].index(call)]
        nodes = " to ".join(dict.fromkeys((run[0].node.name, run[-1].node.name)))
        return f"qfuse: at {nodes} of {self.graph.name}, on {', '.join(dict.fromkeys(step.backend for step in run))}"

    def debug(self, *inputs: Any, until: str | None = None) -> dict[str, Any]:
        """Run with every argument and result checked, and return each tensor as ``node.tensor``.

        until: stop after this node. Raises SpecError at the first value that does not fit its spec.
        """
        if len(inputs) != len(self.inputs):
            raise SpecError(f"[{self.graph.name}] wants {len(self.inputs)} inputs, got {len(inputs)}")
        if until is not None and until not in {step.node.name for step in self.steps}:
            raise SpecError(f"[{self.graph.name}] wants a node of the graph, got {until}")
        seen = dict(zip(self.inputs, inputs, strict=True))
        for step, _, results in self.walk(*inputs):
            name = step.node.name
            seen |= {f"{name}.{out}": value for out, value in results.items()}
            if name == until:
                break
        return seen

    def walk(self, *inputs: Any) -> Iterator[tuple[Step, dict[str, Any], dict[str, Any]]]:
        """Run node by node: each step with its arguments and its results by name, checked against their specs."""
        slots = [*inputs, *self._spare]
        for step in self.steps:
            op, place = step.node.op, f"{self.graph.name}.{step.node.name}"
            values = dict(zip(op.inputs(), [slots[i] for i in step.reads], strict=True))
            env = bind(place, op.inputs().items(), values, op.constants())
            outs = op.select("out")
            results = dict(zip(outs, op.as_tuple(step.call(*values.values())), strict=True))
            bind(place, outs.items(), results, env)
            for slot, value in zip(step.writes, results.values(), strict=True):
                slots[slot] = value
            yield step, values, results

    def trace(self, *inputs: Any) -> list[Primitive]:
        """The primitives that MLX records for one run, in order, without running any of them.

        Works for Metal kernels on a machine without Metal. Handles are passed through as they are, so give a copy.
        """
        found: list[Primitive] = []

        def record(event: dict[str, Any]) -> None:
            if event["type"] == "primitive":
                found.append(_primitive(event))

        arrays = [i for i, value in enumerate(inputs) if isinstance(value, mx.array)]

        def function(*values: mx.array) -> list[mx.array]:
            full = list(inputs)
            for i, value in zip(arrays, values, strict=True):
                full[i] = value
            return [out for out in self.run(*full) if isinstance(out, mx.array)]

        mx.export_function(record, function, *[inputs[i] for i in arrays])
        return found

    def dispatches(self, traced: Sequence[Primitive] | None = None) -> int:
        """GPU launches: declared by the ops, or counted in a trace with views at 0."""
        if traced is None:
            return self.graph.dispatches()
        return sum(not primitive.is_view for primitive in traced)

    def backends(self) -> Counter[str]:
        """How many nodes each backend runs."""
        return Counter(step.backend for step in self.steps)

    def report(self) -> str:
        """One line a node: number, node, op, backend, dispatches, and why an earlier backend was passed over."""
        lines = []
        for number, step in enumerate(self.steps, 1):
            why = "".join(f"  [{name}: {reason}]" for name, reason in step.refusals.items())
            lines.append(f"{number:3} {step.node.name:20} {step.backend:10} {step.node.op.dispatches:2}{why}")
        return "\n".join(lines)


Refuses = Callable[[backends.Backend, Node, backends.Weights], str | None]
Call = tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]


def _runs(steps: Sequence[Step]) -> list[list[Step]]:
    """The steps in order: one with a handle by itself, what lies between two of them together."""
    runs: list[list[Step]] = []
    for handle, group in groupby(steps, lambda step: bool(step.node.op.select("handle"))):
        between = list(group)
        runs += [[step] for step in between] if handle else [between]
    return runs


def _call(step: Step) -> Call:
    return step.call, step.reads, step.writes


def _later(runs: Sequence[Sequence[Step]], number: int, outputs: set[int]) -> set[int]:
    """The slots that are read after a run."""
    return outputs.union(*(step.reads for run in runs[number + 1 :] for step in run))


def _packed(run: Sequence[Step], later: set[int]) -> list[Step]:
    """The run with outputs of a kernel packed into one array where only kernels of the run read them."""
    kept = later.union(*(step.reads for step in run if not isinstance(step.call, Lowered)))

    def packed(step: Step) -> Step:
        outs = zip(step.node.op.select("out"), step.writes, strict=True)
        names = [out for out, slot in outs if slot not in kept]
        if not isinstance(step.call, Lowered) or len(names) < 2:
            return step
        return attrs.evolve(step, call=step.call.packing(names))

    return [packed(step) for step in run]


def _segments(runs: Sequence[Sequence[Step]], outputs: set[int]) -> list[Call]:
    """Each run as one call, that of steps without a handle one that MLX compiles at its first use in a thread."""
    calls: list[Call] = []
    for number, run in enumerate(runs):
        if run[0].node.op.select("handle"):
            calls.append(_call(run[0]))
            continue
        later = _later(runs, number, outputs)
        calls.append(_compiled(_packed(run, later), later))
    return calls


def _compiled(run: Sequence[Step], later: Iterable[int]) -> Call:
    """One call for a run of steps. later: slots that are read after it.

    An optional input that the graph does not wire is in no slot and stays None. MLX keeps a trace for each thread,
    stream and set of shapes: what grows with every token must not come in as a shape.
    """
    written = {slot for step in run for slot in step.writes}
    absent = {slot for step in run for arg, slot in zip(step.node.op.inputs(), step.reads, strict=True)
              if arg not in step.node.inputs}  # fmt: skip
    reads = tuple(sorted({slot for step in run for slot in step.reads} - written - absent))
    writes = tuple(sorted(written & {*later}))

    def function(*values: mx.array) -> list[mx.array]:
        slots: dict[int, Any] = dict.fromkeys(absent) | dict(zip(reads, values, strict=True))
        for step in run:
            results = step.node.op.as_tuple(step.call(*[slots[i] for i in step.reads]))
            slots.update(zip(step.writes, results, strict=True))
        return [slots[i] for i in writes]

    compiled = mx.compile(function)
    if len(writes) > 1:
        return compiled, reads, writes
    return lambda *values: compiled(*values)[0], reads, writes


def build(
    graph: Graph,
    weights: Mapping[str, mx.array | QArray],
    names: Sequence[str | backends.Backend] = ("reference",),
    refuses: Refuses | None = None,
    *,
    segments: bool = False,
) -> Plan:
    """Flatten ``graph``, each node lowered by the first of the backends in ``names`` that takes its op.

    weights: by ``node.spec`` name, kept by reference. names: backends, or their names; an op that none of them takes
    falls to the reference, with every reason in the report. A backend need not run here: its plans can be traced
    anywhere. refuses: why a backend is not to run a node with these weights, or None; default what the backend says of
    the op, with nothing probed as fuse() does. segments: as of :class:`Plan`; every weight is evaluated, since what MLX
    has to compute of a constant it would compute at every call.
    Raises SpecError when a weight is missing or does not fit, ValueError on an unknown backend.
    """
    chosen = [backends.find(name) for name in names]
    slot_of: dict[tuple[str, str], int] = {(name, name): i for i, name in enumerate(graph.inputs())}
    absent = len(slot_of)  # stays None, for optional inputs that the graph does not wire
    next_slot = absent + 1
    steps = []
    for node in graph.nodes():
        bound = {}
        for spec, name in node.weight_names().items():
            if name not in weights:
                raise SpecError(
                    f"[{graph.name}.{name}] wants {node.op.specs[spec].text(node.op.constants())}, got nothing"
                )
            bound[spec] = weights[name]
        bind(f"{graph.name}.{node.name}", node.op.weights().items(), bound, node.op.constants())
        refusals: dict[str, str] = {}
        backend: backends.Backend = backends.BACKENDS["reference"]
        for candidate in () if node.op.library else chosen:
            reason = refuses(candidate, node, bound) if refuses else candidate.refuses(node.op)
            if reason is None:
                backend = candidate
                break
            refusals[candidate.name] = reason
        outs = list(node.op.select("out"))
        writes = tuple(range(next_slot, next_slot + len(outs)))
        next_slot += len(outs)
        slot_of.update({(node.name, out): slot for out, slot in zip(outs, writes, strict=True)})
        reads = tuple(slot_of[node.inputs[arg]] if arg in node.inputs else absent for arg in node.op.inputs())
        name = "library" if node.op.library else backend.name
        steps.append(Step(node, name, backend.lower(node.op, bound), reads, writes, refusals))
    if segments:
        mx.eval([parts(array) for array in weights.values()])
    outputs = {out: slot_of[source] for out, source in graph.outputs().items()}
    return Plan(graph, steps, list(graph.inputs()), outputs, segments=segments)


def _primitive(event: Mapping[str, Any]) -> Primitive:
    name, arguments = event["name"], tuple(event["arguments"])
    inputs, outputs = (tuple(Traced(*array) for array in event[key]) for key in ("inputs", "outputs"))
    if name != "CustomKernel":
        return Primitive(name, inputs=inputs, outputs=outputs, arguments=arguments)
    kernel, source, *sizes = arguments[:8]
    return Primitive(name, kernel, source, tuple(sizes[:3]), tuple(sizes[3:]), inputs, outputs, arguments)
