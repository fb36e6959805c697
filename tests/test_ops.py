"""Every kernel against its reference: op x sample x dtypes and quantisation x backend."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qfuse import REGISTRY, Quant, SpecError, backends
from qfuse.op import Schedule
from qfuse.testing import closeness, compare, error_inputs, opcheck, oracle, run, sample

KERNELS = sorted(name for name, cls in REGISTRY.items() if not cls.library)

# Dtypes of activations, of the conv state and of the rest, quantisation, optional inputs: each meets several others.
VARIANTS = {
    "bf16": {"dtype": "bf16", "quant": Quant(8, 64)},
    "f32": {"dtype": "f32", "quant": Quant(4, 32), "optional": False},
    "f16": {"dtype": {"": "f32", "T": "f16", "S": "bf16"}, "quant": Quant(8, 128)},
    "mixed": {
        "dtype": {"": "f16", "T": "bf16", "S": "f32"},
        "quant": {
            "": Quant(4, 64),
            "w_z": Quant(8, 32),
            "w_k": Quant(8, 64),
            "w_up": Quant(8, 32),
            "ws_up": Quant(8, 64),
        },
    },
}


def made(name, *args, **kwargs):
    """A sample; in f32 the positions are small, since a rounding of the frequency grows with them."""
    op, arguments = sample(REGISTRY[name], *args, **kwargs)
    if "position" in arguments and kwargs.get("dtype") == "f32":
        arguments["position"] = arguments["position"] % 8
    return op, arguments


@pytest.fixture(params=["sim", "metal"])
def backend(request):
    if reason := backends.BACKENDS[request.param].unavailable():
        pytest.skip(reason)
    return request.param


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", ["small", "odd"])
@pytest.mark.parametrize("name", KERNELS)
def test_op(name, shape, variant, backend):
    op, arguments = made(name, shape, **VARIANTS[variant])
    opcheck(op, arguments, backend)


@pytest.mark.parametrize("name", [name for name in REGISTRY if name != "kv_update"])
def test_a_reference_passes_the_checks_that_a_kernel_does(name):
    opcheck(*made(name, dtype="f32"), backend="reference")  # on a CPU, MLX sums a bf16 product in bf16: that would fail


@pytest.mark.parametrize("name", KERNELS)
def test_op_at_production_size(name, backend):
    op, arguments = made(name, "production")
    compare(op, run(op, arguments, backend), arguments)


@pytest.mark.parametrize("B", [1, 8])
@pytest.mark.parametrize("name", KERNELS)
def test_op_with_one_row_and_with_eight(name, B, backend):
    op, arguments = made(name, "small", B=B, **({"M": 2 * B} if name == "gdn_step" else {}))
    compare(op, run(op, arguments, backend), arguments)


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(rows=1, simdgroups=1, take=8),
        Schedule(rows=3, simdgroups=5, take=16, cap=2),
        Schedule(rows=8, simdgroups=16, take=32, cap=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", KERNELS)
def test_any_schedule_gives_the_same_result(name, schedule, backend):
    op, arguments = made(name, "odd")
    compare(op, run(op, arguments, backend, schedule), arguments)


@pytest.mark.parametrize("name", KERNELS)
def test_a_shape_that_the_text_cannot_take_is_refused_with_the_condition(name):
    cls = REGISTRY[name]
    for need in cls.kernel_needs:
        weight, _, rest = need.partition(".bits ")
        if not rest:
            continue
        op, _ = sample(cls, quant={weight: Quant(6, 64)})
        assert op.unmet() == f"wants {need}, got {weight}={op.constants()[weight]}"


@pytest.mark.parametrize("name", [name for name in REGISTRY if name != "kv_update"])
def test_wrong_arguments_are_refused_in_one_line(name):
    op, arguments = sample(REGISTRY[name])
    for wrong in error_inputs(op, arguments):
        with pytest.raises(SpecError, match=wrong.match):
            op(**wrong.arguments)


def test_a_sample_of_an_op_with_a_handle_is_refused():
    with pytest.raises(SpecError, match=r"^\[kv_update\] wants no handle where arguments are drawn, got cache$"):
        sample(REGISTRY["kv_update"])


def test_a_sample_without_a_field_or_a_dim_of_the_call_is_refused():
    with pytest.raises(SpecError, match=r"^\[moe_combine\] wants a sample with k, got none with \{'H': 8\}"):
        sample(REGISTRY["moe_combine"], "none", H=8)
    op, _ = sample(REGISTRY["moe_combine"])
    with pytest.raises(SpecError, match=r"^\[moe_combine.d_routed\] wants a sample with all dims of \(B\)"):
        sample(op, "none")


def test_a_sample_is_the_same_for_a_seed_and_lies_in_its_domain():
    cls = REGISTRY["gdn_step"]
    (_, a), (_, b), (_, c) = (sample(cls, seed=seed) for seed in (0, 0, 1))
    assert mx.array_equal(a["q"], b["q"])
    assert not mx.array_equal(a["q"], c["q"])
    assert 0 <= a["g"].min().item() <= a["g"].max().item() < 1


def test_closeness_passes_twice_the_working_error_and_no_more():
    oracle = mx.array(np.random.default_rng(0).standard_normal(1000).astype(np.float32))
    assert closeness(oracle + 1.9e-3, oracle + 1e-3, oracle).ratio <= 1
    assert closeness(oracle + 2.1e-3, oracle + 1e-3, oracle).ratio > 1
    assert closeness(oracle * (1 + 9e-7), oracle, oracle).ratio <= 1
    assert closeness(oracle * (1 + 2e-6), oracle, oracle).ratio > 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_closeness_never_passes_a_nan_or_another_infinity(bad):
    oracle = mx.array([1.0, 2.0, 3.0])
    got = mx.array([1.0, bad, 3.0])
    found = closeness(got, got, oracle)
    assert found.ratio == np.inf
    assert found.worst == (1,)
    assert str(found).startswith("at [1] wants 2, got")
    assert (closeness(got, got, got).ratio <= 1) == np.isinf(bad)


def test_closeness_of_integers_is_equality():
    assert closeness(mx.array([1, 2]), mx.array([1, 3]), mx.array([1, 3])).ratio == np.inf
    assert closeness(mx.array([1, 3]), mx.array([1, 3]), mx.array([1, 3])).ratio == 0


def test_a_wrong_result_is_reported_with_op_output_index_values_and_ratio():
    op, arguments = sample(REGISTRY["moe_combine"])
    out = oracle(op, arguments)["out"]
    out[1, 2] = 99
    with pytest.raises(AssertionError, match=r"^\[moe_combine.out\] at \[1, 2\] wants \S+, got 99; error / allowed = "):
        compare(op, {"out": out}, arguments)


few = settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
quants = st.builds(Quant, st.sampled_from([4, 8]), st.sampled_from([32, 64, 128]))


@few
@given(st.integers(1, 5), st.integers(1, 70), st.integers(2, 20), quants, st.integers(1, 6), st.integers(1, 16))
def test_projections_of_any_shape(B, D, K, quant, rows, simdgroups):
    op, arguments = sample(REGISTRY["gqa_in_proj"], quant=quant, H=32 * K, Hq=3, Hkv=1, D=D, B=B)
    compare(op, run(op, arguments, "sim", Schedule(rows=rows, simdgroups=simdgroups)), arguments)


@few
@given(st.integers(1, 4), st.integers(1, 70), st.integers(1, 8), st.integers(1, 9), quants)
def test_routing_of_any_shape(B, E, k, I, quant):
    op, arguments = sample(
        REGISTRY["route_swiglu"], quant=quant, H=128, E=max(E, k), k=k, I=I, Is=I + 1, B=B, norm_topk=E % 2 == 0
    )
    compare(op, run(op, arguments, "sim"), arguments)


@few
@given(st.integers(1, 90), st.integers(1, 40), st.integers(1, 5), st.integers(1, 3), st.booleans(), st.data())
def test_attention_over_any_number_of_keys(A, blocks, group, Hkv, masked, data):
    N = data.draw(st.integers(1, A))
    dims = {"Hq": group * Hkv, "Hkv": Hkv, "D": 32, "A": A, "N": N, "B": 2, "blocks": blocks}
    op, arguments = sample(REGISTRY["sdpa_partial"], optional=masked, **dims)
    compare(op, run(op, arguments, "sim"), arguments)


@few
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 40), st.booleans())
def test_the_recurrence_over_any_number_of_steps(B, steps, repeat, Dv, masked):
    dims = {"Hk": 2, "Hv": 2 * repeat, "Dk": 64, "Dv": Dv, "B": B, "M": B * steps}
    op, arguments = sample(REGISTRY["gdn_step"], dtype="f32", optional=masked, **dims)
    compare(op, run(op, arguments, "sim"), arguments)
