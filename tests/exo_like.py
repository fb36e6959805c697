"""Models spread over ranks as exo does it: wrappers of the same form and names, and the same linear layers sharded."""

from inspect import signature

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import shard_inplace, shard_linear


class Wrapping(nn.Module):
    """Keeps a module under exo's key, and hands out its attributes."""

    def __init__(self, inner):
        super().__init__()
        dict.__setitem__(self, "_original_layer", inner)

    @property
    def original_layer(self):
        return self["_original_layer"]

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self["_original_layer"], name)


class PipelineFirstLayer(Wrapping):
    def __init__(self, inner, group):
        super().__init__(inner)
        self.group = group

    def __call__(self, x, *args, **kwargs):
        if self.group.rank() != 0:
            mx.eval(x)
            x = mx.distributed.recv_like(x, self.group.rank() - 1, group=self.group)
            mx.eval(x)
        return self.original_layer(x, *args, **kwargs)


class PipelineLastLayer(Wrapping):
    def __init__(self, inner, group):
        super().__init__(inner)
        self.group = group
        self.signature = signature(inner.__call__)

    def __call__(self, x, *args, **kwargs):
        cache = self.signature.bind_partial(x, *args, **kwargs).arguments.get("cache")
        out = self.original_layer(x, *args, **kwargs)
        mx.eval(out)
        rank, size = self.group.rank(), self.group.size()
        if rank != size - 1:
            out = mx.distributed.send(out, rank + 1, group=self.group)
            if hasattr(cache, "keys"):
                cache.keys = mx.depends(cache.keys, out)
            mx.eval(out)
        out = mx.distributed.all_gather(out, group=self.group)[-out.shape[0] :]
        mx.eval(out)
        return out


class ShardedMoE(Wrapping):
    def __init__(self, inner, group):
        super().__init__(inner)
        self.sharding_group = group

    def __call__(self, x):
        return mx.distributed.all_sum(self.original_layer(x), group=self.sharding_group)


def pipeline(model, group):
    """Even runs of layers, a rank's first and last wrapped; the masks of a kind go by the first layer of that kind."""
    text = model.language_model.model
    size, rank = group.size(), group.rank()
    share = len(text.layers) // size
    layers = text.layers[rank * share : (rank + 1) * share]
    layers[0] = PipelineFirstLayer(layers[0], group)
    layers[-1] = PipelineLastLayer(layers[-1], group)
    text.layers = layers
    text.ssm_idx = next((i for i, layer in enumerate(layers) if layer.is_linear), None)
    text.fa_idx = next((i for i, layer in enumerate(layers) if not layer.is_linear), None)


def tensor(model, group):
    """Every layer sharded: linear layers of MLX's sharded classes, experts in place with a wrapper that sums."""
    for layer in model.layers:
        (_gdn if layer.is_linear else _gqa)(layer, group)
        tensor_moe(layer, group)


def tensor_moe(layer, group):
    for part in (layer.mlp.switch_mlp, layer.mlp.shared_expert):
        shard_inplace(part.gate_proj, "all-to-sharded", group=group)
        shard_inplace(part.up_proj, "all-to-sharded", group=group)
        shard_inplace(part.down_proj, "sharded-to-all", group=group)
    layer.mlp = ShardedMoE(layer.mlp, group)


def _gqa(layer, group):
    m, size = layer.self_attn, group.size()
    if m.num_key_value_heads % size:  # exo wants a head a rank; here so that four ranks have one as well
        for proj in (m.k_proj, m.v_proj):
            for name, x in proj.parameters().items():
                heads = x.reshape(m.num_key_value_heads, -1, *x.shape[1:])
                setattr(proj, name, mx.repeat(heads, size // m.num_key_value_heads, 0).reshape(-1, *x.shape[1:]))
        m.num_key_value_heads = size
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(m, name, shard_linear(getattr(m, name), "all-to-sharded", group=group))
    m.o_proj = shard_linear(m.o_proj, "sharded-to-all", group=group)
    m.num_attention_heads //= size
    m.num_key_value_heads //= size


def _gdn(layer, group):
    m, size, rank = layer.linear_attn, group.size(), group.rank()
    keys = m.key_dim
    if hasattr(m, "in_proj_qkvz"):
        names, segments = ("in_proj_qkvz", "in_proj_ba"), {}
    else:
        names, segments = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), {"in_proj_qkv": [keys, 2 * keys]}
    for name in names:
        more = {"segments": segments[name]} if name in segments else {}
        setattr(m, name, shard_linear(getattr(m, name), "all-to-sharded", group=group, **more))
    m.out_proj = shard_linear(m.out_proj, "sharded-to-all", group=group)
    parts = mx.split(m.conv1d.weight, [keys, 2 * keys])
    m.conv1d.weight = mx.concatenate([mx.split(part, size)[rank] for part in parts])
    m.A_log, m.dt_bias = (mx.split(x, size)[rank] for x in (m.A_log, m.dt_bias))
    for name in ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim"):
        setattr(m, name, getattr(m, name) // size)
    m.conv1d.groups = m.conv_dim
