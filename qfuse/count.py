"""Counts of one decode step: GPU dispatches and bytes, per layer and per token, vanilla beside each mode.

Nothing is run and no weights are needed: the layers are upstream's own, with hollow arrays, traced as for a Metal GPU.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import attrs
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from . import graphs, models
from .describe import EdgeData, GraphData, NodeData, TensorData, describe, total
from .fuse import FusedLayer, Fusion
from .models import RefusedError
from .op import REGISTRY
from .plan import Traced, build
from .show import ranges
from .spec import DTYPE_NAMES, SpecError
from .trace import Launched, Recording, gpu_shaped, launches, record

TRACEABLE = ("metal", "reference")
"""Backends whose calls MLX can record on any machine."""


@attrs.frozen(kw_only=True)
class Count:
    """One step of one layer, or of what is around the layers.

    declared: GPU launches by the ops' declarations, of upstream's part by its trace; None for vanilla. traced: launches
    counted in a trace of the whole call, None where the backend cannot be traced. bytes: read and written.
    """

    declared: int | None
    traced: int | None
    bytes: int | None
    graph: GraphData

    @property
    def dispatches(self) -> int:
        """What was traced, or else what is declared."""
        return (self.declared or 0) if self.traced is None else self.traced


@attrs.frozen(kw_only=True)
class LayerCount:
    """Layers that are alike. modes: by mode, 0 being vanilla; a refused layer is vanilla there, with its ``reason``."""

    kind: str
    layers: tuple[int, ...]
    modes: Mapping[int, Count]
    reason: str = ""


@attrs.frozen(kw_only=True)
class ModelCount:
    """One token of a whole model, per step of ``rows`` rows with ``keys`` keys in the kv caches.

    before, after: the embedding, and the final norm with the output layer, which stay upstream's in every mode.
    """

    name: str
    rows: int
    keys: int
    dtype: str
    backends: tuple[str, ...]
    layers: tuple[LayerCount, ...]
    before: Count
    after: Count

    def dispatches(self, mode: int, *, declared: bool = False) -> int:
        """GPU launches of a token."""
        return sum(times * ((declared and count.declared) or count.dispatches) for times, count in self._parts(mode))

    def bytes(self, mode: int) -> int | None:
        """Bytes read and written for a token."""
        return total(None if count.bytes is None else times * count.bytes for times, count in self._parts(mode))

    def graph(self, mode: int) -> GraphData:
        """The whole model with a node for each run of layers that are alike; a repeated run stands once."""
        return _model_graph(self, mode)

    def _parts(self, mode: int) -> list[tuple[int, Count]]:
        layers = [(len(layer.layers), layer.modes[mode]) for layer in self.layers]
        return [(1, self.before), *layers, (1, self.after)]


def count_model(
    model: nn.Module,
    name: str,
    *,
    rows: int = 1,
    keys: int = 1024,
    backends: Sequence[str] = ("metal",),
    moe: str = "moe_4",
    modes: Sequence[int] = (0, 1, 2),
    gpu: str = "metal",
) -> ModelCount:
    """Count one step of a model, whose weights may be hollow, in each of ``modes``.

    rows: sequences decoded together. keys: in the kv caches once this token's is there. gpu: metal or cuda, whose
    launches of MLX's and mlx-lm's own ops are counted.
    Raises RefusedError on a model of another type.
    """
    layers = models.decoder_layers(model)
    dtype = models.activations(model)
    groups: dict[str, list[int]] = {}
    for index, layer in enumerate(layers):
        groups.setdefault(_signature(layer), []).append(index)
    counted = tuple(
        _count_layer(layers[indices[0]], tuple(indices), rows, keys, backends, moe, modes, gpu)
        for indices in groups.values()
    )
    tokens = models.hollow((rows, 1), mx.int32)
    with gpu_shaped(gpu):
        embed = record(lambda x: [models.before_layers(model, x)], tokens)
        hidden = models.hollow(embed.outputs[0].shape, embed.outputs[0].dtype)
        head = record(lambda x: [models.after_layers(model, x)], hidden)
    return ModelCount(
        name=name,
        rows=rows,
        keys=keys,
        dtype=DTYPE_NAMES[dtype],
        backends=tuple(backends),
        layers=counted,
        before=_traced("embedding", embed, ["tokens"], ["x"], gpu),
        after=_traced("norm and output", head, ["x"], ["logits"], gpu),
    )


def traced_graph(
    name: str, recording: Recording, inputs: Sequence[str], outputs: Sequence[str], gpu: str = "metal"
) -> GraphData:
    """A recording as a graph's data, with a node for each primitive that launches something.

    inputs, outputs: names for the recording's. One called NAME_next carries the state of the input NAME.
    """
    found, wrote = launches(recording, gpu)
    states = {given for given in inputs if f"{given}_next" in outputs}
    tensors = {a.id: _tensor(given, a) for given, a in zip(inputs, recording.inputs, strict=True)}
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
                weights.append(_tensor(f"{node}.{place}", array))
        for place, array in enumerate(launch.outputs):
            owner[array.id] = node
            tensors[array.id] = _tensor(f"{node}.{place}", array)
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


def _count_layer(
    layer: nn.Module,
    indices: tuple[int, ...],
    rows: int,
    keys: int,
    backends: Sequence[str],
    moe: str,
    modes: Sequence[int],
    gpu: str,
) -> LayerCount:
    kind, dtype = ("gdn" if layer.is_linear else "gqa"), layer.input_layernorm.weight.dtype
    state = models.step_state(layer, rows, keys, dtype)
    x = models.hollow((rows, 1, layer.input_layernorm.weight.shape[0]), dtype)
    names = ["x", *state], ["out", *(f"{name}_next" for name in state)]

    def trace(call: Callable[..., Any]) -> Recording:
        def function(x: mx.array, *arrays: mx.array) -> list[mx.array]:
            cache = models.step_cache(layer, dict(zip(state, arrays, strict=True)), keys)
            return [call(x, cache), *models.cache_state(cache)]

        with gpu_shaped(gpu):
            return record(function, x, *state.values())

    vanilla = _traced(f"{kind}_layer_vanilla", trace(lambda x, cache: layer(x, mask=None, cache=cache)), *names, gpu)
    counts = {0: vanilla}
    reason = ""
    for mode in sorted({*modes} - {0}):
        try:
            fused = _fused(layer, mode, backends, moe)
        except (RefusedError, SpecError) as error:
            counts[mode], reason = vanilla, str(error)
            continue
        plan = fused.plan(dtype)
        graph = describe(plan, _call(layer, rows, keys), fused.adapter.weights)
        if mode == 1:
            mix = trace(lambda x, cache: fused.adapter.mix(layer, x, None, cache))  # noqa: B023 (called at once)
            mixer = traced_graph(f"{kind}_layer_mode_1", mix, names[0], ["r", *names[1][1:]], gpu)
            graph = _joined(mixer, graph, "r")
        whole = None
        if all(step.backend in (*TRACEABLE, "library") for step in plan.steps):
            recording = trace(lambda x, cache: fused(layer, x, None, cache))  # noqa: B023
            whole = sum(launch.dispatches for launch in launches(recording, gpu)[0])
        counts[mode] = Count(declared=graph.dispatches, traced=whole, bytes=graph.bytes, graph=graph)
    return LayerCount(kind=kind, layers=indices, modes=counts, reason=reason)


def part_graph(
    model: nn.Module, part: str, *, rows: int = 1, keys: int = 1024, backends: Sequence[str] = ("metal",)
) -> GraphData:
    """The graph called ``part`` in qfuse.graphs for a model's first layer that has one, planned on ``backends``.

    Raises RefusedError where that layer is refused.
    """
    layers = models.decoder_layers(model)
    layer = next(layer for layer in layers if part not in ("gdn", "gqa") or layer.is_linear == (part == "gdn"))
    fused = _fused(layer, 2, backends, "moe_4")
    dims = {**fused.adapter.dims, "T": DTYPE_NAMES[models.activations(model)]}
    plan = build(getattr(graphs, part)(dims), fused.adapter.weights, backends)
    return describe(plan, {**dims, **_call(layer, rows, keys)}, fused.adapter.weights)


def counts_data(count: ModelCount) -> dict[str, Any]:
    """The numbers of a count as plain data: per kind of layer, around the layers, and per token."""

    def numbers(part: Count) -> dict[str, int | None]:
        return {"declared": part.declared, "traced": part.traced, "bytes": part.bytes}

    modes = sorted(count.layers[0].modes)
    return {
        "model": count.name,
        "rows": count.rows,
        "keys": count.keys,
        "dtype": count.dtype,
        "backends": list(count.backends),
        "layers": [
            {
                "kind": layer.kind,
                "layers": list(layer.layers),
                "reason": layer.reason,
                "modes": {str(mode): numbers(part) for mode, part in layer.modes.items()},
            }
            for layer in count.layers
        ],
        "embedding": numbers(count.before),
        "output": numbers(count.after),
        "token": {str(mode): {"dispatches": count.dispatches(mode), "bytes": count.bytes(mode)} for mode in modes},
    }


def _call(layer: nn.Module, rows: int, keys: int) -> dict[str, Any]:
    """The dims of one step: rows, keys, allocated keys, and dtypes of activations and conv state."""
    dtype = layer.input_layernorm.weight.dtype
    dims = {"B": rows, "N": keys, "T": DTYPE_NAMES[dtype], "S": DTYPE_NAMES[dtype]}
    if not layer.is_linear:
        dims["A"] = models.step_state(layer, rows, keys, dtype)["keys"].shape[2]
    return dims


def _fused(layer: nn.Module, mode: int, backends: Sequence[str], moe: str) -> FusedLayer:
    """A layer's plans without touching the layer, the folded router's weights hollow."""
    adapter = models.adapt(layer, fold_router=False)
    d, dtype = adapter.dims, layer.input_layernorm.weight.dtype
    folded = {"M1": models.hollow((d["E"], d["Ka"]), dtype), "Wf": models.hollow((d["E"], d["H"]), dtype)}
    mx.eval(folded)
    weights = {**adapter.weights, **{f"o_proj_router.{name}": array for name, array in folded.items()}}
    return FusedLayer(attrs.evolve(cast(Any, adapter), weights=weights), Fusion(mode, backends, True, moe))


def _traced(name: str, recording: Recording, inputs: Sequence[str], outputs: Sequence[str], gpu: str) -> Count:
    graph = traced_graph(name, recording, inputs, outputs, gpu)
    return Count(declared=None, traced=graph.dispatches, bytes=graph.bytes, graph=graph)


def _joined(first: GraphData, then: GraphData, seam: str) -> GraphData:
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


def _model_graph(count: ModelCount, mode: int) -> GraphData:
    """embedding → the layers, each run of equal ones a node, and a pattern of runs that repeats once → output."""
    group_of = {index: layer for layer in count.layers for index in layer.layers}
    runs: list[tuple[LayerCount, list[int]]] = []
    for index in sorted(group_of):
        if runs and runs[-1][0] is group_of[index]:
            runs[-1][1].append(index)
        else:
            runs.append((group_of[index], [index]))
    period = _period([(layer.layers, len(indices)) for layer, indices in runs])
    repeats = len(runs) // period

    parts: list[tuple[str, Count, list[int], str]] = [("embedding", count.before, [], "")]
    for place, (layer, indices) in enumerate(runs[:period]):
        name = f"{len(indices)} × {layer.kind} layer" if len(indices) > 1 else f"{layer.kind} layer"
        every = [index for _, again in runs[place::period] for index in again]
        unique = name if name not in {part[0] for part in parts} else f"{name} from {indices[0]} on"
        parts.append((unique, layer.modes[mode], every, layer.reason if mode else ""))
    parts.append(("norm and output", count.after, [], ""))

    tensors = [*count.before.graph.tensors[:1]]
    nodes = [NodeData(name=tensors[0].name, kind="input")]
    edges: list[EdgeData] = []
    first = 1
    for name, part, indices, reason in parts:
        times, graph = len(indices) or 1, part.graph
        sides = [total(getattr(node, side) for node in graph.ops) for side in ("reads", "writes")]
        reads, writes = (None if side is None else times * side for side in sides)
        backends = sorted({node.backend for node in graph.ops} - {"library"})
        text = f"layers {ranges(indices)}: {part.dispatches} dispatches each" if indices else ""
        edges.append(EdgeData(source=nodes[-1].name, target=name, tensor=tensors[-1].name, arg="x", bytes=None))
        nodes.append(NodeData(
            name=name, kind="op", backend="+".join(backends), first=0 if indices and repeats > 1 else first,
            dispatches=times * part.dispatches, reads=reads, writes=writes, formula=text,
            refusals={"fuse": reason} if reason else {},
        ))  # fmt: skip
        outs = [edge.tensor for edge in graph.edges if edge.target in ("x", "out", "logits")]
        tensors.append(attrs.evolve(graph.tensor(outs[0]), name=f"{name}.out"))
        first += times * part.dispatches
    nodes.append(NodeData(name="logits", kind="output"))
    edges.append(EdgeData(source=parts[-1][0], target="logits", tensor=tensors[-1].name, arg="logits", bytes=None))
    if repeats > 1:
        back = parts[period][0]
        edges.append(
            EdgeData(source=back, target=parts[1][0], tensor=f"{back}.out", arg=f"{repeats} times", bytes=None)
        )
    return GraphData(
        name=f"{count.name}, {f'mode {mode}' if mode else 'vanilla'}",
        dims={"B": count.rows, "N": count.keys},
        nodes=tuple(nodes),
        tensors=tuple(tensors),
        edges=tuple(edges),
    )


def _period(items: Sequence[Any]) -> int:
    """The length of the shortest pattern that the items repeat."""
    lengths = (n for n in range(1, len(items) + 1) if len(items) % n == 0)
    return next(n for n in lengths if list(items[:n]) * (len(items) // n) == list(items))


def _signature(layer: nn.Module) -> str:
    """Equal for layers whose traces are equal: shapes, dtypes and quantisation of everything in them."""
    arrays = [(name, x.shape, str(x.dtype)) for name, x in tree_flatten(layer.parameters())]
    quants = [(name, m.bits, m.group_size, m.mode) for name, m in layer.named_modules() if hasattr(m, "group_size")]
    return str((type(layer), arrays, quants))


def _label(launch: Launched) -> tuple[str, str]:
    """What a launch is called, and the backend that it belongs to."""
    if not launch.kernel:
        return launch.name, "mlx"
    op = re.match(r"custom_kernel_(\w+?)_[0-9a-f]{8}_", launch.kernel)
    if op and op[1] in REGISTRY:
        return op[1], "metal"
    return re.sub(r"^custom_kernel_|_+(bfloat16_t|half|float)_.*$", "", launch.kernel), "mlx"


def _tensor(name: str, array: Traced) -> TensorData:
    dtype = DTYPE_NAMES.get(array.dtype, str(array.dtype).removeprefix("mlx.core."))
    return TensorData(name=name, shape=array.shape, dtype=dtype, bytes=array.nbytes)
