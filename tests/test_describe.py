"""A graph's plain data against the arrays of a real run: shapes, dtypes, bytes, states and the JSON's schema."""

import json
from pathlib import Path

import jsonschema
import mlx.core as mx
import pytest
from conftest import inputs, make_model
from mlx_lm.models.cache import KVCache

from qfuse import Graph, In, Op, Out, QArray, SpecError, Weight, build, graphs, models, op
from qfuse.describe import describe, report_data, to_json, trace_data
from qfuse.fuse import fuse
from qfuse.ops import RMSNorm
from qfuse.spec import DTYPE_NAMES

SCHEMA = json.loads((Path(__file__).parent.parent / "docs" / "graph.schema.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def model():
    return make_model(dtype=mx.bfloat16)


def planned(layer, kind, rows):
    """A layer's plan, its weights, and the arguments of one step after 3 tokens."""
    adapter = models.adapt(layer, fold_router=True)
    plan = build(graphs.layer(kind, {**adapter.dims, "T": "bf16"}), adapter.weights, ("reference",))
    x = inputs(1, 1, rows, dtype=mx.bfloat16)[0]
    if kind == "gdn":
        return plan, adapter.weights, (x, mx.zeros((rows, 3, 512), mx.bfloat16), mx.zeros((rows, 4, 64, 64)))
    cache = KVCache()
    cache.update_and_fetch(*[mx.ones((rows, 2, 3, 64), mx.bfloat16)] * 2)
    return plan, adapter.weights, (x, mx.array([3] * rows, mx.int32), mx.array([4], mx.int32), cache)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("index", "kind"), [(0, "gdn"), (3, "gqa")])
def test_shapes_dtypes_and_bytes_are_those_of_a_run(model, index, kind, rows):
    plan, weights, arguments = planned(model.layers[index], kind, rows)
    found = describe(plan, {"B": rows, "N": 4, "A": 256, "T": "bf16", "S": "bf16"}, weights)
    seen = plan.debug(*arguments)
    for tensor in found.tensors:
        value = seen[tensor.name]
        if isinstance(value, mx.array):
            assert (tensor.shape, tensor.dtype) == (value.shape, DTYPE_NAMES[value.dtype]), tensor.name
            assert tensor.bytes == value.nbytes
    for node in found.ops:
        for weight in node.weights:
            assert weight.bytes == weights[weight.name].nbytes, weight.name
            assert weight.shape == tuple(weights[weight.name].shape)


def test_a_node_reads_what_it_touches(model):
    plan, weights, arguments = planned(model.layers[0], "gdn", 2)
    found = {node.name: node for node in describe(plan, {"B": 2, "T": "bf16", "S": "bf16"}, weights).ops}
    seen = plan.debug(*arguments)
    chosen = seen["route_swiglu.indices"].reshape(-1)  # 2 rows of 2 experts, read once for each
    expected = sum(seen[f"o_proj_router.{name}"].nbytes for name in ("hw", "x2", "router_dot"))
    for name in ("w_gate", "w_up"):
        expected += sum(part[chosen].nbytes for part in weights[f"route_swiglu.{name}"].parts())
    expected += sum(weights[f"route_swiglu.{name}"].nbytes for name in ("ws_gate", "ws_up", "w_shared_gate"))
    assert found["route_swiglu"].reads == expected
    assert found["gdn_qk_norm"].reads == seen["gdn_in_proj.qkv"][:, :256].nbytes
    assert found["gdn_step"].writes == seen["gdn_step.y"].nbytes + seen["gdn_step.state_next"].nbytes


def test_more_experts_than_there_are_are_read_once(model):
    plan, weights, _ = planned(model.layers[0], "gdn", 1)
    (node,) = [n for n in describe(plan, {"B": 8, "T": "bf16", "S": "bf16"}, weights).ops if n.name == "expert_down"]
    sizes = sum(weights[f"expert_down.{name}"].nbytes for name in ("w_down", "ws_down"))
    assert node.reads == sizes + 8 * (2 * 128 + 128) * 4 + 8 * 2 * 4


def test_the_kv_update_writes_one_key_and_attention_reads_the_used_ones(model):
    plan, weights, _ = planned(model.layers[3], "gqa", 1)
    found = describe(plan, {"B": 1, "N": 100, "A": 256, "T": "bf16"}, weights)
    nodes = {node.name: node for node in found.ops}
    assert nodes["kv_update"].writes == 2 * (2 * 64) * 2
    (keys,) = [edge for edge in found.edges if edge.arg == "k_cache"]
    assert keys.bytes == 2 * 100 * 64 * 2
    assert found.tensor("kv_update.k_cache").bytes == 2 * 256 * 64 * 2


def test_numbers_of_dispatches_run_on_and_states_are_marked(model):
    plan, weights, _ = planned(model.layers[3], "gqa", 1)
    found = describe(plan, {"B": 1, "N": 4, "A": 256, "T": "bf16"}, weights)
    assert [node.first for node in found.ops] == [1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
    assert found.dispatches == 11
    assert [edge.arg for edge in found.edges if edge.state] == ["cache"]
    gdn, _, _ = planned(model.layers[0], "gdn", 1)
    states = [edge.arg for edge in describe(gdn, {"B": 1}).edges if edge.state]
    assert states == ["conv_state", "state", "conv_state_next", "state_next"]


def test_what_a_call_leaves_open_stays_text(model):
    adapter = models.adapt(model.layers[0], fold_router=False)
    found = describe(graphs.gdn_mixer(adapter.dims), {})
    assert found.tensor("x").shape == ("B", 256)
    assert found.tensor("x").bytes is None
    assert found.bytes is None
    assert found.dispatches == 5
    assert {node.backend for node in found.ops} == {""}


def test_refusals_are_in_the_data(no_6_bits):
    adapter = models.adapt(make_model(bits=6).layers[0], fold_router=True)
    plan = build(graphs.layer("gdn", {**adapter.dims, "T": "f32"}), adapter.weights, ("metal",))
    nodes = {node.name: node for node in describe(plan, {"B": 1, "T": "f32", "S": "f32"}, adapter.weights).ops}
    assert nodes["gdn_in_proj"].backend == "reference"
    assert nodes["gdn_in_proj"].refusals == {"metal": "wants w_qkv.bits in (2, 3, 4, 5, 8), got w_qkv=6-bit gs 64"}
    assert nodes["gdn_step"].backend == "metal"
    assert nodes["input_norm"].backend == "library"


def test_json_is_as_the_schema_says(model):
    plan, weights, _ = planned(model.layers[0], "gdn", 1)
    text = to_json([describe(plan, {"B": 1, "T": "bf16", "S": "bf16"}, weights), describe(plan, {})])
    data = json.loads(text)
    jsonschema.validate(data, SCHEMA)
    assert data["graphs"][0]["dispatches"] == 9
    del data["graphs"][0]["nodes"][0]["reads"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, SCHEMA)


def test_a_fusions_report_is_plain_data(model):
    with fuse(model) as fused:
        data = json.loads(json.dumps(report_data(fused.report())))
    assert [layer["dispatches"] for layer in data["layers"]] == [9, 9, 9, 11]
    assert data["layers"][3]["kind"] == "gqa"


def test_a_trace_is_plain_data(model):
    adapter = models.adapt(model.layers[0], fold_router=True)
    plan = build(graphs.moe_4({**adapter.dims, "T": "bf16"}), adapter.weights, ("metal",))
    x = inputs(1, 1, 1, dtype=mx.bfloat16)[0]
    data = json.loads(json.dumps(trace_data(plan.trace(x, x))))
    kernels = [primitive for primitive in data if primitive["kernel"]]
    assert [len(primitive["outputs"]) for primitive in kernels] == [4, 5, 2, 1]
    assert kernels[3]["outputs"][0]["shape"] == [1, 256]
    assert "kernel" in kernels[0]["source"]
    assert len(kernels[0]["grid"]) == 3


def test_an_output_may_have_a_nodes_name():
    g = Graph("same")
    x = g.input("x", "B, 64")
    g.output(x=x, rms_norm=RMSNorm(H=64)(x=x))
    found = describe(g, {"B": 1, "T": "f32"})
    assert [node.name for node in found.nodes] == ["x", "rms_norm", "output x", "output rms_norm"]
    assert [edge.target for edge in found.edges] == ["rms_norm", "output x", "output rms_norm"]


def test_touched_names_tensors_of_the_op():
    with pytest.raises(SpecError, match=r"\.touched\] wants tensors of the op, got z"):

        @op
        class TouchesNothing(Op):
            """y = x·w."""

            x = In("B")
            w = Weight("1")
            y = Out("B")
            touched = {"z": "B"}

            def reference(self, x, w):
                return x * w


def test_a_mixed_quantisation_is_counted_by_tensor():
    layer = make_model(bits=4, group=32).layers[0]
    adapter = models.adapt(layer, fold_router=True)
    found = describe(graphs.gdn({**adapter.dims, "T": "f32"}), {"B": 1, "T": "f32", "S": "f32"}, adapter.weights)
    sizes = {weight.name: weight for node in found.ops for weight in node.weights}
    quantised = [name for name, value in adapter.weights.items() if isinstance(value, QArray) and name in sizes]
    assert len(quantised) == 5
    assert all(sizes[name].bytes == adapter.weights[name].nbytes for name in quantised)
    assert sizes["gdn_in_proj.w_qkv"].quant == "4-bit gs 32"
