"""Rewrite parity: each graph on the reference backend against the untouched upstream layer."""

import mlx.core as mx
import pytest
from conftest import inputs, make_model, rms
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask, create_ssm_mask
from mlx_lm.models.cache import ArraysCache, BatchKVCache, KVCache

from qfuse import backends, build, fuse, graphs, models, tiny

GRAPHS = [
    ("gdn", 1, "moe_4"),
    ("gdn", 2, "moe_4"),
    ("gdn", 2, "moe_5"),
    ("gqa", 1, "moe_4"),
    ("gqa", 2, "moe_4"),
    ("gqa", 2, "moe_5"),
]
LAYER = {"gdn": 0, "gqa": 3}


def new_cache(kind, padding=None):
    if kind == "gdn":
        return ArraysCache(2, left_padding=padding)
    return KVCache() if padding is None else BatchKVCache(padding)


def steps(layer, kind, x, prompt, padding=None):
    """Prefill, then one step a token, as the model's own loop does: the outputs of the steps, and the cache."""
    cache, outs = new_cache(kind, padding), []
    for part in (x[:, :prompt], *(x[:, t : t + 1] for t in range(prompt, x.shape[1]))):
        mask = create_ssm_mask(part, cache) if kind == "gdn" else create_attention_mask(part, cache)
        outs.append(layer(part, mask=mask, cache=cache))
    return mx.concatenate(outs[1:], axis=1), cache


def content(cache):
    if isinstance(cache, ArraysCache):
        return list(cache.cache)
    return [part[..., : cache.size(), :] for part in (cache.keys, cache.values)]


@pytest.mark.parametrize(("kind", "mode", "moe"), GRAPHS)
@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize(("bits", "group"), [(8, 64), (4, 32)])
def test_layer_in_f32(kind, mode, moe, B, bits, group):
    model = make_model(bits=bits, group=group)
    layer, x = model.layers[LAYER[kind]], inputs(1, B, 12)
    expected, expected_cache = steps(layer, kind, x, 6)
    with fuse(model, mode=mode, moe=moe, backends="reference", strict=True):
        got, cache = steps(layer, kind, x, 6)
    assert rms(got - expected) < 1e-5 * rms(expected)
    for a, b in zip(content(cache), content(expected_cache), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert rms(a - b) < 1e-5 * rms(b)


@pytest.mark.parametrize(("kind", "mode", "moe"), GRAPHS)
@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_layer_in_half_precision_is_as_close_to_f32_as_upstream(kind, mode, moe, B, dtype):
    # All experts are chosen, so that a near tie of the router cannot make the comparison one of luck.
    model = make_model(dtype=dtype, num_experts=2)
    layer, x = model.layers[LAYER[kind]], inputs(2, B, 14, dtype=dtype)
    upstream, upstream_cache = steps(layer, kind, x, 6)
    with fuse(model, mode=mode, moe=moe, backends="reference", strict=True):
        got, cache = steps(layer, kind, x, 6)
    assert got.dtype == dtype
    assert [a.dtype for a in content(cache)] == [a.dtype for a in content(upstream_cache)]
    model.set_dtype(mx.float32)
    exact, _ = steps(layer, kind, x.astype(mx.float32), 6)
    assert rms(got - exact) <= 2 * rms(upstream - exact)


@pytest.mark.parametrize("padding", [None, [0, 2, 5]])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_prefill_with_gdn_step(sim, monkeypatch, dtype, padding):
    model = make_model(dtype=dtype, num_experts=2)
    monkeypatch.setattr(backends.BACKENDS[sim], "prefill", True, raising=False)
    layer, x = model.layers[0], inputs(3, 3, 9, dtype=dtype)
    upstream, upstream_cache = steps(layer, "gdn", x, 8, padding)
    with fuse(model, backends=sim, strict=True) as fusion:
        got, cache = steps(layer, "gdn", x, 8, padding)
        calls = fusion.report().layers[0].calls
    assert calls == {f"{models.PREFILL}, with gdn_step and tiled experts": 1, "fused": 1}
    assert [(a.shape, a.dtype) for a in content(cache)] == [(a.shape, a.dtype) for a in content(upstream_cache)]
    model.set_dtype(mx.float32)
    exact, exact_cache = steps(layer, "gdn", x.astype(mx.float32), 8, padding)
    for ours, theirs, true in zip(
        [got, *content(cache)], [upstream, *content(upstream_cache)], [exact, *content(exact_cache)], strict=True
    ):
        assert rms(ours - true) <= max(2 * rms(theirs - true), 1e-5 * rms(true))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", ["gdn", "gqa"])
def test_a_prompt_of_many_rows_has_tiled_experts(monkeypatch, kind, bits):
    model = make_model(bits=bits)
    monkeypatch.setattr(backends.BACKENDS["reference"], "prefill", True)
    layer, mask = model.layers[LAYER[kind]], None if kind == "gdn" else "causal"
    experts, step = layer.mlp.num_experts, {"gdn": "gdn_step and "}.get(kind, "")
    rows = models.TILED_ROWS * experts // layer.mlp.top_k
    x = inputs(3, 1, rows)
    upstream, parameters = layer(x, mask=mask), dict(tree_flatten(layer.parameters()))
    with fuse(model, backends="reference") as fusion:
        got, few = layer(x, mask=mask), layer(x[:, :-1], mask=mask)
        calls = fusion.report().layers[LAYER[kind]].calls
    less = f"{models.PREFILL}, with gdn_step" if kind == "gdn" else models.PREFILL
    assert calls == {f"{models.PREFILL}, with {step}tiled experts": 1, less: 1}
    after = dict(tree_flatten(layer.parameters()))
    assert after.keys() == parameters.keys()
    assert all(after[name] is parameters[name] for name in after)
    assert rms(got - upstream) < 1e-5 * rms(upstream)
    assert rms(few - upstream[:, :-1]) < 1e-5 * rms(few)


def test_the_recurrence_is_upstreams_where_it_has_a_kernel_or_the_cache_a_ragged_past(sim, monkeypatch):
    model, x = make_model(), inputs(4, 2, 9)
    layer = model.layers[0]
    for made, lengths, more in ((False, None, ""), (True, [3, 9], ", with tiled experts")):
        monkeypatch.setattr(backends.BACKENDS[sim], "prefill", made, raising=False)
        cache = ArraysCache(2)
        cache.lengths = lengths and mx.array(lengths)
        with fuse(model, backends=sim, strict=True) as fusion:
            layer(x, cache=cache)
            assert fusion.report().layers[0].calls == {models.PREFILL + more: 1}


@pytest.mark.parametrize("kind", ["gdn", "gqa"])
@pytest.mark.parametrize("mode", [1, 2])
def test_left_padding_and_an_offset_for_each_row(kind, mode):
    model = make_model()
    layer, x, padding = model.layers[LAYER[kind]], inputs(3, 3, 12), [2, 0, 5]
    expected, expected_cache = steps(layer, kind, x, 7, padding)
    with fuse(model, mode=mode, backends="reference", strict=True):
        got, cache = steps(layer, kind, x, 7, padding)
    assert rms(got - expected) < 1e-5 * rms(expected)
    for a, b in zip(content(cache), content(expected_cache), strict=True):
        assert rms(a - b) < 1e-5 * rms(b)


@pytest.mark.parametrize("kind", ["gdn", "gqa"])
def test_each_row_of_a_batch_is_its_own_single_run(kind):
    model = make_model()
    layer, x = model.layers[LAYER[kind]], inputs(4, 4, 9)
    with fuse(model, backends="reference", strict=True):
        together, _ = steps(layer, kind, x, 4)
        for i in range(4):
            alone, _ = steps(layer, kind, x[i : i + 1], 4)
            assert rms(together[i : i + 1] - alone) < 1e-5 * rms(alone)


@pytest.mark.parametrize("heads", [(2, 4), (1, 1), (4, 8), (2, 2)])
def test_key_and_value_heads(heads):
    Hk, Hv = heads
    model = make_model(linear_num_key_heads=Hk, linear_num_value_heads=Hv)
    expected, _ = steps(model.layers[0], "gdn", inputs(5, 2, 8), 4)
    with fuse(model, backends="reference", strict=True):
        got, _ = steps(model.layers[0], "gdn", inputs(5, 2, 8), 4)
    assert rms(got - expected) < 1e-5 * rms(expected)


@pytest.mark.parametrize(
    "config",
    [
        {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 256},
        {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 128},
        {"norm_topk_prob": False},
        {"num_experts": 5, "num_experts_per_tok": 3},
        {"hidden_size": 320, "moe_intermediate_size": 64},
        {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5}},
        {"linear_conv_kernel_dim": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["gdn", "gqa"])
def test_other_shapes_and_settings(kind, config):
    model = make_model(**config)
    x = inputs(6, 2, 8, model.args.text_config["hidden_size"])
    expected, _ = steps(model.layers[LAYER[kind]], kind, x, 4)
    with fuse(model, backends="reference", strict=True):
        got, _ = steps(model.layers[LAYER[kind]], kind, x, 4)
    assert rms(got - expected) < 1e-5 * rms(expected)


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1e-2])
@pytest.mark.parametrize("kind", ["gdn", "gqa"])
def test_the_configs_eps_is_used(kind, eps):
    model = make_model(rms_norm_eps=eps)
    x = 1e-3 * inputs(7, 1, 8)
    expected, _ = steps(model.layers[LAYER[kind]], kind, x, 4)
    with fuse(model, backends="reference", strict=True):
        got, _ = steps(model.layers[LAYER[kind]], kind, x, 4)
    assert rms(got - expected) < 1e-5 * rms(expected)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_512_steps_keep_the_state_in_f32_and_near_upstreams(dtype):
    model = make_model(dtype=dtype, num_experts=2)
    layer, x = model.layers[0], inputs(8, 1, 512, dtype=dtype)

    def states(layer):
        cache, kept = ArraysCache(2), []
        for t in range(512):
            layer(x[:, t : t + 1], mask=None, cache=cache)
            if (t + 1) % 128 == 0:
                mx.eval(cache.cache)
                assert cache[1].dtype == mx.float32
                kept.append(cache[1])
        return kept

    upstream = states(layer)
    with fuse(model, backends="reference", strict=True):
        fused = states(layer)
    drift = [rms(a - b) / rms(b) for a, b in zip(fused, upstream, strict=True)]
    assert max(drift) < (1e-5 if dtype == mx.float32 else 2e-2)
    assert drift[-1] <= 2 * max(drift[:2])  # it does not grow


@pytest.mark.parametrize("moe", ["moe_4", "moe_5"])
def test_routing_in_bf16_is_as_near_to_f32_as_upstreams(moe):
    model = make_model(dtype=mx.bfloat16, num_experts=32, num_experts_per_tok=4)
    layer = model.layers[3]
    adapter = models.adapt(layer, fold_router=True)
    graph = {"moe_4": graphs.moe_4, "moe_5": graphs.moe_5}[moe](adapter.dims)
    plan = build(graph, adapter.weights, ("reference",))
    a, x = inputs(9, 1, 512, adapter.dims["Ka"], mx.bfloat16)[0], inputs(10, 1, 512, dtype=mx.bfloat16)[0]

    def upstream(a, x):
        return layer.mlp.gate(layer.post_attention_layernorm(x + layer.self_attn.o_proj(a))).astype(mx.float32)

    def chosen(logits):
        return mx.sort(mx.argsort(logits, axis=-1)[:, -4:], axis=-1)

    seen = plan.debug(a, x, until="route_swiglu")
    node = next(name.split(".")[0] for name in seen if name.endswith(".router_dot"))
    r = mx.rsqrt(seen[f"{node}.x2"].sum(axis=-1, keepdims=True) / tiny.HIDDEN + 1e-6)
    ours, theirs = r * seen[f"{node}.router_dot"], upstream(a, x)
    mx.eval(ours, theirs)
    model.set_dtype(mx.float32)
    exact = upstream(a.astype(mx.float32), x.astype(mx.float32))
    assert rms(ours - exact) <= rms(theirs - exact)

    def differing(indices):
        return (indices != chosen(exact)).any(axis=-1).sum().item()

    picked = mx.sort(seen["route_swiglu.indices"].astype(mx.uint32), axis=-1)
    assert mx.array_equal(picked, chosen(ours))
    assert differing(picked) <= differing(chosen(theirs)) + 3
