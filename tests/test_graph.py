import networkx as nx
import pytest

from qfuse import Graph, SpecError, graphs
from qfuse.graphs import make
from qfuse.ops import GDNQKNorm, GDNStep, RMSNorm

DIMS = {
    "H": 64, "Hk": 2, "Hv": 4, "Dk": 32, "Dv": 32, "C": 256, "Nv": 128, "Kc": 4, "Ka": 128, "E": 8, "k": 2, "I": 32,
    "Is": 32, "Hq": 4, "Hkv": 2, "D": 32, "R": 8,
}  # fmt: skip

EXPERTS = ["route_swiglu", "expert_down", "moe_combine"]
GDN = ["input_norm", "gdn_in_proj", "gdn_qk_norm", "gdn_step", "gdn_gated_norm"]
GQA = ["input_norm", "gqa_in_proj", "qk_norm_rope", "kv_update", "sdpa_partial", "sdpa_combine_gate"]


@pytest.mark.parametrize(
    ("graph", "nodes", "dispatches"),
    [
        (graphs.gdn(DIMS), [*GDN, "o_proj_router"], 6),
        (graphs.gqa(DIMS), [*GQA, "o_proj_router"], 8),
        (graphs.moe_4(DIMS), ["o_proj_router", *EXPERTS], 4),
        (graphs.moe_5(DIMS), ["o_proj", "norm_router", *EXPERTS], 5),
        (graphs.moe_only(DIMS), ["norm_router", *EXPERTS], 4),
        (graphs.layer("gdn", DIMS), [*GDN, "o_proj_router", *EXPERTS], 9),
        (graphs.layer("gqa", DIMS), [*GQA, "o_proj_router", *EXPERTS], 11),
        (graphs.layer("gdn", DIMS, moe="moe_5"), [*GDN, "o_proj", "norm_router", *EXPERTS], 10),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_nodes_in_order_and_declared_dispatches(graph, nodes, dispatches):
    assert [node.name for node in graph.nodes()] == nodes
    assert len(graph) == len(nodes)
    assert graph.dispatches() == dispatches


class Ranks:
    def __init__(self, size):
        self.size = lambda: size


SUMMED = ["route_swiglu", "expert_down", "moe_sum", "moe_all_sum", "residual"]


@pytest.mark.parametrize(
    ("part", "moe", "groups", "name", "nodes"),
    [
        ("layer", "moe_4", ("mixer", "moe"), "gdn_layer_moe_5_on_2_ranks",
         [*GDN, "o_proj", "mixer_all_sum", "norm_router", *SUMMED]),
        ("layer", "moe_5", ("moe",), "gdn_layer_moe_5_on_2_ranks", [*GDN, "o_proj", "norm_router", *SUMMED]),
        ("layer", "moe_4", ("mixer",), "gdn_layer_moe_5_on_2_ranks",
         [*GDN, "o_proj", "mixer_all_sum", "norm_router", *EXPERTS]),
        ("mixer", "moe_4", ("mixer", "moe"), "gdn_mixer_layer_on_2_ranks", [*GDN, "o_proj", "mixer_all_sum"]),
        ("moe", "moe_4", ("mixer", "moe"), "moe_only_on_2_ranks", ["norm_router", *SUMMED]),
    ],
)  # fmt: skip
def test_a_part_that_is_sharded_has_a_sum_over_its_ranks(part, moe, groups, name, nodes):
    two = Ranks(2)
    graph = graphs.layer("gdn", DIMS | {f"{each}_group": two for each in groups}, part=part, moe=moe)
    assert graph.name == name
    assert [node.name for node in graph.nodes()] == nodes
    assert all(node.op.group is two for node in graph.nodes() if node.op.name == "all_sum")


def test_moe_without_the_routing_prologue():
    nodes = ["post_norm", "router", "swiglu", "expert_down", "moe_combine"]
    assert [node.name for node in graphs.moe_swiglu_only(DIMS).nodes()] == nodes


def test_a_layer_takes_the_state_of_its_kind_and_gives_it_back():
    assert list(graphs.layer("gdn", DIMS).inputs()) == ["x", "conv_state", "state"]
    assert list(graphs.layer("gdn", DIMS).outputs()) == ["out", "conv_state_next", "state_next"]
    assert list(graphs.layer("gqa", DIMS, masked=True).inputs()) == ["x", "position", "length", "cache", "mask"]
    assert list(graphs.layer("gqa", DIMS).outputs()) == ["out"]


def test_it_is_a_networkx_graph_with_inputs_weights_and_outputs_as_nodes():
    graph = graphs.layer("gdn", DIMS).graph
    assert nx.is_directed_acyclic_graph(graph)
    kinds = nx.get_node_attributes(graph, "kind")
    assert kinds["x"] == "input"
    assert kinds["gdn_in_proj.w_qkv"] == "weight"
    assert kinds["output:out"] == "output"
    # Two tensors between the same two nodes are two edges.
    assert set(graph["gdn_qk_norm"]["gdn_step"]) == {"q->q", "k->k"}


def wire(**change):
    g = Graph("bad")
    qkv = g.input("qkv", "B, 256")
    q, k = GDNQKNorm(Hk=2, Dk=32, Nv=128)(qkv=qkv)
    f32 = g.input("g", "B, 4", "f32")
    state = g.input("state", "B, 4, 32, 32", change.get("state", "f32"))
    step = {"q": q, "k": k, "qkv": qkv, "g": f32, "beta": f32, "state": state}
    if "drop" in change:
        del step[change["drop"]]
    GDNStep(Hk=change.get("Hk", 2), Hv=4, Dk=32, Dv=32)(**step, **change.get("more", {}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"state": "bf16"},
            r"\[bad\.gdn_step\.state\] wants .* f32, got \(B, 4, 32, 32\) bf16 from state\.state",
        ),
        ({"Hk": 1}, r"\[bad\.gdn_step\.q\] wants \(M, Hk=1, Dk=32\) T, got \(B, Hk=2, Dk=32\) T from gdn_qk_norm\.q"),
        ({"drop": "beta"}, r"\[bad\.gdn_step\.beta\] wants \(M, Hv=4\) f32, got nothing"),
        ({"more": {"v": None, "w": 3}}, r"\[bad\.gdn_step\] wants q, k, qkv, .*, got w"),
        ({"more": {"mask": 3}}, r"\[bad\.gdn_step\.mask\] wants a tensor of this graph, got int"),
    ],
)
def test_wiring_errors_name_graph_node_argument_wanted_and_got(change, message):
    with pytest.raises(SpecError, match=message):
        wire(**change)
    wire()


def test_a_tensor_of_another_graph_is_refused():
    a, b = Graph("a"), Graph("b")
    x = a.input("x", "B, 8")
    b.input("x", "B, 8")
    with pytest.raises(SpecError, match=r"\[b\.output y\] wants a tensor of this graph, got x of another"):
        b.output(y=x)


def test_a_node_name_is_used_once():
    g = Graph("g")
    n = RMSNorm(H=8)(x=g.input("x", "B, 8"))
    with pytest.raises(SpecError, match=r"\[g\] wants a new node name, got rms_norm: there is one of kind op"):
        RMSNorm(H=8)(x=n)
    RMSNorm(H=8)(x=n, node="again")
    assert [node.name for node in g.nodes()] == ["rms_norm", "again"]


def test_include_says_which_input_is_missing_or_unknown():
    g = Graph("g")
    x = g.input("x", "B, 64")
    with pytest.raises(SpecError, match=r"\[g\.moe_4\.a\] wants \(B, Ka\) T, got nothing"):
        g.include(graphs.moe_4(DIMS), x=x)
    with pytest.raises(SpecError, match=r"\[g\.moe_4\] wants a, x, got y"):
        g.include(graphs.moe_4(DIMS), y=x)


def test_make_takes_fields_by_name_and_says_what_is_missing():
    assert make(RMSNorm, {"H": 8, "eps": 1e-5, "other": 3}) == RMSNorm(H=8, eps=1e-5)
    with pytest.raises(SpecError, match=r"\[gdn_step\.Dv\] wants a value among the dims, got none"):
        make(GDNStep, {"Hk": 1, "Hv": 1, "Dk": 32})
