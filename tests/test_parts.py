"""Tensors that are parts of one array: kernels that write and read them, and where plans have them."""

import mlx.core as mx
import pytest
from conftest import inputs, make_model
from test_ops import KERNELS, VARIANTS

from qfuse import REGISTRY, Plan, backends, build, models
from qfuse.backends.kernel import ALIGNED, WORD, Lowered, Part
from qfuse.plan import _later, _packed
from qfuse.testing import sample


def words(arrays):
    """Arrays by name as parts of one."""
    joined, parts = [], {}
    offset = 0
    for name, x in arrays.items():
        data = x.reshape(-1).view(mx.uint8)
        joined.append(mx.pad(data, (0, -data.size % (WORD * ALIGNED))))
        parts[name] = offset, x.shape, x.dtype
        offset += joined[-1].size // WORD
    pack = mx.concatenate(joined).view(mx.uint32)
    return {name: Part(pack, *part) for name, part in parts.items()}


def whole(x):
    """A part as an array of its own; an array as it is."""
    if not isinstance(x, Part):
        return x
    size = mx.zeros(x.shape, x.dtype).size
    return x.array[x.offset :].view(x.dtype)[:size].reshape(x.shape)


def calls(name, backend, variant="bf16", shape="small"):
    """An op's inputs, some as parts, with the same op giving arrays, and parts where it has several outputs."""
    op, arguments = sample(REGISTRY[name], shape, **VARIANTS[variant])
    weights = {weight: arguments[weight] for weight in op.weights()}
    plain = Lowered(backends.BACKENDS[backend], op, weights)
    given = [name for name in op.inputs() if name in arguments]
    parts = words({name: arguments[name] for name in given})
    outs = list(op.select("out"))
    return (
        plain,
        plain.packing(outs if len(outs) > 1 else ()),
        [arguments.get(name) for name in op.inputs()],
        [parts.get(name, arguments.get(name)) for name in op.inputs()],
    )


@pytest.mark.parametrize(("variant", "shape"), [("bf16", "small"), ("f32", "odd")])
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_of_parts_gives_the_same_bits(sim, name, variant, shape):
    plain, packing, arrays, parts = calls(name, sim, variant, shape)
    expected = plain.op.as_tuple(plain(*arrays))
    got = plain.op.as_tuple(packing(*parts))
    assert len({id(x.array) for x in got if isinstance(x, Part)}) == (len(got) > 1)
    for have, want in zip(got, expected, strict=True):
        assert whole(have).dtype == want.dtype
        assert mx.array_equal(whole(have), want)


def test_every_op_of_parts_compiles_for_cuda():
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: pip install '.[nvrtc]'")
    import nvrtc

    from qfuse.backends.cuda import CudaBackend

    class Kept(CudaBackend):
        def compile(self, text):
            texts.append(text)
            return lambda **_: [None] * len(text.outputs)

    texts, functions = [], []
    for name in KERNELS:
        _, packing, _, parts = calls(name, "cuda")
        lowered = Lowered(Kept(), packing.op, packing.weights, packed=packing.packed)
        launch = lowered.prepare(*parts)
        taken = [x for x in parts if isinstance(x, mx.array)]
        taken += list({id(x.array): x.array for x in parts if isinstance(x, Part)}.values()) + lowered._arrays
        functions.append(nvrtc.function(texts[-1], taken, launch.dtypes))
    assert nvrtc.compile_together(functions, "sm_90a").keys() == {text.name for text in texts}


def packs(calls):
    """Outputs that are packed, by op."""
    return {call.op.name: call.packed for call in calls if isinstance(call, Lowered) and call.packed}


def packed(plan):
    """The plan's steps with what they pack, as in one segment."""
    return _packed(plan.steps, {*plan._output_slots})


def test_a_plan_packs_what_only_kernels_read():
    model = make_model()
    moe = {
        "o_proj_router": {"h", "hw", "x2", "router_dot"},
        "route_swiglu": {"act_routed", "act_shared", "indices", "scores", "shared_gate_logit"},
        "expert_down": {"d_routed", "d_shared"},
    }
    gdn, gqa = (models.adapt(model.layers[i], fold_router=True) for i in (0, 3))

    def found(adapter, backend):
        return packs(step.call for step in packed(build(adapter.graph("f32"), adapter.weights, (backend,))))

    assert found(gdn, "metal") == moe | {
        "gdn_in_proj": {"qkv", "z", "beta", "g"},  # conv_state_next goes to the cache
        "gdn_qk_norm": {"q", "k"},
    }
    assert found(gqa, "metal") == moe | {
        "gqa_in_proj": {"queries", "keys", "gate"},  # values go to the cache
        "sdpa_partial": {"o_part", "sum_part", "max_part"},
    }
    assert found(gdn, "reference") == {}


def test_nothing_packed_crosses_a_segment():
    """A kv cache's update stands between the gate's projection and its use; what MLX compiles gives arrays only."""
    gqa = models.adapt(make_model().layers[3], fold_router=True)
    plan = build(gqa.graph("f32"), gqa.weights, ("metal",), segments=True)
    outputs = {*plan._output_slots}
    before, _, after = (_packed(run, _later(plan._runs, i, outputs)) for i, run in enumerate(plan._runs))
    assert packs(step.call for step in before) == {"gqa_in_proj": {"queries", "keys"}}
    assert "sdpa_partial" in packs(step.call for step in after)


@pytest.mark.parametrize("index", [0, 3])
def test_a_plan_that_packs_gives_the_same_bits(sim, index):
    layer = make_model().layers[index]
    adapter = models.adapt(layer, fold_router=True)
    plan = build(adapter.graph("f32"), adapter.weights, (sim,))
    results = []
    for each in (
        plan,
        Plan(plan.graph, packed(plan), plan.inputs, dict(zip(plan.outputs, plan._output_slots, strict=True))),
    ):
        cache = models.new_cache(layer)
        layer(inputs(1, 1, 3), mask=None if layer.is_linear else "causal", cache=cache)
        results.append(each.run(*adapter.inputs(inputs(0, 1, 1), None, cache)))
    for have, want in zip(*results, strict=True):
        assert mx.array_equal(have, want)


def test_segments_launch_what_packs():
    layer = make_model().layers[0]
    adapter = models.adapt(layer, fold_router=True)
    plan = build(adapter.graph("f32"), adapter.weights, ("metal",), segments=True)
    kernels = [each for each in plan.trace(*adapter.inputs(inputs(0, 1, 1), None, None)) if each.kernel]
    assert [len(each.outputs) for each in kernels] == [2, 1, 2, 1, 1, 1, 1, 1]
    assert [len(each.inputs) for each in kernels[1:5]] == [1, 3, 3, 8]
