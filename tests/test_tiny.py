import json

import mlx.core as mx
import mlx_lm
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from qfuse import tiny


def test_mlx_lm_opens_it_like_any_other(checkpoint):
    model, tokenizer = mlx_lm.load(str(checkpoint))
    weights = dict(tree_flatten(model.parameters()))
    prefix = "language_model.model.layers.0."
    assert weights[prefix + "linear_attn.A_log"].dtype == mx.float32
    assert weights[prefix + "linear_attn.norm.weight"].dtype == mx.bfloat16
    assert weights[prefix + "mlp.switch_mlp.gate_proj.weight"].dtype == mx.uint32
    text = mlx_lm.generate(model, tokenizer, "See 3 o'clock, quick brown fox: a", max_tokens=30)
    assert text == "bcdefghijklmnopqrstuvwxyz{|}~ "[: len(text)]
    assert len(text) >= 29


def test_it_is_small_and_the_same_seed_gives_the_same_bytes(checkpoint, tmp_path):
    assert sum(path.stat().st_size for path in checkpoint.iterdir()) < 8e6
    tiny.write(tmp_path / "again")
    tiny.write(tmp_path / "other", seed=1)
    first, again, other = (
        (folder / "model.safetensors").read_bytes() for folder in (checkpoint, tmp_path / "again", tmp_path / "other")
    )
    assert first == again
    assert first != other
    assert json.loads((checkpoint / "config.json").read_text())["model_type"] == "qwen3_5_moe"


@given(st.text())
def test_tokenizer_is_one_token_a_byte_both_ways(text):
    tokenizer = tiny.tokenizer()
    ids = tokenizer.encode(text).ids
    if tiny.END not in text:
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text


def test_successors_are_a_permutation():
    assert sorted(map(tiny.successor, range(tiny.BYTES))) == list(range(tiny.BYTES))
    assert chr(tiny.successor(ord("a"))) == "b"
