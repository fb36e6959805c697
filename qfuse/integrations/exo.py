"""exo: the hook for fused kernels that its loader calls with a model it has loaded; docs/hosts.md shows where.

EXO_FUSED_KERNELS: 0 nothing, 1 the MoE alone, 2 whole layers, which is the default. Another value fuses nothing and is
logged as an error: a node that answers slowly is of more use than one that does not start.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import mlx.nn as nn

from ..fuse import MODES, Fusion, FusionReport, fuse
from ..load import CheckpointError, read_json
from ..models import MODEL_TYPES, RefusedError

VARIABLE = "EXO_FUSED_KERNELS"
DEFAULT = 2

log = logging.getLogger(__name__)


def maybe_apply_patches(model: nn.Module, model_path: str | Path) -> Fusion | None:
    """Fuse a model that was loaded from a folder, if it is one that can be; call it once the model has been sharded.

    model_path: the folder, whose config.json names the model's type. Every rank calls it with its own part of the
    model: exo's wrappers of first and last layers stay, with the layers within fused, and sharded layers sum as before.

    Returns what was put in, or None where nothing was; one line of the log says what, or why not. Raises nothing for
    a model that is unknown or refused.
    """
    modes = {str(mode): mode for mode in MODES}
    value = os.environ.get(VARIABLE, str(DEFAULT))
    if value not in modes:
        log.error("[%s] wants %s, got %r: nothing is fused", VARIABLE, ", ".join(modes), value)
        return None
    if not modes[value]:
        log.info("[%s] is 0: nothing is fused", VARIABLE)
        return None
    try:
        kind = read_json(Path(model_path) / "config.json").get("model_type")
        if kind not in MODEL_TYPES:
            raise RefusedError(f"[exo] wants a model_type of {', '.join(MODEL_TYPES)}, got {kind}")
        fusion = fuse(model, mode=modes[value])
    except (CheckpointError, RefusedError) as error:
        log.info("%s: left as it is", error)
        return None
    report = fusion.report()
    log.info("[exo] %s", _summary(report))
    log.debug("%s", report)
    return fusion


def _summary(report: FusionReport) -> str:
    reasons = sorted({layer.reason for layer in report.layers if layer.reason})
    return "; ".join([report.headline, *reasons])
