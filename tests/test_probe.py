"""The probe: a kernel that is wrong, or that cannot be made or launched, is found at fuse() and is the only one off."""

import re
from collections import Counter

import attrs
import mlx.core as mx
import mlx.nn as nn
import pytest
from conftest import make_model
from mlx_lm.models.cache import make_prompt_cache

from qfuse import REGISTRY, RefusedError, backends, fuse
from qfuse.backends.metal import MetalBackend
from qfuse.backends.reference import ReferenceBackend
from qfuse.backends.sim import SimBackend
from qfuse.fuse import is_fused
from qfuse.probe import SAMPLES

OTHERS = {"norm_router", "swiglu", "gdn_in_proj_merged", "moe_sum"}  # of other modes, models and sharded layers
KERNELS = {name for name, cls in REGISTRY.items() if not cls.library} - OTHERS


class Fake(ReferenceBackend):
    """The references as if they were kernels, one op with a fault in it."""

    name = "fake"
    probes = True

    def __init__(self, faulty="", fault="", masked=False):
        self.faulty, self.fault, self.masked = faulty, fault, masked
        self.lowered = Counter()

    def lower(self, op, weights):
        self.lowered[op.name] += 1
        call = super().lower(op, weights)
        if op.name != self.faulty:
            return call
        if self.fault == "lowering":
            raise RuntimeError("no room for\nthis kernel")

        def broken(*inputs):
            first, *rest = op.as_tuple(call(*inputs))
            if self.masked and inputs[-1] is None:
                return (first, *rest) if rest else first
            if self.fault == "evaluation":
                raise RuntimeError("launch rejected")
            flat = first.flatten()
            flat[-1] = {"wrong": 1.5 * flat[-1] + 0.01, "nan": mx.nan}[self.fault]
            first = flat.reshape(first.shape)
            return (first, *rest) if rest else first

        return broken


@pytest.fixture
def backend(monkeypatch):
    """Put a backend in the table under a name."""

    def put(backend, name="fake"):
        monkeypatch.setattr(backend, "name", name)
        monkeypatch.setitem(backends.BACKENDS, name, backend)
        return backend

    return put


def tokens(model, n=6):
    cache, found = make_prompt_cache(model), [5, 6, 7]
    step = mx.array([found])
    for _ in range(n):
        found.append(model(step, cache=cache)[0, -1].argmax().item())
        step = mx.array([found[-1:]])
    return found


def refused(report):
    return {node: dict(reasons) for layer in report.layers for node, reasons in layer.refusals.items()}


FAULTS = {
    "wrong": r"^probe: \[{op}\.\w+\] at \[.*\] wants \S+, got \S+; error / allowed = ",
    "nan": r"^probe: \[{op}\.\w+\] at \[.*\] wants \S+, got nan; error / allowed = inf",
    "lowering": r"^probe: RuntimeError: no room for this kernel$",
    "evaluation": r"^probe: RuntimeError: launch rejected$",
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("op", ["gdn_step", "sdpa_combine_gate", "expert_down"])
def test_the_faulty_op_alone_is_off_and_tokens_are_vanillas(backend, op, fault):
    model = make_model()
    vanilla = tokens(model)
    backend(Fake(op, fault))
    with fuse(model, backends="fake") as fusion:
        assert tokens(model) == vanilla
        report = fusion.report()
    assert set(refused(report)) == {op}
    assert re.search(FAULTS[fault].format(op=op), refused(report)[op]["fake"])
    for layer in report.layers:
        kernels = layer.nodes - layer.backends["library"]
        off = {"reference": 1} if op in layer.refusals else {}
        assert layer.backends == {"library": layer.backends["library"], "fake": kernels - len(off)} | off
    assert f"{op}: not on fake: probe: " in str(report)


def test_strict_mode_raises_one_error_and_leaves_the_model_alone(backend):
    model = make_model()
    backend(Fake("gdn_step", "nan"))
    message = r"^\[layers\.0\] .*: \[gdn_step\] wants an op that fake runs, got probe: \[gdn_step\.y\] at .* got nan"
    with pytest.raises(RefusedError, match=message):
        fuse(model, backends="fake", strict=True)
    assert not any(is_fused(layer) for layer in model.layers)


def test_a_faulty_op_goes_to_the_next_backend_that_passes(backend):
    backend(Fake("gdn_step", "wrong"), "first")
    backend(Fake("gdn_step", "lowering"), "second")
    backend(Fake(), "third")
    with fuse(make_model(), backends=("first", "second", "third")) as fusion:
        layer = fusion.report().layers[0]
    assert set(layer.refusals["gdn_step"]) == {"first", "second"}
    assert layer.backends == {"library": 1, "first": 7, "third": 1}


def test_each_distinct_op_is_checked_once(backend):
    model = make_model(num_hidden_layers=8)
    fake = backend(Fake())
    with fuse(model, backends="fake"):
        once = len(SAMPLES)
        assert set(fake.lowered) == KERNELS
        assert fake.lowered["gdn_step"] == once + 6
        assert fake.lowered["sdpa_partial"] == once + 2
        assert fake.lowered["expert_down"] == once + 8
    fake.lowered.clear()
    other = nn.QuantizedLinear.from_linear(nn.Linear(256, 256, bias=False), 32, 8)
    model.layers[1].linear_attn.in_proj_z = other
    model.layers[2].linear_attn.conv1d.weight = model.layers[2].linear_attn.conv1d.weight.astype(mx.float16)
    with fuse(model, backends="fake"):
        assert fake.lowered["gdn_in_proj"] == 3 * once + 6  # another quantisation, another dtype of a weight
        assert fake.lowered["gdn_step"] == once + 6


def test_a_plan_that_a_mask_or_another_dtype_asks_for_later_is_probed_too(backend):
    backend(Fake("gdn_step", "nan", masked=True))
    model = make_model()
    with fuse(model, backends="fake") as fusion:
        layer = fusion.layers[0]._qfuse
        assert not refused(fusion.report())
        assert layer.plan(mx.float32, True).backends()["reference"] == 1
        assert set(refused(fusion.report())) == {"gdn_step"}
        before = len(fusion.probe._known)
        layer.plan(mx.float16)
        assert len(fusion.probe._known) == before + 8


def test_without_the_probe_a_fault_goes_through(backend):
    model = make_model()
    fake = backend(Fake("expert_down", "nan"))
    with fuse(model, backends="fake", probe=False) as fusion:
        assert not refused(fusion.report())
        assert fake.lowered["expert_down"] == 4
        step = model(mx.array([[5]]), cache=make_prompt_cache(model))
        assert mx.isnan(step).all()
        with pytest.raises(ValueError, match="wants the options it was fused with"):
            fuse(model, backends="fake")


def test_where_every_launch_is_rejected_the_reference_runs_all(backend):
    class Metal(MetalBackend):
        """Says that there is a device. MLX says otherwise when a kernel is evaluated."""

        def unavailable(self):
            return None

    if mx.metal.is_available():
        pytest.skip("there is a device")
    model = make_model()
    vanilla = tokens(model)
    backend(Metal(), "rejecting")
    with fuse(model, backends="rejecting") as fusion:
        assert tokens(model) == vanilla
        reasons = refused(fusion.report())
    assert set(reasons) == KERNELS
    assert {reason["rejecting"] for reason in reasons.values()} == {
        "probe: RuntimeError: [metal_kernel] No Metal back-end."
    }


def test_a_metal_text_with_a_fault_in_it_is_found_and_the_right_ones_are_not(backend, sim):
    class Wrong(SimBackend):
        def compile(self, text):
            if text.name.startswith("qk_norm_rope"):
                text = attrs.evolve(text, name="wrong", source=text.source.replace("(-R / 2)", "(-D / 2)"))
            return super().compile(text)

    model = make_model(dtype=mx.bfloat16)
    backend(Wrong(), "sim")
    mx.clear_cache()
    before = mx.get_active_memory()
    with fuse(model, backends="sim") as fusion:
        reasons = refused(fusion.report())
        assert set(reasons) == {"qk_norm_rope"}
        assert re.search(
            r"^probe: \[qk_norm_rope.q_rot\] .*; \[qk_norm_rope.k_rot\] .*$", reasons["qk_norm_rope"]["sim"]
        )
        assert mx.get_active_memory() - before <= fusion.report().new_bytes + 4096
        assert mx.get_cache_memory() < 1e6


@pytest.mark.parametrize(
    ("there", "chosen"), [({"metal"}, "metal"), ({"cuda"}, "cuda"), ({"metal", "cuda"}, "metal"), ((), "reference")]
)
def test_the_default_backend_is_that_of_the_device(monkeypatch, there, chosen):
    for name in ("metal", "cuda"):
        reason = None if name in there else "no device"
        monkeypatch.setattr(backends.BACKENDS[name], "unavailable", lambda reason=reason: reason)
    assert backends.default() == (chosen,)
