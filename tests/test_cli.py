"""The command: what it prints, and that bad input of any kind is one line and exit status 2."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from qfuse import backends, cli


@pytest.fixture
def qfuse(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["qfuse", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capsys.readouterr()
        return stop.value.code, out, err

    return run


def test_generate_writes_english_and_compares_with_vanilla_end_to_end():
    command = [sys.executable, "-m", "qfuse", "generate", "--compare", "--max-tokens", "12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.match(r"Once upon a time[a-z ,;.'\"-]{20,}", done.stdout, re.IGNORECASE)
    assert "8 of 8 layers fused, mode 2" in done.stdout
    assert re.search(r"tokens: (equal, all 12|.*first)", done.stdout)
    assert "largest logit difference: " in done.stdout
    assert "vanilla mlx-lm" in done.stdout
    assert "Traceback" not in done.stderr


def test_generate_compares_a_model_whose_choices_are_clear(qfuse, checkpoint):
    code, out, _ = qfuse("generate", "--model", checkpoint, "--compare", "--max-tokens", 12)
    assert code == 0
    assert "Once upon a timefghijklmnop" in out
    assert "tokens: equal, all 12" in out


@pytest.mark.parametrize("options", [("--mode", "1"), ("--mode", "0"), ("--moe", "moe_5", "--strict")])
def test_generate_in_every_mode(qfuse, checkpoint, options):
    code, out, _ = qfuse("generate", "--model", checkpoint, "--prompt", "12345", "--max-tokens", 8, *options)
    assert code == 0
    assert "123456789:;<=" in out


def test_generate_says_that_nothing_is_fused_in_mode_0(qfuse, checkpoint):
    _, out, _ = qfuse("generate", "--model", checkpoint, "--mode", 0, "--max-tokens", 2)
    assert "0 of 0 layers fused, mode 0" in out


def damage(folder, kind):
    config = folder / "config.json"
    if kind == "config is not JSON":
        config.write_text("{")
    elif kind == "config is a list":
        config.write_text("[]")
    elif kind == "no config":
        config.unlink()
    elif kind == "another model":
        config.write_text(json.dumps({"model_type": "llama"}))
    elif kind == "a key is missing":
        config.write_text(json.dumps({"model_type": "qwen3_5_moe"}))
    elif kind == "another width":
        config.write_text(config.read_text().replace('"hidden_size": 256', '"hidden_size": 128'))
    elif kind == "a weight file is missing":
        (folder / "model.safetensors").unlink()
    elif kind == "no weight files":
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").unlink()
    elif kind == "a weight file is cut short":
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    elif kind == "no tokenizer":
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer_config.json").unlink()
    elif kind == "a broken tokenizer":
        (folder / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("config is not JSON", "[model] wants JSON in "),
        ("config is a list", "[model] wants an object in "),
        ("no config", "[model] wants config.json, got none in "),
        ("another model", "[model] wants model_type qwen3_5_moe, got llama in "),
        ("a key is missing", "[model] wants a checkpoint that mlx-lm opens, got "),
        ("another width", "[model] wants a checkpoint that mlx-lm opens, got "),
        ("a weight file is missing", "[model] wants 1 weight files, got none called model.safetensors in "),
        ("no weight files", "[model] wants model*.safetensors, got none in "),
        ("a weight file is cut short", "[model] wants a checkpoint that mlx-lm opens, got "),
        ("no tokenizer", "[model] wants a tokenizer, got none in "),
        ("a broken tokenizer", "[model] wants a checkpoint that mlx-lm opens, got "),
    ],
)
def test_a_damaged_checkpoint_is_one_line(qfuse, checkpoint, tmp_path, kind, message):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    damage(folder, kind)
    code, out, err = qfuse("generate", "--model", folder)
    assert (code, out) == (2, "")
    assert err.startswith(f"qfuse: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("generate", "--model", "/no/such/folder"),
            "[model] wants a folder, got /no/such/folder: there is no such folder",
        ),
        (("generate", "--model", "nobody/nothing"), "[model] wants a folder or a hub model already downloaded, got"),
        (("generate", "--model", __file__), "[model] wants a folder, got the file "),
        (("generate", "--model", ""), "[model] wants a folder, got "),
        (("generate", "--backend", "abacus"), "[backend] wants one of reference, "),
        (("generate", "--prompt", ""), "[prompt] wants some text, got nothing"),
        (("generate", "--max-tokens", "0"), "Invalid value for '--max-tokens': 0 is not in the range x>=1."),
        (("generate", "--max-tokens", "many"), "Invalid value for '--max-tokens': "),
        (("generate", "--mode", "3"), "Invalid value for '--mode': "),
        (("generate", "--moe", "moe_6"), "Invalid value for '--moe': "),
        (("generate", "--what"), "No such option '--what'"),
        (("check", "frobnicate"), "[check] wants one of expert_down, "),
        (("check", "--backend", "abacus"), "[backend] wants one of reference, "),
        (("sing",), "No such command 'sing'"),
        (("tiny",), "Missing argument 'FOLDER'"),
        (("tiny", __file__), "[folder] wants a folder, got the file "),
        (("tiny", "/proc/nowhere"), "[Errno 2] "),
    ],
)
def test_bad_input_is_one_line(qfuse, arguments, message):
    code, out, err = qfuse(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"qfuse: {message}")
    assert err.count("\n") == 1


def test_tiny_writes_a_checkpoint_and_overwrites_only_when_told(qfuse, tmp_path):
    folder = tmp_path / "new" / "model"
    code, out, _ = qfuse("tiny", folder)
    assert code == 0
    assert out.startswith(f"wrote {folder}: 5.")
    (folder / "mine.txt").write_text("keep")
    code, _, err = qfuse("tiny", folder)
    assert code == 2
    assert "wants an empty folder or --force" in err
    assert (folder / "mine.txt").read_text() == "keep"
    assert qfuse("tiny", folder, "--force")[0] == 0


def test_check_passes_and_a_wrong_kernel_fails_with_status_1(qfuse, monkeypatch):
    code, out, _ = qfuse("check", "--backend", "reference", "moe_combine", "rms_norm")
    assert code == 0
    assert "pass" in out
    assert "MLX's own kernel" in out
    reference = backends.BACKENDS["reference"]
    lower = type(reference).lower
    monkeypatch.setattr(type(reference), "lower", lambda *a: lambda *x: 1.5 * lower(*a)(*x))
    code, out, err = qfuse("check", "--backend", "reference", "moe_combine")
    assert code == 1
    assert "FAIL [moe_combine.out]" in out
    assert err == "qfuse: 1 ops failed\n"


def test_doctor_names_versions_and_why_a_backend_is_not_there(qfuse):
    code, out, _ = qfuse("doctor")
    assert code == 0
    for word in ("qfuse", "mlx-lm", "device", "backend reference", "backend metal"):
        assert word in out
