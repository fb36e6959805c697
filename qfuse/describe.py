"""A graph, a plan or a trace as plain data: what tables, pictures and other tools are made from; docs/graph-data.md.

Shapes, bytes and dispatch numbers come from the specs and from the dims of one call; nothing is run.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import mlx.core as mx

from .graphs.graph import Graph, Node
from .op import REGISTRY, Op
from .plan import Plan, Primitive, Traced
from .spec import DTYPE_NAMES, DTYPES, QArray, Quant, Spec, parse_dims
from .trace import Launched, Recording, launches

if TYPE_CHECKING:
    from .fuse import FusionReport

SCHEMA = 1
"""Version of the data's form; it goes up when a field is renamed or removed."""


@attrs.frozen(kw_only=True)
class TensorData:
    """A tensor that a node writes, or an input. shape: sizes, or a dim's text where the call's dims leave it open.

    name: ``node.tensor``, an input's own name, or ``node.weight``. bytes: of all of it, None where the shape is open.
    quant: a linear layer's bits and group, as text, or "".
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    bytes: int | None
    quant: str = ""

    def label(self) -> str:
        """``1×8192 bf16``."""
        shape = "×".join(map(str, self.shape)) or "scalar"
        return "object" if self.dtype == "object" else f"{shape} {self.quant or self.dtype}"


@attrs.frozen(kw_only=True)
class NodeData:
    """One op call, graph input or graph output, told apart by ``kind``.

    dispatches: GPU launches; first: the number of the first of them, from 1, or 0 where there is none.
    reads, writes: bytes of one call, weights included; None where a shape is open. weights: what is bound once.
    backend: what runs it, "" for a graph that is not planned; refusals: why a backend asked for did not take it.
    """

    name: str
    kind: str
    op: str = ""
    backend: str = ""
    first: int = 0
    dispatches: int = 0
    reads: int | None = 0
    writes: int | None = 0
    weights: tuple[TensorData, ...] = ()
    refusals: Mapping[str, str] = attrs.field(factory=dict)
    formula: str = ""


@attrs.frozen(kw_only=True)
class EdgeData:
    """``tensor`` of ``source`` is argument ``arg`` of ``target``, which reads ``bytes`` of it.

    state: it is carried from one token to the next.
    """

    source: str
    target: str
    tensor: str
    arg: str
    bytes: int | None
    state: bool = False


@attrs.frozen(kw_only=True)
class GraphData:
    """A graph with what one call of it costs. dims: those of the call, such as B. nodes: in the order they run."""

    name: str
    dims: Mapping[str, Any]
    nodes: tuple[NodeData, ...]
    tensors: tuple[TensorData, ...]
    edges: tuple[EdgeData, ...]

    @property
    def ops(self) -> list[NodeData]:
        """The nodes that are op calls."""
        return [node for node in self.nodes if node.kind == "op"]

    @property
    def dispatches(self) -> int:
        return sum(node.dispatches for node in self.ops)

    @property
    def bytes(self) -> int | None:
        """Read and written by one call, or None where a shape is open."""
        return total(part for node in self.ops for part in (node.reads, node.writes))

    def tensor(self, name: str) -> TensorData:
        return next(tensor for tensor in self.tensors if tensor.name == name)


def describe(
    graph: Graph | Plan, dims: Mapping[str, Any], weights: Mapping[str, mx.array | QArray] | None = None
) -> GraphData:
    """A graph's data for one call.

    dims: sizes and dtypes that the graph leaves open, such as ``B=1, N=1024, T="bf16"``; what is not given stays text.
    weights: arrays whose dtypes are taken; weights of any dtype count as T without them.
    """
    plan, graph = (graph, graph.graph) if isinstance(graph, Plan) else (None, graph)
    inputs, outputs = graph.inputs(), graph.outputs()
    tensors = {(name, name): _input(graph, name, spec, dims) for name, spec in inputs.items()}
    states = {name for name, spec in inputs.items() if spec.kind == "handle" or f"{name}_next" in outputs}
    nodes = [NodeData(name=name, kind="input") for name in inputs]
    edges: list[EdgeData] = []
    steps = {step.node.name: step for step in plan.steps} if plan else {}
    number = 1
    for node in graph.nodes():
        op = node.op
        env = _env(node, dims, tensors)
        for out, spec in op.select("out").items():
            tensors[node.name, out] = _tensor(f"{node.name}.{out}", spec, env)
        reads = []
        for arg, source in node.inputs.items():
            tensor = tensors[source]
            reads.append(EdgeData(
                source=source[0], target=node.name, tensor=tensor.name, arg=arg,
                bytes=_touched(op, arg, tensor, env), state=source[0] in states,
            ))  # fmt: skip
        bound = {name: _weight(node, name, spec, env, weights or {}) for name, spec in op.weights().items()}
        step = steps.get(node.name)
        nodes.append(NodeData(
            name=node.name, kind="op", op=op.name, backend=step.backend if step else "",
            first=number if op.dispatches else 0, dispatches=op.dispatches,
            reads=total([*(edge.bytes for edge in reads), *(_touched(op, name, w, env) for name, w in bound.items())]),
            writes=total(_touched(op, out, tensors[node.name, out], env) for out in op.select("out")),
            weights=tuple(bound.values()), refusals=dict(step.refusals) if step else {}, formula=formula(op),
        ))  # fmt: skip
        edges += reads
        number += op.dispatches
    for name, source in outputs.items():
        state = name.endswith("_next") and name.removesuffix("_next") in states
        made = tensors[source].name
        shown = name if name not in {node.name for node in nodes} else f"output {name}"
        nodes.append(NodeData(name=shown, kind="output"))
        edges.append(EdgeData(source=source[0], target=shown, tensor=made, arg=name, bytes=0, state=state))
    return GraphData(
        name=graph.name,
        dims=dict(dims),
        nodes=tuple(nodes),
        tensors=tuple(tensors.values()),
        edges=tuple(edges),
    )


def traced_graph(
    name: str, recording: Recording, inputs: Sequence[str], outputs: Sequence[str], gpu: str = "metal"
) -> GraphData:
    """A recording as a graph's data, with a node for each primitive that launches something.

    inputs, outputs: names for the recording's. One called NAME_next carries the state of the input NAME.
    """
    found, wrote = launches(recording, gpu)
    states = {given for given in inputs if f"{given}_next" in outputs}
    tensors = {a.id: _traced_tensor(given, a) for given, a in zip(inputs, recording.inputs, strict=True)}
    owner = {a.id: given for given, a in zip(inputs, recording.inputs, strict=True)}
    nodes = [NodeData(name=given, kind="input") for given in inputs]
    edges: list[EdgeData] = []
    seen: Counter[str] = Counter()
    number = 1
    for launch in found:
        op, backend = _label(launch)
        seen[op] += 1
        node = op if seen[op] == 1 else f"{op} {seen[op]}"
        weights = []
        for place, array in enumerate(launch.inputs):
            source = wrote[array.id]
            if source in owner:
                edges.append(EdgeData(
                    source=owner[source], target=node, tensor=tensors[source].name, arg=str(place),
                    bytes=array.nbytes, state=owner[source] in states,
                ))  # fmt: skip
            elif math.prod(array.shape) > 1:  # a scalar is no weight
                weights.append(_traced_tensor(f"{node}.{place}", array))
        for place, array in enumerate(launch.outputs):
            owner[array.id] = node
            tensors[array.id] = _traced_tensor(f"{node}.{place}", array)
        nodes.append(NodeData(
            name=node, kind="op", op=op, backend=backend, first=number, dispatches=launch.dispatches,
            reads=launch.reads, writes=launch.writes, weights=tuple(weights),
        ))  # fmt: skip
        number += launch.dispatches
    for wanted, array in zip(outputs, recording.outputs, strict=True):
        source = wrote.get(array.id, array.id)
        nodes.append(NodeData(name=wanted, kind="output"))
        edges.append(EdgeData(
            source=owner[source], target=wanted, tensor=tensors[source].name, arg=wanted, bytes=0,
            state=wanted.removesuffix("_next") in states,
        ))  # fmt: skip
    return GraphData(name=name, dims={}, nodes=tuple(nodes), tensors=tuple(tensors.values()), edges=tuple(edges))


def joined(first: GraphData, then: GraphData, seam: str = "r") -> GraphData:
    """Two graphs as one: what ``first`` calls ``seam`` is an input of ``then``, whose other inputs are first's."""
    (into,) = [edge for edge in first.edges if edge.target == seam]
    sources = {seam: (into.source, into.tensor)}
    edges = [edge for edge in first.edges if edge.target != seam]
    for edge in then.edges:
        source, tensor = sources.get(edge.source, (edge.source, edge.tensor))
        edges.append(attrs.evolve(edge, source=source, tensor=tensor))
    nodes = [node for node in first.nodes if node.name != seam]
    nodes += [
        attrs.evolve(node, first=node.first + first.dispatches if node.first else 0)
        for node in then.nodes
        if node.kind != "input"
    ]
    made = {tensor.name for tensor in first.tensors}
    return GraphData(
        name=first.name, dims=then.dims, nodes=tuple(nodes), edges=tuple(edges),
        tensors=first.tensors + tuple(t for t in then.tensors if t.name not in made | {seam}),
    )  # fmt: skip


def formula(op: Op | type[Op]) -> str:
    """The first paragraph of an op's docstring, on one line."""
    return " ".join((inspect.getdoc(op if isinstance(op, type) else type(op)) or "").split("\n\n")[0].split())


def report_data(report: FusionReport) -> dict[str, Any]:
    """A FusionReport as plain data, for other tools."""
    return {"schema": SCHEMA, **attrs.asdict(report)}


def trace_data(primitives: Iterable[Primitive]) -> list[dict[str, Any]]:
    """What :meth:`qfuse.Plan.trace` gives, as plain data: names, arrays, and for kernels the text and the grid."""

    def arrays(found: Iterable[Traced]) -> list[dict[str, Any]]:
        return [attrs.asdict(_traced_tensor(array.id, array)) for array in found]

    return [
        {
            "name": primitive.name,
            "kernel": primitive.kernel,
            "source": primitive.source,
            "grid": primitive.grid,
            "threadgroup": primitive.threadgroup,
            "view": primitive.is_view,
            "inputs": arrays(primitive.inputs),
            "outputs": arrays(primitive.outputs),
        }
        for primitive in primitives
    ]


def to_json(graphs: Sequence[GraphData], **more: Any) -> str:
    """Graphs as JSON text, by docs/graph.schema.json. more: further top-level values."""
    values = [{**attrs.asdict(graph), "dispatches": graph.dispatches, "bytes": graph.bytes} for graph in graphs]
    return json.dumps({"schema": SCHEMA, "graphs": values, **more}, indent=2, ensure_ascii=False, default=str) + "\n"


def total(parts: Iterable[int | None]) -> int | None:
    """The sum, or None if a part is not known."""
    found = list(parts)
    return None if None in found else sum(part for part in found if part is not None)


def _env(node: Node, dims: Mapping[str, Any], tensors: Mapping[tuple[str, str], TensorData]) -> dict[str, Any]:
    """Dims and dtype tokens of one call: the op's constants, then what its inputs have, then what the caller says."""
    bound: dict[str, Any] = {}
    for arg, source in node.inputs.items():
        spec, tensor = node.op.specs[arg], tensors[source]
        for dim, size in zip(spec.dims, tensor.shape, strict=False):
            if dim.text.isidentifier() and isinstance(size, int):
                bound.setdefault(dim.text, size)
        if spec.dtype not in DTYPES and tensor.dtype in DTYPES:
            bound.setdefault(spec.dtype, tensor.dtype)
    return {**dims, **bound, **node.op.constants()}


def _input(graph: Graph, name: str, spec: Spec, dims: Mapping[str, Any]) -> TensorData:
    """A graph input; a size that the dims leave open is the one that an op which takes it has as a constant."""
    found = _tensor(name, spec, dims)
    for node in graph.nodes():
        for arg, source in node.inputs.items():
            if source == (name, name):
                taken = _tensor(name, node.op.specs[arg], {**dims, **node.op.constants()})
                shape = tuple(b if isinstance(a, str) else a for a, b in zip(found.shape, taken.shape, strict=True))
                found = attrs.evolve(found, shape=shape, bytes=_bytes(shape, found.dtype))
    return found


def _tensor(name: str, spec: Spec, env: Mapping[str, Any]) -> TensorData:
    shape = tuple(dim.partial(env) for dim in spec.dims)
    dtype = env.get(spec.dtype, spec.dtype) if spec.kind != "handle" else "object"
    return TensorData(name=name, shape=shape, dtype=dtype, bytes=_bytes(shape, dtype))


def _weight(node: Node, name: str, spec: Spec, env: Mapping[str, Any], weights: Mapping[str, Any]) -> TensorData:
    place = f"{node.name}.{name}"
    array = weights.get(place)
    shape = tuple(dim.partial(env) for dim in spec.dims)
    dtype = env.get(spec.dtype or "T", spec.dtype or "T") if array is None else DTYPE_NAMES[array.dtype]
    size = _bytes(shape, dtype)
    quant = env[name] if spec.kind == "qweight" else Quant(0, 0)
    elements = _elements(shape)
    if elements is not None and quant.bits and dtype in DTYPES:
        size = elements * quant.bits // 8 + 2 * (elements // quant.group) * DTYPES[dtype].size
    return TensorData(name=place, shape=shape, dtype=dtype, bytes=size, quant=str(quant) if quant.bits else "")


def _touched(op: Op, name: str, tensor: TensorData, env: Mapping[str, Any]) -> int | None:
    """Bytes that one call reads or writes of a tensor, by the op's ``touched``."""
    text = op.touched.get(name)
    if text is None or tensor.bytes is None:
        return tensor.bytes
    part, whole = _elements([dim.partial(env) for dim in parse_dims(text)]), _elements(tensor.shape)
    return None if part is None or not whole else tensor.bytes * min(part, whole) // whole


def _bytes(shape: Sequence[int | str], dtype: str) -> int | None:
    elements = _elements(shape)
    if dtype == "object":
        return 0
    return None if elements is None or dtype not in DTYPES else elements * DTYPES[dtype].size


def _elements(shape: Sequence[int | str]) -> int | None:
    sizes = [size for size in shape if isinstance(size, int)]
    return math.prod(sizes) if len(sizes) == len(shape) else None


def _label(launch: Launched) -> tuple[str, str]:
    """What a launch is called, and the backend that it belongs to."""
    if not launch.kernel:
        return launch.name, "mlx"
    op = re.match(r"custom_kernel_(\w+?)_[0-9a-f]{8}_", launch.kernel)
    if op and op[1] in REGISTRY:
        return op[1], "metal"
    return re.sub(r"^custom_kernel_|_+(bfloat16_t|half|float)_.*$", "", launch.kernel), "mlx"


def _traced_tensor(name: str, array: Traced) -> TensorData:
    dtype = DTYPE_NAMES.get(array.dtype, str(array.dtype).removeprefix("mlx.core."))
    return TensorData(name=name, shape=array.shape, dtype=dtype, bytes=array.nbytes)
