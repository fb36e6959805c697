"""fuse(model): put plans in place of decoder layers' own ``__call__``, instance by instance, and take them out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn

from . import backends as backend_table
from . import graphs, models
from .graphs import Graph
from .graphs.graph import make
from .models import PREFILL, PREFILL_GDN, Adapter, GDNAdapter, RefusedError
from .ops import GDNStep
from .plan import Plan, build
from .show import fusion_text
from .spec import DTYPE_NAMES, SpecError

MODES = {0: "off", 1: "MoE", 2: "GDN, GQA and MoE"}
MOE_GRAPHS = ("moe_4", "moe_5")
LONG_BLOCKS = 256


class FusedLayer:
    """One layer's adapter and the plans made for it so far, by dtype of the activations, mask or none, long or short.

    calls: how many calls were fused, under ``"fused"``, and how many upstream ran, under the reason.
    """

    def __init__(self, adapter: Adapter, fusion: Fusion) -> None:
        self.adapter = adapter
        self.fusion = fusion
        self.calls: Counter[str] = Counter()
        self._recurrence = _recurrence(adapter, fusion) if fusion.mode == 2 else None
        self._plans: dict[tuple[mx.Dtype, bool, bool], Plan] = {}

    def __call__(self, layer: nn.Module, x: mx.array, mask: Any, cache: Any) -> mx.array | None:
        """The layer's output, or None where upstream has to run it. Raises RefusedError in strict mode."""
        reason = self.refuses(layer, x, mask, cache)
        if reason == PREFILL and self._recurrence and not layer.training:
            adapter, step = self._recurrence
            if adapter.refuses_states(x, mask, cache) is None:
                self.calls[PREFILL_GDN] += 1
                return adapter.prefill(step, layer, x, mask, cache)
        if reason is not None:
            self.calls[reason] += 1
            if self.fusion.strict and reason != PREFILL:
                raise RefusedError(f"[{self.adapter.kind} layer] wants a call it can fuse, got one refused: {reason}")
            return None
        self.calls["fused"] += 1
        if self.fusion.mode == 2:
            plan = self.plan(x.dtype, mask is not None, self.adapter.long(cache))
            return self.adapter.decode(plan, x, mask, cache)
        r = self.adapter.mix(layer, x, mask, cache)
        B, _, H = x.shape
        (out,) = self.plan(x.dtype).run(r.reshape(B, H), x.reshape(B, H))
        return out.reshape(B, 1, H)

    def refuses(self, layer: nn.Module, x: mx.array, mask: Any, cache: Any) -> str | None:
        """Why this call cannot be fused, or None."""
        if x.dtype not in DTYPE_NAMES:
            return f"activations are {x.dtype}"
        if self.fusion.mode == 1:
            return models.refuses_shape(layer, x)
        return self.adapter.refuses(layer, x, mask, cache)

    def plan(self, dtype: mx.Dtype, masked: bool = False, long: bool = False) -> Plan:
        """The plan for activations of ``dtype``, built at its first use. long: with attention in more blocks."""
        plan = self._plans.get((dtype, masked, long))
        if plan is None:
            graph = self.graph(DTYPE_NAMES[dtype], masked, long)
            # A mask over the keys is another shape at every token, and MLX would compile anew each time.
            segments = self.fusion.segments and not (masked and self.adapter.kind == "gqa")
            plan = build(graph, self.adapter.weights, self.fusion.backends, segments=segments)
            self._plans[dtype, masked, long] = plan
        return plan

    def graph(self, dtype: str, masked: bool, long: bool = False) -> Graph:
        """The declared graph of this layer in the fusion's mode."""
        blocks = {"blocks": LONG_BLOCKS} if long else {}
        dims = tuple(sorted({**self.adapter.dims, **blocks, "T": dtype}.items()))
        return _graph(self.adapter.kind if self.fusion.mode == 2 else "", dims, masked, self.fusion.moe)


def _recurrence(adapter: Adapter, fusion: Fusion) -> tuple[GDNAdapter, Callable[..., Any]] | None:
    """The adapter with gdn_step for its prompts, where the first backend that takes the op is made for them."""
    if not isinstance(adapter, GDNAdapter):
        return None
    op = make(GDNStep, adapter.dims)
    chosen = (backend_table.find(name) for name in fusion.backends)
    backend = next((backend for backend in chosen if backend.refuses(op) is None), None)
    return (adapter, backend.lower(op, {})) if backend and backend.prefill else None


@lru_cache(maxsize=64)
def _graph(kind: str, dims: tuple[tuple[str, Any], ...], masked: bool, moe: str) -> Graph:
    return graphs.layer(kind, dict(dims), masked=masked, moe=moe) if kind else graphs.moe_only(dict(dims))


@attrs.frozen(kw_only=True)
class LayerReport:
    """What became of one decoder layer.

    graph: the graph's name, or "" if the layer was refused, with ``reason``. nodes, dispatches: declared for one step.
    backends: nodes per backend. refusals: per node, why a backend asked for did not take it. calls: see FusedLayer.
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
    """What :func:`fuse` did. ``str()`` gives the table that the command prints."""

    mode: int
    backends: tuple[str, ...]
    layers: tuple[LayerReport, ...]
    new_bytes: int

    @property
    def fused(self) -> int:
        """Layers that run a plan at a decode step."""
        return sum(bool(layer.graph) for layer in self.layers)

    def __str__(self) -> str:
        return fusion_text(self)


class Fusion:
    """A fused model: what was put in, and the way to take it out. Also a context manager, which removes at exit."""

    def __init__(self, mode: int, backends: Sequence[str], strict: bool, moe: str, segments: bool = False) -> None:
        self.mode = mode
        self.backends = tuple(backends)
        self.strict = strict
        self.moe = moe
        self.segments = segments
        self.layers: dict[int, nn.Module] = {}
        self.refused: dict[int, tuple[nn.Module, str]] = {}

    def report(self) -> FusionReport:
        """The state of every layer, and how its calls went so far."""
        rows = [_report(i, layer._qfuse) for i, layer in self.layers.items()]
        rows += [LayerReport(index=i, kind=_kind(layer), reason=reason) for i, (layer, reason) in self.refused.items()]
        return FusionReport(
            mode=self.mode,
            backends=self.backends,
            layers=tuple(sorted(rows, key=lambda row: row.index)),
            new_bytes=sum(array.nbytes for layer in self.layers.values() for array in _folded(layer._qfuse.adapter)),
        )

    def remove(self) -> None:
        """Give every layer its own class back; the model is what it was before. Doing it twice does nothing."""
        for layer in self.layers.values():
            layer.__class__ = type(layer).__mro__[1]
            del layer._qfuse
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
) -> Fusion:
    """Run the decode steps of a model's layers through fused plans.

    Prefill stays upstream's, but for the recurrence on CUDA in mode 2, which is gdn_step's: upstream has no kernel for
    it there.

    mode: 0 nothing, 1 the MoE alone, 2 whole layers. backends: names in order of preference, default the
    reference. strict: raise on anything that is not fused, instead of leaving it to upstream and saying
    so in the report. moe: ``moe_4``, with the router folded into the output projection's dispatch, or ``moe_5``.
    segments: the nodes of a layer before and after its kv cache's update as one function each that MLX compiles, which
    spares Python most of its work at a token; a batch with a mask over its keys runs without.

    Each layer instance gets a subclass of its own class; other models, the parameters and ``isinstance`` are as before.
    Fusing a fused model again with the same options returns its Fusion.

    Raises RefusedError on a model of another type, and in strict mode on a layer that is refused; ValueError on
    options that do not exist; RuntimeError on a backend that cannot run here.
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
    fusion = Fusion(mode, names, strict, moe, segments)
    existing = next((layer._qfuse.fusion for layer in layers if is_fused(layer)), None)
    if existing is not None:
        options = (existing.mode, existing.backends, existing.strict, existing.moe, existing.segments)
        if options != (mode, names, strict, moe, segments):
            raise ValueError(f"[fuse] wants the options it was fused with, or remove() first, got mode {mode}, {names}")
        return existing
    if mode == 0:
        return fusion
    try:
        for index, layer in enumerate(layers):
            _fuse_layer(index, layer, fusion)
    except BaseException:
        fusion.remove()
        raise
    return fusion


def is_fused(layer: nn.Module) -> bool:
    """Whether this layer instance runs plans."""
    return isinstance(vars(layer).get("_qfuse"), FusedLayer)


def _fuse_layer(index: int, layer: nn.Module, fusion: Fusion) -> None:
    try:
        adapter = models.adapt(layer, fold_router=fusion.mode == 2 and fusion.moe == "moe_4")
        fused = FusedLayer(adapter, fusion)
        fused.plan(adapter.weights["input_norm.w_norm"].dtype)
    except (RefusedError, SpecError) as error:
        if fusion.strict:
            raise RefusedError(f"[layers.{index}] wants a layer it can fuse, got one refused: {error}") from error
        fusion.refused[index] = layer, str(error)
        return
    layer._qfuse = fused
    layer.__class__ = _subclass(type(layer))  # type: ignore[arg-type]
    fusion.layers[index] = layer


@cache
def _subclass(cls: type) -> type:
    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:  # noqa: N807
        out = self._qfuse(self, x, mask, cache)
        return cls.__call__(self, x, mask=mask, cache=cache) if out is None else out

    return type(f"Fused{cls.__name__}", (cls,), {"__call__": __call__, "__doc__": f"A {cls.__name__} run by qfuse."})


def _kind(layer: nn.Module) -> str:
    return "gdn" if getattr(layer, "is_linear", False) else "gqa"


def _folded(adapter: Adapter) -> list[mx.array]:
    named = (adapter.weights.get(f"o_proj_router.{name}") for name in ("M1", "Wf"))
    return [array for array in named if isinstance(array, mx.array)]


def _report(index: int, fused: FusedLayer) -> LayerReport:
    plan = next(iter(fused._plans.values()))
    return LayerReport(
        index=index,
        kind=fused.adapter.kind,
        graph=plan.graph.name,
        nodes=len(plan.steps),
        dispatches=plan.dispatches(),
        backends=dict(plan.backends()),
        refusals={step.node.name: step.refusals for step in plan.steps if step.refusals},
        calls=dict(fused.calls),
    )
