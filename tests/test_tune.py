"""Tuned schedules: the search, the file, and that a plan uses what is in it and nothing that has changed since."""

import pytest

from qfuse import REGISTRY, backends, bench, cli, tune
from qfuse.backends.kernel import Lowered
from qfuse.backends.metal import MetalBackend
from qfuse.configs import CONFIGS
from qfuse.op import Schedule
from qfuse.testing import sample


@pytest.fixture(autouse=True)
def empty(monkeypatch, tmp_path):
    monkeypatch.setenv("QFUSE_CACHE_DIR", str(tmp_path))


def test_the_search_finds_the_fastest_that_runs():
    def seconds(s):
        if s.rows == 8:
            return None  # it would be the fastest
        return 1 / s.rows + (s.simdgroups - 4) ** 2 + (s.take - 16) ** 2 + abs(s.cap - 528)

    spent = tune.search(Schedule(), str, seconds)
    assert min(spent, key=spent.__getitem__) == Schedule(rows=4, simdgroups=4, take=16, cap=528)
    assert Schedule() in spent
    assert not any(s.rows == 8 for s in spent)


def test_a_field_that_a_text_does_not_mention_is_not_searched():
    tried = tune.search(Schedule(), lambda s: f"simdgroups={s.simdgroups}", lambda s: float(s.simdgroups))
    assert {(s.rows, s.take) for s in tried} == {(4, 8)}


def test_a_declared_schedule_that_is_wrong_is_an_error():
    with pytest.raises(RuntimeError, match=r"^\[tune\] wants a declared schedule that runs, got Schedule"):
        tune.search(Schedule(), str, lambda s: None)


def prepared(**dims):
    op, arguments = sample(REGISTRY["gqa_in_proj"], "small", **dims)
    lowered = Lowered(MetalBackend(), op, {name: arguments[name] for name in op.weights()})
    inputs = [arguments[name] for name in op.inputs()]
    return lowered.prepare(*inputs), lowered.text(op.schedule("metal"), *inputs).name


def test_a_kept_schedule_is_used_for_its_text_and_no_other():
    before, text = prepared()
    tune.keep("metal", {text: Schedule(rows=2, simdgroups=8, cap=3)})
    assert prepared()[0].threadgroup == (256, 1, 1)
    assert prepared()[0].grid == (3 * 256, 1, 1)
    assert prepared(B=3)[0].threadgroup == before.threadgroup
    assert tune.best("cuda", text) is None
    tune.keep("metal", {"another": Schedule()})
    assert tune.best("metal", text) == Schedule(rows=2, simdgroups=8, cap=3)


def test_a_schedule_of_another_device_or_version_is_not_used(monkeypatch):
    tune.keep("metal", {"text": Schedule(rows=2)})
    monkeypatch.setattr(tune, "device", lambda: "another")
    assert tune.best("metal", "text") is None


def test_a_broken_file_is_said_to_be():
    tune.path().write_text("{")
    with pytest.raises(ValueError, match=r"^\[schedules\] wants JSON in .*schedules.json, got"):
        tune.best("metal", "text")


def test_the_kernels_of_a_model_are_measured_and_its_plans_use_the_best(sim, monkeypatch):
    monkeypatch.setattr(tune, "search", lambda start, text, measure: {start: measure(start), Schedule(cap=1): 0.0})
    both = bench.Bench(bench.random_model(CONFIGS["tiny"]), (sim,))
    found = both.uses(1, 8)
    few = {name: found[name] for name in ("rms_norm", "gdn_gated_norm", "moe_combine") if name in found}
    monkeypatch.setattr(both, "uses", lambda *_: few)
    rows = bench.tune_ops(both, backends.get(sim), 1, 8)
    assert [(row["op"], row["tried"]) for row in rows] == [("gdn_gated_norm", 2), ("moe_combine", 2)]
    assert [row["op"] for row in bench.tune_ops(both, backends.get(sim), 1, 8, ["moe_combine"])] == ["moe_combine"]
    assert all(tune.best(sim, row["text"]) == Schedule(cap=1) for row in rows)
    use = few["moe_combine"][0]
    assert Lowered(backends.get(sim), use.op, {}).prepare(*use.given.values()).grid == (64, 1, 1)


def test_a_fast_schedule_that_is_wrong_is_not_kept(sim, monkeypatch):
    monkeypatch.setattr(tune, "search", lambda start, text, measure: {start: 1.0, Schedule(rows=2): 0.0})
    both = bench.Bench(bench.random_model(CONFIGS["tiny"]), (sim,))

    def disagree(*_):
        raise AssertionError("it disagrees")

    monkeypatch.setattr(bench, "compare", disagree)
    (row,) = bench.tune_ops(both, backends.get(sim), 1, 8, ["moe_combine"])
    assert row["best"] == row["declared"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "none"], "[tune.op] wants one of"),
        (["--backend", "reference"], "[tune.backend] wants one that compiles kernels, got reference"),
        (["--backend", "none"], "[backend] wants one of"),
        (["--batch", "0"], "0 is not in the range"),
    ],
)
def test_wrong_options_are_one_line_and_status_2(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr("sys.argv", ["qfuse", "tune", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
