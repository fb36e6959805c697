"""Small configs of every model class that is fused, from the default one's numbers."""

from qfuse import tiny

DENSE = tiny.CONFIG | {"model_type": "qwen3_5", "num_experts": 0, "intermediate_size": 192}
NEXT = {key: value for key, value in tiny.CONFIG.items() if key != "rope_parameters"} | {
    "model_type": "qwen3_next",
    "intermediate_size": 192,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 4096,
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
}
FAMILIES = {"qwen3_5_moe": tiny.CONFIG, "qwen3_5": DENSE, "qwen3_next": NEXT}
