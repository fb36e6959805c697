"""Models spread over processes that mlx.launch starts, over the ring backend on loopback; see ranks.py."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import ranks

LAUNCH = Path(sys.executable).with_name("mlx.launch")
TESTS = Path(__file__).parent
RUNS = {2: list(ranks.SCENARIOS), 4: ["sharded", "pipelined"]}
SECONDS = 240
ONCE, FUSED = {"prefill, S > 1": 1}, {"fused": ranks.STEPS + 1}


def free_ports(count):
    """The first of so many free ports in a row."""
    for start in range(30000 + os.getpid() % 9000, 60000, count):
        held = []
        try:
            for port in range(start, start + count):
                held.append(socket.socket())
                held[-1].bind(("127.0.0.1", port))
        except OSError:
            continue
        else:
            return start
        finally:
            for each in held:
                each.close()
    raise AssertionError("no free ports")


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """What every rank of so many wrote; each number of ranks is started once."""

    @cache
    def run(size):
        folder = tmp_path_factory.mktemp(f"ranks{size}")
        start = ["-n", str(size), "--backend", "ring", "--starting-port", str(free_ports(size))]
        command = [str(LAUNCH), *start, sys.executable, str(TESTS / "ranks.py"), str(folder), *RUNS[size]]
        path = os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
        done = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = done.communicate(timeout=SECONDS)
        finally:  # the launcher and its ranks share a process group
            with contextlib.suppress(ProcessLookupError):
                os.killpg(done.pid, signal.SIGKILL)
        assert done.returncode == 0, said
        files = [folder / f"{rank}.json" for rank in range(size)]
        assert all(file.is_file() for file in files), said
        return [json.loads(file.read_text()) for file in files]

    return run


@pytest.fixture(params=[(size, name) for size, names in RUNS.items() for name in names], ids=lambda p: f"{p[0]}-{p[1]}")
def found(request, launched):
    """Number of ranks, scenario, and what each rank found."""
    size, name = request.param
    return size, name, [each[name] for each in launched(size)]


def graphs(size, name, rank):
    """Index and graph of each layer that a rank has to report."""
    over = f"_on_{size}_ranks"
    if "sharded" in name or "tensor" in name:
        parts = ["gdn_layer_moe_5", "gqa_layer_moe_5"]
        if name == "sharded, mode 1" or (name == "sharded, a mode a rank" and rank == 0):
            parts = ["moe_only"] * 2
        elif name == "sharded, dense":
            parts = ["gdn_mixer_layer", "gqa_mixer_layer"]
        return list(enumerate(f"{part}{over}" for part in parts))
    whole = ["gdn_layer"] * 3 + ["gqa_layer"]
    share = 4 // size
    start = share * (rank if "exo" in name else size - 1 - rank)  # mlx-lm gives the last layers to the first rank
    first = 0 if "exo" in name else start  # exo does not keep which layers it took
    return [(first + i, whole[start + i]) for i in range(share)]


@cache
def alone(name):
    """What a scenario's model gives whole, vanilla and in this process."""
    return ranks.generated(ranks.model_of(ranks.SCENARIOS[name][0]))


def test_tokens_are_those_of_one_process(found):
    _, name, each = found
    tokens, logprobs = alone(name)
    for rank in each:
        assert rank["tokens"] == tokens
        assert rank["logprobs"] == pytest.approx(logprobs, abs=5e-5)


def test_the_report_of_each_rank_names_its_own_layers_and_calls(found):
    size, name, each = found
    for number, rank in enumerate(each):
        expected = [[index, graph, "", ONCE | FUSED] for index, graph in graphs(size, name, number)]
        assert rank["layers"] == expected


def test_segments_reach_across_sharded_layers_and_not_across_machines(launched):
    for rank in launched(2):
        assert rank["sharded, segments"]["chain"] == ONCE | FUSED
        reason = "the layers are spread over machines"
        assert rank["pipelined, segments"]["chain"] == ONCE | {reason: FUSED["fused"]}
