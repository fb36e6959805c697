"""Each op's reference against an oracle written by somebody else: mlx-lm's modules, or MLX's own fast ops."""

import re
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from conftest import inputs, make_model, rms
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache
from mlx_lm.models.gated_delta import gated_delta_ops, normalize_qk

from qfuse import REGISTRY, build, graphs, models
from qfuse.ops import GDNQKNorm, GDNStep, KVUpdate, QKNormRope, SDPACombineGate, SDPAPartial
from qfuse.ops.route_swiglu import choose_experts
from qfuse.testing import sample


def normal(seed, *shape):
    return mx.random.normal(shape, key=mx.random.key(seed))


@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_qk_norm_adds_eps_to_the_sum_of_squares(scale):
    qkv = scale * normal(0, 3, 2 * 2 * 64 + 32)
    q, k = GDNQKNorm(Hk=2, Dk=64, Nv=32)(qkv=qkv)
    heads = qkv[:, :256].reshape(3, 2, 2, 64)
    expected = normalize_qk(heads[:, 0], heads[:, 1], inv_scale=64**-0.5, eps=1e-6)
    assert rms(q - expected[0]) < 1e-6 * rms(q)
    assert rms(k - expected[1]) < 1e-6 * rms(k)


@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("heads", [(2, 4), (3, 3)])
def test_step_is_upstreams_recurrence(T, masked, heads):
    (Hk, Hv), B, D = heads, 2, 32
    q, k, v = normal(1, B, T, Hk, D), 0.2 * normal(2, B, T, Hk, D), normal(3, B, T, Hv, D)
    g, beta = (mx.random.uniform(0, 1, (B, T, Hv), key=mx.random.key(seed)) for seed in (4, 5))
    state = normal(6, B, Hv, D, D)
    mask = mx.array([[t % 2 == b for t in range(T)] for b in range(B)]) if masked else None
    expected, expected_state = gated_delta_ops(q, k, v, g, beta, state, mask)
    qkv = mx.concatenate([x.reshape(B * T, -1) for x in (q, k, v)], axis=-1)
    rows = [x.reshape(B * T, *x.shape[2:]) for x in (q, k, g, beta)]
    y, state_next = GDNStep(Hk=Hk, Hv=Hv, Dk=D, Dv=D)(
        q=rows[0],
        k=rows[1],
        qkv=qkv,
        g=rows[2],
        beta=rows[3],
        state=state,
        mask=mask if mask is None else mask.flatten(),
    )
    y = y.reshape(expected.shape)
    assert rms(state_next - expected_state) < 1e-6 * rms(expected_state)
    if masked:
        assert mx.array_equal(y, mx.where(mask[..., None, None], y, 0))
        expected = mx.where(mask[..., None, None], expected, 0)
    assert rms(y - expected) < 1e-6 * rms(expected)


@settings(max_examples=40, deadline=None)
@given(
    heads=st.sampled_from([(4, 2), (3, 1), (2, 2)]),
    A=st.integers(1, 70),
    used=st.floats(0, 1),
    blocks=st.sampled_from([1, 5, 32]),
    masked=st.booleans(),
)
def test_attention_in_blocks_is_attention(heads, A, used, blocks, masked):
    (Hq, Hkv), B, D = heads, 2, 32
    length = 1 + int(used * (A - 1))
    q, k, v = normal(1, B, Hq, D), normal(2, B, Hkv, A, D), normal(3, B, Hkv, A, D)
    gate = mx.random.uniform(0, 1, (B, Hq * D), key=mx.random.key(4))
    mask = mx.random.bernoulli(0.5, (B, length), key=mx.random.key(5)) if masked else None
    if masked:
        mask[:, 0] = True
    parts = SDPAPartial(Hq=Hq, Hkv=Hkv, D=D, blocks=blocks)(
        q_rot=q, k_cache=k, v_cache=v, length=mx.array([length], mx.int32), mask=mask
    )
    a = SDPACombineGate(Hq=Hq, D=D, blocks=blocks, T="f32")(**parts._asdict(), gate=gate)
    expected = mx.fast.scaled_dot_product_attention(
        q[:, :, None],
        k[:, :, :length],
        v[:, :, :length],
        scale=D**-0.5,
        mask=None if mask is None else mask[:, None, None],
    )
    assert rms(a - expected.reshape(B, -1) * gate) < 1e-6


def test_a_block_without_keys_weighs_nothing_and_a_row_without_keys_is_zero():
    q, k, v = normal(1, 1, 2, 32), normal(2, 1, 1, 4, 32), normal(3, 1, 1, 4, 32)
    nothing = mx.zeros((1, 4), mx.bool_)
    parts = SDPAPartial(Hq=2, Hkv=1, D=32, blocks=8)(
        q_rot=q, k_cache=k, v_cache=v, length=mx.array([2], mx.int32), mask=None
    )
    assert mx.array_equal(parts.max_part[0, 0] == -mx.inf, mx.arange(8) >= 2)
    assert mx.array_equal(parts.sum_part[0, 0, 2:], mx.zeros(6))
    parts = SDPAPartial(Hq=2, Hkv=1, D=32, blocks=8)(
        q_rot=q, k_cache=k, v_cache=v, length=mx.array([4], mx.int32), mask=nothing
    )
    a = SDPACombineGate(Hq=2, D=32, blocks=8, T="f32")(**parts._asdict(), gate=mx.ones((1, 64)))
    assert mx.array_equal(a, mx.zeros((1, 64)))


@pytest.mark.parametrize("theta", [1e7, 1e5])
def test_rope_turns_the_first_dims_only_by_each_rows_position(theta):
    queries, keys, w = normal(1, 3, 2, 64), normal(2, 3, 1, 64), normal(3, 64)
    position = mx.array([0, 7, 4000], mx.int32)
    q, k = QKNormRope(Hq=2, Hkv=1, D=64, R=16, theta=theta)(
        queries=queries, keys=keys, position=position, w_qnorm=w, w_knorm=w
    )
    normed = mx.fast.rms_norm(queries, w, 1e-6)
    assert mx.allclose(q[:, :, 16:], normed[:, :, 16:], atol=1e-6)
    assert mx.allclose(q[0], normed[0], atol=1e-6)
    for row, offset in enumerate(position.tolist()):
        angle = offset * theta ** (-2 * mx.arange(8) / 16)
        first, second = normed[row, :, :8], normed[row, :, 8:16]
        assert mx.allclose(q[row, :, :8], first * mx.cos(angle) - second * mx.sin(angle), atol=2e-3)
    assert not mx.allclose(k[2, :, :16], k[0, :, :16])


def test_kv_update_gives_the_allocated_buffers():
    cache = KVCache()
    k_cache, v_cache = KVUpdate(Hkv=2, D=8)(k_rot=normal(1, 3, 2, 8), values=normal(2, 3, 2, 8), cache=cache)
    assert cache.offset == 1
    assert k_cache.shape == v_cache.shape == (3, 2, 256, 8)
    assert mx.array_equal(k_cache[:, :, 0], normal(1, 3, 2, 8))


def test_experts_are_ordered_ties_go_to_the_lower_and_nan_is_last():
    nan = float("nan")
    logits = mx.array([[1.0, 3, 3, 2], [nan, 0, nan, -1], [nan] * 4, [-mx.inf] * 4, [200.0, 0, 0, 0]])
    indices, _ = choose_experts(logits, 3, True)
    assert indices.tolist() == [[1, 2, 3], [1, 3, 0], [0, 1, 2], [0, 1, 2], [0, 1, 2]]
    assert indices.dtype == mx.uint32


@pytest.mark.parametrize("graph", ["moe_only", "moe_swiglu_only"])
@pytest.mark.parametrize(("bits", "group"), [(2, 32), (3, 64), (4, 128), (5, 32), (6, 64), (8, 128)])
def test_moe_graphs_are_upstreams_block_at_every_width(graph, bits, group):
    model = make_model(bits=bits, group=group)
    layer = model.layers[0]
    adapter = models.adapt(layer, fold_router=False)
    plan = build(getattr(graphs, graph)(adapter.dims), adapter.weights, ("reference",))
    x, r = inputs(1, 1, 4)[0], inputs(2, 1, 4)[0]
    h = x + r
    (got,) = plan.run(r, x) if graph == "moe_only" else plan.run(h)
    expected = h + layer.mlp(layer.post_attention_layernorm(h))
    assert rms(got - expected) < 1e-5 * rms(expected)


def test_what_is_declared_exact_is_upstreams_bit_for_bit():
    exact = {name for name, cls in REGISTRY.items() if cls.accuracy == "exact"}
    assert exact == {"rms_norm", "linear", "kv_update", "all_sum", "residual"}
    for dtype in ("f32", "bf16", "f16"):
        op, values = sample(REGISTRY["rms_norm"], "odd", dtype=dtype)
        norm = nn.RMSNorm(op.H, eps=op.eps)
        norm.weight = values["w_norm"]
        assert mx.array_equal(op(**values), norm(values["x"]))
        op, values = sample(REGISTRY["linear"], dtype=dtype)
        w = values["w"]
        layer = nn.QuantizedLinear(op.K, op.N, bias=False, group_size=w.quant.group, bits=w.quant.bits)
        layer.weight, layer.scales, layer.biases = w.weight, w.scales, w.biases
        assert mx.array_equal(op(**values), layer(values["x"]))
        op, values = sample(REGISTRY["residual"], dtype=dtype)
        assert mx.array_equal(op(**values), values["h"] + values["y"])
        op, values = sample(REGISTRY["all_sum"], dtype=dtype)
        assert mx.array_equal(op(**values), values["x"])  # one rank alone; several are in test_ranks


def test_every_op_says_how_near_it_is_and_the_page_says_the_same():
    page = (Path(__file__).parent.parent / "docs/numerics.md").read_text("utf-8")
    for kind in ("exact", "approximate"):
        (named,) = re.findall(rf"^\| {kind} \|.*\| (.*) \|$", page, re.MULTILINE)
        assert set(named.split(", ")) == {name for name, cls in REGISTRY.items() if cls.accuracy == kind}
