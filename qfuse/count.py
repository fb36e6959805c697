"""Counts of one decode step: GPU dispatches and bytes, per layer and per token, vanilla beside each mode.

Nothing is run and no weights are needed: upstream's own layers, with hollow arrays, are traced as a GPU would run them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import attrs
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from . import graphs, hollow, models
from .describe import EdgeData, GraphData, NodeData, describe, joined, total, traced_graph
from .models import Adapter, RefusedError
from .plan import Plan, build
from .show import ranges
from .spec import DTYPE_NAMES, SpecError
from .trace import Recording, gpu_shaped, launches, record

TRACEABLE = ("library", "metal", "reference")
"""What runs a node in a way that MLX can record on any machine."""


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
    step = _Step(rows=rows, keys=keys, backends=tuple(backends), moe=moe, gpu=gpu)
    layers = models.decoder_layers(model)
    groups: dict[str, list[int]] = {}
    for index, layer in enumerate(layers):
        groups.setdefault(_signature(layer), []).append(index)
    tokens = hollow.zeros((rows, 1), mx.int32)
    with gpu_shaped(gpu):
        embed = record(lambda x: [models.before_layers(model, x)], tokens)
        out = embed.outputs[0]
        head = record(lambda x: [models.after_layers(model, x)], hollow.zeros(out.shape, out.dtype))
    return ModelCount(
        name=name,
        rows=rows,
        keys=keys,
        dtype=DTYPE_NAMES[models.form(layers[0])[2]],
        backends=step.backends,
        layers=tuple(_count_layer(layers[same[0]], same, step, modes) for same in groups.values()),
        before=step.counted("embedding", embed, ["tokens"], ["x"]),
        after=step.counted("norm and output", head, ["x"], ["logits"]),
    )


@attrs.frozen(kw_only=True)
class _Step:
    """What is asked of every layer, see count_model."""

    rows: int
    keys: int
    backends: tuple[str, ...]
    moe: str
    gpu: str

    def counted(self, name: str, recording: Recording, inputs: Sequence[str], outputs: Sequence[str]) -> Count:
        """A part that is upstream's own."""
        graph = traced_graph(name, recording, inputs, outputs, self.gpu)
        return Count(declared=None, traced=graph.dispatches, bytes=graph.bytes, graph=graph)


def _count_layer(layer: nn.Module, same: Sequence[int], step: _Step, modes: Sequence[int]) -> LayerCount:
    """One of the layers numbered ``same``, which are alike."""
    kind, H, dtype = models.form(layer)
    state = models.step_state(layer, step.rows, step.keys, dtype)
    names = ["x", *state], ["out", *(f"{name}_next" for name in state)]
    given = [hollow.zeros((step.rows, 1, H), dtype), *(hollow.zeros(*form) for form in state.values())]

    def trace(call: Callable[..., Any]) -> Recording:
        def function(x: mx.array, *arrays: mx.array) -> list[mx.array]:
            cache = models.step_cache(layer, dict(zip(state, arrays, strict=True)), step.keys)
            return [call(x, cache), *models.cache_state(cache)]

        with gpu_shaped(step.gpu):
            return record(function, *given)

    vanilla = step.counted(f"{kind}_layer_vanilla", trace(lambda x, cache: layer(x, mask=None, cache=cache)), *names)
    counts, reason = {0: vanilla}, ""
    for mode in sorted({*modes} - {0}):
        try:
            adapter = _adapter(layer)
            plan = _plan(adapter, kind if mode == 2 else "", dtype, step)
        except (RefusedError, SpecError) as error:
            counts[mode], reason = vanilla, str(error)
            continue
        graph = describe(plan, _call(layer, step), adapter.weights)
        if mode == 1:
            mix = trace(partial(_mix, adapter, layer))
            graph = joined(traced_graph(f"{kind}_layer_mode_1", mix, names[0], ["r", *names[1][1:]], step.gpu), graph)
        whole = None
        if all(each.backend in TRACEABLE for each in plan.steps):
            run = partial(_decode, adapter, plan) if mode == 2 else partial(_mix, adapter, layer, plan=plan)
            whole = sum(launch.dispatches for launch in launches(trace(run), step.gpu)[0])
        counts[mode] = Count(declared=graph.dispatches, traced=whole, bytes=graph.bytes, graph=graph)
    return LayerCount(kind=kind, layers=tuple(same), modes=counts, reason=reason)


def _decode(adapter: Adapter, plan: Plan, x: mx.array, cache: Any) -> mx.array:
    """One fused step."""
    return adapter.decode(plan, x, None, cache)


def _mix(adapter: Adapter, layer: nn.Module, x: mx.array, cache: Any, plan: Plan | None = None) -> mx.array:
    """The mixer by upstream, and the MoE by a plan if there is one: mode 1."""
    r = adapter.mix(layer, x, None, cache)
    if plan is None:
        return r
    B, _, H = x.shape
    (out,) = plan.run(r.reshape(B, H), x.reshape(B, H))
    return out.reshape(B, 1, H)


def part_graph(
    model: nn.Module, part: str, *, rows: int = 1, keys: int = 1024, backends: Sequence[str] = ("metal",)
) -> GraphData:
    """The graph called ``part`` in qfuse.graphs for a model's first layer that has one, planned on ``backends``.

    Raises RefusedError where that layer is refused.
    """
    layers = models.decoder_layers(model)
    layer = next(layer for layer in layers if part not in ("gdn", "gqa") or models.form(layer)[0] == part)
    try:
        adapter = _adapter(layer)
    except RefusedError as error:
        raise RefusedError(f"[{part}] wants a layer it can fuse, got one refused: {error}") from error
    dims = {**adapter.dims, "T": DTYPE_NAMES[models.form(layer)[2]]}
    plan = build(getattr(graphs, part)(dims), adapter.weights, backends)
    step = _Step(rows=rows, keys=keys, backends=tuple(backends), moe=part, gpu="metal")
    return describe(plan, _call(layer, step), adapter.weights)


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


def _call(layer: nn.Module, step: _Step) -> dict[str, Any]:
    """The dims of one step: rows, keys, allocated keys, and dtypes of activations and conv state."""
    kind, _, dtype = models.form(layer)
    dims = {"B": step.rows, "N": step.keys, "T": DTYPE_NAMES[dtype], "S": DTYPE_NAMES[dtype]}
    if kind == "gqa":
        dims["A"] = models.step_state(layer, step.rows, step.keys, dtype)["keys"][0][2]
    return dims


def _adapter(layer: nn.Module) -> Adapter:
    """A layer's adapter, with the folded router's weights hollow."""
    adapter = models.adapt(layer, fold_router=False)
    if adapter.part != "layer":  # what upstream runs between the nodes of a part is not counted
        raise RefusedError(
            f"only its {adapter.part} is fused: {'; '.join(adapter.left.values()) or 'the MLP is dense'}"
        )
    d, (_, _, dtype) = adapter.dims, models.form(layer)
    folded = {"M1": hollow.zeros((d["E"], d["Ka"]), dtype), "Wf": hollow.zeros((d["E"], d["H"]), dtype)}
    mx.eval(folded)
    weights = {**adapter.weights, **{f"o_proj_router.{name}": array for name, array in folded.items()}}
    return attrs.evolve(cast(Any, adapter), weights=weights)


def _plan(adapter: Adapter, kind: str, dtype: mx.Dtype, step: _Step) -> Plan:
    """The plan of what is fused of a layer of ``kind``, or of the MoE alone."""
    graph = adapter.graph(DTYPE_NAMES[dtype], moe=step.moe, part="" if kind else "moe")
    return build(graph, adapter.weights, step.backends)


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
