"""What qfuse.testing promises to those who write ops: samples, the tolerance, and what opcheck finds."""

import importlib.util
import sys

import mlx.core as mx
import numpy as np
import pytest

from qfuse import REGISTRY, SpecError
from qfuse.backends.sim import SimBackend, SimulationError
from qfuse.testing import closeness, compare, opcheck, oracle, sample

MODULE = '''
import mlx.core as mx

from qfuse import In, Op, Out, Weight, op


@op
class ScaledSum(Op):
    """y = w · (a + b)."""

    N: int

    a = In("B, N")
    b = In("B, N")
    w = Weight("N")
    y = Out("B, N")

    tiles = "(B * N + 63) // 64"
    samples = {"small": {"N": 40, "B": 3}}

    def reference(self, a, b, w):
        return (a + b) * w.astype(a.dtype)
'''
BODY = """for (int i = thread_position_in_grid.x; i < B * N; i += threads_per_grid.x) {
  const float sum = float(a[i]) + float(b[i]);
  y[i] = T(sum * float(w[i % N]));
}
"""


@pytest.fixture
def scaled_sum(tmp_path, monkeypatch):
    """Make the op above, in a module of its own, with any text."""

    def make(body=BODY):
        (tmp_path / "scaled_sum.py").write_text(MODULE)
        (tmp_path / "scaled_sum.metal").write_text(body)
        spec = importlib.util.spec_from_file_location("scaled_sum", tmp_path / "scaled_sum.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "scaled_sum", module)
        spec.loader.exec_module(module)
        return module.ScaledSum

    yield make
    REGISTRY.pop("scaled_sum", None)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_an_op_from_elsewhere_is_checked_as_ours_are(scaled_sum, dtype, sim):
    found = opcheck(*sample(scaled_sum(), dtype=dtype), backend=sim)
    assert found["y"].ratio <= 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("w[i % N]", "w[0]", r"^\[scaled_sum.y\] at \[\d, \d+\] wants \S+, got \S+; error / allowed = \S+$"),
        ("* float(w[i % N])", "/ 0.0f", r"^\[scaled_sum.y\] at .* got (inf|-inf|nan);"),
        ("b[i]", "b[i % N]", r"^\[scaled_sum.y\] at \[[12], \d+\] wants"),
    ],
)
def test_a_wrong_kernel_is_reported(scaled_sum, old, new, message, sim):
    with pytest.raises(AssertionError, match=message):
        opcheck(*sample(scaled_sum(BODY.replace(old, new))), backend=sim)


def test_a_fault_that_leaves_the_result_right_is_found_by_the_simulator_in_full(scaled_sum, sim):
    all_write = "y[0] = T((float(a[0]) + float(b[0])) * float(w[0]));\n"
    op, arguments = sample(scaled_sum(BODY + all_write))
    opcheck(op, arguments, SimBackend())
    with pytest.raises((AssertionError, SimulationError), match=r"scaled_sum.metal:\d: \w+: .*y\[0\]"):
        opcheck(op, arguments, sim)


def test_a_backend_that_gives_another_result_the_second_time_is_reported(scaled_sum):
    class Restless:
        """Adds a little more at every call."""

        name = "restless"
        calls = 0

        def unavailable(self):
            return None

        def refuses(self, op):
            return None

        def lower(self, op, weights):
            def call(*inputs):
                self.calls += 1
                return op.reference(*inputs, **weights) + self.calls * 1e-9

            return call

    with pytest.raises(AssertionError, match=r"^\[scaled_sum.y\] wants the same result twice, got two$"):
        opcheck(*sample(scaled_sum(), dtype="f32"), backend=Restless())


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


def test_a_sample_never_masks_everything():
    for seed in range(20):
        assert sample(REGISTRY["gdn_step"], "production", seed=seed)[1]["mask"].any().item()


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
        compare(op, {"out": out.astype(mx.bfloat16)}, arguments)
