"""The benchmarks, held to what no machine should fall below, and that ``qfuse bench`` measures what it says."""

import json

import mlx.core as mx
import pytest
from bench import executor, routing, simulator

from qfuse import bench, cli
from qfuse.backends.sim import SimBackend
from qfuse.configs import CONFIGS
from qfuse.fuse import is_fused


def test_building_a_tokens_graph_costs_python_no_more_than_vanilla():
    assert executor.measure(rounds=20)["ratio"] <= 1.0


def test_only_near_ties_are_routed_otherwise_than_in_f32():
    found = routing.measure(layers=1, rows=256)
    for name in ("upstream", "moe_4", "moe_5"):
        assert found[name]["differ"] < 0.1
        assert found[name]["gap"] < found["any"]["gap"]
    assert found["moe_4"]["differ"] <= found["upstream"]["differ"]


@pytest.mark.skipif(bool(SimBackend().unavailable()), reason=str(SimBackend().unavailable()))
def test_the_simulator_is_fast_enough_for_a_whole_suite():
    assert simulator.measure(rounds=5) >= 1e5  # about 6e5 on an idle machine


@pytest.fixture(scope="module")
def both():
    return bench.Bench(bench.random_model(CONFIGS["tiny"], bits=4), ("reference",))


def test_both_models_share_every_array():
    model = bench.random_model(CONFIGS["tiny"])
    size, before = sum(x.nbytes for _, x in bench.tree_flatten(model.parameters())), mx.get_active_memory()
    two = bench.Bench(model, ("reference",))
    mx.eval(two.fused.parameters())
    new = mx.get_active_memory() - before - two.fusion.report().new_bytes
    assert new < 0.05 * size
    assert two.fused is not two.vanilla
    assert not is_fused(two.vanilla.language_model.model.layers[0])


def test_random_weights_are_of_the_size_of_real_ones(both):
    layer = both.vanilla.language_model.model.layers[0]
    for module, gain in ((layer.mlp.switch_mlp.gate_proj, 1), (layer.mlp.gate, 4)):
        w = mx.dequantize(module.weight, module.scales, module.biases, module.group_size, module.bits)
        wanted = gain * w.shape[-1] ** -0.5
        assert w.astype(mx.float32).var().sqrt().item() == pytest.approx(wanted, rel=0.15)


def test_filled_caches_are_new_each_time_and_stand_at_the_context(both):
    fresh = bench.filled_caches(both.vanilla, 2, 300)
    one, two = fresh(), fresh()
    both.vanilla(mx.array([[1], [2]]), cache=one)
    attention = [c for c in zip(one, two, strict=True) if hasattr(c[0], "keys")]
    assert [(a.offset, b.offset, b.keys.shape[2]) for a, b in attention] == [(301, 300, 512)]
    assert mx.abs(attention[0][1].keys[..., 300:, :]).max().item() > 0  # the other's update is not seen here


def test_traffic_counts_the_chosen_experts_and_the_used_keys(both):
    rows = {row["op"]: row for row in both.ops(1, 64)}
    E, k, H, I = 8, 2, 256, 128
    expert = 2 * I * H // 2 + 4 * I * H // 64 * 2
    shared = expert + H + 4 * H // 64
    rest = 2 * H + 4 * H // 32 + 4 * E + 4 * (k + 1) * I + 8 * k + 4
    assert rows["route_swiglu"]["mb"] == pytest.approx((k * expert + shared + rest) / 1e6, rel=0.02)
    assert rows["sdpa_partial"]["mb"] < 0.11 < 2 * 2 * 2 * 256 * 64 / 1e6


def test_the_command_prints_a_table_and_keeps_the_numbers(monkeypatch, capsys, tmp_path):
    out = tmp_path / "results" / "cpu.json"
    command = ["qfuse", "bench", "--config", "tiny", "--backend", "reference", "--out", str(out), "--rounds", "1"]
    for more in (["--steps", "2", "--prefill", "3"], ["--steps", "2"], ["--steps", "2", "--segments"], ["--ops"]):
        monkeypatch.setattr("sys.argv", command + more)
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 0
    found = json.loads(out.read_text())
    assert [(row["what"], row["context"], row["lowering"]) for row in found["rows"]] == [
        ("prefill", 3, "reference"),
        ("decode", 64, "reference"),
        ("decode", 64, "reference, segments"),
    ]
    assert found["rows"][1]["vanilla_ms"] / found["rows"][1]["fused_ms"] == pytest.approx(
        found["rows"][1]["ratio"], 1e-3
    )
    assert len(found["ops"]) == 13
    assert {each["date"] for each in (*found["rows"], *found["ops"])} == {found["date"]}
    said = capsys.readouterr()
    assert "decode 8-bit B 1 N 64" in said.out
    assert "decode, batch 1, context 64: round 1 of 1, fused" in said.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "huge"], "'huge' is not one of"),
        (["--config", "tiny", "--model", "x"], "[bench] wants --config or --model, got both"),
        (["--model", "x", "--bits", "4"], "[bench.bits] wants a --config, got a --model"),
        (["--model", "/nowhere"], "[model] wants a folder, got /nowhere"),
        (["--backend", "none"], "[backend] wants one of"),
    ],
)
def test_wrong_options_are_one_line_and_status_2(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr("sys.argv", ["qfuse", "bench", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
