"""A fused model inside mlx-lm: everything that generates, keeps a cache, adapts, trains or saves, as without qfuse."""

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from conftest import make_model, rms
from families import FAMILIES
from mlx.utils import tree_flatten, tree_map
from mlx_lm import utils
from mlx_lm.generate import BatchGenerator, batch_generate, generate_step, speculative_generate_step, stream_generate
from mlx_lm.models.cache import (
    KVCache,
    can_trim_prompt_cache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.utils import linear_to_lora_layers, remove_lora_layers

from qfuse import fuse, models, tiny
from qfuse.ops import MOECombine

PROMPT = [72, 101, 108, 108, 111, 44, 32]
RAGGED = [[5, 6, 7, 8, 9, 10, 11], [65], [70, 71, 72], [90, 80, 70, 60, 50]]
HOW = {"layers": {}, "segments": {"segments": True}}
each_way = pytest.mark.parametrize("how", HOW.values(), ids=HOW)
fused_how = partial(fuse, backends="reference")


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory, checkpoint):
    net, tokenizer = mlx_lm.load(str(checkpoint))
    net.set_dtype(mx.float32)
    mx.eval(net.parameters())
    return net, tokenizer


def agree(model, run, **options):
    """The report, after ``run`` gave the same with the model fused as without."""
    wanted = run()
    with fused_how(model, **options) as fusion:
        assert run() == wanted
        return fusion.report()


def whole(report, least):
    """Every layer ran at least so many steps fused; with segments, so did the chain."""
    assert min(layer.calls["fused"] for layer in report.layers) >= least
    assert not report.chain or report.chain["fused"] >= least


def greedy(model, n=8, prompt=PROMPT, **options):
    return [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=n, **options)]


@each_way
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_step(family, how):
    net = make_model(**FAMILIES[family])
    report = agree(net, lambda: greedy(net, 12), **how)
    assert all(layer.calls == {"prefill, S > 1": 1, "fused": 13} for layer in report.layers)
    one = "a layer is not fused as a whole" if family == "qwen3_5" else "fused"  # a dense MLP is upstream's
    assert report.chain == (
        {one: 13 + (one != "fused")} | ({"prefill, S > 1": 1} if one == "fused" else {}) if how else {}
    )


@each_way
def test_sampling_penalties_prompts_in_pieces_and_embeddings(model, how):
    def run():
        mx.random.seed(3)
        sampled = greedy(model, sampler=make_sampler(0.8, top_p=0.9), prefill_step_size=3,
                         logits_processors=make_logits_processors(repetition_penalty=1.3))  # fmt: skip
        embeddings = models.before_layers(model, mx.array([PROMPT]))[0] * 1.5
        return sampled, greedy(model, prompt=[], input_embeddings=embeddings), greedy(model, prompt=[9])

    whole(agree(model, run, **how), 20)


@each_way
def test_stream_generate_and_generate(loaded, how):
    net, tokenizer = loaded

    def run():
        pieces = list(stream_generate(net, tokenizer, "See 12", max_tokens=9))
        text = mlx_lm.generate(net, tokenizer, "quick brown fox", max_tokens=5)
        return [(p.text, p.token, p.finish_reason) for p in pieces], text

    whole(agree(net, run, **how), 12)
    assert run()[1] == "yz{|}"


@each_way
def test_batch_generate_of_ragged_prompts_and_on_from_its_caches(loaded, how):
    net, tokenizer = loaded

    def run():
        first = batch_generate(net, tokenizer, RAGGED, max_tokens=[7, 4, 9, 6], return_prompt_caches=True,
                               return_token_ids=True)  # fmt: skip
        then = batch_generate(net, tokenizer, [[66], [67, 68], [69], [70]], prompt_caches=first.caches, max_tokens=4,
                              return_token_ids=True)  # fmt: skip
        return first.token_ids, then.token_ids, first.texts

    whole(agree(net, run, **how), 10)


def served(model):
    """Tokens by row, of rows that join and leave a batch, one of them with a cache of its own, one taken out."""
    batch, tokens = BatchGenerator(model, prefill_batch_size=2), {}

    def step(times):
        for _ in range(times):
            for each in batch.next()[1]:
                tokens.setdefault(each.uid, []).append(each.token)

    first, _ = batch.insert(RAGGED[:2], [30, 5])
    step(4)
    batch.insert(RAGGED[2:], [3, 9])
    step(5)
    taken, _ = batch.remove([first], return_prompt_caches=True)[first]
    batch.insert([[33]], [6], caches=[taken])
    step(20)
    batch.close()
    return tokens


@each_way
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_join_and_leave(family, how):
    net = make_model(**FAMILIES[family])
    report = agree(net, lambda: served(net), **how)
    assert min(layer.calls["fused"] for layer in report.layers) >= 12
    assert report.chain.get("fused", 0) >= 12 * (bool(how) and family != "qwen3_5")
    assert not any("shape" in reason or "mask" in reason for layer in report.layers for reason in layer.calls)


@each_way
def test_more_rows_than_are_fused_go_to_upstream(loaded, how):
    net, tokenizer = loaded

    def run():
        return batch_generate(net, tokenizer, [[n, n + 1, n + 2] for n in range(9)], max_tokens=3, prefill_batch_size=9,
                              return_token_ids=True).token_ids  # fmt: skip

    report = agree(net, run, **how)
    assert all(layer.calls["9 rows, more than 8"] == 4 for layer in report.layers)
    assert not how or report.chain["9 rows, more than 8"] == 4


@each_way
def test_caches_that_grow_past_256_keys_in_a_masked_batch(loaded, how):
    net = make_model(num_hidden_layers=2, full_attention_interval=2)
    prompts = [[1 + n % 90 for n in range(length)] for length in (252, 249, 30)]

    def run():
        return batch_generate(net, loaded[1], prompts, max_tokens=9, return_token_ids=True).token_ids

    whole(agree(net, run, **how), 9)


@each_way
def test_a_prompt_cache_is_saved_loaded_copied_and_reused(model, tmp_path, how):
    def run(name):
        cache = make_prompt_cache(model)
        out = [greedy(model, 6, prompt_cache=cache)]
        save_prompt_cache(str(tmp_path / name), cache, {"of": "this test"})
        twin = copy.deepcopy(cache)
        out.append(greedy(model, 5, [33, 34], prompt_cache=cache))
        out.append(greedy(model, 5, [33, 34], prompt_cache=twin))
        return [*out, *reused(name)]

    def reused(name):
        cache, said = load_prompt_cache(str(tmp_path / name), return_metadata=True)
        return [greedy(model, 5, [33, 34], prompt_cache=cache), said]

    wanted = run("without.safetensors")
    assert wanted[1] == wanted[2] == wanted[3]
    with fused_how(model, **how) as fusion:
        assert run("with.safetensors") == wanted
        assert reused("without.safetensors") == wanted[3:]
        whole(fusion.report(), 16)
    assert reused("with.safetensors") == wanted[3:]


@each_way
def test_trimming_is_refused_as_upstream_refuses_it(model, how):
    def run():
        cache = make_prompt_cache(model)
        tokens = greedy(model, 4, prompt_cache=cache)
        assert not can_trim_prompt_cache(cache)
        with pytest.raises(ValueError, match="requires a trimmable prompt cache"):
            list(speculative_generate_step(mx.array(PROMPT), model, model))
        offsets = [c.offset for c in cache if isinstance(c, KVCache)]
        return tokens, trim_prompt_cache(cache, 2), offsets, [c.trim(2) for c in cache if isinstance(c, KVCache)]

    agree(model, run, **how)


@each_way
def test_a_quantised_kv_cache_from_a_position_on_is_upstreams(model, how):
    report = agree(model, lambda: greedy(model, 12, kv_bits=8, quantized_kv_start=11), **how)
    reason = "QuantizedKVCache is not fused"
    assert report.layers[0].calls["fused"] == 13
    fused, left = report.layers[3].calls["fused"], report.layers[3].calls[f"MoE alone: {reason}"]
    assert (fused, left) == (5, 8)
    assert not how or (report.chain["fused"], report.chain[reason]) == (5, 8)


def on_threads(*runs):
    """What each gives, all at once on threads of their own, which end with their streams."""

    def alone(run):
        try:
            return run()
        finally:
            mx.clear_streams()

    with ThreadPoolExecutor(len(runs)) as pool:
        return list(pool.map(alone, runs))


@each_way
def test_generation_on_other_threads_and_on_several_at_once(model, how):
    def run():
        prompts = (PROMPT, [9, 8, 7], [65])
        return on_threads(*(partial(greedy, model, 6, prompt) for prompt in prompts)), on_threads(
            partial(served, model)
        )

    whole(agree(model, run, **how), 18)


@each_way
def test_a_batch_that_outgrows_what_is_fused_and_comes_back(model, how):
    def run():
        batch, found = BatchGenerator(model, prefill_batch_size=4, completion_batch_size=9), []
        for count in (3, 6, 0):
            batch.insert([[n, n + 1, n + 2] for n in range(count)], [9 + 2 * n for n in range(count)])
            for _ in range(4 if count else 30):
                found += [(each.uid, each.token) for each in batch.next()[1]]
        batch.close()
        return found

    report = agree(model, run, **how)
    assert min(layer.calls["9 rows, more than 8"] for layer in report.layers) > 2
    whole(report, 8)


LORA = {"rank": 4, "scale": 4.0, "dropout": 0.0}


def adapt(net, keys=None, **options):
    """LoRA layers on the last two decoder layers, with something in them."""
    mx.random.seed(1)
    linear_to_lora_layers(net, 2, LORA | ({"keys": keys} if keys else {}), **options)
    for name, module in net.named_modules():
        if hasattr(module, "lora_b"):
            module.lora_b = 0.05 * mx.random.normal(module.lora_b.shape, key=mx.random.key(len(name)))
    net.eval()


@each_way
@pytest.mark.parametrize("keys", [None, ["linear_attn.out_proj", "self_attn.o_proj"]], ids=["all", "mixer"])
def test_an_adapter_put_in_before_is_refused_by_name(how, keys):
    net = make_model()
    adapt(net, keys)
    report = agree(net, lambda: (greedy(net), served(net)), **how)
    rest = "moe_only" if keys else ""
    assert [layer.graph for layer in report.layers] == ["gdn_layer", "gdn_layer", rest, rest]
    assert all("is a LoRALinear" in layer.reason for layer in report.layers[2:])
    assert not any(layer.reason for layer in report.layers[:2])


def test_dora_is_refused_by_name():
    net = make_model()
    adapt(net, ["linear_attn.out_proj", "self_attn.o_proj"], use_dora=True)
    report = agree(net, lambda: greedy(net))
    assert [layer.reason for layer in report.layers] == ["", "", "out_proj is a DoRALinear", "o_proj is a DoRALinear"]


@each_way
def test_an_adapter_put_in_afterwards_is_seen_and_its_removal_too(how):
    net = make_model()
    plain = greedy(net)
    with fused_how(net, **how) as fusion:
        assert greedy(net) == plain
        adapt(net, ["linear_attn.out_proj", "self_attn.o_proj"])
        adapted = greedy(net)
        reasons = [set(layer.calls) - {"fused", "prefill, S > 1"} for layer in fusion.report().layers]
        remove_lora_layers(net)
        assert greedy(net) == plain
    assert reasons[:2] == [set(), set()]
    assert reasons[2] == {f"{models.CHANGED}: out_proj is a LoRALinear"}
    assert reasons[3] == {f"{models.CHANGED}: o_proj is a LoRALinear"}
    adapt(net, ["linear_attn.out_proj", "self_attn.o_proj"])
    assert greedy(net) == adapted != plain


def test_a_merged_adapter_is_fused():
    net = make_model()
    adapt(net, ["linear_attn.out_proj", "self_attn.o_proj"])
    merged = [(name, module.fuse()) for name, module in net.named_modules() if isinstance(module, LoRALinear)]
    net.update_modules(nn.utils.tree_unflatten(merged))
    agree(net, lambda: greedy(net), strict=True)


@each_way
@pytest.mark.parametrize("prompt", [PROMPT, [65]], ids=["prompt", "one-token"])
def test_weights_loaded_afterwards_are_seen(how, prompt):
    net, other = make_model(), make_model(seed=1)
    wanted = greedy(other, prompt=prompt)
    with fused_how(net, **how) as fusion:
        assert greedy(net, prompt=prompt) != wanted
        net.load_weights(tree_flatten(other.parameters()))
        assert greedy(net, prompt=prompt) == wanted
        assert all(layer.calls[models.CHANGED] == 9 for layer in fusion.report().layers)
    with fused_how(net, **how):
        assert greedy(net, prompt=prompt) == wanted


@each_way
def test_save_model_writes_the_same_files(model, tmp_path, how):
    def saved(folder):
        utils.save_model(folder, model)
        utils.save_config(dict(FAMILIES["qwen3_5_moe"]), folder / "config.json")
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    wanted = saved(tmp_path / "without")
    with fused_how(model, **how):
        greedy(model)
        assert saved(tmp_path / "with") == wanted
    assert {"config.json", "model.safetensors"} <= set(wanted)


@each_way
def test_a_copy_of_the_model_is_as_it_was_before(model, how):
    with fused_how(model, **how) as fusion:
        wanted = greedy(model)
        before = fusion.report()
        copied = copy.deepcopy(model)
        assert [type(m) for m in copied.modules()] == [type(m) for m in make_model().modules()]
        assert greedy(copied) == wanted
        assert fusion.report() == before
        fused_how(copied, **how)
        assert greedy(copied) == greedy(model) == wanted


def loss(net, tokens):
    return nn.losses.cross_entropy(net(tokens[:, :-1]), tokens[:, 1:], reduction="mean")


def trained(net, length):
    """The loss, the gradients and the tokens after a step with them. The weights are given back."""
    before = net.trainable_parameters()
    value, gradients = nn.value_and_grad(net, loss)(net, mx.array([RAGGED[0][:length]] * 2))
    net.update(before)
    net.update(tree_map(lambda x, g: x - 0.5 * g, net.trainable_parameters(), gradients))
    tokens = None if net.training else greedy(net)
    net.update(before)
    return value, dict(tree_flatten(gradients)), tokens


@each_way
@pytest.mark.parametrize("length", [2, 7], ids=["one-token", "prompt"])
@pytest.mark.parametrize("training", [True, False])
def test_gradients(how, length, training):
    net = models.new_model(tiny.CONFIG)
    tiny.randomise(net, 0)
    net.train(training)
    wanted = trained(net, length)
    with fused_how(net, **how) as fusion:
        value, gradients, tokens = trained(net, length)
        calls = fusion.report().layers[0].calls
        net.eval()
        assert greedy(net) == greedy(net)
    assert rms(value - wanted[0]) < 1e-6
    assert gradients.keys() == wanted[1].keys()
    assert sum(rms(x) > 0 for x in wanted[1].values()) > 20
    assert all(rms(gradients[name] - x) <= 1e-5 * rms(x) for name, x in wanted[1].items())
    assert tokens == wanted[2]
    if length == 2:
        assert calls["the model is in training mode; call model.eval()" if training else models.CHANGED] >= 1


def test_segments_are_compiled_for_few_shapes_whatever_a_cache_holds(model, monkeypatch):
    traced, right = [], MOECombine.reference
    monkeypatch.setattr(MOECombine, "reference", lambda *a: traced.append(1) or right(*a))
    with fused_how(model, segments=True):
        for length in (3, 190, 40):
            cache = make_prompt_cache(model)
            greedy(model, 2, [1 + n % 90 for n in range(length)], prompt_cache=cache)
            for held in cache:  # as BatchKVCache.extract leaves it
                if isinstance(held, KVCache):
                    held.keys, held.values = held.keys[..., : held.offset, :], held.values[..., : held.offset, :]
            greedy(model, 3, [7], prompt_cache=cache)
            traced.append(None)
    first = traced.index(None)
    assert first >= 4
    assert traced[first:].count(1) == 0
