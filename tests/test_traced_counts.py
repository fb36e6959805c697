"""Dispatches as MLX records them: on the metal backend each kernel op is one CustomKernel and nothing else is added."""

import mlx.core as mx
import pytest
from conftest import inputs, make_model
from mlx_lm.models.cache import KVCache

from qfuse import build, graphs, models


@pytest.fixture(scope="module")
def model():
    return make_model(dtype=mx.bfloat16)


def traced(layer, graph, *arguments):
    adapter = models.adapt(layer, fold_router=True)
    plan = build(graph({**adapter.dims, "T": "bf16"}), adapter.weights, ("metal",))
    launches = [primitive for primitive in plan.trace(*arguments) if not primitive.is_view]
    kernels = [step.node.op.name for step in plan.steps if not step.node.op.library]
    found = [primitive.kernel.removeprefix("custom_kernel_") for primitive in launches if primitive.kernel]
    assert len(found) == len(kernels)
    assert all(name.startswith(f"{kernel}_") for name, kernel in zip(found, kernels, strict=True))
    # MLX's norm is one kernel on a GPU; on a CPU it is recorded as the small ops that come before the first of ours.
    first = next(i for i, primitive in enumerate(launches) if primitive.kernel)
    return found, [primitive.name for primitive in launches[first:] if not primitive.kernel]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("B", [1, 3])
def test_gdn_layer(model, masked, B):
    x = inputs(1, 1, B, dtype=mx.bfloat16)[0]
    state = [mx.zeros((B, 3, 512), mx.bfloat16), mx.zeros((B, 4, 64, 64))]
    mask = [mx.ones((B,), mx.bool_)] if masked else []
    kernels, others = traced(model.layers[0], lambda d: graphs.layer("gdn", d, masked=masked), x, *state, *mask)
    assert (len(kernels), others) == (8, [])


@pytest.mark.parametrize("masked", [False, True])
def test_gqa_layer(model, masked):
    cache = KVCache()
    cache.update_and_fetch(*[mx.zeros((1, 2, 3, 64), mx.bfloat16)] * 2)
    mx.eval(cache.keys, cache.values)
    x = inputs(1, 1, 1, dtype=mx.bfloat16)[0]
    mask = [mx.ones((1, 4), mx.bool_)] if masked else []
    arguments = [x, mx.array([3], mx.int32), mx.array([4], mx.int32), cache, *mask]
    kernels, others = traced(model.layers[3], lambda d: graphs.layer("gqa", d, masked=masked), *arguments)
    assert (len(kernels), others) == (8, ["SliceUpdate", "SliceUpdate"])


@pytest.mark.parametrize(("graph", "kernels"), [("moe_4", 4), ("moe_only", 4)])
def test_moe(model, graph, kernels):
    first = inputs(1, 1, 2, dtype=mx.bfloat16)[0]
    found, others = traced(model.layers[0], getattr(graphs, graph), first, first)
    assert (len(found), others) == (kernels, [])
