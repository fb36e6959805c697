"""One layer of each kind at the true widths of published models, few experts: the references, and the Metal texts."""

import mlx.core as mx
import pytest
from conftest import inputs, rms
from mlx_lm.models.cache import ArraysCache, KVCache

from qfuse import bench, fuse, models, tiny

BASE = tiny.CONFIG | {
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 12,
    "num_experts_per_tok": 8,
    "vocab_size": 64,
}
DENSE = BASE | {"model_type": "qwen3_5", "num_experts": 0, "intermediate_size": 64}  # the MLP is upstream's


def numbers(config, hidden, heads, kv_heads, value_heads, width=0, **more):
    return config | more | {
        "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "linear_num_value_heads": value_heads, "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width,
    }  # fmt: skip


CONFIGS = {
    "35B-A3B": numbers(BASE, 2048, 16, 2, 32, 512),
    "122B-A10B": numbers(BASE, 3072, 32, 2, 64, 1024),
    "397B-A17B": numbers(BASE, 4096, 32, 2, 64, 1024, num_experts_per_tok=10),
    "27B": numbers(DENSE, 5120, 24, 4, 48),
    "9B": numbers(DENSE, 4096, 16, 4, 32),
    "4B": numbers(DENSE, 2560, 16, 4, 32),
    "0.8B": numbers(DENSE, 1024, 8, 2, 16),
    "Next-80B-A3B": numbers(
        {key: value for key, value in BASE.items() if key != "rope_parameters"}, 2048, 16, 2, 32, 512,
        model_type="qwen3_next", num_experts_per_tok=10, intermediate_size=64, decoder_sparse_step=1,
        mlp_only_layers=[], max_position_embeddings=4096, rope_theta=1e7, partial_rotary_factor=0.25,
    ),
    "width 640": numbers(BASE, 2560, 16, 4, 32, 640),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_of_each_kind_at_true_widths(name, sim):
    config = CONFIGS[name]
    model = bench.random_model(config)
    model.set_dtype(mx.float32)
    model.eval()
    x = inputs(1, 1, 6, config["hidden_size"])
    outs = {}
    for backend in (None, "reference", sim):
        fusion = fuse(model, backends=backend, strict=True, probe=False) if backend else None
        for kind, layer in enumerate(models.decoder_layers(model)):
            cache = ArraysCache(2) if layer.is_linear else KVCache()
            prefill(layer, x, cache)
            outs[backend, kind] = layer(x[:, 5:], mask=None, cache=cache)
            mx.eval(outs[backend, kind])
        if fusion:
            assert all(layer.calls["fused"] == 1 for layer in fusion.report().layers)
            fusion.remove()
    for kind in (0, 1):
        wanted = outs[None, kind]
        for backend in ("reference", sim):
            assert rms(outs[backend, kind] - wanted) < 1e-4 * rms(wanted), (backend, kind)


def prefill(layer, x, cache):
    """Five tokens by upstream, which leaves a state and keys that are not zero."""
    layer(x[:, :5], mask=None if layer.is_linear else "causal", cache=cache)
