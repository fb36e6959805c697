import mlx.core as mx
import pytest

from qfuse import Graph, Plan, Quant, SpecError, backends, build, op
from qfuse.graphs import moe_5
from qfuse.op import Op
from qfuse.ops import GDNStep, RMSNorm
from qfuse.spec import In, Out, QArray
from qfuse.testing import sample

DIMS = {"H": 64, "Ka": 128, "E": 8, "k": 2, "I": 32, "Is": 32}


def quantised(key, *shape):
    return QArray(*mx.quantize(mx.random.normal(shape, key=mx.random.key(key)), 32, 8), Quant(8, 32))


@pytest.fixture
def plan():
    H, Ka, E, I, Is = (DIMS[name] for name in ("H", "Ka", "E", "I", "Is"))
    weights = {
        "o_proj.w": quantised(0, H, Ka),
        "norm_router.w_norm": mx.ones(H),
        "norm_router.w_router": quantised(1, E, H),
        "route_swiglu.w_gate": quantised(2, E, I, H),
        "route_swiglu.w_up": quantised(3, E, I, H),
        "route_swiglu.ws_gate": quantised(4, Is, H),
        "route_swiglu.ws_up": quantised(5, Is, H),
        "route_swiglu.w_shared_gate": quantised(6, 1, H),
        "expert_down.w_down": quantised(7, E, H, I),
        "expert_down.ws_down": quantised(8, H, Is),
    }
    graph = moe_5(DIMS | {name: Quant(8, 32) for name in weights if not name.endswith("norm")})
    return build(graph, weights, ("reference",))


def arguments(B=3):
    return [mx.random.normal((B, n), key=mx.random.key(n)) for n in (DIMS["Ka"], DIMS["H"])]


def test_run_and_debug_agree_and_debug_names_every_tensor(plan):
    (out,) = plan.run(*arguments())
    seen = plan.debug(*arguments())
    assert mx.array_equal(out, seen["moe_combine.out"])
    assert set(seen) >= {"a", "x", "o_proj.y", "norm_router.h", "route_swiglu.indices", "expert_down.d_shared"}
    assert "expert_down.d_routed" not in plan.debug(*arguments(), until="route_swiglu")


def test_segments_are_calls_that_mlx_compiles(plan):
    outputs = dict(zip(plan.outputs, plan._output_slots, strict=True))
    segments = Plan(plan.graph, plan.steps, plan.inputs, outputs, segments=True)
    assert len(segments._hot) == 1 < len(plan._hot)
    for B in (3, 3):
        assert mx.allclose(segments.run(*arguments(B))[0], plan.run(*arguments(B))[0], rtol=1e-5)


def test_a_weight_that_is_yet_to_be_computed_is_computed_once_for_all_calls():
    graph = Graph("norm")
    graph.output(y=RMSNorm(H=64)(x=graph.input("x", "B, H"), node="norm"))
    ready, lazy = mx.sin(mx.arange(64.0)), mx.sin(mx.arange(64.0))
    mx.eval(ready)
    plans = [build(graph, {"norm.w_norm": weight}, ("reference",), segments=True) for weight in (ready, lazy)]
    first, second = ([primitive.name for primitive in plan.trace(mx.ones((1, 64)))] for plan in plans)
    assert first == second


def test_rows_do_not_depend_on_each_other(plan):
    a, x = arguments(4)
    (out,) = plan.run(a, x)
    for i in range(4):
        assert mx.allclose(out[i : i + 1], plan.run(a[i : i + 1], x[i : i + 1])[0], atol=1e-5)


def test_debug_says_what_does_not_fit(plan):
    a, x = arguments()
    with pytest.raises(SpecError, match=r"\[moe_5\.o_proj\.x\] wants \(B=3, K=128\) f32, got \(3, 64\) f32"):
        plan.debug(x, a)
    with pytest.raises(SpecError, match=r"\[moe_5\] wants 2 inputs, got 1"):
        plan.debug(a)
    with pytest.raises(SpecError, match=r"\[moe_5\] wants a node of the graph, got nowhere"):
        plan.debug(a, x, until="nowhere")


def test_trace_lists_what_mlx_records(plan):
    names = [primitive.name for primitive in plan.trace(*arguments())]
    assert names.count("QuantizedMatmul") == 1 + 1 + 2 + 1 + 1  # o_proj, router, shared gate and up, its gate, down
    assert names.count("GatherQMM") == 3
    assert plan.dispatches() == 5
    assert plan.dispatches(plan.trace(*arguments())) > 20  # the reference is plain MLX: many small launches


def test_report_has_a_line_a_node(plan):
    lines = plan.report().splitlines()
    assert [line.split()[1] for line in lines] == [step.node.name for step in plan.steps]
    assert lines[0].split()[2] == "library"
    assert lines[1].split()[2] == "reference"


def test_a_missing_weight_and_one_that_does_not_fit():
    g = Graph("g")
    g.output(n=RMSNorm(H=8)(x=g.input("x", "B, 8")))
    with pytest.raises(SpecError, match=r"\[g\.rms_norm\.w_norm\] wants \(H=8\) float, got nothing"):
        build(g, {})
    with pytest.raises(SpecError, match=r"\[g\.rms_norm\.w_norm\] wants \(H=8\) float, got \(9,\) f32"):
        build(g, {"rms_norm.w_norm": mx.ones(9)})
    with pytest.raises(ValueError, match=r"\[backend\] wants one of reference, .*, got foo"):
        build(g, {"rms_norm.w_norm": mx.ones(8)}, ("foo",))


def test_an_op_that_no_backend_takes_runs_its_reference_and_the_report_says_why():
    step, arguments = sample(GDNStep, Hk=1, Hv=1, Dk=33, Dv=2, M=1, B=1, optional=False)
    g = Graph("g")
    dims = {name: ", ".join(map(str, x.shape)) for name, x in arguments.items()}
    refs = {name: g.input(name, dims[name], step.inputs()[name].dtype) for name in arguments}
    g.output(**step(**refs)._asdict())
    plan = build(g, {}, ("metal",))
    assert plan.steps[0].backend == "reference"
    assert "[metal: wants Dk % 32 == 0, got Dk=33]" in plan.report()
    assert plan.run(*arguments.values())[0].shape == (1, 1, 2)


@pytest.fixture
def passes():
    """An op that notes the order in which its instances run."""
    seen = []

    @op
    class Pass(Op):
        """y = x."""

        label: str

        x = In("B")
        y = Out("B")
        library = True

        def reference(self, x):
            seen.append(self.label)
            return x

    yield Pass, seen
    from qfuse import REGISTRY

    del REGISTRY["pass"]


def test_order_is_topological_with_ties_by_insertion(passes):
    Pass, seen = passes
    g = Graph("order")
    x = g.input("x", "B")
    z = Pass(label="z")(x=x, node="z")
    a = Pass(label="a")(x=x, node="a")
    b = Pass(label="b")(x=z, node="b")
    g.output(a=a, b=b)
    build(g, {}, ("reference",)).run(mx.ones(1))
    assert seen == ["z", "a", "b"]


def test_an_unused_optional_input_arrives_as_none():
    g = Graph("masked")
    x = g.input("x", "B")
    mask = g.input("mask", "B", "bool", optional=True)
    assert list(g.inputs()) == ["x", "mask"]
    g.output(x=x, mask=mask)
    assert build(g, {}, ("reference",)).run(mx.ones(1), None)[1] is None


def test_backends_are_found_by_name_and_say_why_they_cannot_run():
    assert backends.get("reference").unavailable() is None
    if not mx.metal.is_available():
        with pytest.raises(RuntimeError, match=r"\[backend\] wants one that runs here, got metal: MLX has no Metal"):
            backends.get("metal")
        assert "metal" not in backends.default()
