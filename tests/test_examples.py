"""docs/examples: a dense MLP composed of two ops from a package of their own, checked as qfuse's own are."""

import re
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from conftest import inputs, rms
from mlx_lm.models.qwen3_next import Qwen3NextMLP

from qfuse import REGISTRY, build
from qfuse.backends import BACKENDS
from qfuse.describe import describe
from qfuse.testing import opcheck, sample

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def package():
    sys.path.insert(0, str(DOCS / "examples" / "dense-mlp"))
    try:
        import dense_mlp

        yield dense_mlp
    finally:
        del sys.path[0]
        for name in [name for name in sys.modules if name.split(".")[0] == "dense_mlp"]:
            del sys.modules[name]
        for name in ("norm_swiglu", "down_residual"):
            REGISTRY.pop(name, None)


def layer(dtype):
    """A norm and an 8-bit MLP as a dense mlx-lm model has them."""
    mx.random.seed(0)
    norm, mlp = nn.RMSNorm(256), Qwen3NextMLP(256, 512)
    for module in (norm, mlp):
        module.set_dtype(dtype)
    norm.weight = 1 + 0.1 * mx.random.normal((256,)).astype(dtype)
    nn.quantize(mlp, 64, 8)
    mx.eval(norm.parameters(), mlp.parameters())
    return norm, mlp


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("name", ["small", "odd"])
@pytest.mark.parametrize("cls", ["NormSwiglu", "DownResidual"])
def test_the_ops_of_another_package_pass_opcheck(package, cls, name, dtype, sim):
    found = opcheck(*sample(getattr(package, cls), name, dtype=dtype), sim)
    assert all(close.ratio <= 1 for close in found.values())


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("backend", ["reference", "sim"])
def test_the_graph_is_the_layer(package, backend, rows):
    if reason := BACKENDS[backend].unavailable():
        pytest.skip(reason)
    norm, mlp = layer(mx.float32)
    arrays, dims = package.weights(norm, mlp)
    plan = build(package.dense_mlp(dims), arrays, (backend,))
    assert plan.backends() == {backend: 2}
    h = inputs(1, 1, rows)[0]
    (out,) = plan.run(h)
    assert rms(out - (h + mlp(norm(h)))) < 1e-5 * rms(out)


def test_two_dispatches_where_mlx_has_six(package):
    norm, mlp = layer(mx.bfloat16)
    arrays, dims = package.weights(norm, mlp)
    plan = build(package.dense_mlp(dims), arrays, ("metal",))
    kernels = [primitive.kernel for primitive in plan.trace(inputs(1, 1, 1, dtype=mx.bfloat16)[0]) if primitive.kernel]
    assert [re.match(r"custom_kernel_([a-z_]+)_", name)[1] for name in kernels] == ["norm_swiglu", "down_residual"]
    shown = describe(plan, {"B": 1, "T": "bf16"}, arrays)
    assert shown.dispatches == 2
    assert shown.bytes > sum(array.nbytes for array in arrays.values())


def test_the_page_shows_the_package_as_it_is():
    page = (DOCS / "composing.md").read_text("utf-8")
    files = {path.name: path.read_text("utf-8") for path in (DOCS / "examples").rglob("*.*") if path.is_file()}
    shown = re.findall(r"```(?:python|metal) title=\"(\w+\.\w+)\"\n(.*?)```", page, re.DOTALL)
    assert {name for name, _ in shown} >= {"norm_swiglu.py", "norm_swiglu.metal", "graph.py"}
    for name, text in shown:
        assert text.strip() in files[name], name
