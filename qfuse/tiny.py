"""A small seeded qwen3_5_moe checkpoint, made in a second: ``qfuse tiny``, and most of the tests.

It is not trained. Its embeddings and its output layer are set so that the likeliest token is the next character in
ASCII order, with every layer adding its own random part: text that shows at a glance whether a model still counts.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm import utils
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from .models import conversion, new_model

END = "<|endoftext|>"
BYTES = 256
HIDDEN, LAYERS, VOCAB = 256, 4, 512
CONFIG = {
    "model_type": "qwen3_5_moe",
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": BYTES,
    "rope_parameters": {"type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}


def successor(byte: int) -> int:
    """The byte that the model says after this one: a ring through printable ASCII, and one through the rest."""
    if 32 <= byte < 127:
        return 32 + (byte - 31) % 95
    return 127 if byte == 31 else (byte + 1) % BYTES


def randomise(model: nn.Module, seed: int) -> None:
    """Fill a new, unquantised model with seeded random weights, each parameter's from its own key."""
    # Layers as they are initialised would add little; these gains give each about the weight it has in a real model.
    gains = {"o_proj": 3.0, "out_proj": 3.0, "down_proj": 3.0, "mlp.gate": 4.0, "conv1d": 2.0}
    parameters = sorted(tree_flatten(model.parameters()))
    keys = mx.random.split(mx.random.key(seed), len(parameters))
    weights = []
    for (name, value), key in zip(parameters, keys, strict=True):
        if name.endswith("A_log"):
            new = mx.random.uniform(-5, 3, value.shape, key=key)  # heads that forget at once, and some that do not
        elif value.ndim == 1:
            new = 1 + 0.1 * mx.random.normal(value.shape, key=key)
        else:
            fan_in = math.prod(value.shape[1:]) if "conv1d" in name else value.shape[-1]
            gain = next((gain for part, gain in gains.items() if name.endswith(f"{part}.weight")), 1.0)
            new = mx.random.uniform(-1, 1, value.shape, key=key) * (gain * fan_in**-0.5)
        weights.append((name, new))
    model.update(tree_unflatten(weights))


def settle(model: nn.Module, *, bits: int, group: int, dtype: mx.Dtype) -> None:
    """Cast and quantise as mlx-lm's convert does: A_log in f32, router and shared gate 8-bit, then evaluate."""
    keep, quantised = conversion(model)
    parameters = tree_flatten(model.parameters())
    model.update(tree_unflatten([(name, x.astype(dtype) if keep(name) else x) for name, x in parameters]))
    nn.quantize(model, group, bits, class_predicate=quantised)
    mx.eval(model.parameters())
    model.eval()


def tiny_model(seed: int = 0) -> nn.Module:
    """The model: bf16, 8-bit in groups of 64."""
    model = new_model(CONFIG)
    randomise(model, seed)
    embeddings = mx.random.normal((VOCAB, HIDDEN), key=mx.random.key(seed))
    head = mx.zeros((VOCAB, HIDDEN))
    head[mx.array([successor(byte) for byte in range(BYTES)])] = embeddings[:BYTES] * (16 / HIDDEN)
    model.language_model.model.embed_tokens.weight = embeddings
    model.language_model.lm_head.weight = head
    settle(model, bits=8, group=64, dtype=mx.bfloat16)
    return model


def tokenizer() -> Tokenizer:
    """One token a byte, and an end of text."""
    vocab = {char: i for i, char in enumerate(_byte_chars())} | {END: BYTES}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END])
    return made


def write(folder: Path, seed: int = 0) -> None:
    """Write the checkpoint: config.json, model.safetensors, tokenizer files. The folder is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    utils.save_model(folder, tiny_model(seed))
    gate = {"group_size": 64, "bits": 8}
    quantization: dict[str, object] = {"group_size": 64, "bits": 8, "mode": "affine"}
    for layer in range(LAYERS):
        for name in ("gate", "shared_expert_gate"):
            quantization[f"language_model.model.layers.{layer}.mlp.{name}"] = gate
    utils.save_config({**CONFIG, "quantization": quantization}, folder / "config.json")
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "model_max_length": 1 << 20}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _byte_chars() -> list[str]:
    """The character that byte-level tokenizers write for each byte: printable Latin-1 as it is, the rest past it."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    extra = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(extra)) for byte in range(BYTES)]
