"""The hook that exo's loader calls, and models spread over ranks as exo does it; real ranks are in test_ranks.py."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import exo_like
import mlx.core as mx
import numpy as np
import pytest
from conftest import make_model, rms
from mlx_lm.models.cache import make_prompt_cache

from qfuse import fuse, models, upstream
from qfuse.fuse import is_fused
from qfuse.graphs import make
from qfuse.integrations.exo import VARIABLE, maybe_apply_patches
from qfuse.ops import GDNStep


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe"}))
    return tmp_path


@pytest.fixture(autouse=True)
def said(caplog, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    caplog.set_level(logging.INFO, logger="qfuse")
    return lambda: [(record.levelname, record.getMessage()) for record in caplog.records]


def decoded(model, steps=4):
    cache = make_prompt_cache(model)
    outs = [model(mx.array([[5, 6, 7]]), cache=cache)[:, -1]]
    outs += [model(mx.array([[token]]), cache=cache)[:, -1] for token in range(steps)]
    return mx.concatenate(outs)


@pytest.mark.parametrize(("value", "graph"), [(None, "gdn_layer"), ("2", "gdn_layer"), ("1", "moe_only")])
def test_the_variable_chooses_how_much_is_fused(folder, said, monkeypatch, capsys, value, graph):
    if value:
        monkeypatch.setenv(VARIABLE, value)
    model = make_model()
    expected = decoded(model)
    fusion = maybe_apply_patches(model, folder)
    assert rms(decoded(model) - expected) < 2e-5 * rms(expected)
    assert fusion.report().layers[0].graph == graph
    assert fusion.report().layers[0].calls["fused"] == 4
    assert said() == [("INFO", f"[exo] 4 of 4 layers fused, mode {value or 2}")]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("value", "level", "text"),
    [
        ("0", "INFO", "[EXO_FUSED_KERNELS] is 0: nothing is fused"),
        ("3", "ERROR", "[EXO_FUSED_KERNELS] wants 0, 1, 2, got '3': nothing is fused"),
        ("", "ERROR", "[EXO_FUSED_KERNELS] wants 0, 1, 2, got '': nothing is fused"),
        ("on", "ERROR", "[EXO_FUSED_KERNELS] wants 0, 1, 2, got 'on': nothing is fused"),
    ],
)
def test_off_and_values_that_do_not_exist_fuse_nothing(folder, said, monkeypatch, value, level, text):
    monkeypatch.setenv(VARIABLE, value)
    model = make_model()
    assert maybe_apply_patches(model, folder) is None
    assert said() == [(level, text)]
    assert not any(is_fused(layer) for layer in model.layers)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ('{"model_type": "llama"}', "[exo] wants a model_type of qwen3_5_moe, qwen3_5, qwen3_next, got llama"),
        ("{}", "[exo] wants a model_type of qwen3_5_moe, qwen3_5, qwen3_next, got None"),
        ("[1]", "[model] wants an object in "),
        ("{", "[model] wants JSON in "),
        (None, "[model] wants config.json, got none in "),
    ],
)
def test_an_unknown_model_is_left_alone_with_one_line(folder, said, config, reason):
    (folder / "config.json").unlink()
    if config is not None:
        (folder / "config.json").write_text(config)
    assert maybe_apply_patches(object(), str(folder)) is None
    ((level, text),) = said()
    assert level == "INFO"
    assert text.startswith(reason)
    assert text.endswith(": left as it is")


def test_what_fuse_refuses_is_left_alone_too(folder, said, monkeypatch):
    assert maybe_apply_patches(object(), folder) is None  # the config is of a known type, the model is not
    monkeypatch.setattr(upstream, "moved", lambda: "wants mlx-lm as it was, got another")
    model = make_model()
    assert maybe_apply_patches(model, folder) is None
    assert [text for _, text in said()] == [
        "[fuse] wants a model of type qwen3_5_moe, qwen3_5 or qwen3_next, got object: left as it is",
        "[fuse] wants mlx-lm as it was, got another; check_upstream=False fuses all the same: left as it is",
    ]
    assert not any(is_fused(layer) for layer in model.layers)


def test_a_part_that_is_refused_is_named_in_the_line(folder, said):
    model = make_model()
    model.layers[3].self_attn.o_proj.bias = mx.zeros(256)
    maybe_apply_patches(model, folder)
    assert said() == [("INFO", "[exo] 4 of 4 layers fused, mode 2; o_proj has a bias")]


@pytest.mark.parametrize("layers", [4, 1])
def test_what_exo_wraps_layers_in_stays_and_the_layers_within_are_fused(folder, layers):
    model = make_model(num_hidden_layers=layers)
    exo_like.pipeline(model, mx.distributed.init())
    first, last = model.layers[0], model.layers[-1]
    expected = decoded(model)
    with maybe_apply_patches(model, folder) as fusion:
        assert (model.layers[0], model.layers[-1]) == (first, last)
        assert [type(layer) for layer in (first, last)] == [
            exo_like.PipelineFirstLayer if layers > 1 else exo_like.PipelineLastLayer,
            exo_like.PipelineLastLayer,
        ]
        assert rms(decoded(model) - expected) < 2e-5 * rms(expected)
        assert [layer.calls["fused"] for layer in fusion.report().layers] == [4] * layers
        fusion.warmup()
    assert not any(is_fused(layer) for layer in models.decoder_layers(model))
    assert mx.array_equal(decoded(model), expected)


def test_segments_do_not_go_past_a_wrapper():
    model = make_model()
    exo_like.pipeline(model, mx.distributed.init())
    with fuse(model, backends="reference", segments=True) as fusion:
        decoded(model)
        assert fusion.report().chain == {"a layer is not fused as a whole": 5}


class Simulated:
    """A rank of a group whose ranks are threads of this process, which meet to sum."""

    def __init__(self, rank, meeting, parts):
        self._rank, self._meeting, self._parts = rank, meeting, parts
        self.sums = 0

    def rank(self):
        return self._rank

    def size(self):
        return self._meeting.parties

    def all_sum(self, x):
        self.sums += 1
        self._parts[self._rank] = np.array(x.astype(mx.float32))
        self._meeting.wait()
        total = sum(self._parts)
        self._meeting.wait()
        return mx.array(total).astype(x.dtype)


@pytest.fixture
def over_ranks(monkeypatch):
    """What a function of a rank gives in each of two."""
    meeting, parts = Barrier(2, timeout=60), [None, None]
    ranks = [Simulated(rank, meeting, parts) for rank in range(2)]
    monkeypatch.setattr(mx.distributed, "all_sum", lambda x, *, group: group.all_sum(x))

    def run(function):
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(function, ranks))

    return run


def test_tensor_sharding_over_simulated_ranks(folder, over_ranks):
    expected = decoded(make_model(group=32))

    def rank(group):
        model = make_model(group=32)
        exo_like.tensor(model, group)
        fusion = maybe_apply_patches(model, folder)
        return np.array(decoded(model)), fusion.report(), group.sums

    for out, report, sums in over_ranks(rank):
        assert rms(mx.array(out) - expected) < 2e-5 * rms(expected)
        graphs = [layer.graph for layer in report.layers]
        assert graphs == ["gdn_layer_moe_5_on_2_ranks"] * 3 + ["gqa_layer_moe_5_on_2_ranks"]
        assert all(layer.calls == {"fused": 4, "prefill, S > 1": 1} for layer in report.layers)
        assert sums == 2 * 4 * 5  # of a mixer and a MoE, in four layers, at a prompt and four steps


def test_a_sharded_layer_in_half_precision_is_as_close_to_f32_as_upstream(folder, over_ranks):
    # All experts are chosen, so that a near tie of the router cannot make the comparison one of luck.
    def rank(group):
        model = make_model(group=32, dtype=mx.bfloat16, num_experts=2)
        exo_like.tensor(model, group)
        upstream = decoded(model).astype(mx.float32)
        maybe_apply_patches(model, folder)
        return np.array(upstream), np.array(decoded(model).astype(mx.float32))

    whole = make_model(group=32, dtype=mx.bfloat16, num_experts=2)
    whole.set_dtype(mx.float32)
    exact = decoded(whole)
    for theirs, ours in over_ranks(rank):
        assert rms(mx.array(ours) - exact) <= 2 * rms(mx.array(theirs) - exact)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_prompt_with_gdn_step_sums_a_sharded_mixer_once(monkeypatch, wrapped):
    monkeypatch.setattr(mx.distributed, "all_sum", lambda x, *, group: 2 * x)
    model, one = make_model(), mx.distributed.init()
    if wrapped:
        exo_like.tensor(model, one)
    else:
        model.shard(one)
    layer, x = model.layers[0], mx.random.normal((2, 5, 256), key=mx.random.key(1))
    adapter = models.adapt(layer, fold_router=False)
    r = adapter.recur(make(GDNStep, adapter.dims).reference, layer, x, None, None)
    got = models.after_mixer(layer, x, r)
    assert rms(got - layer(x)) < 1e-5 * rms(got)
