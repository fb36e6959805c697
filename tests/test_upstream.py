"""The guard against an mlx-lm that computes something else than the references do."""

import pytest
from conftest import make_model
from mlx_lm.models import gated_delta, qwen3_next

from qfuse import RefusedError, fuse, upstream
from qfuse.fuse import is_fused


@pytest.fixture
def fresh():
    upstream.moved.cache_clear()
    yield
    upstream.moved.cache_clear()


def test_the_installed_one_is_known(fresh):
    assert upstream.moved() is None


def test_another_body_is_refused_with_both_versions(fresh, monkeypatch):
    def __call__(self, x, mask=None, cache=None):
        return x

    monkeypatch.setattr(qwen3_next.Qwen3NextAttention, "__call__", __call__)
    monkeypatch.delattr(gated_delta, "compute_g")
    model = make_model()
    wanted = (
        r"^\[fuse\] wants Qwen3NextAttention.__call__, compute_g as in mlx-lm 0.32.2, "
        r"got another in mlx-lm [\d.]+ on mlx [\d.]+; check_upstream=False fuses all the same$"
    )
    with pytest.raises(RefusedError, match=wanted):
        fuse(model, backends="reference")
    assert not any(is_fused(layer) for layer in model.layers)
    with fuse(model, backends="reference", check_upstream=False):
        assert all(is_fused(layer) for layer in model.layers)


def test_spacing_is_no_difference(fresh, monkeypatch):
    before = upstream.digest("mlx_lm.models.qwen3_next:Qwen3NextMLP.__call__")
    source = upstream.inspect.getsource
    monkeypatch.setattr(upstream.inspect, "getsource", lambda found: source(found).replace(",", " ,\n"))
    assert upstream.digest("mlx_lm.models.qwen3_next:Qwen3NextMLP.__call__") == before
