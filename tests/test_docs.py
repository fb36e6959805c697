"""The examples of README.md and docs/ run as they stand."""

import re
import sys
import types
from pathlib import Path

import mlx.core as mx
import pytest

from qfuse import REGISTRY
from qfuse.backends.sim import SimBackend

ROOT = Path(__file__).parent.parent


def blocks(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text("utf-8"), re.DOTALL)


def test_readme_fuses_a_model(checkpoint, capsys):
    example = blocks("README.md")[0].replace("path/to/qwen3.5-moe", str(checkpoint))
    exec(compile(example, "README.md", "exec"), {})
    assert "4 of 4 layers fused" in capsys.readouterr().out


def test_the_page_on_mlx_lm_fuses_a_batch(checkpoint, capsys):
    (example,) = blocks("docs/mlx-lm.md")
    exec(compile(example.replace("path/to/qwen3.5-moe", str(checkpoint)), "docs/mlx-lm.md", "exec"), {})
    said = capsys.readouterr().out
    assert "4 of 4 layers fused" in said
    assert "pqrstuvw" in said


def test_a_sharded_model_is_fused_with_one_rank(checkpoint, capsys):
    example = blocks("docs/distributed.md")[0].replace("path/to/qwen3.5-moe", str(checkpoint))
    exec(compile(example, "docs/distributed.md", "exec"), {})
    said = capsys.readouterr().out
    assert "4 of 4 layers fused" in said
    assert "moe_5_on_1_ranks" in said.replace("\n", "")


def test_readme_composes_a_layer():
    names = {}
    exec(compile(blocks("README.md")[1], "README.md", "exec"), names)
    assert names["q"].shape == names["k"].shape == (1, 2, 64)


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)", (ROOT / page).read_text("utf-8")):
        assert (ROOT / page).parent.joinpath(target).exists(), target


def test_adding_an_op_has_an_op_that_runs():
    names = {"__name__": "scale_add_example"}
    sys.modules["scale_add_example"] = types.ModuleType("scale_add_example")
    try:
        exec(compile(blocks("docs/adding-an-op.md")[0], "docs/adding-an-op.md", "exec"), names)
        out = names["ScaleAdd"](N=4)(x=mx.ones((2, 4)), b=mx.ones((2, 4)))
        assert mx.array_equal(out, 3 * mx.ones((2, 4)))
    finally:
        REGISTRY.pop("scale_add", None)
        del sys.modules["scale_add_example"]


@pytest.mark.skipif(bool(SimBackend().unavailable()), reason=str(SimBackend().unavailable()))
def test_the_simulator_finds_what_its_page_says(capsys):
    (example,) = blocks("docs/simulator.md")
    exec(compile(example, "docs/simulator.md", "exec"), {})
    said = capsys.readouterr().out
    assert said
    assert said in (ROOT / "docs/simulator.md").read_text("utf-8")
    mended = example.replace("all[i] = x[i];", "all[i] = x[i]; threadgroup_barrier(mem_flags::mem_threadgroup);")
    exec(compile(mended, "docs/simulator.md", "exec"), names := {})
    assert names["reverse"].findings == []
    assert capsys.readouterr().out == ""
