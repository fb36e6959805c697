"""The trained model that comes with the package, vanilla against fused: tokens, perplexity, routing, the Metal texts.

In f32 the two are the same computation up to rounding, and must agree; in bf16 each has errors of its own, and the
fused one's must not be the larger.
"""

import json
import math

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from conftest import rms
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model

from qfuse import build, fuse, generate, graphs, models, tiny
from qfuse.backends import BACKENDS
from qfuse.load import DEFAULT

# From Persuasion, chapter 9; not in the text that it was trained on.
PARAGRAPH = (
    "Her sensations on the discovery made her perfectly speechless. She could not even thank him. She could only hang "
    "over little Charles, with most disordered feelings. His kindness in stepping forward to her relief, the manner, "
    "the silence in which it had passed, the little particulars of the circumstance, with the conviction soon forced "
    "on her by the noise he was studiously making with the child, that he meant to avoid hearing her thanks, and "
    "rather sought to testify that her conversation was the last of his wants, produced such a confusion of varying, "
    "but very painful agitation, as she could not recover from."
)
MODES = [(1, "moe_4"), (2, "moe_4"), (2, "moe_5")]


def opened(dtype):
    model, tokenizer = mlx_lm.load(str(DEFAULT))
    if dtype != mx.bfloat16:
        model.set_dtype(dtype)
    return model, tokenizer


@pytest.fixture(scope="module")
def loaded():
    return opened(mx.float32)


@pytest.fixture(scope="module")
def model(loaded):
    return loaded[0]


@pytest.fixture(scope="module")
def tokens(loaded):
    return [loaded[1].eos_token_id, *loaded[1].encode(PARAGRAPH)]


@pytest.fixture(scope="module")
def expected(model, tokens):
    return steps(model, tokens[:-1])


@pytest.fixture(scope="module")
def half(tokens):
    model, _ = opened(mx.bfloat16)
    return model, steps(model, tokens[:16])


def steps(model, tokens):
    """f32 logits [S, V] of these tokens, decoded one by one."""
    cache, out = make_prompt_cache(model), []
    for token in tokens:
        out.append(model(mx.array([[token]]), cache=cache)[0].astype(mx.float32))
        mx.eval(out[-1])
    return mx.concatenate(out)


def greedy(model, tokenizer, stream=generation_stream):
    """64 tokens after a few words."""
    prompt = mx.array(tokenizer.encode("Once upon a time"))
    return [token for token, _ in generate_step(prompt, model, stream, max_tokens=64)]


def nats(logits, tokens):
    return nn.losses.cross_entropy(logits, mx.array(tokens[1:]), reduction="sum").item()


def test_it_comes_with_all_that_it_needs_and_stays_small():
    sizes = {path.name: path.stat().st_size for path in DEFAULT.iterdir()}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(sizes)
    assert sum(sizes.values()) < 8e6
    card = (DEFAULT / "README.md").read_text("utf-8")
    for word in ("license: apache-2.0", "public domain", "bits per byte", "## Samples"):
        assert word in card


def test_mlx_lm_opens_it_and_its_shape_is_the_familys():
    model, tokenizer = opened(mx.bfloat16)
    weights = dict(tree_flatten(model.parameters()))
    prefix = "language_model.model.layers.0."
    assert [layer.is_linear for layer in model.layers] == [True, True, True, False] * 2
    assert weights[prefix + "linear_attn.A_log"].dtype == mx.float32
    assert weights[prefix + "input_layernorm.weight"].dtype == mx.bfloat16
    for name, expert in (("gate_proj", (8, 64)), ("up_proj", (8, 64)), ("down_proj", (8, 32))):
        linear = model.layers[0].mlp.switch_mlp[name]
        assert (linear.bits, linear.group_size) == expert
    assert json.loads((DEFAULT / "config.json").read_text())["model_type"] == "qwen3_5_moe"
    text = PARAGRAPH + "\n“ß”\t1234"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_no_row_of_64_is_one_group():
    """MLX 0.32.4 multiplies by such rows wrongly on a Hopper GPU."""
    model, _ = opened(mx.bfloat16)
    quantised = [module for _, module in model.named_modules() if hasattr(module, "scales")]
    assert quantised
    assert all(module.scales.shape[-1] > 1 or module.group_size < 64 for module in quantised)


def test_it_has_learnt_english(expected, tokens):
    assert nats(expected, tokens) / math.log(2) / len(PARAGRAPH) < 2.1


@pytest.mark.parametrize(("mode", "moe"), MODES)
def test_perplexity_of_a_held_out_paragraph(model, expected, tokens, mode, moe):
    with fuse(model, mode=mode, moe=moe, backends="reference", strict=True):
        got = steps(model, tokens[:-1])
    assert rms(got - expected) < 1e-4 * rms(expected)
    ratio = math.exp((nats(got, tokens) - nats(expected, tokens)) / (len(tokens) - 1))
    assert abs(ratio - 1) < 1e-3


@pytest.mark.parametrize(("mode", "moe"), MODES)
def test_64_greedy_tokens(model, loaded, mode, moe):
    expected = greedy(*loaded)
    with fuse(model, mode=mode, moe=moe, backends="reference", strict=True):
        assert greedy(*loaded) == expected


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize(("mode", "moe"), MODES)
@pytest.mark.parametrize("backend", ["cuda", "metal"])
def test_64_greedy_tokens_on_a_gpu(model, loaded, backend, mode, moe, segments):
    if reason := BACKENDS[backend].unavailable():
        pytest.skip(reason)
    expected = greedy(*loaded, mx.default_stream(mx.cpu))
    assert greedy(*loaded) == expected
    with fuse(model, mode=mode, moe=moe, backends=backend, strict=True, segments=segments):
        assert greedy(*loaded) == expected


def test_a_prompt_on_a_gpu_is_as_near_to_f32_as_upstream(model, tokens):
    if reason := BACKENDS["cuda"].unavailable():
        pytest.skip(reason)
    prompt, half = mx.array([tokens]), opened(mx.bfloat16)[0]
    with mx.stream(mx.cpu):
        exact = model(prompt)
        mx.eval(exact)
    upstream = half(prompt)
    with fuse(half, backends="cuda", strict=True) as fusion:
        got = half(prompt)
        calls = [call for layer in fusion.report().layers for call in layer.calls]
    assert calls
    assert all(call.endswith("tiled experts") for call in calls)
    assert rms(got - exact) < 1.5 * rms(upstream - exact)


@pytest.mark.parametrize(("mode", "moe"), MODES)
def test_in_bf16_it_is_as_near_to_f32_as_upstream(expected, tokens, half, mode, moe):
    model, upstream = half
    exact = expected[: len(upstream)]
    with fuse(model, mode=mode, moe=moe, backends="reference", strict=True):
        got = steps(model, tokens[: len(upstream)])
    assert rms(got - exact) < 1.5 * rms(upstream - exact)


def test_the_experts_chosen_are_upstreams(half, model, tokens):
    """Every layer's router on the paragraph's own activations, in bf16, against the same in f32."""
    half_model, _ = half
    seen = observed(half_model, tokens)
    ours = theirs = rows = 0
    for layer, exact_layer, (a, x) in zip(half_model.layers, model.layers, seen, strict=True):
        adapter = models.adapt(layer, fold_router=True)
        plan = build(graphs.moe_4(adapter.dims), adapter.weights, ("reference",))
        picked = mx.sort(plan.debug(a, x, until="route_swiglu")["route_swiglu.indices"].astype(mx.uint32), axis=-1)
        exact = chosen(exact_layer, a.astype(mx.float32), x.astype(mx.float32))
        ours += differing(picked, exact)
        theirs += differing(chosen(layer, a, x), exact)
        rows += len(x)
    assert rows == 8 * len(tokens)
    assert theirs < 0.1 * rows
    assert ours <= theirs + 3


def observed(model, tokens):
    """What each layer's output projection is given, and the layer itself: a [S, Ka], x [S, H]."""
    projections = [layer.linear_attn if layer.is_linear else layer.self_attn for layer in model.layers]
    names = ["out_proj" if layer.is_linear else "o_proj" for layer in model.layers]
    kept = []

    class Kept(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def __call__(self, x, *rest, **more):
            kept.append(x[0])
            return self.inner(x, *rest, **more)

    originals = [(m, name, m[name]) for m, name in zip(projections, names, strict=True)]
    originals += [(layer, "input_layernorm", layer.input_layernorm) for layer in model.layers]
    for module, name, inner in originals:
        module[name] = Kept(inner)
    mx.eval(model(mx.array([tokens])), kept)
    for module, name, inner in originals:
        module[name] = inner
    return list(zip(kept[1::2], kept[::2], strict=True))


def chosen(layer, a, x):
    """The sets of experts that upstream's modules choose."""
    project = layer.linear_attn.out_proj if layer.is_linear else layer.self_attn.o_proj
    logits = layer.mlp.gate(layer.post_attention_layernorm(x + project(a)))
    return mx.sort(mx.argsort(logits, axis=-1)[:, -layer.mlp.top_k :], axis=-1)


def differing(a, b):
    return (a != b).any(axis=-1).sum().item()


def test_a_few_tokens_through_the_metal_texts(model, expected, tokens, sim):
    with fuse(model, backends=sim, strict=True) as fused:
        got = steps(model, tokens[:3])
        assert dict(fused.report().layers[0].backends) == {"sim": 8, "library": 1}
    assert rms(got - expected[:3]) < 1e-4 * rms(expected[:3])


def test_in_4_bits():
    model, _ = opened(mx.float32)
    model = dequantize_model(model)
    tiny.settle(model, bits=4, group=32, dtype=mx.float32)
    cut = list(range(100, 116))
    expected = steps(model, cut)
    with fuse(model, backends="reference", strict=True):
        assert rms(steps(model, cut) - expected) < 1e-4 * rms(expected)


def test_a_word_after_the_prompt_is_parted_from_it(loaded):
    net, tokenizer = loaded
    run = generate.generate(net, tokenizer, generate.encode(tokenizer, "She was not a woman to"), 3)
    assert run.text.startswith(" ")
