"""The measurements of tests/bench, held to what no machine should fall below."""

import pytest
from bench import executor, simulator

from qfuse.backends.sim import SimBackend


def test_building_a_tokens_graph_costs_python_no_more_than_vanilla():
    assert executor.measure(rounds=20)["ratio"] <= 1.0


@pytest.mark.skipif(bool(SimBackend().unavailable()), reason=str(SimBackend().unavailable()))
def test_the_simulator_is_fast_enough_for_a_whole_suite():
    assert simulator.measure(rounds=5) >= 1e5  # about 6e5 on an idle machine
