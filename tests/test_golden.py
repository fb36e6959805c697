"""Logits of transformers on torch, f32, held against the same checkpoint converted by mlx-lm and fused.

tests/golden/make.py made them; nothing here needs torch.
"""

import attrs
import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from golden import checkpoint
from mlx_lm.models.cache import make_prompt_cache

from qfuse import fuse
from qfuse.ops import GDNGatedNorm, GDNQKNorm, QKNormRope, RMSNorm, RouteSwiglu

TOLERANCE = 1e-4  # of the largest logit, for the largest difference


@pytest.fixture(scope="module")
def golden():
    return np.load(checkpoint.GOLDEN)


@pytest.fixture(scope="module")
def folder(golden, tmp_path_factory):
    """The checkpoint as mlx_lm.convert writes it."""
    work = tmp_path_factory.mktemp("golden")
    drawn = checkpoint.weights()
    assert checkpoint.digest(drawn) == golden["weights"], "the weights are not those of the golden logits"
    checkpoint.write(work / "published", drawn)
    mlx_lm.convert(str(work / "published"), str(work / "mlx"), dtype="float32")
    return work / "mlx"


@pytest.fixture
def model(folder):
    return mlx_lm.load(str(folder))[0]


def run(model, prompt):
    """Logits of every token: ``prompt`` of them at once, the others a step each."""
    tokens, cache, outs = mx.array(checkpoint.tokens())[None], make_prompt_cache(model), []
    starts = range(prompt, tokens.shape[1])
    for part in (tokens[:, :prompt], *(tokens[:, t : t + 1] for t in starts)):
        outs.append(model(part, cache=cache)[0])
        mx.eval(outs[-1])
    return np.array(mx.concatenate(outs))


def difference(logits, golden):
    """max |a - b| / max |b| over all tokens and the whole vocabulary, b being transformers'."""
    expected = golden["logits"]
    assert logits.dtype == np.float32
    assert logits.shape == expected.shape
    return np.abs(logits - expected).max() / np.abs(expected).max()


def test_upstream(model, golden):
    assert difference(run(model, checkpoint.PROMPT), golden) < TOLERANCE


@pytest.mark.parametrize("options", [{"moe": "moe_4"}, {"moe": "moe_5"}, {"mode": 1}, {"segments": True}], ids=str)
@pytest.mark.parametrize("prompt", [checkpoint.PROMPT, 1], ids=["prompt and steps", "steps alone"])
def test_fused(model, golden, options, prompt):
    with fuse(model, backends="reference", strict=True, **options) as fusion:
        assert difference(run(model, prompt), golden) < TOLERANCE
        steps = checkpoint.PROMPT + checkpoint.STEPS - prompt
        assert all(layer.calls["fused"] >= steps for layer in fusion.report().layers)


@pytest.mark.parametrize(
    ("op", "wrong"),
    [
        (RMSNorm, {"eps": 1e-6}),
        (GDNQKNorm, {"l2_eps": 64e-6}),  # as if it were added to the mean of the squares
        (GDNGatedNorm, {"eps": 1e-6}),
        (QKNormRope, {"eps": 1e-6}),
        (QKNormRope, {"theta": 1.01e4}),
        (RouteSwiglu, {"eps": 1e-6}),
        (RouteSwiglu, {"norm_topk": False}),
    ],
    ids=str,
)
def test_a_wrong_constant_shows(model, golden, monkeypatch, op, wrong):
    right = op.reference
    monkeypatch.setattr(op, "reference", lambda self, *args, **kw: right(attrs.evolve(self, **wrong), *args, **kw))
    with fuse(model, backends="reference", strict=True):
        assert difference(run(model, 1), golden) > 2 * TOLERANCE
