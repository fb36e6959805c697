"""The executor's own cost, as tests/bench/executor.py measures it."""

from bench import executor


def test_building_a_tokens_graph_costs_python_no_more_than_vanilla():
    assert executor.measure(rounds=20)["ratio"] <= 1.0
