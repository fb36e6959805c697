"""Every op against its reference: op x sample x dtypes and quantisation x every backend that compiles kernels.

The full checks of the simulator are in test_kernel_checks.py; here it runs as it does in a model.
"""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qfuse import REGISTRY, Quant, SpecError, backends
from qfuse.op import Schedule
from qfuse.testing import compare, error_inputs, opcheck, run, sample

KERNELS = sorted(name for name, cls in REGISTRY.items() if not cls.library)
REFERENCES = sorted(name for name, cls in REGISTRY.items() if not cls.select("handle"))

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
    "uneven": {
        "dtype": "f32",
        "quant": {
            "": Quant(6, 64),
            "w_k": Quant(3, 32),
            "w_z": Quant(5, 64),
            "w_up": Quant(2, 32),
            "ws_up": Quant(5, 32),
        },
    },
}


def made(name, *args, **kwargs):
    """A sample; in f32 the positions are small, since a rounding of the frequency grows with them."""
    op, arguments = sample(REGISTRY[name], *args, **kwargs)
    if "position" in arguments and kwargs.get("dtype") == "f32":
        arguments["position"] = arguments["position"] % 8
    return op, arguments


@pytest.fixture(params=[name for name, backend in backends.BACKENDS.items() if backend.probes])
def backend(request):
    found = backends.BACKENDS[request.param]
    if reason := found.unavailable():
        pytest.skip(reason)
    return found


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", ["small", "odd", "production"])
@pytest.mark.parametrize("name", KERNELS)
def test_op(name, shape, variant, backend):
    op, arguments = made(name, shape, **VARIANTS[variant])
    opcheck(op, arguments, backend)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", REFERENCES)
def test_a_reference_keeps_to_its_declaration(name, variant):
    for shape in REGISTRY[name].samples:
        op, arguments = made(name, shape, **VARIANTS[variant])
        op(**arguments)  # checks shapes and dtypes of the results


@pytest.mark.parametrize("name", REFERENCES)
def test_a_reference_passes_the_checks_that_a_kernel_does(name):
    for shape in REGISTRY[name].samples:  # on a CPU, MLX sums a bf16 product in bf16: that would fail
        opcheck(*made(name, shape, dtype="f32"), backend="reference")


@pytest.mark.parametrize("B", [1, 8, 33])
@pytest.mark.parametrize("name", KERNELS)
def test_op_with_one_row_and_with_eight(name, B, backend):
    op, arguments = made(name, "small", B=B, **({"M": 2 * B} if name == "gdn_step" else {}))
    compare(op, run(op, arguments, backend), arguments)


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(rows=1, simdgroups=1, take=8),
        Schedule(rows=3, simdgroups=5, take=16, depth=2, cap=2),
        Schedule(rows=8, simdgroups=16, take=32, depth=8, cap=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", KERNELS)
def test_any_schedule_gives_the_same_result(name, schedule, backend):
    op, arguments = made(name, "odd")
    compare(op, run(op, arguments, backend, schedule), arguments)


@pytest.mark.parametrize("depth", [2, 3, 8])
@pytest.mark.parametrize("name", ["gdn_in_proj", "swiglu", "o_proj_router"])
def test_loads_ahead_end_where_the_inputs_do(name, depth, backend):
    op, arguments = made(name, "small", H=832)  # four times 256 inputs, the last in part
    compare(op, run(op, arguments, backend, Schedule(rows=2, depth=depth)), arguments)


@pytest.mark.parametrize("name", KERNELS)
def test_a_shape_that_the_text_cannot_take_is_refused_with_the_condition(name):
    cls = REGISTRY[name]
    for need in cls.kernel_needs:
        weight, _, rest = need.partition(".bits ")
        if not rest:
            continue
        op, _ = sample(cls, quant={weight: Quant(0)})
        assert op.unmet() == f"wants {need}, got {weight}={op.constants()[weight]}"


@pytest.mark.parametrize("name", REFERENCES)
def test_wrong_arguments_are_refused_in_one_line(name):
    op, arguments = sample(REGISTRY[name])
    for wrong in error_inputs(op, arguments):
        with pytest.raises(SpecError, match=wrong.match):
            op(**wrong.arguments)


few = settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
quants = st.builds(Quant, st.sampled_from([2, 3, 4, 5, 6, 8]), st.sampled_from([32, 64, 128]))


@few
@given(st.integers(1, 5), st.integers(1, 70), st.integers(2, 20), quants, st.integers(1, 6), st.integers(1, 16))
def test_projections_of_any_shape(sim, B, D, K, quant, rows, simdgroups):
    op, arguments = sample(REGISTRY["gqa_in_proj"], quant=quant, H=32 * K, Hq=3, Hkv=1, D=D, B=B)
    compare(op, run(op, arguments, sim, Schedule(rows=rows, simdgroups=simdgroups)), arguments)


@few
@given(st.integers(1, 4), st.integers(1, 70), st.integers(1, 8), st.integers(1, 9), quants)
def test_routing_of_any_shape(sim, B, E, k, I, quant):
    op, arguments = sample(
        REGISTRY["route_swiglu"], quant=quant, H=128, E=max(E, k), k=k, I=I, Is=I + 1, B=B, norm_topk=E % 2 == 0
    )
    compare(op, run(op, arguments, sim), arguments)


@few
@given(st.integers(1, 90), st.integers(1, 40), st.integers(1, 5), st.integers(1, 3), st.booleans(), st.data())
def test_attention_over_any_number_of_keys(sim, A, blocks, group, Hkv, masked, data):
    N = data.draw(st.integers(1, A))
    dims = {"Hq": group * Hkv, "Hkv": Hkv, "D": 32, "A": A, "N": N, "B": 2, "blocks": blocks}
    op, arguments = sample(REGISTRY["sdpa_partial"], optional=masked, **dims)
    compare(op, run(op, arguments, sim), arguments)


@few
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 40), st.booleans())
def test_the_recurrence_over_any_number_of_steps(sim, B, steps, repeat, Dv, masked):
    dims = {"Hk": 2, "Hv": 2 * repeat, "Dk": 64, "Dv": Dv, "B": B, "M": B * steps}
    op, arguments = sample(REGISTRY["gdn_step"], dtype="f32", optional=masked, **dims)
    compare(op, run(op, arguments, sim), arguments)
