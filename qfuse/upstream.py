"""Upstream: the code of mlx-lm that a plan stands in for, and whether the installed one is still that code."""

from __future__ import annotations

import inspect
from functools import cache
from hashlib import sha256
from importlib import import_module, metadata
from typing import Any

KNOWN = "0.32.2"
"""The mlx-lm whose code was read."""

BODIES: dict[str, tuple[str, ...]] = {
    "mlx_lm.models.qwen3_5:Qwen3_5TextModel.__call__": ("3384ff0a3a92",),
    "mlx_lm.models.qwen3_next:Qwen3NextModel.__call__": ("21bcebc25541",),
    "mlx_lm.models.base:create_attention_mask": ("2d465b3603c6",),
    "mlx_lm.models.base:create_ssm_mask": ("23dc6c2585ef",),
    "mlx_lm.models.qwen3_5:DecoderLayer.__call__": ("2f16df97b226",),
    "mlx_lm.models.qwen3_5:GatedDeltaNet.__call__": ("4802614f1738",),
    "mlx_lm.models.qwen3_next:Qwen3NextDecoderLayer.__call__": ("2f16df97b226",),
    "mlx_lm.models.qwen3_next:Qwen3NextGatedDeltaNet.__call__": ("1b18f97cc575",),
    "mlx_lm.models.qwen3_next:Qwen3NextGatedDeltaNet.fix_query_key_value_ordering": ("9d59df616985",),
    "mlx_lm.models.qwen3_next:Qwen3NextAttention.__call__": ("29f6ecfd5d22",),
    "mlx_lm.models.qwen3_next:Qwen3NextSparseMoeBlock.__call__": ("6e8e166f2bd8",),
    "mlx_lm.models.qwen3_next:Qwen3NextMLP.__call__": ("7a851c773f0f",),
    "mlx_lm.models.qwen3_next:Qwen3NextRMSNormGated.__call__": ("b9d3e8e115b6",),
    "mlx_lm.models.gated_delta:compute_g": ("eaee062e9023",),
    "mlx_lm.models.gated_delta:normalize_qk": ("dd1b1e10bf4e",),
    "mlx_lm.models.gated_delta:gated_delta_update": ("bbc33d9dfd93",),
    "mlx_lm.models.gated_delta:_gated_delta_step_ops": ("3028155eeb2d",),
    "mlx_lm.models.switch_layers:SwitchGLU.__call__": ("a4f20f8180f0",),
    "mlx_lm.models.switch_layers:SwitchLinear.__call__": ("f27eb0571c39",),
    "mlx_lm.models.switch_layers:QuantizedSwitchLinear.__call__": ("a829e0ef6260",),
    "mlx_lm.models.activations:swiglu": ("5cc2248bc31c",),
    "mlx_lm.models.activations:precise_swiglu": ("88a8bb75dfb1",),
    "mlx_lm.models.cache:KVCache.update_and_fetch": ("024f393d1277",),
    "mlx_lm.models.cache:BatchKVCache.update_and_fetch": ("f27afed55785",),
    "mlx_lm.models.cache:ArraysCache.advance": ("20da9a71f061",),
    "mlx_lm.models.cache:ArraysCache.make_mask": ("a2cfa2705444",),
    "mlx_lm.models.cache:ArraysCache.extend": ("1b39957b4202",),
}
"""What is stood in for, and the digests of its source that are known to compute what the references compute."""


@cache
def moved() -> str | None:
    """Why the installed mlx-lm is not to be stood in for, or None. Only what is named in BODIES is looked at."""
    changed = [name.partition(":")[2] for name, known in BODIES.items() if digest(name) not in known]
    if not changed:
        return None
    versions = f"mlx-lm {metadata.version('mlx-lm')} on mlx {metadata.version('mlx')}"
    return f"wants {', '.join(changed)} as in mlx-lm {KNOWN}, got another in {versions}"


def digest(name: str) -> str:
    """Of the source of ``module:name``, whatever its spacing; "missing" where there is no such thing."""
    module, _, path = name.partition(":")
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
        source = inspect.getsource(inspect.unwrap(found))
    except (ImportError, AttributeError, OSError, TypeError):
        return "missing"
    return sha256("".join(source.split()).encode()).hexdigest()[:12]
