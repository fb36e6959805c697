"""Faults that kernels of this family have had, each as a test that the faulty form would fail."""

import math

import mlx.core as mx
import numpy as np
import pytest

from qfuse import REGISTRY, Quant, SpecError, backends
from qfuse.backends.kernel import MAX_THREADS, SIMD
from qfuse.op import Schedule
from qfuse.testing import compare, oracle, reference, run, sample

SIM = "sim"
WHY_NOT = backends.BACKENDS[SIM].unavailable()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


def check(op, arguments, schedule=None):
    """Run on the simulator, compare with the reference, and give the outputs."""
    got = run(op, arguments, SIM, schedule)
    compare(op, got, arguments)
    return got


@pytest.mark.parametrize(
    "name", ["o_proj_router", "norm_router", "route_swiglu", "swiglu", "expert_down", "moe_combine"]
)
def test_every_row_of_a_batch_is_right_not_just_the_first(name):
    op, arguments = sample(REGISTRY[name], B=3)
    for out in check(op, arguments).values():
        rows = np.array(out.astype(mx.float32)).reshape(3, -1)
        assert not (rows[0] == rows[1]).all()


def test_the_state_keeps_in_f32_what_bf16_would_round_away():
    op, arguments = sample(REGISTRY["gdn_step"], B=1, M=1)
    arguments |= {
        "g": mx.ones((1, op.Hv)),
        "beta": mx.full((1, op.Hv), 1e-4),
        "state": mx.ones((1, op.Hv, op.Dv, op.Dk)),
    }
    new = check(op, arguments)["state_next"]
    assert new.dtype == mx.float32
    assert (new != 1).mean().item() > 0.9


def test_a_bf16_state_is_refused():
    op, arguments = sample(REGISTRY["gdn_step"])
    with pytest.raises(SpecError, match=r"^\[gdn_step.state\] wants \(B=2, .*\) f32, got \(2, 4, 64, 64\) bf16$"):
        op.bind(arguments | {"state": arguments["state"].astype(mx.bfloat16)})


@pytest.mark.parametrize("conv", ["f32", "f16"])
def test_the_conv_state_has_a_dtype_of_its_own(conv):
    op, arguments = sample(REGISTRY["gdn_in_proj"], dtype={"": "bf16", "S": conv})
    assert check(op, arguments)["conv_state_next"].dtype == {"f32": mx.float32, "f16": mx.float16}[conv]


@pytest.mark.parametrize("N", [1023, 1024, 1100])
def test_the_mask_counts_however_many_keys_there_are(N):
    op, arguments = sample(REGISTRY["sdpa_partial"], A=1280, N=N, B=2)
    arguments["length"] = mx.array([N], mx.int32)
    masked = check(op, arguments)
    del arguments["mask"]
    assert not mx.array_equal(masked["sum_part"], check(op, arguments)["sum_part"])


def test_a_mask_row_stops_its_own_state_and_window_only():
    op, arguments = sample(REGISTRY["gdn_step"], B=2, M=2)
    arguments["mask"] = mx.array([False, True])
    got = check(op, arguments)
    assert mx.array_equal(got["state_next"][0], arguments["state"][0])
    assert not got["y"][0].any()
    op, arguments = sample(REGISTRY["gdn_in_proj"], B=2)
    arguments["mask"] = mx.array([False, True])
    window = check(op, arguments)["conv_state_next"]
    assert not window[0, -1].any()
    assert window[1, -1].any()
    assert mx.array_equal(window[:, :-1], arguments["conv_state"][:, 1:])


@pytest.mark.parametrize(
    ("name", "out"),
    [("gdn_gated_norm", "a"), ("qk_norm_rope", "q_rot"), ("route_swiglu", "act_shared"), ("gdn_qk_norm", "q")],
)
def test_eps_is_the_ops_own(name, out):
    field = "l2_eps" if name == "gdn_qk_norm" else "eps"
    results = []
    for eps in (1e-6, 9.0):
        op, arguments = sample(REGISTRY[name], "small", **{field: eps})
        results.append(check(op, arguments)[out])
    assert not mx.allclose(*results, rtol=1e-2).item()


@pytest.mark.parametrize("H", [8, 40, 104, 136])
@pytest.mark.parametrize("rows", [1, 3, 4, 7])
def test_a_tail_of_rows_is_counted_once(H, rows):
    op, arguments = sample(REGISTRY["o_proj_router"], dtype="f32", H=H, Ka=64, E=5, B=2)
    got = check(op, arguments, Schedule(rows=rows, simdgroups=3))
    squares = np.array(got["h"]).astype(np.float64) ** 2
    np.testing.assert_allclose(np.array(got["x2"]).sum(axis=1), squares.sum(axis=1), rtol=1e-5)


def test_partial_squares_do_not_depend_on_the_schedule():
    op, arguments = sample(REGISTRY["o_proj_router"], "odd")
    schedules = [Schedule(rows=r, simdgroups=s) for r, s in ((4, 8), (1, 1), (3, 16))]
    first, *others = (run(op, arguments, SIM, schedule)["x2"] for schedule in schedules)
    for other in others:
        assert mx.array_equal(first, other)


@pytest.mark.parametrize("K", [64, 96, 128, 640])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_need_not_be_a_multiple_of_256(K, bits):
    quant = Quant(bits, 32)
    check(*sample(REGISTRY["gqa_in_proj"], quant=quant, H=K))
    check(*sample(REGISTRY["gdn_in_proj"], quant=quant, H=K))
    check(*sample(REGISTRY["o_proj_router"], quant=quant, Ka=K))
    check(*sample(REGISTRY["norm_router"], quant=quant, H=K))
    check(*sample(REGISTRY["route_swiglu"], quant=quant, H=K))
    check(*sample(REGISTRY["expert_down"], quant=quant, I=K, Is=K))


@pytest.mark.parametrize("part", [20, 32, 48])
@pytest.mark.parametrize("name", ["o_proj_router", "norm_router"])
def test_a_partial_may_be_of_any_width(name, part):
    check(*sample(REGISTRY[name], "small", dtype="f32", part=part))


def route(logits, k=3, **fields):
    """indices and scores of these logits [B, E], by the simulator, with the same by the reference."""
    B, E = np.shape(logits)
    op, arguments = sample(REGISTRY["route_swiglu"], E=E, k=k, B=B, **fields)
    arguments["router_dot"] = mx.array(logits, mx.float32)
    got = run(op, arguments, SIM)
    assert (np.array(got["indices"]) < E).all()
    return got, reference(op, arguments)


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("logits", "wanted"),
    [
        ([1, 5, 5, 5, 2, 5], [1, 2, 3]),
        ([0, 0, 0, 0], [0, 1, 2]),
        ([9e4, 1, 2, 3], [0, 3, 2]),
        ([9e4, -9e4, -9e4, -9e4], [0, 1, 2]),
        ([-INF, -INF, 7, -INF], [2, 0, 1]),
        ([-INF] * 5, [0, 1, 2]),
        ([NAN, 3, NAN, 1, 2], [1, 4, 3]),
        ([NAN, NAN, 3, NAN], [2, 0, 1]),
        ([NAN] * 40, [0, 1, 2]),
        ([*range(70)], [69, 68, 67]),
    ],
)
def test_top_k_has_a_winner_in_every_round_and_ties_go_to_the_lower_index(logits, wanted):
    got, wanted_too = route([logits, logits[::-1]])
    assert got["indices"][0].tolist() == wanted == wanted_too["indices"][0].tolist()
    assert got["indices"][1].tolist() == wanted_too["indices"][1].tolist()
    assert np.array_equal(np.isnan(got["scores"]), np.isnan(wanted_too["scores"]))


@pytest.mark.parametrize("norm", [True, False])
def test_every_expert_can_be_chosen(norm):
    got, wanted = route([[3, 1, 2, 5], [1, 2, 3, 4]], k=4, norm_topk=norm)
    assert got["indices"].tolist() == [[3, 0, 2, 1], [3, 2, 1, 0]]
    assert mx.allclose(got["scores"], wanted["scores"]).item()


def test_an_index_out_of_range_reads_no_other_memory():
    for name in ("swiglu", "expert_down"):
        op, arguments = sample(REGISTRY[name], E=3, k=2, B=1)
        last = run(op, arguments | {"indices": mx.array([[2, 2]], mx.uint32)}, SIM)
        wild = run(op, arguments | {"indices": mx.array([[3, 2**31]], mx.uint32)}, SIM)
        for out in last:
            assert mx.array_equal(last[out], wild[out])


def attend(N, *, masked=None, B=1):
    """One step of attention through both kernels, and its softmax in f64."""
    op, arguments = sample(REGISTRY["sdpa_partial"], dtype="f32", A=max(N, 1), N=N, B=B, optional=masked is not None)
    arguments["length"] = mx.array([N], mx.int32)
    if masked is not None:
        arguments["mask"] = mx.array(masked)
    part = check(op, arguments)
    merge, more = sample(REGISTRY["sdpa_combine_gate"], dtype="f32", Hq=op.Hq, D=op.D, B=B)
    a = run(merge, {**part, "gate": more["gate"]}, SIM)["a"]
    q, k, v = (np.array(arguments[name]).astype(np.float64) for name in ("q_rot", "k_cache", "v_cache"))
    k, v = (np.repeat(x, op.Hq // op.Hkv, axis=1) for x in (k, v))
    scores = np.einsum("bhd,bhnd->bhn", q, k) * op.D**-0.5
    if masked is not None:
        scores = np.where(np.array(masked)[:, None], scores, -np.inf)
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        wanted = np.einsum("bhn,bhnd->bhd", weights / weights.sum(axis=-1, keepdims=True), v)
    return a, part, np.nan_to_num(wanted).reshape(B, -1) * np.array(more["gate"])


@pytest.mark.parametrize("N", [1, 2, 31, 33])
def test_a_block_without_a_key_weighs_nothing(N):
    a, part, wanted = attend(N)
    empty = np.array(part["max_part"])[..., N:]
    assert (empty == -np.inf).all()
    assert not part["sum_part"][..., N:].any()
    assert not part["o_part"][..., N:, :].any()
    np.testing.assert_allclose(a, wanted, rtol=1e-4, atol=1e-6)


def test_a_row_with_no_key_at_all_gives_zeros():
    masked = [[False] * 40, [True] * 40]
    a, _, wanted = attend(40, masked=masked, B=2)
    assert not a[0].any()
    np.testing.assert_allclose(a, wanted, rtol=1e-4, atol=1e-6)


def test_keys_past_the_length_or_the_mask_are_not_seen():
    op, arguments = sample(REGISTRY["sdpa_partial"], A=64, N=20, B=1)
    arguments |= {"length": mx.array([9], mx.int32), "mask": mx.ones((1, 20), mx.bool_)}
    short = check(op, arguments)
    beyond = mx.arange(64)[:, None] >= 9
    arguments |= {
        name: mx.where(beyond, mx.array(NAN, mx.bfloat16), arguments[name]) for name in ("k_cache", "v_cache")
    }
    for name, out in run(op, arguments, SIM).items():
        assert mx.array_equal(out, short[name])


@pytest.mark.parametrize("T", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("scales", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("quant", [Quant(4, 32), Quant(4, 128), Quant(8, 64)], ids=str)
def test_any_dtype_with_scales_of_any_other(T, scales, quant):
    op, arguments = sample(REGISTRY["gqa_in_proj"], dtype={"": scales, "T": T}, quant=quant)
    got = check(op, arguments)
    assert got["queries"].dtype == arguments["n"].dtype


def test_no_threadgroup_has_more_than_512_threads():
    assert SIMD * 16 == MAX_THREADS
    with pytest.raises(SpecError, match=r"^\[schedule\] wants 1 <= simdgroups <= 16, got simdgroups=17$"):
        Schedule(simdgroups=17)


@pytest.mark.parametrize(
    "wrong", [{"take": 12}, {"take": 64}, {"rows": 0}, {"simdgroups": 0}, {"depth": 9}, {"cap": -1}]
)
def test_a_schedule_that_no_text_can_follow_is_refused(wrong):
    (name,) = wrong
    with pytest.raises(SpecError, match=rf"^\[schedule\] wants .*{name}.*, got {name}="):
        Schedule(**wrong)


@pytest.mark.parametrize("size", [100.0, -100.0])
def test_a_large_input_neither_overflows_nor_vanishes(size):
    op, arguments = sample(REGISTRY["gdn_in_proj"], dtype="f32", B=1)
    arguments |= {"dt_bias": mx.full((op.Hv,), size), "A_log": mx.full((op.Hv,), -6.0)}
    g = check(op, arguments)["g"]
    assert ((g > 0.7) & (g < 0.9)).all().item() if size > 0 else (g == 1).all().item()


def test_the_oracle_of_a_half_precision_call_is_f32():
    op, arguments = sample(REGISTRY["sdpa_combine_gate"], dtype="bf16")
    assert oracle(op, arguments)["a"].dtype == mx.float32
