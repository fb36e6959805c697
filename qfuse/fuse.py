"""fuse(model): put plans in place of decoder layers' own ``__call__``, instance by instance, and take them out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, cast

import attrs
import mlx.core as mx
import mlx.nn as nn

from . import backends as backend_table
from . import models, upstream
from .chain import Chain, raised
from .graphs.graph import Graph, make
from .models import PREFILL, Adapter, GDNAdapter, RefusedError
from .ops import GDNStep
from .plan import Plan, build
from .probe import Probe
from .show import fusion_text
from .spec import DTYPE_NAMES, QArray, SpecError

MODES = {0: "off", 1: "MoE", 2: "GDN, GQA and MoE"}
MOE_GRAPHS = ("moe_4", "moe_5")


class FusedLayer:
    """One layer's adapter and its plans so far, by part, dtype of the activations, mask or none, long or short.


    calls: how many calls were fused, under ``"fused"`` and ``"MoE alone: reason"``, how many upstream ran, under the
    reason, and how many did not end, under ``"raised Error: message"``.
    """

    def __init__(self, layer: nn.Module, adapter: Adapter, fusion: Fusion) -> None:
        self.adapter = adapter
        self.fusion = fusion
        self.calls: Counter[str] = Counter()
        self._places = models.places(layer, adapter)
        self._changed: str | None = None
        self._mixer = _prompts_mixer(adapter, fusion)
        self._tiled = adapter.part != "mixer" and backend_table.find(fusion.backends[0]).prefill
        self._plans: dict[tuple[str, mx.Dtype, bool, bool], Plan] = {}

    def __call__(
        self,
        layer: nn.Module,
        x: mx.array,
        mask: Any,
        cache: Any,
        more: Mapping[str, Any] = {},
    ) -> mx.array | None:
        """The layer's output, or None where upstream has to run it. Raises RefusedError in strict mode.

        more: what a layer of a subclass is called with besides, which no plan takes.
        """
        part, adapter = self.adapter.part, self.adapter
        reason = f"called with {', '.join(more)}" if more else self.refuses(layer, x, cache)
        if reason == PREFILL and not layer.training and (out := self._prompt(layer, x, mask, cache)) is not None:
            return out
        if reason is not None:
            self._refuse(reason)
            return None
        if part != "moe" and (reason := adapter.refuses(x, mask, cache)) is not None:
            if part == "mixer" or self.fusion.strict:
                self._refuse(reason)
                return None
            part = "moe"
        try:
            out = self._run(part, layer, x, mask, cache)
        except BaseException as error:
            self.calls[raised(error)] += 1
            raise
        self.calls["fused" if reason is None else f"MoE alone: {reason}"] += 1
        return out

    def _prompt(self, layer: nn.Module, x: mx.array, mask: Any, cache: Any) -> mx.array | None:
        """A prompt by upstream's modules with what the backend has for it, or None where that is nothing."""
        mixer = self._mixer if self._mixer and self.adapter.refuses(x, mask, cache) is None else None
        mlp = models.tiled_experts(layer, x) if self._tiled else None
        if mixer is None and mlp is None:
            return None
        ours = {"gdn_step": mixer, "tiled experts": mlp}
        self.calls[f"{PREFILL}, with {' and '.join(name for name in ours if ours[name] is not None)}"] += 1
        return models.after_mixer(layer, x, (mixer or self.adapter.mix)(layer, x, mask, cache), mlp)

    def _run(self, part: str, layer: nn.Module, x: mx.array, mask: Any, cache: Any) -> mx.array:
        adapter = self.adapter
        if part == "moe":
            r = adapter.mix(layer, x, mask, cache)
            B, _, H = x.shape
            (out,) = self.plan(x.dtype, part=part).run(r.reshape(B, H), x.reshape(B, H))
            return out.reshape(B, 1, H)
        if self.fusion.segments:
            models.whole_steps(cache)
        out = adapter.decode(self.plan(x.dtype, mask is not None, adapter.long(cache)), x, mask, cache)
        if part == "layer":
            return out
        return models.after_mixer(layer, x, out)

    def refuses(self, layer: nn.Module, x: mx.array, cache: Any) -> str | None:
        """Why no step of this shape is fused, or None. Where a sequence begins, the layer's weights are looked at."""
        if x.dtype not in DTYPE_NAMES:
            return f"activations are {x.dtype}"
        if not layer.training and models.begins(x, cache):
            self._changed = models.changed(layer, self.adapter, self._places)
        return models.refuses_shape(layer, x) or self._changed

    def _refuse(self, reason: str) -> None:
        self.calls[reason] += 1
        if self.fusion.strict and reason != PREFILL:
            raise RefusedError(f"[{self.adapter.kind} layer] wants a call it can fuse, got one refused: {reason}")

    def graph(self, dtype: mx.Dtype, masked: bool = False, long: bool = False, part: str = "") -> Graph:
        """What :meth:`plan` is built of."""
        return self.adapter.graph(DTYPE_NAMES[dtype], masked=masked, moe=self.fusion.moe, part=part, long=long)

    def plan(self, dtype: mx.Dtype, masked: bool = False, long: bool = False, part: str = "") -> Plan:
        """The plan for activations of ``dtype``, built at its first use. Raises RefusedError in strict mode.

        long: with attention in more blocks. part: of the layer, default the one that is fused.
        """
        key = part or self.adapter.part, dtype, masked, long
        plan = self._plans.get(key)
        if plan is None:
            graph = self.graph(dtype, masked, long, part)
            # A mask over the keys is another shape at every token, and MLX would compile anew each time.
            segments = self.fusion.segments and not (masked and self.adapter.kind == "gqa")
            plan = self._plans[key] = self.fusion.build(graph, self.adapter.weights, dtype, segments=segments)
        return plan


def _prompts_mixer(adapter: Adapter, fusion: Fusion) -> Callable[..., mx.array] | None:
    """The mixer for an adapter's prompts with gdn_step, where the first backend that takes the op is made for them."""
    if not isinstance(adapter, GDNAdapter) or adapter.part == "moe" or adapter.dims["merged"]:
        return None
    op = make(GDNStep, adapter.dims)
    chosen = (backend_table.find(name) for name in fusion.backends)
    backend = next((backend for backend in chosen if backend.refuses(op) is None), None)
    return partial(adapter.recur, backend.lower(op, {})) if backend and backend.prefill else None


@attrs.frozen(kw_only=True)
class LayerReport:
    """What became of one decoder layer.

    graph: the graph's name, or "" if the layer was refused. reason: why it, or a part of it, was not fused. nodes,
    dispatches: declared for one step. backends: nodes per backend. refusals: per node, why a backend asked for did not
    take it. calls: see FusedLayer.
    """

    index: int
    kind: str
    graph: str = ""
    reason: str = ""
    nodes: int = 0
    dispatches: int = 0
    backends: Mapping[str, int] = attrs.field(factory=dict)
    refusals: Mapping[str, Mapping[str, str]] = attrs.field(factory=dict)
    calls: Mapping[str, int] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class FusionReport:
    """What :func:`fuse` did. ``str()`` gives the table that the command prints.

    chain: with segments, the calls of the model's layers as one, see qfuse.chain; or 0 and why there can be none.
    """

    mode: int
    backends: tuple[str, ...]
    layers: tuple[LayerReport, ...]
    new_bytes: int
    chain: Mapping[str, int] = attrs.field(factory=dict)

    @property
    def headline(self) -> str:
        """How many of the layers are fused, and in which mode."""
        return f"{self.fused} of {len(self.layers)} layers fused, mode {self.mode}"

    @property
    def fused(self) -> int:
        """Layers that run a plan at a decode step."""
        return sum(bool(layer.graph) for layer in self.layers)

    def __str__(self) -> str:
        return fusion_text(self)


class Fusion:
    """A fused model: what was put in, and the way to take it out. Also a context manager, which removes at exit."""

    def __init__(
        self,
        mode: int,
        backends: Sequence[str],
        strict: bool,
        moe: str,
        probe: bool,
        segments: bool = False,
        check_upstream: bool = True,
    ) -> None:
        self.mode = mode
        self.backends = tuple(backends)
        self.strict = strict
        self.moe = moe
        self.probe = Probe() if probe else None
        self.segments = segments
        self.check_upstream = check_upstream
        self.options = (mode, tuple(backends), strict, moe, probe, segments)
        self.layers: dict[int, nn.Module] = {}
        self.refused: dict[int, tuple[nn.Module, str]] = {}
        self.text: nn.Module | None = None  # the model that holds the layers, where segments reach across them
        self.unchained: str | None = None  # why they do not, where they could

    def build(self, graph: Graph, weights: Mapping[str, mx.array | QArray], dtype: mx.Dtype, *, segments: bool) -> Plan:
        """A plan on these backends, each op probed. Raises RefusedError in strict mode on one that is refused."""
        refuses = partial(self.probe, dtype=DTYPE_NAMES[dtype]) if self.probe else None
        plan = build(graph, weights, self.backends, refuses, segments=segments)
        for step in plan.steps:
            for backend, reason in step.refusals.items() if self.strict else ():
                raise RefusedError(f"[{step.node.name}] wants an op that {backend} runs, got {reason}")
        return plan

    def report(self) -> FusionReport:
        """The state of every layer, and how its calls went so far."""
        rows = [_report(i, layer._qfuse) for i, layer in self.layers.items()]
        rows += [LayerReport(index=i, kind=_kind(layer), reason=reason) for i, (layer, reason) in self.refused.items()]
        return FusionReport(
            mode=self.mode,
            backends=self.backends,
            layers=tuple(sorted(rows, key=lambda row: row.index)),
            new_bytes=sum(array.nbytes for layer in self.layers.values() for array in _folded(layer._qfuse.adapter)),
            chain=dict(self.text._qfuse.calls) if self.text else {self.unchained: 0} if self.unchained else {},
        )

    def warmup(self, rows: Sequence[int] = (1,)) -> None:
        """Run a step of every layer with so many rows, on caches of its own: kernels are compiled, nothing is counted.

        Raises ValueError on a number of rows that is not fused.
        """
        for B in rows:
            if not 1 <= B <= models.MAX_ROWS:
                raise ValueError(f"[warmup.rows] wants 1 to {models.MAX_ROWS}, got {B}")
            for layer in self.layers.values():
                fused, norm = layer._qfuse, layer.input_layernorm.weight
                before = Counter(fused.calls)
                mx.eval(layer(mx.zeros((B, 1, norm.size), norm.dtype), None, models.new_cache(layer)))
                fused.calls = before

    def remove(self) -> None:
        """Give every layer its own class back; the model is what it was before. Doing it twice does nothing."""
        for layer in self.layers.values():
            _give_back(layer)
        if self.text is not None:
            _give_back(self.text)
        self.text = self.unchained = None
        self.layers.clear()
        self.refused.clear()

    def __enter__(self) -> Fusion:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


def fuse(
    model: nn.Module,
    *,
    mode: int = 2,
    backends: str | Sequence[str] | None = None,
    strict: bool = False,
    moe: str = "moe_4",
    segments: bool = False,
    probe: bool = True,
    check_upstream: bool = True,
) -> Fusion:
    """Run the decode steps of a model's layers through fused plans.

    Prefill stays upstream's, but on CUDA for the recurrence in mode 2, which is gdn_step's, and for the experts, see
    qfuse.models.TiledExperts: upstream has no kernel for the one there, and wastes most of its kernel for the other.

    mode: 0 nothing, 1 the MoE alone, 2 whole layers. backends: names in order of preference, default
    :func:`qfuse.backends.default`; an op that none of them takes is run by its reference. strict: raise on anything
    that is refused, a layer, a call or an op by one of the backends, instead of leaving it to what comes next and
    saying so in the report. moe: ``moe_4``, with the router folded into the output projection's dispatch, or ``moe_5``;
    a layer that is sharded over ranks is of moe_5's form either way, see docs/distributed.md.
    probe: on a backend that compiles kernels, check each distinct op against its reference before it is used, and
    leave one that fails to the next backend, see docs/design.md for what it costs. check_upstream: refuse an mlx-lm
    whose code is not the one that the plans stand in for, see qfuse.upstream, and layers of a subclass with its own.
    segments: in mode 2, what lies between two updates of a kv cache as one function that MLX compiles, which spares
    Python most of its work at a token. Within it, outputs that only kernels read are parts of one array, see
    docs/design.md. It reaches across layers where all of them are fused as a whole, see qfuse.chain; else a batch with
    a mask over its keys runs without.

    Each layer instance gets a subclass of its own class; other models, the parameters and ``isinstance`` are as before.
    Fusing a fused model again with the same options returns its Fusion. A copy of a fused model is not fused.

    Raises RefusedError on a model of another type, and in strict mode on a layer or an op that is refused; ValueError
    on options that do not exist; RuntimeError on a backend that cannot run here.
    """
    names = (backends,) if isinstance(backends, str) else tuple(backends or backend_table.default())
    if mode not in MODES:
        raise ValueError(f"[fuse.mode] wants {', '.join(map(str, MODES))}, got {mode}")
    if moe not in MOE_GRAPHS:
        raise ValueError(f"[fuse.moe] wants {' or '.join(MOE_GRAPHS)}, got {moe}")
    for name in names:
        backend_table.get(name)
    if segments and "sim" in names:
        raise ValueError("[fuse.segments] wants backends that MLX can compile, got sim")
    layers = models.decoder_layers(model)
    if check_upstream and mode and (reason := upstream.moved()):
        raise RefusedError(f"[fuse] {reason}; check_upstream=False fuses all the same")
    fusion = Fusion(mode, names, strict, moe, probe, segments, check_upstream)
    existing = next((layer._qfuse.fusion for layer in layers if is_fused(layer)), None)
    if existing is not None:
        if existing.options != fusion.options:
            raise ValueError(f"[fuse] wants the options it was fused with, or remove() first, got mode {mode}, {names}")
        return existing
    if mode == 0:
        return fusion
    try:
        for index, layer in enumerate(layers, models.first_layer(model)):
            _fuse_layer(index, layer, fusion)
    except BaseException:
        fusion.remove()
        raise
    if segments and mode == 2 and isinstance(text := models.text_model(model), models.TEXT_MODELS):
        fusion.unchained = models.own_call(text)
        if fusion.unchained is None:
            fusion.text = text
            _take(text, Chain(), _text_subclass)
    return fusion


def is_fused(layer: nn.Module) -> bool:
    """Whether this layer instance runs plans."""
    return isinstance(vars(layer).get("_qfuse"), FusedLayer)


def _fuse_layer(index: int, layer: nn.Module, fusion: Fusion) -> None:
    try:
        fused = _adapted(layer, fusion)
    except (RefusedError, SpecError) as error:
        if fusion.strict:
            raise RefusedError(f"[layers.{index}] wants a layer it can fuse, got one refused: {error}") from error
        fusion.refused[index] = layer, str(error)
        return
    _take(layer, fused, _subclass)
    fusion.layers[index] = layer


def _adapted(layer: nn.Module, fusion: Fusion) -> FusedLayer:
    """As much of a layer as its mode names and its weights allow: all of it, or its mixer, or its MoE."""
    wanted = models.PARTS if fusion.mode == 2 else ("moe",)
    if fusion.check_upstream and (reason := models.own_call(layer)):
        raise RefusedError(reason)
    refused: dict[str, str] = {}
    for parts in (wanted, *[(part,) for part in wanted if len(wanted) > 1]):
        try:
            adapter = models.adapt(layer, fold_router=fusion.moe == "moe_4", parts=parts)
            adapter = attrs.evolve(cast(Any, adapter), left=refused | dict(adapter.left))
            if fusion.strict and adapter.left:
                raise RefusedError("; ".join(adapter.left.values()))
            fused = FusedLayer(layer, adapter, fusion)
            fused.plan(adapter.weights["input_norm.w_norm"].dtype)
            return fused
        except SpecError as error:
            if fusion.strict or len(parts) < len(wanted) or len(wanted) == 1:
                raise
            refused = {"layer": str(error)}
    raise AssertionError("one of the parts was tried last, and raised")


def _take(module: nn.Module, runner: FusedLayer | Chain, subclass: Callable[[Any], type]) -> None:
    module._qfuse = runner
    module.__class__ = subclass(type(module))


def _give_back(module: nn.Module) -> None:
    module.__class__ = type(module).__mro__[1]
    del module._qfuse


@cache
def _subclass(cls: type) -> type:
    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None, **more: Any) -> mx.array:  # noqa: N807
        if more:
            more = {name: value for name, value in more.items() if value is not None}
        out = self._qfuse(self, x, mask, cache, more)
        return cls.__call__(self, x, mask=mask, cache=cache, **more) if out is None else out

    return _fused_class(cls, __call__)


@cache
def _text_subclass(cls: type) -> type:
    def __call__(  # noqa: N807
        self: Any, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None
    ) -> mx.array:
        out = self._qfuse(self, inputs, cache, input_embeddings)
        if out is not None:
            return out
        more = () if input_embeddings is None else (input_embeddings,)  # Qwen3-Next's text model takes none
        return cls.__call__(self, inputs, cache, *more)

    return _fused_class(cls, __call__)


def _fused_class(cls: type, call: Callable[..., mx.array]) -> type:
    def __reduce_ex__(self: Any, protocol: Any) -> tuple[Any, ...]:  # noqa: N807
        # A copy, as mlx-lm makes of models to quantise them, is of the module and not of what runs it.
        make, (_, *args), state, *items = cast(Any, cls).__reduce_ex__(self, protocol)
        return make, (cls, *args), {name: x for name, x in state.items() if name != "_qfuse"}, *items

    members = {"__call__": call, "__reduce_ex__": __reduce_ex__, "__doc__": f"A {cls.__name__} run by qfuse."}
    return type(f"Fused{cls.__name__}", (cls,), members)


def _kind(layer: nn.Module) -> str:
    return "gdn" if getattr(layer, "is_linear", False) else "gqa"


def _folded(adapter: Adapter) -> list[mx.array]:
    named = (adapter.weights.get(f"o_proj_router.{name}") for name in ("M1", "Wf"))
    return [array for array in named if isinstance(array, mx.array)]


def _report(index: int, fused: FusedLayer) -> LayerReport:
    plan, *others = fused._plans.values()
    return LayerReport(
        index=index,
        kind=fused.adapter.kind,
        graph=plan.graph.name,
        reason="; ".join(fused.adapter.left.values()),
        nodes=len(plan.steps),
        dispatches=plan.dispatches(),
        backends=dict(plan.backends()),
        refusals={step.node.name: step.refusals for each in (plan, *others) for step in each.steps if step.refusals},
        calls=dict(fused.calls),
    )
