"""A small checkpoint laid out as Qwen3.5-MoE's are published, its weights drawn by numpy, for golden numbers."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import mlx.core as mx
import numpy as np

from qfuse import tiny

# The norms' eps is large, so that the place of each one shows in the logits.
TEXT = {
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
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
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 192,
    "vocab_size": 96,
    "rms_norm_eps": 1e-3,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "dtype": "float32",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}
CONFIG = {
    "model_type": "qwen3_5_moe",
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": TEXT,
    "tie_word_embeddings": False,
}
SEED, PROMPT, STEPS = 20, 70, 32
SMALL_KEY = 2e-3
GOLDEN = Path(__file__).with_name("transformers.npz")


def tokens() -> np.ndarray:
    """The token ids that are run, [PROMPT + STEPS] int64: a prompt past one chunk of 64, then one a step."""
    return np.random.RandomState(SEED + 1).randint(0, TEXT["vocab_size"], PROMPT + STEPS)


def weights() -> dict[str, np.ndarray]:
    """Every tensor by its published name, f32. Norms but the gated one are stored less 1, as published."""
    H, V, E = TEXT["hidden_size"], TEXT["vocab_size"], TEXT["num_experts"]
    I, Is = TEXT["moe_intermediate_size"], TEXT["shared_expert_intermediate_size"]
    D, Dk, Dv = TEXT["head_dim"], TEXT["linear_key_head_dim"], TEXT["linear_value_head_dim"]
    Hq, Hkv = TEXT["num_attention_heads"], TEXT["num_key_value_heads"]
    Nk, Hv = TEXT["linear_num_key_heads"] * Dk, TEXT["linear_num_value_heads"]
    Nv, Kc = Hv * Dv, TEXT["linear_conv_kernel_dim"]
    draw = np.random.RandomState(SEED)  # RandomState's streams are the same in every numpy
    drawn: dict[str, np.ndarray] = {}

    def add(name: str, *shape: int, gain: float = 1.0, around: tuple[float, float] | None = None) -> None:
        low, high = around or (-gain * shape[-1] ** -0.5, gain * shape[-1] ** -0.5)
        drawn[name] = draw.uniform(low, high, shape).astype(np.float32)

    text = "model.language_model"
    add(f"{text}.embed_tokens.weight", V, H, around=(-1.7, 1.7))
    for index, kind in enumerate(TEXT["layer_types"]):
        layer = f"{text}.layers.{index}"
        add(f"{layer}.input_layernorm.weight", H, around=(-0.3, 0.3))
        add(f"{layer}.post_attention_layernorm.weight", H, around=(-0.3, 0.3))
        if kind == "linear_attention":
            mixer = f"{layer}.linear_attn"
            add(f"{mixer}.in_proj_qkv.weight", 2 * Nk + Nv, H, gain=1.7)
            # The first key head is small enough that the eps of its l2norm counts.
            drawn[f"{mixer}.in_proj_qkv.weight"][Nk : Nk + Dk] *= np.float32(SMALL_KEY)
            add(f"{mixer}.in_proj_z.weight", Nv, H, gain=1.7)
            add(f"{mixer}.in_proj_b.weight", Hv, H, gain=1.7)
            add(f"{mixer}.in_proj_a.weight", Hv, H, gain=1.7)
            add(f"{mixer}.conv1d.weight", 2 * Nk + Nv, 1, Kc, gain=2.0)
            add(f"{mixer}.A_log", Hv, around=(-4.0, 1.0))
            add(f"{mixer}.dt_bias", Hv, around=(-2.0, 1.0))
            add(f"{mixer}.norm.weight", Dv, around=(0.7, 1.3))
            add(f"{mixer}.out_proj.weight", H, Nv, gain=3.0)
        else:
            mixer = f"{layer}.self_attn"
            add(f"{mixer}.q_proj.weight", 2 * Hq * D, H, gain=1.7)
            add(f"{mixer}.k_proj.weight", Hkv * D, H, gain=1.7)
            add(f"{mixer}.v_proj.weight", Hkv * D, H, gain=1.7)
            add(f"{mixer}.q_norm.weight", D, around=(-0.3, 0.8))
            add(f"{mixer}.k_norm.weight", D, around=(-0.3, 0.8))
            add(f"{mixer}.o_proj.weight", H, Hq * D, gain=3.0)
        add(f"{layer}.mlp.gate.weight", E, H, gain=4.0)
        add(f"{layer}.mlp.experts.gate_up_proj", E, 2 * I, H, gain=1.7)
        add(f"{layer}.mlp.experts.down_proj", E, H, I, gain=3.0)
        for name, rows, columns, gain in (("gate", Is, H, 1.7), ("up", Is, H, 1.7), ("down", H, Is, 3.0)):
            add(f"{layer}.mlp.shared_expert.{name}_proj.weight", rows, columns, gain=gain)
        add(f"{layer}.mlp.shared_expert_gate.weight", 1, H, gain=1.7)
    add(f"{text}.norm.weight", H, around=(-0.3, 0.3))
    add("lm_head.weight", V, H, gain=1.7)
    return drawn


def digest(drawn: dict[str, np.ndarray]) -> str:
    """Of all weights and the tokens, so that other numbers than the golden ones were made from are told apart."""
    whole = sha256(tokens().astype(np.int64).tobytes())
    for name, array in sorted(drawn.items()):
        whole.update(name.encode())
        whole.update(array.tobytes())
    return whole.hexdigest()[:16]


def write(folder: Path, drawn: dict[str, np.ndarray]) -> None:
    """Write config.json, model.safetensors and a tokenizer, which the numbers do not use. The folder is made."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    arrays = {name: mx.array(array) for name, array in drawn.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "pt"})
    tiny.write_tokenizer(folder)
