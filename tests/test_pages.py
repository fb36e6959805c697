"""The pages of docs/: their examples run, what is generated is what the code gives, and README's counts are counted."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from qfuse import REGISTRY
from qfuse.cli import cli
from qfuse.picture import Request

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("generate_docs", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_graphs_is_what_the_code_gives(generate):
    assert (DOCS / "graphs.md").read_text("utf-8") == generate.page(), "run python docs/generate.py"


def test_the_pictures_are_of_the_graphs_as_they_are(generate):
    for name, (_, request) in generate.PICTURES.items():
        text = (DOCS / "pictures" / f"{name}.svg").read_text("utf-8")
        assert generate.stamp(request.render("dot").decode()) in text, "run python docs/generate.py"
    assert {path.stem for path in (DOCS / "pictures").iterdir()} == set(generate.PICTURES)


def test_the_readmes_counts_are_counted():
    count = Request().count
    text = (ROOT / "README.md").read_text("utf-8")
    gdn, gqa = count.layers
    for name, vanilla, fused in (
        ("gated delta net + MoE", gdn.modes[0].traced, gdn.modes[2].traced),
        ("gated attention + MoE", gqa.modes[0].traced, gqa.modes[2].traced),
        ("one token of Qwen3.5-35B-A3B", count.dispatches(0), count.dispatches(2)),
    ):
        assert f"| {name} | {vanilla} | {fused} |" in text


def examples():
    for path in sorted(DOCS.glob("*.md")):
        if path.name != "adding-an-op.md":  # which has a test of its own
            for number, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text("utf-8"), re.DOTALL)):
                yield pytest.param(path.name, block, id=f"{path.stem}-{number}")


@pytest.fixture
def dense_mlp(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS / "examples" / "dense-mlp"))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "dense_mlp"]:
        del sys.modules[name]
    for name in ("norm_swiglu", "down_residual"):
        REGISTRY.pop(name, None)


@pytest.mark.parametrize(("page", "block"), list(examples()))
def test_examples_run(page, block, dense_mlp, checkpoint, capsys):
    block = block.replace("path/to/qwen3.5-moe", str(checkpoint))
    exec(compile(block, page, "exec"), {})
    out = capsys.readouterr().out
    for said in re.findall(r"^print\(.*\)  # (\d.*)$", block, re.MULTILINE):
        assert said in out


def test_the_commands_of_getting_started_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = re.findall(r"^qfuse (graph.*?) *(?:#.*)?$", (DOCS / "index.md").read_text("utf-8"), re.MULTILINE)
    assert len(lines) == 6
    for line in lines:
        cli.main(line.split(), standalone_mode=False)
    assert {path.name for path in tmp_path.iterdir()} == {"gdn.svg", "layers.html", "refused.png"}
