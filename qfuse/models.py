"""Adapters: what qfuse must know of mlx-lm's model classes. The only file with their attribute names in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import lru_cache
from typing import Any, ClassVar, Protocol

import attrs
import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import (
    AllToShardedLinear,
    QuantizedAllToShardedLinear,
    QuantizedShardedToAllLinear,
    ShardedToAllLinear,
)
from mlx_lm.models import cache as caches
from mlx_lm.models import gated_delta, qwen3_5, qwen3_5_moe, qwen3_next
from mlx_lm.models.base import create_attention_mask, create_ssm_mask
from mlx_lm.models.gated_delta import compute_g, normalize_qk
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear

from . import graphs
from .graphs import Graph
from .plan import Plan
from .spec import QArray, Quant, SpecError, parts

MAX_ROWS = 8
"""Rows that a decode step may have; more go to upstream, whose batched kernels are made for them."""

MODEL_TYPES = ("qwen3_5_moe", "qwen3_5", "qwen3_next")
"""The model types of config.json that are fused."""

LONG = 4096
"""Keys that a cache may have room for before attention over it is split otherwise."""

LONG_DIMS = {"blocks": 128}
"""Of sdpa_partial then: more blocks."""

TILE = 16
"""Rows that MLX's gather_qmm takes at a time on CUDA, for each product of a batch."""

TILED_ROWS = 4
"""Rows of a prompt an expert, on average, from which those of one expert are multiplied together."""

PREFILL = "prefill, S > 1"
CHANGED = "its weights were changed after fuse(); remove() and fuse again"


class RefusedError(ValueError):
    """A layer or a call that is not fused; the text is the reason."""


class Adapter(Protocol):
    """One layer of a model, seen from qfuse.

    kind: gdn or gqa. states: how many its plan gives after the first output. part: what of it can be fused: ``layer``,
    or ``mixer`` or ``moe`` alone. left: why a part cannot.
    dims: op fields and quantisations, see qfuse.graphs.make. weights: the layer's own arrays by ``node.spec`` name.
    """

    @property
    def kind(self) -> str: ...

    @property
    def states(self) -> int: ...

    @property
    def part(self) -> str: ...

    @property
    def left(self) -> Mapping[str, str]: ...

    @property
    def dims(self) -> Mapping[str, Any]: ...

    @property
    def weights(self) -> Mapping[str, mx.array | QArray]: ...

    def graph(
        self, dtype: str, *, masked: bool = False, moe: str = "moe_4", part: str = "", long: bool = False
    ) -> Graph:
        """The declared graph of the layer's part, or of another, for activations of ``dtype``.

        long: with attention in LONG_DIMS, for a cache of that many keys.
        """

    def mix(self, layer: nn.Module, x: mx.array, mask: Any, cache: Any) -> mx.array:
        """The mixer by upstream's own modules: r [B, 1, H]."""

    def refuses(self, x: mx.array, mask: Any, cache: Any) -> str | None:
        """Why the mixer of this call cannot be fused, or None. Raises TypeError on a cache of the wrong class."""

    def inputs(self, x: mx.array, mask: Any, cache: Any) -> tuple[Any, ...]:
        """What the layer's plan takes for one step, x [B, 1, H], in its order."""

    def long(self, cache: Any) -> bool:
        """Whether the cache has room for more than LONG keys."""

    def keep(self, cache: Any, *states: mx.array) -> None:
        """Bring the cache up to date with what the layer's plan gives after its first output."""

    def decode(self, plan: Plan, x: mx.array, mask: Any, cache: Any) -> mx.array:
        """One fused step, x [B, 1, H] → the plan's first output [B, 1, H], the cache brought up to date."""


PARTS = ("mixer", "moe")
LAYERS = (qwen3_5.DecoderLayer, qwen3_next.Qwen3NextDecoderLayer)
TEXT_MODELS = (qwen3_5.Qwen3_5TextModel, qwen3_next.Qwen3NextModel)
SUMMED = (ShardedToAllLinear, QuantizedShardedToAllLinear)
"""Linear layers that sum their results over a group."""

WRAPPED = "_original_layer"
"""The key under which exo's wrappers keep the module that they wrap."""


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a model of this family, told by their classes. Raises RefusedError on any other model.

    Of a model whose layers are spread over machines, those of this one. Where exo wraps a layer, to receive what it
    takes or to send what it gives, it is the one within.
    """
    text = getattr(model, "language_model", model)
    held = getattr(getattr(text, "model", None), "layers", None)
    layers = [_unwrapped(layer) for layer in held if layer is not None] if isinstance(held, list) else []
    if not any(isinstance(layer, LAYERS) for layer in layers):
        raise RefusedError(
            f"[fuse] wants a model of type {', '.join(MODEL_TYPES[:-1])} or {MODEL_TYPES[-1]}, "
            f"got {_kind_of(model, layers)}"
        )
    return layers


def first_layer(model: nn.Module) -> int:
    """The number in the whole model of the first decoder layer that is held here; exo does not keep it, and it is 0."""
    return getattr(text_model(model), "start_idx", 0)


def own_call(module: nn.Module) -> str | None:
    """Why a layer or a text model of a subclass is not one whose ``__call__`` can be stood in for, or None."""
    place = type(module).__call__.__module__
    if not isinstance(module, (*LAYERS, *TEXT_MODELS)) or place in (qwen3_5.__name__, qwen3_next.__name__):
        return None
    return f"{type(module).__name__} has a __call__ of its own, from {place}"


def _unwrapped(module: nn.Module) -> nn.Module:
    while isinstance(module, nn.Module) and WRAPPED in module:
        module = module[WRAPPED]
    return module


def prefilled(model: nn.Module, index: int, x: mx.array) -> Any:
    """The cache of one layer after upstream ran it on x [B, S, H], for steps with activations of the dtype of x."""
    layer, cache = decoder_layers(model)[index], caches.make_prompt_cache(model)[index]
    layer(x.astype(layer.input_layernorm.weight.dtype), mask=None if layer.is_linear else "causal", cache=cache)
    if not layer.is_linear:
        cache.keys, cache.values = (part.astype(x.dtype) for part in (cache.keys, cache.values))
    return cache


def adapt(layer: nn.Module, *, fold_router: bool, parts: Sequence[str] = PARTS) -> Adapter:
    """Read one decoder layer, or only these ``parts`` of it. Raises RefusedError if none of them can be fused.

    fold_router: make the folded router weights that o_proj_router takes, the only new memory; not of a sharded layer.
    """
    if not isinstance(layer, LAYERS):
        raise RefusedError(f"layer is a {type(layer).__name__}, not a {' or '.join(each.__name__ for each in LAYERS)}")
    norm = layer.input_layernorm
    dims: dict[str, Any] = {"H": norm.weight.size, "eps": norm.eps}
    weights: dict[str, Any] = {"input_norm.w_norm": norm.weight}
    left: dict[str, str] = {}
    found = []
    for part in parts:
        try:
            more = _moe(layer) if part == "moe" else _gdn(layer) if layer.is_linear else _gqa(layer)
        except RefusedError as error:
            left[part] = str(error)
            continue
        if more is not None:
            found.append(part)
            dims |= more[0]
            weights |= more[1]
    if not found:
        raise RefusedError("; ".join(left.values()) or "the MLP is dense, which upstream runs")
    if len(found) == 2:
        dims["o_proj_router.w_o"], weights["o_proj_router.w_o"] = dims["o_proj.w"], weights["o_proj.w"]
        if fold_router and not {"mixer_group", "moe_group"} & dims.keys():
            weights["o_proj_router.M1"], weights["o_proj_router.Wf"] = _fold(weights)
    part = "layer" if len(found) == 2 else found[0]
    return (GDNAdapter if layer.is_linear else GQAAdapter)(part=part, left=left, dims=dims, weights=weights)


@attrs.frozen(kw_only=True)
class LayerAdapter:
    """What the adapters of both kinds share, see :class:`Adapter`."""

    kind: ClassVar[str]
    states: ClassVar[int]
    part: str
    left: Mapping[str, str]
    dims: Mapping[str, Any]
    weights: Mapping[str, mx.array | QArray]

    def graph(
        self, dtype: str, *, masked: bool = False, moe: str = "moe_4", part: str = "", long: bool = False
    ) -> Graph:
        dims = {**self.dims, "T": dtype} | (LONG_DIMS if long else {})
        return _graph(self.kind, tuple(sorted(dims.items())), masked, moe, part or self.part)

    def decode(self: Adapter, plan: Plan, x: mx.array, mask: Any, cache: Any) -> mx.array:
        out, *states = plan.run(*self.inputs(x, mask, cache))
        self.keep(cache, *states)
        return out.reshape(x.shape)


@attrs.frozen
class TiledExperts:
    """Upstream's SwitchGLU, by its own projections, for a prompt: x [B, S, H], indices [B, S, k] → [B, S, k, H].

    Upstream has gather_qmm multiply each row by itself, which on CUDA leaves all but one row of its tile empty. Here a
    product is of TILE rows of one expert; a tile that is not full repeats the prompt's first row. There are at most
    so many tiles whatever the router says, so nothing waits for it.
    """

    routed: nn.Module

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        up, gate, down = self.routed.up_proj, self.routed.gate_proj, self.routed.down_proj
        M, E = indices.size, up.num_experts
        tiles = M // TILE + min(E, M)
        order = mx.argsort(indices.flatten())
        expert = indices.flatten()[order]
        rows = (expert[:, None] == mx.arange(E)).sum(axis=0)
        needed = (rows + TILE - 1) // TILE
        end = mx.cumsum(needed)  # the tile after each expert's last
        place = mx.arange(M) + ((end - needed) * TILE - mx.cumsum(rows) + rows)[expert]
        source = mx.zeros(tiles * TILE, mx.uint32)
        source[place] = order // indices.shape[-1]
        of_tile = mx.minimum((mx.arange(tiles)[:, None] >= end).sum(axis=1), E - 1)
        y = x.reshape(-1, x.shape[-1])[source].reshape(tiles, TILE, -1)
        y = down(self.routed.activation(up(y, of_tile), gate(y, of_tile)), of_tile)
        return y.reshape(tiles * TILE, -1)[place[mx.argsort(order)]].reshape(*indices.shape, -1)


def after_mixer(layer: nn.Module, x: mx.array, r: mx.array, mlp: nn.Module | None = None) -> mx.array:
    """A layer's output by upstream's modules, from its input and its mixer's output, each [B, S, H].

    mlp: in place of the layer's own.
    """
    h = x + r
    return h + (layer.mlp if mlp is None else mlp)(layer.post_attention_layernorm(h))


def tiled_experts(layer: nn.Module, x: mx.array) -> nn.Module | None:
    """A layer's MoE with :class:`TiledExperts`, upstream's block in all else, for a prompt x [B, S, H].

    None where it has too few rows for that, and where its experts are not quantised.
    """
    mlp = layer.mlp
    if type(mlp) is not qwen3_next.Qwen3NextSparseMoeBlock:
        return None
    routed = mlp.switch_mlp
    if x.shape[0] * x.shape[1] * mlp.top_k < TILED_ROWS * mlp.num_experts:
        return None
    projections = routed.up_proj, routed.gate_proj, routed.down_proj
    if any(type(module) is not QuantizedSwitchLinear for module in projections):
        return None
    block = copy(mlp)
    block.switch_mlp = TiledExperts(routed)
    return block


@lru_cache(maxsize=256)
def _graph(kind: str, dims: tuple[tuple[str, Any], ...], masked: bool, moe: str, part: str) -> Graph:
    return graphs.layer(kind, dict(dims), masked=masked, moe=moe, part=part)


@attrs.frozen(kw_only=True)
class GDNAdapter(LayerAdapter):
    """A layer with a gated delta net. Its cache is an ArraysCache of conv_state and state."""

    kind, states = "gdn", 2

    def mix(self, layer: nn.Module, x: mx.array, mask: Any, cache: Any) -> mx.array:
        return layer.linear_attn(layer.input_layernorm(x), mask, cache)

    def refuses(self, x: mx.array, mask: Any, cache: Any) -> str | None:
        if cache is not None:
            _wants_cache(cache, caches.ArraysCache)
            if cache.lengths is not None:
                return "the cache has lengths left from a ragged prefill"
        if mask is not None and mask.shape != x.shape[:2]:
            return f"mask {tuple(mask.shape)} is not [B, {x.shape[1]}]"
        return None

    def long(self, cache: Any) -> bool:  # noqa: ARG002 (a state is of one size)
        return False

    def inputs(self, x: mx.array, mask: Any, cache: Any) -> tuple[Any, ...]:
        masks = () if mask is None else (mask.reshape(x.shape[0]),)
        return x.reshape(x.shape[0], -1), *self._states(x, cache), *masks

    def keep(self, cache: Any, *states: mx.array) -> None:
        if cache is not None:
            cache[0], cache[1] = states
            cache.advance(1)
            # Padding that is passed masks nothing, and mlx-lm would count it on in every layer without evaluating it.
            if cache.left_padding is not None and cache.left_padding.max().item() <= 0:
                cache.left_padding = None

    def recur(self, step: Callable[..., Any], layer: nn.Module, x: mx.array, mask: Any, cache: Any) -> mx.array:
        """The mixer for a prompt, x [B, S, H] → r [B, S, H], by upstream's own modules but for the recurrence.

        step: a gdn_step of M = B·S rows. Raises TypeError on a cache of the wrong class.
        """
        m, d = layer.linear_attn, self.dims
        B, S, _ = x.shape
        M, keys = B * S, d["Hk"] * d["Dk"]
        n = layer.input_layernorm(x)
        qkv, z, b, a = (proj(n) for proj in (m.in_proj_qkv, m.in_proj_z, m.in_proj_b, m.in_proj_a))
        if mask is not None:
            qkv = mx.where(mask[..., None], qkv, 0)
        conv_state, state = self._states(x, cache)
        window = mx.concatenate([conv_state, qkv], axis=1)
        qkv = nn.silu(m.conv1d(window))
        q, k = (part.reshape(M, d["Hk"], d["Dk"]) for part in mx.split(qkv[..., : 2 * keys], 2, axis=-1))
        q, k = normalize_qk(q, k, inv_scale=d["Dk"] ** -0.5, eps=1e-6)
        g = compute_g(m.A_log, a, m.dt_bias).reshape(M, -1)
        beta = mx.sigmoid(b).astype(mx.float32).reshape(M, -1)
        y, state = step(q, k, qkv.reshape(M, -1), g, beta, state, None if mask is None else mask.reshape(M))
        if cache is not None:
            cache[0], cache[1] = mx.contiguous(window[:, 1 - d["Kc"] :]), state
            cache.advance(S)
        y = m.norm(y.reshape(B, S, d["Hv"], d["Dv"]), z.reshape(B, S, d["Hv"], d["Dv"]))
        r = m.out_proj(y.reshape(B, S, -1))
        if getattr(m, "sharding_group", None) is not None:
            r = mx.distributed.all_sum(r, group=m.sharding_group)
        return r

    def _states(self, x: mx.array, cache: Any) -> tuple[mx.array, mx.array]:
        """conv_state and state of a cache, zeros where there is none yet."""
        conv_state, state = (cache[0], cache[1]) if cache is not None else (None, None)
        B, d = x.shape[0], self.dims
        if conv_state is None:
            conv_state = mx.zeros((B, d["Kc"] - 1, d["C"]), x.dtype)
        if state is None:
            state = mx.zeros((B, d["Hv"], d["Dv"], d["Dk"]), mx.float32)
        elif state.dtype != mx.float32:
            state = state.astype(mx.float32)  # caches saved by older mlx-lm hold it in bf16
        return conv_state, state


@attrs.frozen(kw_only=True)
class GQAAdapter(LayerAdapter):
    """A layer with gated attention. Its cache is a KVCache, or a BatchKVCache with an offset per row."""

    kind, states = "gqa", 0

    def mix(self, layer: nn.Module, x: mx.array, mask: Any, cache: Any) -> mx.array:
        return layer.self_attn(layer.input_layernorm(x), mask, cache)

    def refuses(self, x: mx.array, mask: Any, cache: Any) -> str | None:
        if cache is None:
            return "no kv cache"
        if type(cache) not in (caches.KVCache, caches.BatchKVCache):
            _wants_cache(cache, caches._BaseCache, but=caches.ArraysCache)
            return f"{type(cache).__name__} is not fused"
        if mask is not None and not isinstance(mask, mx.array):
            return f"mask {mask!r} at a decode step"
        if mask is not None and (mask.dtype != mx.bool_ or mask.shape[:-1] not in ((x.shape[0], 1, 1), (1, 1, 1))):
            return f"mask {tuple(mask.shape)} {mask.dtype} is not a boolean [B, 1, 1, N]"
        return None

    def long(self, cache: Any) -> bool:
        return cache.keys is not None and cache.keys.shape[2] > LONG

    def inputs(self, x: mx.array, mask: Any, cache: Any) -> tuple[Any, ...]:
        B, _, H = x.shape
        offset = cache.offset
        batched = isinstance(offset, mx.array)
        length = mx.array([(cache._idx if batched else offset) + 1], mx.int32)
        position = offset.astype(mx.int32) if batched else mx.array([offset] * B, mx.int32)
        masks = () if mask is None else (mx.broadcast_to(mask.reshape(mask.shape[0], -1), (B, mask.shape[-1])),)
        return x.reshape(B, H), position, length, cache, *masks

    def keep(self, cache: Any, *states: mx.array) -> None:
        pass  # the plan has the cache itself as an input


def refuses_shape(layer: nn.Module, x: mx.array) -> str | None:
    """Why no step of this shape is fused, whatever the mode, or None."""
    B, S, _ = x.shape
    if S != 1:
        return PREFILL
    if B > MAX_ROWS:
        return f"{B} rows, more than {MAX_ROWS}"
    if layer.training:
        return "the model is in training mode; call model.eval()"
    return None


def begins(x: mx.array, cache: Any) -> bool:
    """Whether this call is a prompt's, or the first token's without one."""
    return x.shape[1] > 1 or cache is None or cache.empty()


Place = tuple[nn.Module, str, Any]


def places(layer: nn.Module, adapter: Adapter) -> list[Place]:
    """Where a layer holds what its adapter read, and its modules: owner, name, value."""
    read = {id(part) for array in adapter.weights.values() for part in parts(array)}
    owners = layer.modules()
    return [(m, key, x) for m in owners for key, x in m.items() if isinstance(x, nn.Module) or id(x) in read]


def changed(layer: nn.Module, adapter: Adapter, places: Sequence[Place]) -> str | None:
    """Why a layer is no longer the one that the adapter read: other arrays, or modules that are not read; or None."""
    if all(owner.get(key) is x for owner, key, x in places):  # a twentieth of the time of reading it again
        return None
    try:
        now = adapt(layer, fold_router=False, parts=PARTS if adapter.part == "layer" else (adapter.part,))
    except (RefusedError, SpecError) as error:
        return f"{CHANGED}: {error}"
    if reasons := [reason for part, reason in now.left.items() if part not in adapter.left]:
        return f"{CHANGED}: {'; '.join(reasons)}"
    held = [(parts(array), parts(adapter.weights[name])) for name, array in now.weights.items()]
    return None if all(a is b for new, old in held for a, b in zip(new, old, strict=True)) else CHANGED


def whole_steps(cache: Any) -> None:
    """Round the room of a kv cache up to a multiple of its step, so that its shape is one of few.

    mlx-lm adds steps to whatever a prompt or a batch left, and what MLX has compiled goes by shapes.
    """
    if getattr(cache, "keys", None) is not None and (more := -cache.keys.shape[2] % cache.step):
        room = [(0, 0), (0, 0), (0, more), (0, 0)]
        cache.keys, cache.values = mx.pad(cache.keys, room), mx.pad(cache.values, room)


def upstream_kernels() -> list[tuple[Any, str, Any]]:
    """mlx-lm's own decode kernels as (module, name, kernel): it makes them at import, and only where Metal is.

    Call it while mx.metal.is_available says so.
    """
    make, place = gated_delta._make_gated_delta_kernel, gated_delta
    return [
        (place, "_gated_delta_kernel", make(has_mask=False)),
        (place, "_gated_delta_kernel_masked", make(has_mask=True)),
        (place, "_gated_delta_kernel_packed", gated_delta._make_gated_delta_packed_kernel()),
    ]


def text_model(model: nn.Module) -> nn.Module:
    """The part of a model that holds its decoder layers: tokens → what the output layer takes."""
    return getattr(model, "language_model", model).model


def embedded(text: nn.Module, tokens: mx.array, embeddings: mx.array | None = None) -> mx.array:
    """What a text model's first layer takes, [B, S, H]."""
    return text.embed_tokens(tokens) if embeddings is None else embeddings


def normed(text: nn.Module, h: mx.array) -> mx.array:
    """What a text model gives, from its last layer's output."""
    return text.norm(h)


def layer_calls(text: nn.Module, x: mx.array, cache: Sequence[Any] | None) -> list[tuple[nn.Module, Any, Any]]:
    """The layers that upstream's loop would call for x [B, 1, H], each with its mask and its cache.

    A mask over the keys has false ones put after it, up to a multiple of a cache's step, so that its shape seldom
    changes. Raises RefusedError on a prompt, and where the layers are spread over machines.
    """
    if x.shape[1] != 1:
        raise RefusedError(PREFILL)
    if text.pipeline_size > 1:
        raise RefusedError("the layers are spread over machines")
    layers = text.pipeline_layers
    held = [None] * len(layers) if cache is None else cache
    rows = None if text.ssm_idx is None else create_ssm_mask(x, held[text.ssm_idx])
    keys = None if text.fa_idx is None else create_attention_mask(x, held[text.fa_idx])
    if isinstance(keys, mx.array):
        keys = mx.pad(keys, [(0, 0)] * (keys.ndim - 1) + [(0, -keys.shape[-1] % caches.KVCache.step)])
    return [(layer, rows if layer.is_linear else keys, c) for layer, c in zip(layers, held, strict=False)]


def step_state(layer: nn.Module, rows: int, keys: int, dtype: mx.Dtype) -> dict[str, tuple[tuple[int, ...], mx.Dtype]]:
    """Shapes and dtypes of what a layer's cache holds at a decode step, by name.

    GDN: conv_state, state. GQA: keys, values, allocated in the cache's own steps for ``keys`` keys.
    """
    if layer.is_linear:
        m = layer.linear_attn
        conv = (rows, m.conv_kernel_size - 1, m.conv_dim)
        state = (rows, m.num_v_heads, m.head_v_dim, m.head_k_dim)
        return {"conv_state": (conv, dtype), "state": (state, mx.float32)}
    m, step = layer.self_attn, caches.KVCache.step
    shape = (rows, m.num_key_value_heads, -(-keys // step) * step, m.head_dim)
    return {"keys": (shape, dtype), "values": (shape, dtype)}


def step_cache(layer: nn.Module, state: Mapping[str, mx.array], keys: int) -> Any:
    """A cache that holds ``state``, with room for the last of ``keys`` keys."""
    if layer.is_linear:
        cache = caches.ArraysCache(2)
        cache[0], cache[1] = state["conv_state"], state["state"]
        return cache
    cache = caches.KVCache()
    cache.keys, cache.values, cache.offset = state["keys"], state["values"], keys - 1
    return cache


def cache_state(cache: Any) -> list[mx.array]:
    """The arrays that a cache holds, in the order of :func:`step_state`."""
    return [cache[0], cache[1]] if isinstance(cache, caches.ArraysCache) else [cache.keys, cache.values]


def form(layer: nn.Module) -> tuple[str, int, mx.Dtype]:
    """A decoder layer's kind, gdn or gqa, its hidden size, and the dtype that it computes in."""
    weight = layer.input_layernorm.weight
    return "gdn" if layer.is_linear else "gqa", weight.size, weight.dtype


def before_layers(model: nn.Module, tokens: mx.array) -> mx.array:
    """A model's embedding: tokens [B, 1] → [B, 1, H]."""
    return embedded(text_model(model), tokens)


def after_layers(model: nn.Module, h: mx.array) -> mx.array:
    """A model's final norm and output layer: h [B, 1, H] → logits [B, 1, V]."""
    text = getattr(model, "language_model", model)
    h = normed(text.model, h)
    return text.model.embed_tokens.as_linear(h) if text.args.tie_word_embeddings else text.lm_head(h)


def _wants_cache(cache: Any, cls: type, but: type | None = None) -> None:
    if not isinstance(cache, cls) or (but is not None and isinstance(cache, but)):
        wanted = "a kv cache" if but else cls.__name__
        raise TypeError(f"[cache] wants {wanted} for this layer, got {type(cache).__name__}")


def _kind_of(model: nn.Module, layers: Sequence[nn.Module]) -> str:
    kind = getattr(model, "model_type", None) or type(model).__name__
    classes = sorted({f"{type(layer).__module__}.{type(layer).__name__}" for layer in layers})
    return f"{kind} with layers of {', '.join(classes)}" if kind in MODEL_TYPES and classes else kind


def _linear(place: str, module: nn.Module, *, summed: bool = False) -> QArray:
    """The arrays of a linear layer, by reference. summed: it may be one that sums its results over a group."""
    kind = type(module)
    if kind in SUMMED and not summed:
        raise RefusedError(f"{place} is a {kind.__name__}, which sums over ranks where no op does")
    if "bias" in module:
        raise RefusedError(f"{place} has a bias")
    if kind in (nn.Linear, SwitchLinear, AllToShardedLinear, ShardedToAllLinear):
        return QArray(module.weight)
    if kind not in (
        nn.QuantizedLinear,
        QuantizedSwitchLinear,
        QuantizedAllToShardedLinear,
        QuantizedShardedToAllLinear,
    ):
        raise RefusedError(f"{place} is a {kind.__name__}")
    if module.mode != "affine" or module.get("biases") is None:
        raise RefusedError(f"{place} is quantised as {module.mode}; only affine is fused")
    if getattr(module, "global_scale", None) is not None:
        raise RefusedError(f"{place} has a global scale")
    array = QArray(module.weight, module.scales, module.biases, Quant(module.bits, module.group_size))
    if array.shape[-1] != module.scales.shape[-1] * module.group_size:
        shapes = f"{tuple(module.weight.shape)} and {tuple(module.scales.shape)}"
        raise RefusedError(f"{place} says {array.quant}, but its arrays are {shapes}")
    return array


def _linears(place: str, **modules: nn.Module) -> tuple[dict[str, QArray], dict[str, Quant]]:
    """Arrays and quantisations of the linear layers of one node, by ``node.spec`` name."""
    arrays = {f"{place}.{name}": _linear(f"{place}.{name}", module) for name, module in modules.items()}
    return arrays, {name: array.quant for name, array in arrays.items()}


def _moe(layer: nn.Module) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Dims and weights of the MoE; None of a dense MLP, which is not ours to fuse."""
    moe, group = _sharded_block(layer.mlp)
    norm = layer.post_attention_layernorm
    if type(moe) is qwen3_next.Qwen3NextMLP:
        return None
    if type(moe) is not qwen3_next.Qwen3NextSparseMoeBlock:
        raise RefusedError(f"mlp is a {type(moe).__name__}, not a sparse MoE block")
    if moe.sharding_group is not None:
        if group is not None:
            raise RefusedError("the MoE is summed over ranks twice, by itself and by what wraps it")
        group = moe.sharding_group
    if type(moe.switch_mlp) is not SwitchGLU:
        raise RefusedError(f"switch_mlp is a {type(moe.switch_mlp).__name__}")
    routed, shared = moe.switch_mlp, moe.shared_expert
    gate_up = {"w_gate": routed.gate_proj, "w_up": routed.up_proj, "ws_gate": shared.gate_proj, "ws_up": shared.up_proj}
    weights: dict[str, Any] = {}
    dims: dict[str, Any] = {}
    for arrays, quants in (
        _linears("norm_router", w_router=moe.gate),
        _linears("router", w_router=moe.gate, w_shared_gate=moe.shared_expert_gate),
        _linears("route_swiglu", **gate_up, w_shared_gate=moe.shared_expert_gate),
        _linears("swiglu", **gate_up),
        _linears("expert_down", w_down=routed.down_proj, ws_down=shared.down_proj),
    ):
        weights |= arrays
        dims |= quants
    for node in ("o_proj_router", "norm_router", "post_norm"):
        weights[f"{node}.w_norm"] = norm.weight
    if norm.eps != layer.input_layernorm.eps:
        raise RefusedError(f"norms of one layer have eps {layer.input_layernorm.eps} and {norm.eps}")
    E, I, _ = weights["route_swiglu.w_gate"].shape
    return dims | _group("moe", group) | {
        "E": E,
        "I": I,
        "Is": weights["route_swiglu.ws_gate"].shape[0],
        "k": moe.top_k,
        "norm_topk": bool(moe.norm_topk_prob),
    }, weights


def _sharded_block(mlp: nn.Module) -> tuple[nn.Module, Any]:
    """An MLP as it is; or of exo's ShardedMoE what it wraps, and the group over which it sums that one's results."""
    if type(mlp).__name__ == "ShardedMoE" and WRAPPED in mlp:
        return mlp[WRAPPED], mlp.sharding_group
    return mlp, None


def _group(part: str, group: Any) -> dict[str, Any]:
    return {} if group is None else {f"{part}_group": group}


def _output(place: str, mixer: nn.Module, module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Dims and weights of a mixer's output projection, whose results mlx-lm sums after it or within it."""
    array = _linear(place, module, summed=True)
    group = getattr(mixer, "sharding_group", None)
    if type(module) in SUMMED:
        if group is not None:
            raise RefusedError(f"{place} is summed over ranks twice, by itself and by its mixer")
        group = module.group
    return {"o_proj.w": array.quant} | _group("mixer", group), {"o_proj.w": array}


def _gdn(layer: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    m = layer.linear_attn
    weights: dict[str, Any]
    if type(m) is qwen3_5.GatedDeltaNet:
        node, split = (
            "gdn_in_proj",
            {"w_qkv": m.in_proj_qkv, "w_z": m.in_proj_z, "w_b": m.in_proj_b, "w_a": m.in_proj_a},
        )
    elif type(m) is qwen3_next.Qwen3NextGatedDeltaNet:
        node = "gdn_in_proj_merged"
        split = {"w_qkvz": m.in_proj_qkvz, "w_ba": m.in_proj_ba}
    else:
        raise RefusedError(f"linear_attn is a {type(m).__name__}")
    weights, dims = _linears(node, **split)
    weights |= {
        f"{node}.w_conv": m.conv1d.weight,
        f"{node}.A_log": m.A_log,
        f"{node}.dt_bias": m.dt_bias,
        "gdn_gated_norm.w_norm": m.norm.weight,
    }
    if m.norm.eps != layer.input_layernorm.eps:
        raise RefusedError(f"norms of one layer have eps {layer.input_layernorm.eps} and {m.norm.eps}")
    # Shapes come from the arrays: module attributes are stale once a layer has been sharded.
    C, Kc, _ = m.conv1d.weight.shape
    Hv, Dv, Dk = m.A_log.shape[0], m.norm.weight.shape[0], m.head_k_dim
    Nv = Hv * Dv
    sizes = {"C": C, "Kc": Kc, "Hv": Hv, "Dv": Dv, "Dk": Dk, "Hk": (C - Nv) // (2 * Dk), "Nv": Nv, "Ka": Nv}
    out_dims, out_weights = _output("out_proj", m, m.out_proj)
    return dims | sizes | out_dims | {"merged": node == "gdn_in_proj_merged"}, weights | out_weights


def _gqa(layer: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    m = layer.self_attn
    if type(m) is not qwen3_next.Qwen3NextAttention:
        raise RefusedError(f"self_attn is a {type(m).__name__}")
    if type(m.rope) is not nn.RoPE or m.rope.traditional or m.rope.scale != 1.0:
        raise RefusedError(f"rope {type(m.rope).__name__} with scaling or another layout is not fused")
    weights: dict[str, Any]
    weights, dims = _linears("gqa_in_proj", w_q=m.q_proj, w_k=m.k_proj, w_v=m.v_proj)
    weights |= {"qk_norm_rope.w_qnorm": m.q_norm.weight, "qk_norm_rope.w_knorm": m.k_norm.weight}
    if not m.q_norm.eps == m.k_norm.eps == layer.input_layernorm.eps:
        raise RefusedError(
            f"norms of one layer have eps {layer.input_layernorm.eps}, {m.q_norm.eps} and {m.k_norm.eps}"
        )
    D = m.q_norm.weight.shape[0]
    Hq, Hkv = weights["gqa_in_proj.w_q"].shape[0] // (2 * D), weights["gqa_in_proj.w_k"].shape[0] // D
    sizes = {"D": D, "Hq": Hq, "Hkv": Hkv, "R": m.rope.dims, "theta": float(m.rope.base), "Ka": Hq * D}
    out_dims, out_weights = _output("o_proj", m, m.o_proj)
    return dims | sizes | out_dims, weights | out_weights


def _fold(weights: Mapping[str, Any]) -> tuple[mx.array, mx.array]:
    """M1 = Wf·w_o and Wf = W_router·diag(w_norm), computed in f32 and kept in the norm weight's dtype."""
    w_norm = weights["o_proj_router.w_norm"]
    router = weights["norm_router.w_router"].astype(mx.float32).dense()
    Wf = router.astype(mx.float32) * w_norm.astype(mx.float32)
    M1 = Wf @ weights["o_proj_router.w_o"].astype(mx.float32).dense().astype(mx.float32)
    folded = M1.astype(w_norm.dtype), Wf.astype(w_norm.dtype)
    mx.eval(folded)  # now, or every layer's dense projection would be alive at once
    return folded


def conversion(model: nn.Module) -> tuple[Callable[[str], bool], Callable[[str, nn.Module], Any]]:
    """How mlx-lm's convert treats a model: whether a parameter is cast, and how a module is quantised, by path."""
    keep = getattr(model, "cast_predicate", None) or (lambda _: True)
    chosen = getattr(model, "quant_predicate", None) or (lambda *_: True)
    return keep, lambda path, module: hasattr(module, "to_quantized") and chosen(path, module)


def new_model(config: Mapping[str, Any]) -> nn.Module:
    """An untrained model from a config.json's contents, of one of MODEL_TYPES."""
    module = {"qwen3_5_moe": qwen3_5_moe, "qwen3_5": qwen3_5, "qwen3_next": qwen3_next}[config["model_type"]]
    return module.Model(module.ModelArgs.from_dict(dict(config)))


def vocabulary(model: nn.Module) -> int:
    """How many tokens the model knows."""
    return model.language_model.args.vocab_size


def new_cache(layer: nn.Module) -> Any:
    """An empty cache for one decoder layer."""
    return caches.ArraysCache(2) if layer.is_linear else caches.KVCache()


def make_cache(model: nn.Module) -> list[Any]:
    """mlx-lm's own caches for the model, empty."""
    return caches.make_prompt_cache(model)


def filled_caches(model: nn.Module, batch: int, context: int) -> Callable[[], list[Any]]:
    """Caches as after ``context`` tokens, random inside; each call gives new ones over the same arrays."""
    empty = make_cache(model)
    mx.eval(model(mx.zeros((batch, 1), mx.int32), cache=empty), [c.state for c in empty])
    held = []
    for cache in empty:
        if hasattr(cache, "keys"):
            B, heads, _, D = cache.keys.shape
            shape = (B, heads, -(-context // cache.step) * cache.step, D)
            held.append([mx.random.normal(shape).astype(cache.keys.dtype) for _ in range(2)])
        else:
            held.append([0.1 * mx.random.normal(x.shape).astype(x.dtype) for x in cache.cache])
    mx.eval(held)

    def fresh() -> list[Any]:
        caches = make_cache(model)
        for cache, arrays in zip(caches, held, strict=True):
            if hasattr(cache, "keys"):
                cache.keys, cache.values = (mx.array(x) for x in arrays)
                cache.offset = context
            else:
                cache.cache = list(arrays)
        return caches

    return fresh
