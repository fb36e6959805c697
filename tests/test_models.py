"""Every model class that is fused, against upstream: its layers, its dense MLPs, its spellings of one config."""

import mlx.core as mx
import pytest
from conftest import inputs, make_model, rms
from families import DENSE, FAMILIES, NEXT
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import qwen3_5
from mlx_lm.models.cache import make_prompt_cache

from qfuse import RefusedError, fuse, models, tiny


def family(config, **more):
    return make_model(**(config | more))


def decoded(model, B=2, prompt=5, steps=4, **options):
    """Logits of some steps after a prefill; fused if there are options."""
    tokens = mx.random.randint(0, 512, (B, prompt + steps), key=mx.random.key(3))
    cache = make_prompt_cache(model)
    model(tokens[:, :prompt], cache=cache)
    fusion = fuse(model, **options) if options else None
    outs = [model(tokens[:, i : i + 1], cache=cache) for i in range(prompt, prompt + steps)]
    mx.eval(outs)
    if fusion is not None:
        report = fusion.report()
        assert all(layer.calls == {"fused": steps} for layer in report.layers)
        fusion.remove()
    return mx.concatenate(outs, axis=1)


MODES = [(name, mode) for name in FAMILIES for mode in (1, 2) if (name, mode) != ("qwen3_5", 1)]  # no MoE in it


@pytest.mark.parametrize(("name", "mode"), MODES)
@pytest.mark.parametrize("bits", [8, 4])
def test_a_family_against_upstream(name, bits, mode):
    model = family(FAMILIES[name], bits=bits)
    expected = decoded(model)
    got = decoded(model, mode=mode, backends="reference", strict=True)
    assert rms(got - expected) < 2e-5 * rms(expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_on_the_kernels(name, sim):
    model = family(FAMILIES[name], num_hidden_layers=4)
    expected = decoded(model, steps=1)
    got = decoded(model, steps=1, backends="sim", strict=True, probe=False)
    assert rms(got - expected) < 2e-5 * rms(expected)


def test_a_sharded_model_on_the_kernels(sim):
    model = family(tiny.CONFIG, num_hidden_layers=2, full_attention_interval=2)
    model.shard(mx.distributed.init())
    expected = decoded(model, steps=1)
    got = decoded(model, steps=1, backends="sim", strict=True, probe=False)
    assert rms(got - expected) < 2e-5 * rms(expected)


def test_a_dense_model_has_its_mixers_fused_and_its_mlps_left_alone():
    model = family(DENSE)
    with fuse(model, backends="reference", strict=True) as fusion:
        report = fusion.report()
        assert [layer.graph for layer in report.layers] == ["gdn_mixer_layer"] * 3 + ["gqa_mixer_layer"]
        assert {layer.reason for layer in report.layers} == {""}
        assert report.new_bytes == 0
    with fuse(model, mode=1, backends="reference") as fusion:
        assert {layer.reason for layer in fusion.report().layers} == {"the MLP is dense, which upstream runs"}


def test_a_model_with_some_dense_layers():
    model = family(NEXT, mlp_only_layers=[1])
    expected = decoded(model)
    with fuse(model, backends="reference", strict=True) as fusion:
        assert [layer.graph for layer in fusion.report().layers] == [
            "gdn_layer", "gdn_mixer_layer", "gdn_layer", "gqa_layer",
        ]  # fmt: skip
    assert rms(decoded(model, backends="reference", strict=True) - expected) < 2e-5 * rms(expected)


def test_the_text_model_alone_and_under_language_model():
    model = family(tiny.CONFIG)
    text = model.language_model
    assert isinstance(text, qwen3_5.TextModel)
    expected = decoded(text)
    assert rms(decoded(text, backends="reference", strict=True) - expected) < 2e-5 * rms(expected)
    nested = models.new_model({"model_type": "qwen3_5_moe", "text_config": tiny.CONFIG})
    assert len(models.decoder_layers(nested)) == tiny.LAYERS


ROPES = {
    "type": {"type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.25},
    "rope_type": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.25},
    "mrope": {"type": "mrope", "rope_theta": 1e5, "partial_rotary_factor": 0.25, "mrope_section": [4, 2, 2]},
    "half": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("rope", ROPES)
def test_a_rope_in_every_spelling(rope):
    model = family(tiny.CONFIG, rope_parameters=ROPES[rope])
    attention = models.decoder_layers(model)[3]
    assert models.adapt(attention, fold_router=False).dims["theta"] == ROPES[rope]["rope_theta"]
    expected = decoded(model)
    assert rms(decoded(model, backends="reference", strict=True) - expected) < 2e-5 * rms(expected)


SCALED = {
    "linear": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 4096},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "dynamic": {"factor": 2.0},
}


@pytest.mark.parametrize("kind", SCALED)
def test_a_rope_that_is_scaled_is_refused_and_the_rest_of_its_layer_is_not(kind):
    rope = {"type": kind, "rope_theta": 1e5, "partial_rotary_factor": 0.25} | SCALED[kind]
    model = family(tiny.CONFIG, rope_parameters=rope)
    expected = decoded(model)
    with fuse(model, backends="reference") as fusion:
        layer = fusion.report().layers[3]
        assert layer.graph == "moe_only"
        assert layer.reason.startswith("rope ")
        assert layer.reason.endswith("with scaling or another layout is not fused")
    assert rms(decoded(model, backends="reference") - expected) < 2e-5 * rms(expected)
    with pytest.raises(RefusedError, match=r"\[layers.3\] .* rope "):
        fuse(model, backends="reference", strict=True)


@given(st.integers(0, 9), st.integers(1, 40), st.sampled_from([(1, 1), (4, 1), (5, 3), (16, 4)]), st.booleans())
@settings(max_examples=20, deadline=None)
def test_tiled_experts_are_upstreams_whatever_the_router_says(seed, S, sizes, spread):
    E, k = sizes
    routed = make_model(num_experts=E, num_experts_per_tok=k).layers[0].mlp.switch_mlp
    x, key = inputs(seed, 2, S), mx.random.key(seed)
    taste = mx.random.normal((2, S, E), key=key) * spread  # or all to the same experts
    indices = mx.argpartition(taste, kth=-k, axis=-1)[..., -k:]
    got, expected = models.TiledExperts(routed)(x, indices), routed(x, indices)
    assert got.shape == expected.shape
    assert rms(got - expected) <= 1e-5 * rms(expected)
