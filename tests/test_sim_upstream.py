"""Kernels that nobody here wrote, in the simulator: mlx-lm's own, and those of MLX's guide to custom kernels.

Each module of mlx-lm is loaded once more with the simulator in place of mx.fast.metal_kernel, so that its kernels are
the installed ones, called by the module's own code.
"""

import importlib.util
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from qfuse.backends.sim import Kernel, SimBackend, SimulationError

pytestmark = pytest.mark.skipif(bool(SimBackend().unavailable()), reason=str(SimBackend().unavailable()))


@pytest.fixture(scope="module")
def upstream():
    """upstream(name): a module of mlx-lm whose kernels run in the simulator with full checks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.metal, "is_available", lambda: True)
        patch.setattr("mlx_lm.utils.can_run_metal", lambda: True)
        patch.setattr(mx.fast, "metal_kernel", Kernel)

        def load(name):
            spec = importlib.util.find_spec(name)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module

        yield load


def normal(*shape, seed=0, dtype=mx.float32):
    return mx.array(np.random.default_rng(seed + sum(shape)).standard_normal(shape), dtype)


def close(got, wanted, tolerance=2e-6):
    error, size = mx.abs(got - wanted).max().item(), mx.abs(wanted).max().item()
    assert error <= tolerance * size, f"{error} of {size}"


def delta_inputs(B=2, T=3, Hk=2, Hv=4, Dk=64, Dv=40, vector=False):
    q, k = (normal(B, T, Hk, Dk, seed=i) * Dk**-0.5 for i in (1, 2))
    g = mx.sigmoid(normal(*((B, T, Hv, Dk) if vector else (B, T, Hv)), seed=4))
    return q, k, normal(B, T, Hv, Dv, seed=3), g, mx.sigmoid(normal(B, T, Hv, seed=5)), normal(B, Hv, Dv, Dk, seed=6)


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_gated_delta(upstream, vector, masked):
    module = upstream("mlx_lm.models.gated_delta")
    inputs = delta_inputs(vector=vector)
    mask = mx.array([[True, True, True], [False, True, True]]) if masked else None
    y, state = module.gated_delta_kernel_unpacked(*inputs, mask)
    wanted, wanted_state = module.gated_delta_ops(*inputs, mask)
    if masked:  # what the kernel gives where there is no token is not specified to be what the loop gives
        wanted = mx.where(mask[..., None, None], wanted, 0)
    close(y, wanted)
    close(state, wanted_state)


def test_gated_delta_packed_equals_its_comparator_bit_for_bit(upstream):
    module = upstream("mlx_lm.models.gated_delta")
    inputs = delta_inputs(Dk=128, Dv=32, B=1)
    packed, tree = module.gated_delta_kernel(*inputs), module.gated_delta_kernel_xtree(*inputs)
    for got, wanted in zip(packed, tree, strict=True):
        assert mx.array_equal(got, wanted)
    for got, wanted in zip(packed, module.gated_delta_ops(*inputs), strict=True):
        close(got, wanted)


def test_ssm(upstream):
    module = upstream("mlx_lm.models.ssm")
    B, H, Dh, G, Ds = 2, 4, 24, 2, 64
    x, dt = normal(B, 1, H, Dh, seed=1), normal(B, 1, H, seed=2)
    A_log, D, bias = normal(H, seed=3), normal(H, seed=4), normal(H, seed=5)
    keys, queries, state = normal(B, 1, G, Ds, seed=6), normal(B, 1, G, Ds, seed=7), normal(B, H, Dh, Ds, seed=8)
    limit = (0.001, 100.0)
    y, new = module.ssm_update_kernel(x, A_log, keys, queries, D, dt, bias, state, limit)
    wanted, wanted_state = module.ssm_attn(x, A_log, keys, queries, D, dt, bias, state, limit)
    close(y, wanted)
    close(new, wanted_state)


def test_rwkv7(upstream):
    module = upstream("mlx_lm.models.rwkv7")
    B, T, H, D = 1, 3, 2, 64
    r, w, k, v, a, b = (normal(B, T, H, D, seed=i) * D**-0.5 for i in range(6))
    state = normal(B, H, D, D, seed=9)
    y, new = module.wkv7_kernel(r, w, k, v, a, b, state)
    for t in range(T):
        step, state = module._wkv7_step_ops(*(x[:, t] for x in (r, w, k, v, a, b)), state)
        close(y[:, t], step.squeeze(-1))
    close(new, state)


@pytest.mark.parametrize("invert", [False, True])
def test_bitlinear(upstream, invert):
    module = upstream("mlx_lm.models.bitlinear_layers")
    layer = module.BitLinear(256, 32, bias=False, invert_weight_scales=invert)
    ternary = np.random.default_rng(0).integers(0, 3, (4, 8, 256))
    layer.weight = mx.array(sum(ternary[i] << 2 * i for i in range(4)).astype(np.uint8))
    layer.weight_scale = mx.array([0.37])
    x = normal(3, 256)
    scale = 1 / 0.37 if invert else 0.37
    close(layer(x), x @ mx.array((ternary.reshape(32, 256) - 1).astype(np.float32)).T * scale)


def test_head_norms_and_rope(upstream):
    B, L, HQ, HK, D = 2, 3, 4, 2, 48
    packed = normal(B, L, 2 * (HQ + HK) * D)
    options = {"n_heads": HQ, "n_kv_heads": HK, "head_dim": D, "eps": 1e-6, "query_scale": 0.25}
    heads = packed.reshape(B, L, 2 * (HQ + HK), D)
    wanted_q = mx.fast.rms_norm(heads[..., :HQ, :], None, 1e-6) * 0.25
    wanted_k = mx.fast.rms_norm(heads[..., HQ : HQ + HK, :], None, 1e-6)
    q, k = upstream("mlx_lm.kernels.qk_norm").qk_norm(packed, **options)
    close(q, wanted_q)
    close(k, wanted_k)
    rope = upstream("mlx_lm.kernels.qk_norm_rope")
    for got, wanted in zip(
        rope.qk_norm_rope(packed, rope_base=1e4, offset=5, **options), (wanted_q, wanted_k), strict=True
    ):
        turned = mx.fast.rope(wanted.swapaxes(1, 2), D, traditional=True, base=1e4, scale=1.0, offset=5).swapaxes(1, 2)
        close(got, turned, 2e-5)


def test_expert_routing(upstream):
    module = upstream("mlx_lm.kernels.expert_routing")
    logits, bias = normal(5, 40), normal(40, seed=1) * 0.1
    indices, weights = module.expert_routing(logits, bias, top_k=4, multiplier=1.5, score_eps=1e-20, route_scale=2.0)
    scores = mx.sigmoid(1.5 * logits)
    order = mx.argsort(-(scores + bias), axis=-1)[:, :4]
    assert mx.array_equal(indices, order.astype(mx.uint32))
    chosen = mx.take_along_axis(scores, order, axis=-1)
    close(weights, 2 * chosen / chosen.sum(axis=-1, keepdims=True))


def test_norms_around_a_residual_stream(upstream):
    module = upstream("mlx_lm.kernels.norm_add_norm")
    D = 520
    branch, stream, alpha, beta = normal(3, D), normal(3, D, seed=1), normal(D, seed=2), normal(D, seed=3)
    norm = nn.RMSNorm(D, eps=1e-5)
    norm.weight = normal(D, seed=4)
    new, normed = module.norm_add_norm(
        branch, stream, alpha=alpha, beta=beta, post_weight=None, post_eps=1e-6, next_norm=norm
    )
    wanted = alpha * stream + beta * mx.fast.rms_norm(branch, None, 1e-6)
    close(new, wanted)
    close(normed, norm(wanted))
    close(module.pre_norm(stream, norm, dtype=mx.float32), norm(stream))


def test_the_combined_experts(upstream):
    module = upstream("mlx_lm.kernels.post_expert_norm_combine")
    experts, weights, norm = normal(2, 3, 300), mx.softmax(normal(2, 3)), normal(300)
    wanted = (mx.fast.rms_norm(experts * norm, None, 1e-6) * weights[..., None]).sum(axis=-2)
    close(module.post_expert_norm_combine(experts, weights, norm_weight=norm, eps=1e-6), wanted)


def test_the_losses_write_a_shared_reduction_while_others_still_read_the_last(upstream):
    """Two reductions share one array: the second is written with no barrier after the first was read."""
    module = upstream("mlx_lm.tuner.losses")
    q, p = normal(2, 5000), normal(2, 5000, seed=1)
    for loss in (module.kl_div_loss, module.js_div_loss):
        with pytest.raises(SimulationError) as error:
            loss(q, p)
        found = {(f.kind, f.severity) for f in error.value.findings}
        assert ("race", "error") in found
        assert all("shared[" in f.message for f in error.value.findings if f.kind == "race")


def test_the_losses_agree_with_their_fallbacks_in_an_orderly_schedule(upstream, monkeypatch):
    monkeypatch.setattr(mx.fast, "metal_kernel", partial(Kernel, full=False))
    module = upstream("mlx_lm.tuner.losses")
    q, p = normal(2, 5000), normal(2, 5000, seed=1)
    got = module.kl_div_loss(q, p), module.js_div_loss(q, p)
    monkeypatch.setattr(module, "can_run_metal", lambda: False)
    for have, wanted in zip(got, (module.kl_div_loss(q, p), module.js_div_loss(q, p)), strict=True):
        close(have, wanted, 1e-4)


GUIDE = {
    "exp": ("uint elem = thread_position_in_grid.x;\nT tmp = inp[elem];\nout[elem] = metal::exp(tmp);", True),
    "exp with strides": (
        "uint elem = thread_position_in_grid.x;\n"
        "uint loc = elem_to_loc(elem, inp_shape, inp_strides, inp_ndim);\n"
        "T tmp = inp[loc];\nout[elem] = metal::precise::exp(tmp);",
        False,
    ),
}


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize(("source", "contiguous"), GUIDE.values(), ids=GUIDE)
def test_the_examples_of_the_guide(source, contiguous, dtype):
    kernel = Kernel("myexp", ["inp"], ["out"], source, ensure_row_contiguous=contiguous)
    a = normal(4, 16, dtype=dtype)[::2]
    (out,) = kernel(
        inputs=[a], template=[("T", dtype)], grid=(a.size, 1, 1), threadgroup=(256, 1, 1), output_shapes=[a.shape],
        output_dtypes=[a.dtype],
    )  # fmt: skip
    assert mx.allclose(out, mx.exp(a), rtol=1e-2 if dtype != mx.float32 else 1e-6)
    assert kernel.findings == []
