"""A short run of tests/bench/soak.py: rows join and leave at random, tokens are mlx-lm's, memory comes back."""

import pytest
from bench import soak

from qfuse import fuse


@pytest.fixture(scope="module")
def model():
    return soak.model()


@pytest.fixture(scope="module")
def wanted(model):
    return soak.soak(model, 60, 20, longest=30)


@pytest.mark.parametrize("options", [{}, {"segments": True}], ids=["layers", "segments"])
def test_sixty_steps(model, wanted, options):
    tokens, samples = wanted
    with fuse(model, backends="reference", **options) as fusion:
        got, ours = soak.soak(model, 60, 20, longest=30)
        report = fusion.report()
    assert got == tokens
    assert sum(map(len, tokens.values())) > 100
    assert max(sample.rows for sample in samples) > 2
    assert report.layers[0].calls["fused"] > 40
    assert not options or report.chain["fused"] == report.layers[0].calls["fused"]
    # Nothing waits behind the caches but the step computed ahead; and no row, no memory.
    assert all(each.waiting <= 8 for each in ours)
    assert ours[-1].active <= samples[-1].active + report.new_bytes + 2**16
