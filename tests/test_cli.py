"""The command: what it prints, and that bad input of any kind is one line and exit status 2."""

import json
import re
import shutil
import subprocess
import sys

import attrs
import mlx.core as mx
import pytest
from conftest import make_model

from qfuse import backends, cli
from qfuse.backends.sim import SimBackend
from qfuse.check import layer_ops
from qfuse.show import check_table, to_text


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
    assert "tokens: equal, all 12" in done.stdout
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
        ("another model", "[model] wants model_type qwen3_5_moe or qwen3_5 or qwen3_next, got llama in "),
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
        (("check", "frobnicate"), "[check] wants one of all_sum, expert_down, "),
        (("check", "--backend", "abacus"), "[backend] wants one of reference, "),
        (("check", "--backend", "reference", "--full"), "[backend] wants sim for full checks, got reference"),
        (("check", "--backend", "reference", "--until", "gdn_step"), "[backend] wants one that compiles kernels for"),
        (("check", "--model", "/no/such/folder"), "[model] wants a folder, got /no/such/folder: there is no"),
        (("check", "--until", "nowhere"), "[until] wants one of input_norm, gdn_in_proj, "),
        (("check", "--until", "gdn_step", "--layer", "3"), "[until] wants one of input_norm, gqa_in_proj, "),
        (("check", "--until", "gdn_step", "--layer", "8"), "[layer] wants 0 to 7, got 8"),
        (("check", "--until", "gdn_step", "gdn_step"), "[check] wants ops and samples, or --until, got both"),
        (("check", "--layer", "0"), "[check] wants --layer with --model or --until, got it alone"),
        (("check", "--dtype", "f64"), "Invalid value for '--dtype': "),
        (("check", "--sample", "huge"), "Invalid value for '--sample': "),
        (("serve", "--model", "/no/such/folder"), "[model] wants a folder, got /no/such/folder: there is no such"),
        (("serve", "--what"), "[serve] wants what mlx_lm.server takes, got unrecognized arguments: --what"),
        (("serve", "--port", "x"), "[serve] wants what mlx_lm.server takes, got argument --port: invalid int value"),
        (("serve", "--port", "65536"), "[serve.port] wants 0 to 65535, got 65536"),
        (("serve", "--backend", "abacus"), "[backend] wants one of reference, "),
        (("serve", "--backend", "sim", "--segments"), "[fuse.segments] wants backends that MLX can compile, got sim"),
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


def test_an_op_that_the_checkpoint_has_not_is_one_line(qfuse, checkpoint):
    code, out, err = qfuse("check", "--model", checkpoint, "norm_router")
    assert (code, out) == (2, "")
    assert re.match(r"qfuse: \[check\] wants one of the model's expert_down, .*, got norm_router\n$", err)


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
    code, out, err = qfuse("check", "--backend", "reference", "moe_combine", "rms_norm", "--sample", "all")
    assert (code, err) == (0, "")
    assert re.findall(r"^moe_combine +(\w+) .* pass", out, re.MULTILINE) == ["small", "odd", "production"]
    assert re.search(r"^rms_norm .* MLX's own", out, re.MULTILINE)
    reference = backends.BACKENDS["reference"]
    lower = type(reference).lower
    monkeypatch.setattr(type(reference), "lower", lambda *a: lambda *x: 1.5 * lower(*a)(*x))
    code, out, err = qfuse("check", "--backend", "reference", "moe_combine")
    assert code == 1
    assert re.search(
        r"FAIL moe_combine, small sample: \[moe_combine.out\] at \[.*\] wants \S+, got \S+; error / all", out
    )
    assert err == "qfuse: 1 of 1 failed\n"


def test_check_of_a_checkpoint_takes_each_distinct_op_with_its_own_weights(qfuse, checkpoint, sim):
    code, out, _ = qfuse("check", "--model", checkpoint)
    assert code == 0, out
    rows = dict(re.findall(r"^(\w+) +(\d\S*) .*(?:pass|own)", out, re.MULTILINE))
    assert len(rows) == 14
    assert (rows["gdn_step"], rows["sdpa_partial"], rows["route_swiglu"]) == ("0-2", "3", "0-3")
    code, out, _ = qfuse("check", "--model", checkpoint, "--layer", 3, "--full", "--dtype", "f16", "qk_norm_rope")
    assert code == 0
    assert "f16 on sim, full checks" in out
    assert "qk_norm_rope   3" in out


@pytest.fixture
def wrong_rope(monkeypatch, sim):
    """The simulator with another angle in qk_norm_rope."""
    right = SimBackend.compile

    def changed(self, text):
        if text.name.startswith("qk_norm_rope"):
            text = attrs.evolve(text, name="wrong", source=text.source.replace("(-R / 2)", "(-D / 2)"))
        return right(self, text)

    monkeypatch.setattr(SimBackend, "compile", changed)
    monkeypatch.setitem(backends.BACKENDS, "sim", SimBackend())


def test_check_until_names_the_first_node_that_differs(qfuse, checkpoint, wrong_rope):
    code, out, err = qfuse("check", "--model", checkpoint, "--until", "moe_combine", "--layer", 3)
    assert code == 1
    assert re.search(r"^gqa_in_proj +3 .* pass", out, re.MULTILINE)
    assert re.search(r"^qk_norm_rope +3 .* FAIL", out, re.MULTILINE)
    assert "sdpa_partial" not in out
    assert "FAIL qk_norm_rope in layer 3: [qk_norm_rope.q_rot] at [" in out
    assert err == "qfuse: 1 of 2 failed\n"


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize(("node", "layer"), [("gdn_step", 0), ("sdpa_partial", 3)])
def test_check_until_takes_the_first_layer_with_the_node(qfuse, sim, node, layer, dtype):
    code, out, _ = qfuse("check", "--until", node, "--dtype", dtype)
    assert code == 0, out
    assert re.search(rf"^{node} +{layer} .* pass", out, re.MULTILINE)


def test_check_of_a_checkpoint_says_which_layers_cannot_be_fused(sim):
    model = make_model()
    model.layers[1].linear_attn.out_proj.bias = mx.zeros(256)
    ops, refused = layer_ops(model)
    assert {each.node.op.name: each.layers for each in ops}["gdn_step"] == [0, 2]
    assert {each.node.op.name: each.layers for each in ops}["expert_down"] == [0, 1, 2, 3]
    assert [(each.layers, each.skipped) for each in refused] == [("1", "the mixer: out_proj has a bias")]
    assert "out_proj has a bias" in to_text(check_table(refused, ""))


def test_a_finding_is_a_failure_and_is_counted(qfuse, monkeypatch, sim):
    right = SimBackend.compile

    def racing(self, text):
        source = text.source.replace("threadgroup_barrier(mem_flags::mem_threadgroup);", "")
        return right(self, attrs.evolve(text, name="racing", source=source))

    monkeypatch.setattr(SimBackend, "compile", racing)
    code, out, _ = qfuse("check", "--full", "--dtype", "f32", "o_proj_router")
    assert code == 1
    assert re.search(r"\d, first (race|uninitialised read) .*FAIL", out)
    assert "o_proj_router.metal:" in out


def test_doctor_names_versions_and_why_a_backend_is_not_there(qfuse):
    code, out, _ = qfuse("doctor")
    assert code == 0
    for word in ("qfuse", "mlx-lm", "device", "backend reference", "backend metal"):
        assert word in out
