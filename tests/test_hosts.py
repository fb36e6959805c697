"""Programs that load models: the examples of docs/hosts.md, with stand-ins of the form that their classes have."""

import re
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from conftest import make_model, rms
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_5
from test_docs import blocks
from test_exo import decoded

from qfuse import RefusedError, fuse, models, tiny, upstream
from qfuse.fuse import is_fused


class OwnLayer(nn.Module):
    """A layer with mlx-lm's parameters in a class that is another's, as all of mlx-vlm's are."""

    def __init__(self, layer):
        super().__init__()
        dict.update(self, layer)


def example(name):
    (code,) = [block for block in blocks("docs/hosts.md") if f"def {name}(" in block]
    exec(compile(code, "docs/hosts.md", "exec"), names := {})
    return names[name]


@pytest.fixture
def language_model():
    """A language model of mlx-vlm's form: parameters as mlx-lm's text model has them, layers of another class."""
    model = make_model()
    text = model.language_model
    expected = decoded(text)
    text.model.layers = [OwnLayer(layer) for layer in text.model.layers]
    return SimpleNamespace(model=text, expected=expected)


def test_layers_of_mlx_vlm_are_refused_by_name(language_model):
    language_model.model.model_type = "qwen3_5_moe"
    with pytest.raises(RefusedError, match=r"or qwen3_next, got qwen3_5_moe with layers of test_hosts\.OwnLayer$"):
        fuse(language_model.model)


def test_a_text_model_of_mlx_lm_over_the_arrays_of_mlx_vlm(language_model):
    source = language_model.model
    text, fusion = example("fused_text")(source, tiny.CONFIG)
    own = {id(array) for _, array in tree_flatten(source.parameters())}
    assert all(id(array) in own for _, array in tree_flatten(text.parameters()))
    expected = language_model.expected
    assert rms(decoded(text) - expected) < 2e-5 * rms(expected)
    assert fusion.report().fused == 4
    assert fusion.report().layers[0].calls["fused"] == 4


class PatchedLayer(qwen3_5.DecoderLayer):
    """As mlx-engine's: with positions in its own way, here one that is easy to tell, and without them as its base."""

    def __call__(self, x, mask=None, cache=None, position_ids=None):
        out = super().__call__(x, mask, cache)
        return out if position_ids is None else -out


class PatchedText(qwen3_5.Qwen3_5TextModel):
    """Hands every layer the positions that were set before."""

    def __call__(self, inputs, cache=None, input_embeddings=None):
        x = self.embed_tokens(inputs)
        for layer, held in zip(self.layers, cache, strict=True):
            mask = "causal" if x.shape[1] > 1 and not layer.is_linear else None
            x = layer(x, mask=mask, cache=held, position_ids=self.position_ids)
        return self.norm(x)


@pytest.fixture
def kit():
    model = make_model()
    text = model.language_model.model
    text.__class__, text.position_ids = PatchedText, None
    for layer in text.layers:
        layer.__class__ = PatchedLayer
    return SimpleNamespace(model=model)


def test_layers_with_a_call_of_their_own_are_refused_unless_someone_answers_for_them(kit):
    with fuse(kit.model, backends="reference") as fusion:
        reasons = {layer.reason for layer in fusion.report().layers}
        assert reasons == {"PatchedLayer has a __call__ of its own, from test_hosts"}
        assert fusion.report().fused == 0
    with pytest.raises(RefusedError, match=r"\[layers\.0\] .* PatchedLayer has a __call__ of its own"):
        fuse(kit.model, backends="reference", strict=True)


def test_classes_put_in_place_of_mlx_lms_are_seen(monkeypatch):
    monkeypatch.setattr(qwen3_5, "DecoderLayer", PatchedLayer)
    monkeypatch.setattr(qwen3_5, "Qwen3_5TextModel", PatchedText)
    moved = upstream.moved.__wrapped__()
    assert moved.startswith("wants Qwen3_5TextModel.__call__, DecoderLayer.__call__ as in mlx-lm ")


def test_a_kit_of_mlx_engine(kit):
    expected = decoded(kit.model)
    with example("fused_kit")(kit) as fusion:
        assert rms(decoded(kit.model) - expected) < 2e-5 * rms(expected)
        assert {tuple(layer.calls.items()) for layer in fusion.report().layers} == {
            (("prefill, S > 1", 1), ("fused", 4))
        }
    assert all(type(layer) is PatchedLayer for layer in kit.model.layers)


def test_a_step_with_positions_is_the_layers_own(kit):
    kit.model.language_model.model.position_ids = mx.zeros((3, 1, 1))
    expected = decoded(kit.model)
    with fuse(kit.model, backends="reference", check_upstream=False) as fusion:
        assert mx.array_equal(decoded(kit.model), expected)
        assert all(layer.calls == {"called with position_ids": 5} for layer in fusion.report().layers)
    with (
        fuse(kit.model, backends="reference", check_upstream=False, strict=True),
        pytest.raises(RefusedError, match="got one refused: called with position_ids"),
    ):
        decoded(kit.model)


def test_segments_do_not_replace_a_loop_of_its_own(kit):
    expected = decoded(kit.model)
    with fuse(kit.model, backends="reference", check_upstream=False, segments=True) as fusion:
        assert rms(decoded(kit.model) - expected) < 2e-5 * rms(expected)
        assert not is_fused(models.text_model(kit.model))
        said = "PatchedText has a __call__ of its own, from test_hosts"
        assert fusion.report().chain == {said: 0}
        assert re.search(rf"segments across layers: {said}", str(fusion.report()))
