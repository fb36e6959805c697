"""The runner of mlx-lm's own tests, on a source of its own making: what it tells apart, and what it says."""

import subprocess
import sys
from importlib import metadata

import click
import pytest
from upstream import run as runner

from qfuse import load

VERSION = metadata.version("mlx-lm")
TESTS = """\
import unittest
import mlx.core as mx
from mlx_lm.utils import load

HF_MODEL_PATH = "nobody/nothing"

class TestIt(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model, cls.tokenizer = load(HF_MODEL_PATH)

    def test_passes(self):
        self.assertEqual(self.model(mx.array([[1]])).shape, (1, 1, 2048))

    def test_fails(self):
        self.assertEqual(1, 2)

    def test_fused(self):
        self.model(mx.array([[1]]), cache=self.model.make_cache())
        self.assertFalse(any(hasattr(layer, "_qfuse") for layer in self.model.layers))
"""


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    for name, text in {"mlx_lm/_version.py": f"__version__ = {VERSION!r}\n", "tests/test_it.py": TESTS}.items():
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)
    return folder


def test_what_fails_by_upstream_too_is_told_apart(source, tmp_path, capsys):
    options = {"backends": "reference"}
    assert runner.compared(source / "tests", ["test_it.py"], load.DEFAULT, tmp_path, options) == 1
    said = capsys.readouterr().out
    assert "1 passed, 0 skipped, 2 failed fused; 1 unlike upstream" in said
    assert "  upstream too: test_it.py::TestIt::test_fails: failed: AssertionError: 1 != 2\n" in said
    assert "  fused: test_it.py::TestIt::test_fused: failed: AssertionError: True is not false" in said
    assert "  upstream: passed\n" in said
    assert " 14 fused\n" in said


def test_nothing_fused_is_an_error(source, tmp_path):
    with pytest.raises(click.ClickException, match="wants calls that ran fused, got none"):
        runner.compared(source / "tests", ["test_it.py::TestIt::test_passes"], load.DEFAULT, tmp_path, {"mode": 0})


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["test_other"], "[files] wants files of mlx-lm's tests, got test_other.py"),
        (["--options", "[]"], "[options] wants a JSON object, got []"),
    ],
)
def test_bad_arguments(source, args, message):
    with pytest.raises(click.UsageError) as error:
        runner.main(["--from", str(source), *args], standalone_mode=False)
    assert error.value.format_message() == message


@pytest.mark.parametrize("wrong", ["version", "no tests", "no archive"])
def test_a_source_that_is_none(source, tmp_path, wrong):
    message = f"wants the source of mlx-lm {VERSION}, which is installed, got 0.1"
    if wrong == "version":
        (source / "mlx_lm" / "_version.py").write_text("__version__ = '0.1'\n")
    elif wrong == "no tests":
        source, message = tmp_path, "wants mlx-lm's source with its tests, got"
    else:
        source, message = source / "tests" / "test_it.py", "wants a folder or a tar archive, got"
    with pytest.raises(click.UsageError, match=message):
        runner.tests_folder(source, tmp_path / "work")


def test_bad_input_is_one_line_and_status_2(tmp_path):
    done = subprocess.run([sys.executable, runner.__file__, "--from", tmp_path], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, f"[from] wants mlx-lm's source with its tests, got {tmp_path}\n")
