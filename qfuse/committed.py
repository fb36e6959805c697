"""Kernels that a CUDA GPU launches for a step, counted in the graphs that MLX commits: the check on what is traced.

MLX writes each graph it commits as a DOT file where MLX_SAVE_CUDA_GRAPHS_DOT_FILE is set to a prefix. It reads that
once a process, hence a process of its own here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from . import hollow, models
from .fuse import fuse

PREFIX = "MLX_SAVE_CUDA_GRAPHS_DOT_FILE"
_NODE = re.compile(r'"graph_\d+_node_\d+"\[style="[^"]*" shape="[^"]*" label="\d+\n([^"]*?)\n?"')


def kernels(texts: Iterable[str]) -> Counter[str]:
    """Launches by symbol in the texts of DOT files; what stands for another graph, or for none, launches nothing."""
    found = Counter(symbol for text in texts for symbol in _NODE.findall(text))
    return Counter({symbol: n for symbol, n in found.items() if not re.fullmatch(r"graph_\d+|EMPTY", symbol)})


def count_step(
    config: Mapping[str, Any], *, bits: int, rows: int, keys: int, backends: Sequence[str], moe: str
) -> dict[int, int]:
    """Kernels of one step of a model by mode; its weights are zeros, which its memory must hold.

    Raises RuntimeError where MLX has no CUDA GPU, or where the step fails.
    """
    if not mx.cuda.is_available():
        raise RuntimeError("[committed] wants a CUDA GPU, got none")
    request = {"config": dict(config), "bits": bits, "rows": rows, "keys": keys, "backends": list(backends), "moe": moe}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", __name__, json.dumps(request)],
            env={**os.environ, PREFIX: f"{folder}/graph_"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["nothing"]
        raise RuntimeError(f"[committed] wants a step that runs, got {last[0]}")
    return {int(mode): count for mode, count in json.loads(done.stdout.splitlines()[-1]).items()}


def _count(request: Mapping[str, Any], prefix: Path) -> dict[int, int]:
    model = hollow.model_of(request["config"], bits=request["bits"], group=64, dtype=mx.bfloat16)
    model.update(tree_map(lambda x: mx.zeros(x.shape, x.dtype), model.parameters()))  # hollow ones are strided
    mx.eval(model.parameters())
    counts = {}
    for mode in (0, 1, 2):
        with fuse(model, mode=mode, backends=request["backends"], moe=request["moe"]):
            counts[mode] = _step(model, request["rows"], request["keys"], prefix)
    return counts


def _step(model: nn.Module, rows: int, keys: int, prefix: Path) -> int:
    """Kernels of the second of two steps; the first leaves caches that nothing else holds, as in a decode loop."""
    tokens = mx.zeros((rows, 1), mx.int32)
    caches = []
    for layer in models.decoder_layers(model):
        forms = models.step_state(layer, rows, keys + 1, models.form(layer)[2])
        state = {name: mx.zeros(*form) for name, form in forms.items()}
        caches.append(models.step_cache(layer, state, keys))
    written: set[Path] = set()
    for _ in range(2):
        mx.eval(tokens, *[models.cache_state(cache) for cache in caches])
        mx.synchronize()
        before = set(prefix.parent.glob(f"{prefix.name}*"))
        mx.eval(model(tokens, cache=caches), *[models.cache_state(cache) for cache in caches])
        mx.synchronize()
        written = set(prefix.parent.glob(f"{prefix.name}*")) - before
    return kernels(path.read_text() for path in written).total()


if __name__ == "__main__":
    print(json.dumps(_count(json.loads(sys.argv[1]), Path(os.environ[PREFIX]))))
