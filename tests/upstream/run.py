"""mlx-lm's own tests, of the installed version, with every model of the families that are fused run fused.

    python tests/upstream/run.py [--from PATH] [TEST_FILE ...]

The tests come from mlx-lm's source release at the installed version, by pip, or from a checkout or an archive of it.
The checkpoint that they download is replaced by two: the package's trained model, and one of the same shape with
attention alone, whose caches can be trimmed. A test that fails fused is run again on the same model by upstream alone;
if it fails there too, and with the same message, it is not a matter of fusing. Exit status 1 if one differs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import attrs
import click
import mlx.core as mx
from mlx_lm import utils

import qfuse
from qfuse import load, models, tiny

FILES = ("test_models", "test_gated_delta", "test_prompt_cache", "test_generate", "test_server")
HERE = Path(__file__).parents[1]
# Plain turns; the trained model has none of its own.
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@attrs.frozen
class Outcome:
    """Results of one run by test id: ``passed``, ``failed`` or ``skipped``, and why."""

    results: dict[str, tuple[str, str]]
    calls: dict[str, int]

    def named(self, result: str) -> list[str]:
        return [name for name, (got, _) in self.results.items() if got == result]


def tests_folder(source: Path | None, work: Path) -> Path:
    """The folder of mlx-lm's tests. Raises click.UsageError on a source without them or of another version."""
    version = metadata.version("mlx-lm")
    if source is None:
        wanted = ["--no-deps", "--no-binary", "mlx-lm", f"mlx-lm=={version}"]
        if subprocess.run([sys.executable, "-m", "pip", "download", "-q", "-d", str(work), *wanted]).returncode:
            raise click.UsageError(f"[from] wants mlx-lm {version} from pip or a PATH, got neither")
        (source,) = work.glob("mlx_lm-*.tar.gz")
    if source.is_file():
        try:
            with tarfile.open(source) as archive:
                archive.extractall(work / "source", filter="data")
        except tarfile.TarError as error:
            raise click.UsageError(f"[from] wants a folder or a tar archive, got {source}: {error}") from error
        source = next((work / "source").iterdir(), work / "source")
    stated = source / "mlx_lm" / "_version.py"
    if not (source / "tests").is_dir() or not stated.is_file():
        raise click.UsageError(f"[from] wants mlx-lm's source with its tests, got {source}")
    found = stated.read_text("utf-8").split("__version__ = ")[1].strip().strip("'\"")
    if found != version:
        raise click.UsageError(f"[from] wants the source of mlx-lm {version}, which is installed, got {found}")
    return source / "tests"


def write_models(work: Path) -> dict[str, Path]:
    """The two checkpoints that stand for the hub's, by what the table calls them."""
    trained, attention = work / "trained", work / "attention"
    shutil.copytree(load.DEFAULT, trained)
    settings = json.loads((trained / "tokenizer_config.json").read_text("utf-8")) | {"chat_template": TEMPLATE}
    (trained / "tokenizer_config.json").write_text(json.dumps(settings))
    give_token_0_a_text(trained)
    shutil.copytree(trained, attention, ignore=shutil.ignore_patterns("model*", "config.json"))
    config = json.loads((trained / "config.json").read_text("utf-8"))
    config = {name: value for name, value in config.items() if not name.startswith("quantization")}
    text = config.get("text_config", config)
    text |= {"full_attention_interval": 1, "num_hidden_layers": 2}
    text.pop("layer_types", None)
    model = models.new_model(config)
    tiny.randomise(model, 0)
    mx.eval(model.parameters())
    utils.save_model(attention, model)
    utils.save_config(config, attention / "config.json")
    return {"gated delta net and attention, trained": trained, "attention alone, random": attention}


def give_token_0_a_text(checkpoint: Path) -> None:
    """Exchange the tokens "!" and end of text, as some tests want the answer "!!!!!" of token 0."""
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text("utf-8"))
    vocab, (end,) = tokenizer["model"]["vocab"], tokenizer["added_tokens"]
    end["id"] = vocab[end["content"]] = vocab["!"]
    vocab["!"] = 0
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    utils.save_config(config | {"eos_token_id": end["id"]}, checkpoint / "config.json")


def run(tests: Path, names: list[str], model: Path, work: Path, fused: bool, options: dict[str, Any]) -> Outcome:
    """Run some files or test ids in a process of its own."""
    xml, report = work / "results.xml", work / "report.json"
    for left in (xml, report):
        left.unlink(missing_ok=True)
    # The plugin's folder, and the qfuse that runs here, wherever the tests are.
    path = [HERE, Path(qfuse.__file__).parents[1], *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "HF_HUB_OFFLINE": "1",
        "QFUSE_UPSTREAM_MODEL": str(model),
        "QFUSE_UPSTREAM_OPTIONS": json.dumps(options),
    }
    if fused:
        environment["QFUSE_UPSTREAM_REPORT"] = str(report)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "upstream.plugin", "-p", "no:cacheprovider"]
    command += ["--rootdir", str(tests), "-o", "faulthandler_timeout=300", f"--junitxml={xml}", *names]
    done = subprocess.run(command, cwd=tests, env=environment, capture_output=True, text=True)
    if not xml.is_file():
        raise click.ClickException(f"[pytest] wants to end by itself, got {done.returncode}:\n{done.stdout[-4000:]}")
    results = {}
    for case in ElementTree.parse(xml).iter("testcase"):
        file, _, cls = case.attrib["classname"].rpartition(".")
        name = f"{file or cls}.py::{cls + '::' if file else ''}{case.attrib['name']}"
        why = next((e for e in case if e.tag in ("failure", "error", "skipped")), None)
        result = "passed" if why is None else "skipped" if why.tag == "skipped" else "failed"
        reason = "" if why is None else re.sub(r"0x[0-9a-f]+", "0x", why.attrib.get("message", ""))
        results[name] = result, reason
    return Outcome(results, json.loads(report.read_text("utf-8")) if fused else {})


def compared(tests: Path, names: list[str], model: Path, work: Path, options: dict[str, Any]) -> int:
    """Run fused, what fails again by upstream alone, and print both. How many tests differ."""
    fused = run(tests, names, model, work, True, options)
    failed = fused.named("failed")
    alone = run(tests, failed, model, work, False, {}) if failed else Outcome({}, {})
    ours = [name for name in failed if fused.results[name] != alone.results[name]]
    counts = {result: len(fused.named(result)) for result in ("passed", "skipped", "failed")}
    print(", ".join(f"{n} {result}" for result, n in counts.items()), f"fused; {len(ours)} unlike upstream")
    for name in failed:
        print(f"  {'fused' if name in ours else 'upstream too'}: {name}: {_line(fused.results[name])}")
        if name in ours:
            print(f"  upstream: {_line(alone.results[name])}")
    for name, n in sorted(fused.calls.items(), key=lambda item: -item[1]):
        print(f"  {n:6} {name}")
    if not fused.calls.get("fused"):
        raise click.ClickException("[upstream] wants calls that ran fused, got none")
    return len(ours)


def _file(tests: Path, name: str) -> Path:
    return tests / name.partition("::")[0]


def _line(result: tuple[str, str]) -> str:
    return f"{result[0]}: {' '.join(result[1].split())[:120]}" if result[1] else result[0]


@click.command()
@click.argument("files", nargs=-1)
@click.option("--from", "source", type=click.Path(exists=True, path_type=Path), help="mlx-lm's source, or its archive.")
@click.option("--options", default="{}", help="More arguments for fuse(), as JSON.")
def main(files: tuple[str, ...], source: Path | None, options: str) -> None:
    """Run FILES of mlx-lm's tests fused, by default those for models, caches, generation and the server."""
    try:
        more = {"backends": "reference"} | json.loads(options)
    except (ValueError, TypeError) as error:
        raise click.UsageError(f"[options] wants a JSON object, got {options}") from error
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        tests = tests_folder(source, work)
        names = [name if name.endswith(".py") or "::" in name else f"{name}.py" for name in files or FILES]
        if missing := [name for name in names if not _file(tests, name).is_file()]:
            raise click.UsageError(f"[files] wants files of mlx-lm's tests, got {', '.join(missing)}")
        print(f"mlx-lm {metadata.version('mlx-lm')}, mlx {metadata.version('mlx')}: {', '.join(names)}")
        failed = 0
        for i, (title, model) in enumerate(write_models(work).items()):
            # Files that load no checkpoint make the same models whatever stands for it.
            again = [name for name in names if i == 0 or "HF_MODEL_PATH" in _file(tests, name).read_text("utf-8")]
            print(f"{title}: {', '.join(again)}", flush=True)
            failed += compared(tests, again, model, work, more) if again else 0
    sys.exit(failed > 0)


if __name__ == "__main__":
    try:
        main(standalone_mode=False)
    except click.UsageError as error:
        print(error.format_message(), file=sys.stderr)
        sys.exit(2)
