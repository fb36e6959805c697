"""Counts of dispatches and bytes, against what mlx-lm's code says, what MLX fuses, and a second way of counting."""

import io
import re
from collections import Counter

import hypothesis
import mlx.core as mx
import numpy as np
import pytest
from conftest import inputs, make_model
from hypothesis import strategies as st
from mlx_lm.models import gated_delta
from mlx_lm.models.cache import make_prompt_cache

from qfuse import committed, count, devices, hollow, models
from qfuse.configs import CONFIGS
from qfuse.trace import _reshape_strides, gpu_shaped, launches, record

NAME = "qwen3.5-35b-a3b"


def full(bits=8, config=NAME):
    return hollow.model_of(CONFIGS[config], bits=bits, group=64, dtype=mx.bfloat16)


@pytest.fixture(scope="module")
def counted():
    return count.count_model(full(), NAME)


def ops(layer, mode=0):
    return Counter(node.op for node in layer.modes[mode].graph.ops)


def test_a_vanilla_gdn_layer_is_what_mlx_lms_code_says(counted):
    gdn, _ = counted.layers
    assert len(gdn.layers) == 30
    # GatedDeltaNet.__call__, DecoderLayer.__call__ and SparseMoeBlock.__call__, line by line.
    assert ops(gdn) == {
        "RMSNorm": 5,  # input, q, k, gated, post attention
        "QuantizedMatmul": 10,  # qkv, z, b, a, out; router, shared gate, and the shared expert's three
        "Concatenate": 1,  # of the conv state and the new value
        "Convolution": 1,
        "Compiled_silu": 1,
        "Multiply": 4,  # q and k by their scales, experts by scores, the shared expert by its gate
        "Sigmoid": 2,  # beta, and the shared gate
        "Compiled_compute_g": 1,
        "gated_delta_step_packed_btree": 1,
        "Compiled_precise_swiglu": 1,  # the norm's gate
        "Softmax": 1,
        "ArgPartition": 1,
        "GatherAxis": 1,  # scores of the chosen experts
        "Reduce": 2,  # the sum that scores are divided by, and the sum over experts
        "Divide": 1,
        "GatherQMM": 3,
        "Arange": 3,  # row numbers that gather_qmm makes
        "Compiled_swiglu": 2,
        "Add": 3,  # two residuals, and the shared expert
    }
    assert gdn.modes[0].traced == 44 + 1  # one a primitive, and the concatenation's second input


def test_a_vanilla_gqa_layer_is_what_mlx_lms_code_says(counted):
    _, gqa = counted.layers
    assert len(gqa.layers) == 10
    mixer = ops(gqa) - ops(counted.layers[0])
    assert mixer == {"RoPE": 2, "SliceUpdate": 2, "ScaledDotProductAttention": 1, "Reshape": 1}
    # 41 primitives; the queries are copied for their norm, and 1024 keys take two passes.
    assert gqa.modes[0].traced == sum(ops(gqa).values()) + 2 == 43


def test_attention_of_few_keys_is_one_launch():
    _, few = count.count_model(full(), NAME, keys=1023).layers
    assert few.modes[0].traced == 42


def test_modes_declare_what_is_traced(counted):
    for layer, declared in zip(counted.layers, ({1: 23, 2: 9}, {1: 21, 2: 11}), strict=True):
        for mode, expected in declared.items():
            assert layer.modes[mode].declared == layer.modes[mode].traced == expected
    assert counted.dispatches(2) == counted.dispatches(2, declared=True) == 30 * 9 + 10 * 11 + 6
    assert counted.dispatches(0) == 30 * 45 + 10 * 43 + 6
    assert counted.dispatches(1) == 30 * 23 + 10 * 21 + 6


@pytest.mark.parametrize("moe", ["moe_4", "moe_5"])
@pytest.mark.parametrize("rows", [1, 3])
def test_declared_is_traced_for_more_rows_and_the_plain_projection(rows, moe):
    found = count.count_model(full(config="tiny"), "tiny", rows=rows, moe=moe, modes=(0, 2))
    for layer in found.layers:
        assert layer.modes[2].declared == layer.modes[2].traced


@pytest.mark.parametrize("bits", [4, 8])
def test_bytes_of_a_token_are_those_of_the_weights_it_reads(bits):
    """By hand from the config: what a token reads of each weight, the f32 states both ways, the kv cache once."""
    found = count.count_model(full(bits), NAME)
    quantised, router = bits / 8 + 4 / 64, 1 + 4 / 64  # bytes a weight: a code, and bf16 scale and bias for each 64
    moe = 3 * 2048 * 512 * (8 + 1) * quantised + (256 + 1) * 2048 * router
    gdn = (2048 * (8192 + 4096 + 32 + 32) + 4096 * 2048) * quantised + 8192 * 4 * 2
    gqa = (2048 * (8192 + 512 + 512) + 4096 * 2048) * quantised
    state, cache = 2 * 32 * 128 * 128 * 4, 2 * 2 * 1024 * 256 * 2
    weights = 30 * (gdn + moe + state) + 10 * (gqa + moe + cache) + 248320 * 2048 * quantised
    assert weights < found.bytes(0) < 1.02 * weights  # the rest is activations
    folded = 40 * 256 * ((4096 + 2048) * 2 - 2048 * router)  # M1 and Wf in bf16, instead of the router
    assert weights + folded < found.bytes(2) < 1.02 * (weights + folded)
    assert abs(found.bytes(1) - found.bytes(0)) < 0.01 * weights


def test_the_layers_and_what_is_around_them_are_the_whole_model():
    """The model's own __call__, traced at once, launches what the parts add up to."""
    model = full(config="tiny")
    found = count.count_model(model, "tiny", keys=5)
    states = [models.step_state(layer, 1, 5, mx.bfloat16) for layer in model.layers]
    arrays = [hollow.zeros(*form) for state in states for form in state.values()]

    def step(tokens, *arrays):
        pairs = [dict(zip(state, arrays[2 * i : 2 * i + 2], strict=True)) for i, state in enumerate(states)]
        caches = [models.step_cache(layer, pair, 5) for layer, pair in zip(model.layers, pairs, strict=True)]
        return [model(tokens, cache=caches), *[array for cache in caches for array in models.cache_state(cache)]]

    with gpu_shaped():
        recording = record(step, hollow.zeros((1, 1), mx.int32), *arrays)
    whole, _ = launches(recording)
    assert sum(launch.dispatches for launch in whole) == found.dispatches(0)
    assert sum(launch.reads + launch.writes for launch in whole) == found.bytes(0)


def test_a_real_step_has_the_same_primitives():
    """MLX's own graph of a step that could be run here, for what a CPU and a GPU do alike."""
    model = make_model(dtype=mx.bfloat16)
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([[1, 2, 3]]), cache=cache))
    for layer, state in zip(model.layers, cache, strict=True):
        out = layer(inputs(1, 1, 1, dtype=mx.bfloat16), None, state)
        text = io.StringIO()
        mx.export_to_dot(text, out, *models.cache_state(state))
        real = Counter(re.findall(r'label ="([^"]+)", shape=rectangle', text.getvalue()))
        kind = "gdn" if layer.is_linear else "gqa"
        (found,) = [ops(each) for each in count.count_model(model, "tiny", keys=4).layers if each.kind == kind]
        alike = ["QuantizedMatmul", "GatherQMM", "ArgPartition", "GatherAxis", "Convolution", "SliceUpdate"]
        if layer.is_linear:
            alike.append("Concatenate")  # a CPU's rope has some of its own
        for name in alike:
            assert real[name] == found[name], name


def test_a_refused_layer_is_vanilla_with_the_reason():
    model = full(config="tiny")
    model.layers[1].mlp.shared_expert.up_proj.bias = mx.zeros((128,))
    found = count.count_model(model, "tiny")
    (refused,) = [layer for layer in found.layers if layer.reason]
    assert refused.layers == (1,)
    assert refused.reason.endswith("ws_up has a bias")
    assert refused.modes[2] is refused.modes[0]
    model.layers[0].mlp.shared_expert.up_proj.bias = mx.zeros((128,))
    with pytest.raises(models.RefusedError, match=r"^\[moe_4\] wants a layer it can fuse, got one refused: .* a bias$"):
        count.part_graph(model, "moe_4")
    assert [node.name for node in found.graph(2).ops if node.refusals] == ["gdn layer from 1 on"]
    assert found.dispatches(2) == 2 * 9 + refused.modes[0].traced + 11 + 6


def test_a_backend_that_cannot_be_traced_is_declared_only():
    found = count.count_model(full(config="tiny"), "tiny", backends=("sim",))
    assert found.layers[0].modes[2].traced is None
    assert found.dispatches(2) == 3 * 9 + 11 + 6


def test_cuda_has_no_kernel_for_the_recurrence_nor_for_wide_heads():
    gdn, gqa = count.count_model(full(), NAME, gpu="cuda").layers
    assert ops(gdn)["Compiled__gated_delta_step_ops"] == 1
    assert ops(gqa)["ScaledDotProductAttention"] == 0
    assert ops(gqa)["Matmul"] == 2
    assert (gdn.modes[2].traced, gqa.modes[2].traced) == (9, 11)


def test_the_model_is_left_as_it_was():
    before = mx.fast.rms_norm, mx.contiguous, mx.default_device, gated_delta.compute_g, gated_delta._gated_delta_kernel
    with gpu_shaped():
        assert gated_delta._gated_delta_kernel is not None
        assert mx.fast.rms_norm is not before[0]
    after = mx.fast.rms_norm, mx.contiguous, mx.default_device, gated_delta.compute_g, gated_delta._gated_delta_kernel
    assert before == after


def traced(function, *arrays):
    with gpu_shaped():
        found, _ = launches(record(lambda *a: [function(*a)], *arrays))
    return [(launch.name, launch.dispatches) for launch in found]


def test_what_launches_and_what_is_a_view():
    x = mx.zeros((2, 4, 6))
    assert traced(lambda x: x.transpose(1, 0, 2)[:, :, 1:].reshape(4, 2, 5, 1), x) == []
    assert traced(lambda x: x.transpose(1, 0, 2).reshape(-1), x) == [("Reshape", 1)]
    assert traced(lambda x: mx.concatenate([x, x, x[:, :2]], axis=1), x) == [("Concatenate", 3)]
    assert traced(lambda x: mx.contiguous(x[:, 1:]), x) == [("Contiguous", 1)]
    assert traced(lambda x: mx.contiguous(x[1:]), x) == []
    halves = traced(lambda x: mx.fast.rms_norm(mx.split(x, 2, -1)[0], None, 1e-6), x)
    assert halves == [("RMSNorm", 2)]
    assert traced(lambda x: mx.exp(mx.split(x, 2, -1)[0]), x) == [("Exp", 1)]


@hypothesis.given(st.data())
def test_a_reshape_is_a_view_exactly_where_numpys_is(data):
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    base = np.zeros(shape, np.float32)
    array = base.transpose(data.draw(st.permutations(range(len(shape)))))
    array = array[tuple(slice(data.draw(st.integers(0, n - 1)), None) for n in array.shape)]
    new = list(data.draw(st.permutations([*array.shape, 1])))
    if data.draw(st.booleans()) and len(new) > 1:
        new[:2] = [new[0] * new[1]]
    strides = tuple(step // 4 for step in array.strides)
    found = _reshape_strides(array.shape, strides, new)
    hypothesis.assume(array.size)
    assert (found is not None) == np.shares_memory(array.reshape(new), base)


@pytest.mark.parametrize("step", devices.MEASURED, ids=lambda step: f"{step.bits}bit-{step.rows}-{step.keys}")
def test_the_estimate_is_within_a_factor_of_two_of_what_was_measured(step):
    found = count.count_model(full(step.bits, step.config), "", rows=step.rows, keys=step.keys, modes=(0,), gpu="cuda")
    estimate = 1e3 * devices.find(step.device).seconds(found.dispatches(0), found.bytes(0))
    assert step.low / 2 < estimate < 2 * step.high


def test_the_cost_of_a_launch_is_half_of_one_with_many_inputs():
    launched, milliseconds = devices.EMPTY
    assert 1e3 * devices.find("h200").seconds(launched, 0) / milliseconds == pytest.approx(0.5, abs=0.05)


def test_nothing_is_faster_than_its_bytes():
    found = count.count_model(full(), NAME)
    assert devices.find("h200").seconds(0, found.bytes(0)) == pytest.approx(0.77e-3, rel=0.02)  # 3.28 GB at 4.3 TB/s


def test_every_device_says_where_its_constants_are_from():
    for device in devices.DEVICES.values():
        assert device.gpu in ("metal", "cuda")
        for source in (device.memory_source, device.dispatch_source):
            assert "https://" in source or source.startswith("measured")
    with pytest.raises(ValueError, match=r"\[device\] wants one of h200, .*, got abacus"):
        devices.find("abacus")


# In the form that MLX 0.32.4 writes: two kernels, one of them in a graph of its own, and a node that is none.
DOT = """digraph dot {
subgraph cluster_21 {
label="graph_21" graph[style="dashed"];
"graph_21_node_0"[style="bold" shape="octagon" label="0
_ZN3mlx4core2cu6rbitscEPKjPh4dim3bm
"];

"graph_21_node_1"[style="solid" shape="rectangle" label="1
graph_22
"];

"graph_21_node_2"[style="solid" shape="rectangle" label="2
EMPTY
"];

"graph_21_node_0" -> "graph_21_node_1";
}
subgraph cluster_22 {
label="graph_22" graph[style="dashed"];
"graph_22_node_0"[style="bold" shape="octagon" label="0
conv1d_c1_k1_nhwc
"];
}
}
"""


def test_kernels_of_committed_graphs():
    found = committed.kernels([DOT, DOT])
    assert found == {"_ZN3mlx4core2cu6rbitscEPKjPh4dim3bm": 2, "conv1d_c1_k1_nhwc": 2}


def test_committed_graphs_need_a_cuda_gpu():
    with pytest.raises(RuntimeError, match=r"^\[committed\] wants a CUDA GPU, got none$"):
        committed.count_step(CONFIGS["tiny"], bits=8, rows=1, keys=4, backends=("cuda",), moe="moe_4")


def test_an_h200_launched_what_is_traced():
    block = {**CONFIGS[NAME], "num_hidden_layers": 4}
    model = hollow.model_of(block, bits=8, group=64, dtype=mx.bfloat16)
    traced = count.count_model(model, NAME, keys=4, gpu="cuda")
    assert traced.dispatches(2) == devices.COMMITTED[2]
    for mode in (0, 1):  # cuBLAS has one more: a batched product that MLX first makes a table of pointers for
        assert devices.COMMITTED[mode] - 1 == traced.dispatches(mode)
