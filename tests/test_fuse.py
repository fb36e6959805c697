"""What fuse() puts in, what it refuses and says, and that remove() leaves nothing behind."""

import copy
import re
from concurrent.futures import ThreadPoolExecutor

import exo_like
import mlx.core as mx
import mlx.nn as nn
import pytest
from conftest import inputs, make_model, rms
from mlx.nn.layers.distributed import shard_linear
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3, qwen3_5
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, make_prompt_cache

from qfuse import RefusedError, bench, fuse, models
from qfuse.fuse import FusionReport, LayerReport, is_fused


@pytest.fixture
def model():
    return make_model(dtype=mx.bfloat16)


def logits(model, cache=None, tokens=8):
    cache = cache or make_prompt_cache(model)
    out = [model(mx.array([[5, 6, 7]]), cache=cache)[:, -1]]
    out += [model(mx.array([[t]]), cache=cache)[:, -1] for t in range(tokens)]
    return mx.concatenate(out)


def names(model):
    return [name for name, _ in tree_flatten(model.parameters())]


@pytest.mark.parametrize("mode", [1, 2])
def test_only_instances_change_and_remove_is_exact(model, mode):
    classes, attributes = [type(m) for m in model.modules()], [set(vars(layer)) for layer in model.layers]
    before, parameters = logits(model), names(model)
    fusion = fuse(model, mode=mode, backends="reference")
    assert all(is_fused(layer) and isinstance(layer, qwen3_5.DecoderLayer) for layer in model.layers)
    assert names(model) == parameters
    assert not mx.array_equal(logits(model), before)
    fusion.remove()
    fusion.remove()
    assert [type(m) for m in model.modules()] == classes
    assert [set(vars(layer)) for layer in model.layers] == attributes
    assert names(model) == parameters
    assert mx.array_equal(logits(model), before)


def test_two_models_in_a_process_one_fused(model):
    other = make_model(dtype=mx.bfloat16)
    before = logits(other)
    with fuse(model, backends="reference"):
        assert not any(is_fused(layer) for layer in other.layers)
        assert mx.array_equal(logits(other), before)


@pytest.mark.parametrize("segments", [False, True])
def test_a_copy_of_a_fused_model_is_not_fused_and_stands_alone(segments):
    model = make_model()
    expected = logits(model, tokens=2)
    with fuse(model, backends="reference", segments=segments) as fusion:
        copied = copy.deepcopy(model)
        assert type(copy.copy(model.layers[0])) is qwen3_5.DecoderLayer
        assert not any(is_fused(layer) for layer in copied.layers)
        assert [type(m) for m in copied.modules()] == [type(m) for m in make_model().modules()]
        assert mx.array_equal(logits(copied, tokens=2), expected)
        for layer in copied.layers:
            layer.input_layernorm.weight = 2 * layer.input_layernorm.weight
        calls = fusion.report().layers[0].calls
        with fuse(copied, backends="reference", segments=segments):
            assert not mx.allclose(logits(copied, tokens=2), expected)
        assert fusion.report().layers[0].calls == calls
        assert rms(logits(model, tokens=2) - expected) < 1e-5 * rms(expected)


def test_a_context_manager_removes_even_after_an_error(model):
    with pytest.raises(ZeroDivisionError), fuse(model, backends="reference"):
        _ = 1 / 0
    assert not any(is_fused(layer) for layer in model.layers)


def test_fusing_twice_is_a_no_op_and_with_other_options_an_error(model):
    fusion = fuse(model, backends="reference")
    assert fuse(model, backends="reference") is fusion
    with pytest.raises(
        ValueError, match=r"\[fuse\] wants the options it was fused with, or remove\(\) first, got mode 1"
    ):
        fuse(model, mode=1, backends="reference")


def test_segments_give_what_single_calls_do_while_the_cache_grows_and_in_another_thread():
    model = make_model(num_hidden_layers=2, full_attention_interval=2)
    cache = make_prompt_cache(model)
    cache[1].step = 4  # a new buffer after every fourth key
    twin = copy.deepcopy(cache)
    twin[1].step = 4
    with fuse(model, backends="reference"):
        expected = logits(model, cache, tokens=4)
    with fuse(model, backends="reference", segments=True) as fusion:
        assert [len(layer._qfuse.plan(mx.float32)._hot) for layer in model.layers] == [1, 3]
        assert rms(logits(model, twin, tokens=4) - expected) < 1e-5 * rms(expected)
        with ThreadPoolExecutor(1) as pool:
            again = pool.submit(lambda: mx.eval(out := logits(model, tokens=4)) or out).result()
        assert rms(again - expected) < 1e-5 * rms(expected)
        assert fusion.segments
        with pytest.raises(ValueError, match="wants the options it was fused with"):
            fuse(model, backends="reference")


def test_a_cache_with_room_for_more_keys_is_read_in_more_blocks(monkeypatch):
    model = make_model(num_hidden_layers=2, full_attention_interval=2)
    with fuse(model, backends="reference"):
        expected = logits(model, tokens=4)
    monkeypatch.setattr(models, "LONG", 255)  # a KVCache takes room for 256 at first
    with fuse(model, backends="reference"):
        assert rms(logits(model, tokens=4) - expected) < 1e-5 * rms(expected)
        long = model.layers[1]._qfuse.plan(mx.float32, False, True)
        (part,) = [step.node.op for step in long.steps if step.node.name == "sdpa_partial"]
        assert part.blocks == models.LONG_DIMS["blocks"]
    uses = bench.Bench(model, ("reference",)).uses(1, 8)
    assert [use.op.blocks for use in uses["sdpa_partial"]] == [models.LONG_DIMS["blocks"]]


def test_segments_leave_a_layer_whose_mask_grows_as_it_is():
    model = make_model()
    with fuse(model, backends="reference", segments=True):
        gdn, gqa = model.layers[0]._qfuse, model.layers[3]._qfuse
        assert len(gdn.plan(mx.float32, masked=True)._hot) == 1
        assert len(gqa.plan(mx.float32, masked=True)._hot) == len(gqa.plan(mx.float32, masked=True).steps)


def test_mode_0_fuses_nothing(model):
    fusion = fuse(model, mode=0)
    assert fusion.report().fused == 0
    assert not any(is_fused(layer) for layer in model.layers)


@pytest.mark.parametrize(("mode", "moe"), [(1, "moe_4"), (2, "moe_4"), (2, "moe_5")])
def test_memory_stays_within_two_percent(mode, moe):
    model = make_model(dtype=mx.bfloat16)
    mx.synchronize()
    before = mx.get_active_memory()
    fusion = fuse(model, mode=mode, moe=moe, backends="reference")
    logits(model)
    mx.synchronize()
    assert mx.get_active_memory() <= 1.02 * before
    report = fusion.report()
    assert (report.new_bytes > 0) == (mode == 2 and moe == "moe_4")
    assert report.new_bytes <= 0.02 * sum(x.nbytes for _, x in tree_flatten(model.parameters()))


def test_weights_are_the_models_own_arrays(model):
    with fuse(model, backends="reference") as fusion:
        own = {id(x) for _, x in tree_flatten(model.parameters())}
        for layer in fusion.layers.values():
            for name, array in layer._qfuse.adapter.weights.items():
                parts = array.parts() if hasattr(array, "parts") else [array]
                assert name.endswith((".M1", ".Wf")) or all(id(part) in own for part in parts), name


def test_report_counts_layers_dispatches_and_calls(model):
    with fuse(model, backends="reference") as fusion:
        logits(model, tokens=5)
        report = fusion.report()
        gdn, gqa = report.layers[0], report.layers[3]
    assert report.fused == 4
    assert (gdn.kind, gdn.nodes, gdn.dispatches, gdn.backends) == ("gdn", 9, 9, {"library": 1, "reference": 8})
    assert (gqa.kind, gqa.nodes, gqa.dispatches) == ("gqa", 10, 11)
    assert gdn.calls == gqa.calls == {"fused": 5, "prefill, S > 1": 1}
    assert "4 of 4 layers fused, mode 2" in str(report)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mode": 3}, ValueError, r"\[fuse\.mode\] wants 0, 1, 2, got 3"),
        ({"moe": "moe_6"}, ValueError, r"\[fuse\.moe\] wants moe_4 or moe_5, got moe_6"),
        ({"backends": "foo"}, ValueError, r"\[backend\] wants one of reference, .*, got foo"),
        ({"backends": ("reference", "bar")}, ValueError, r"got bar"),
        (
            {"backends": "sim", "segments": True},
            ValueError,
            r"\[fuse\.segments\] wants backends that MLX can compile, got sim",
        ),
    ],
)
def test_options_that_do_not_exist(model, options, error, message):
    with pytest.raises(error, match=message):
        fuse(model, **options)
    assert not any(is_fused(layer) for layer in model.layers)


def test_other_models_are_refused_by_name():
    args = qwen3.ModelArgs.from_dict(
        {
            "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64, "head_dim": 32,
            "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-6, "vocab_size": 64,
            "max_position_embeddings": 64, "rope_theta": 1e4, "tie_word_embeddings": True,
        }
    )  # fmt: skip
    with pytest.raises(
        RefusedError, match=r"\[fuse\] wants a model of type qwen3_5_moe, qwen3_5 or qwen3_next, got qwen3"
    ):
        fuse(qwen3.Model(args))


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __call__(self, x):
        return self.inner(x)


def with_bias(model):
    model.layers[3].self_attn.o_proj.bias = mx.zeros(256)


def wrapped(model):
    model.layers[3].mlp = Wrapper(model.layers[3].mlp)


def other_mode(model):
    model.layers[3].mlp.switch_mlp.down_proj.mode = "mxfp8"


def summed_twice(model):
    model.layers[3].mlp.sharding_group = mx.distributed.init()
    exo_like.tensor_moe(model.layers[3], mx.distributed.init())


def mixer_summed_twice(model):
    model.layers[3].self_attn.o_proj = shard_linear(model.layers[3].self_attn.o_proj, "sharded-to-all")
    model.layers[3].self_attn.sharding_group = mx.distributed.init()


def summed_within(model):
    expert = model.layers[3].mlp.shared_expert
    expert.down_proj = shard_linear(expert.down_proj, "sharded-to-all")


def scaled_rope(model):
    model.layers[3].self_attn.rope.scale = 0.5


def lying_group(model):
    model.layers[3].self_attn.v_proj.group_size = 32


WITHOUT_MOE, WITHOUT_MIXER = "gqa_mixer_layer", "moe_only"  # what is left of a layer without the part that is refused


@pytest.mark.parametrize(
    ("change", "reason", "rest"),
    [
        (with_bias, "o_proj has a bias", WITHOUT_MIXER),
        (wrapped, "mlp is a Wrapper, not a sparse MoE block", WITHOUT_MOE),
        (other_mode, r"expert_down\.w_down is quantised as mxfp8; only affine is fused", WITHOUT_MOE),
        (summed_twice, "the MoE is summed over ranks twice, by itself and by what wraps it", WITHOUT_MOE),
        (mixer_summed_twice, "o_proj is summed over ranks twice, by itself and by its mixer", WITHOUT_MIXER),
        (summed_within, r"expert_down\.ws_down is a QuantizedShardedToAllLinear, which sums over ranks", WITHOUT_MOE),
        (scaled_rope, "rope RoPE with scaling or another layout is not fused", WITHOUT_MIXER),
        (lying_group, r"gqa_in_proj\.w_v says 8-bit gs 32, but its arrays are", WITHOUT_MIXER),
    ],
)
def test_a_part_that_cannot_be_fused_stays_upstreams_with_the_reason(model, change, reason, rest):
    change(model)
    with fuse(model, backends="reference") as fusion:
        report = fusion.report()
        assert [layer.graph for layer in report.layers] == ["gdn_layer"] * 3 + [rest]
        assert re.search(reason, report.layers[3].reason)
        assert "refused: " in str(report)
    with pytest.raises(RefusedError, match=r"\[layers\.3\] wants a layer it can fuse, got one refused: .*" + reason):
        fuse(model, backends="reference", strict=True)
    assert not any(is_fused(layer) for layer in model.layers)


def test_a_layer_without_a_part_to_fuse_stays_upstreams(model):
    with_bias(model)
    wrapped(model)
    with fuse(model, backends="reference") as fusion:
        report = fusion.report()
        assert [bool(layer.graph) for layer in report.layers] == [True, True, True, False]
        assert report.layers[3].reason == "o_proj has a bias; mlp is a Wrapper, not a sparse MoE block"
        assert not is_fused(model.layers[3])


@pytest.mark.parametrize("change", [wrapped, with_bias], ids=["mixer", "moe"])
@pytest.mark.parametrize("layer", [0, 3], ids=["gdn", "gqa"])
def test_a_part_alone_gives_what_the_layer_gives(change, layer):
    model = make_model()
    block = model.layers[layer]
    if change is wrapped:
        block.mlp = Wrapper(block.mlp)
    else:
        projection = block.linear_attn.out_proj if block.is_linear else block.self_attn.o_proj
        projection.bias = mx.full(256, 0.1)
    tokens = mx.array([[7, 8, 9, 10, 11]])
    made = []
    for fused in (False, True):
        cache = make_prompt_cache(model)
        model(tokens, cache=cache)
        fusion = fuse(model, backends="reference") if fused else None
        steps = [model(mx.array([[i]]), cache=cache) for i in (3, 4, 5)]
        made.append(mx.concatenate(steps))
        if fusion:
            assert fusion.report().layers[layer].calls == {"fused": 3}
            assert fusion.report().layers[layer].graph != ("gdn_layer" if block.is_linear else "gqa_layer")
            fusion.remove()
    assert rms(made[1] - made[0]) < 1e-5 * rms(made[0])


def test_what_a_step_cannot_fuse_is_upstreams_with_the_reason(model):
    gdn, gqa = model.layers[0], model.layers[3]
    many, one = inputs(1, 9, 1, dtype=mx.bfloat16), inputs(1, 1, 1, dtype=mx.bfloat16)
    additive = mx.zeros((1, 1, 1, 1), mx.bfloat16)

    def run():
        model.train()
        outs = [gdn(one, None, ArraysCache(2))]
        model.eval()
        outs += [gdn(many, None, ArraysCache(2)), gqa(one, additive, KVCache()), gqa(one, None, None)]
        outs.append(gqa(one, None, QuantizedKVCache()))
        return outs

    expected = run()
    with fuse(model, backends="reference") as fusion:
        outs = run()
        assert all(mx.array_equal(a, b) for a, b in zip(outs[:2], expected[:2], strict=True))
        assert all(rms(a - b) < 0.02 * rms(b) for a, b in zip(outs[2:], expected[2:], strict=True))
        calls = fusion.report().layers
        assert calls[0].calls == {"the model is in training mode; call model.eval()": 1, "9 rows, more than 8": 1}
        assert set(calls[3].calls) == {
            "MoE alone: mask (1, 1, 1, 1) mlx.core.bfloat16 is not a boolean [B, 1, 1, N]",
            "MoE alone: no kv cache",
            "MoE alone: QuantizedKVCache is not fused",
        }
    with fuse(model, backends="reference", strict=True), pytest.raises(RefusedError, match="9 rows, more than 8"):
        gdn(many, None, ArraysCache(2))


def test_a_cache_of_the_wrong_class_is_a_clear_error(model):
    x = inputs(1, 1, 1, dtype=mx.bfloat16)
    with fuse(model, backends="reference"):
        with pytest.raises(TypeError, match=r"\[cache\] wants ArraysCache for this layer, got KVCache"):
            model.layers[0](x, None, KVCache())
        with pytest.raises(TypeError, match=r"\[cache\] wants a kv cache for this layer, got ArraysCache"):
            model.layers[3](x, None, ArraysCache(2))


def test_a_gdn_layer_without_a_cache_starts_from_zero(model):
    x = inputs(1, 2, 1, dtype=mx.bfloat16)
    expected = model.layers[0](x)
    with fuse(model, backends="reference", strict=True):
        assert rms(model.layers[0](x) - expected) < 0.02 * rms(expected)


def test_conv_state_is_contiguous_and_a_copied_cache_stays_behind(model):
    with fuse(model, backends="reference", strict=True):
        cache = make_prompt_cache(model)
        logits(model, cache, tokens=3)
        copied = copy.deepcopy(cache)
        kept = [mx.array(x) for x in cache[0].cache] + [mx.array(cache[3].keys)]
        a = logits(model, copied, tokens=3)
        for x, y in zip([*cache[0].cache, cache[3].keys], kept, strict=True):
            assert mx.array_equal(x, y)
        assert mx.array_equal(a, logits(model, cache, tokens=3))
    assert cache[0][0].shape == (1, 3, 512)


def test_a_state_saved_in_bf16_is_taken_up_in_f32(model):
    cache = ArraysCache(2)
    cache[0], cache[1] = mx.zeros((1, 3, 512), mx.bfloat16), inputs(3, 4, 64, 64, mx.bfloat16)[None]
    with fuse(model, backends="reference", strict=True):
        model.layers[0](inputs(1, 1, 1, dtype=mx.bfloat16), None, cache)
    assert cache[1].dtype == mx.float32


@pytest.mark.parametrize("conv", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_conv_state_keeps_a_dtype_of_its_own(model, conv, dtype):
    model.set_dtype(dtype)
    cache = ArraysCache(2)
    cache[0] = inputs(3, 1, 3, 512, conv)
    with fuse(model, backends="reference", strict=True):
        out = model.layers[0](inputs(1, 1, 1, dtype=dtype), None, cache)
    assert (out.dtype, cache[0].dtype, cache[1].dtype) == (dtype, conv, mx.float32)


def test_a_reason_with_brackets_is_printed_whole():
    row = LayerReport(index=0, kind="gdn", reason="mask (1, 2) is not [B, 1]")
    report = FusionReport(mode=2, backends=("reference",), layers=(row,), new_bytes=0)
    assert "is not [B, 1]" in str(report)
