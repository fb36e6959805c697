"""Open a checkpoint for the commands: say what is wrong with a folder before mlx-lm does, and load with progress."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from .hollow import empty
from .models import MODEL_TYPES, decoder_layers

DEFAULT = Path(__file__).with_name("default_model")
"""The checkpoint that comes with the package: a small trained one, see its README.md."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be opened; the text says which file and why, in one line."""


def locate(model: str) -> Path:
    """A folder as it is, or the local copy of a hub model; nothing is downloaded. Raises CheckpointError."""
    folder = Path(model).expanduser()
    if model.strip() and folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"[model] wants a folder, got the file {model}")
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", model):
        try:
            return Path(snapshot_download(model, local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError, OSError):
            raise CheckpointError(f"[model] wants a folder or a hub model already downloaded, got {model}") from None
    raise CheckpointError(f"[model] wants a folder, got {model}: there is no such folder")


def check(folder: Path) -> dict[str, Any]:
    """Read config.json and see that every weight file is there. Raises CheckpointError."""
    config = read_json(folder / "config.json")
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise CheckpointError(
            f"[model] wants model_type {' or '.join(MODEL_TYPES)}, got {kind} in {folder / 'config.json'}"
        )
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(read_json(index).get("weight_map", {}).values()))
    else:
        files = sorted(path.name for path in folder.glob("model*.safetensors"))
    if not files:
        raise CheckpointError(f"[model] wants model*.safetensors, got none in {folder}")
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"[model] wants {len(files)} weight files, got none called {missing[0]} in {folder}")
    if not (folder / "tokenizer.json").is_file() and not (folder / "tokenizer_config.json").is_file():
        raise CheckpointError(f"[model] wants a tokenizer, got none in {folder}")
    return config


@contextmanager
def opening(folder: Path) -> Iterator[None]:
    """Whatever a broken file makes mlx-lm or MLX raise, it is the file that is wrong: a CheckpointError."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())
        raise CheckpointError(f"[model] wants a checkpoint that mlx-lm opens, got {folder}: {text[:300]}") from error


def load(folder: Path, progress: Callable[[int, int], None] = lambda _done, _total: None) -> tuple[nn.Module, Any]:
    """Model and tokenizer by mlx-lm, weights read layer by layer. progress: called with layers read and layers in all.

    Raises CheckpointError on anything that mlx-lm or MLX says of the files.
    """
    check(folder)
    with opening(folder):
        model, tokenizer = mlx_lm.load(str(folder), lazy=True)
        layers = decoder_layers(model)
        for done, layer in enumerate(layers):
            progress(done, len(layers))
            mx.eval(layer.parameters())
        mx.eval(model.parameters())
        progress(len(layers), len(layers))
    return model, tokenizer


def hollow(folder: Path) -> nn.Module:
    """The model of a checkpoint without its weights: shapes, dtypes and quantisation as they are, nothing read.

    Raises CheckpointError on anything that mlx-lm or MLX says of the files.
    """
    check(folder)
    with opening(folder):
        model, _ = mlx_lm.utils.load_model(folder, lazy=True)
        empty(model)
    model.eval()
    return model


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"[model] wants {path.name}, got none in {path.parent}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"[model] wants JSON in {path}, got {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"[model] wants an object in {path}, got {type(value).__name__}")
    return value
