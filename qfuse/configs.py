"""Model configs by name, as config.json has them: the shapes that are published, no weights."""

from __future__ import annotations

from typing import Any

from .tiny import CONFIG as TINY

_QWEN35: dict[str, Any] = {
    "model_type": "qwen3_5_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "vocab_size": 248320,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": {"type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}

CONFIGS: dict[str, dict[str, Any]] = {
    "tiny": TINY,
    "qwen3.5-35b-a3b": _QWEN35,
    "qwen3.5-122b-a10b": _QWEN35
    | {
        "hidden_size": 3072,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "linear_num_value_heads": 64,
        "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 1024,
    },
    "qwen3.5-397b-a17b": _QWEN35
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "linear_num_value_heads": 64,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 1024,
    },
}
