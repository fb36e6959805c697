"""Schedules measured on the device in hand: searched once, kept in a file, and used by every plan after that.

A tuned schedule goes by the device, MLX's version and the name of the text that it replaces, which holds a digest of
everything in it: op, dims, dtypes and the declared schedule. What has changed since is not found, and not used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import platformdirs

from .op import Schedule

FIELDS = {
    "take": (8, 16, 32),
    "depth": (1, 2, 4, 8),
    "rows": (1, 2, 4, 8),
    "simdgroups": (1, 2, 4, 8),
    "cap": (0, 264, 528, 1056, 2112),
}
ORDER = ("take", "depth", "rows", "simdgroups", "rows", "depth", "cap")


def path() -> Path:
    """The file of tuned schedules: ``schedules.json`` in $QFUSE_CACHE_DIR, or in the user's cache folder."""
    return Path(os.environ.get("QFUSE_CACHE_DIR") or platformdirs.user_cache_dir("qfuse")) / "schedules.json"


@cache
def device() -> str:
    """What a schedule is measured for: the device that MLX runs on by default, and MLX's version."""
    info = mx.device_info()
    return (
        f"{info.get('device_name') or info.get('architecture') or mx.default_device()}, mlx {metadata.version('mlx')}"
    )


def best(backend: str, text: str) -> Schedule | None:
    """The tuned schedule for the text that the declared one gives, or None."""
    found = _read(path()).get(device(), {}).get(f"{backend}.{text}")
    return Schedule(**found) if found else None


def keep(backend: str, schedules: dict[str, Schedule]) -> None:
    """Add tuned schedules by text name to the file. Plans made from now on use them."""
    file = path()
    entries = {**_read(file)}
    ours = {f"{backend}.{text}": attrs.asdict(schedule) for text, schedule in schedules.items()}
    entries[device()] = {**entries.get(device(), {}), **ours}
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_suffix(".tmp")
    scratch.write_text(json.dumps(entries, indent=1) + "\n", "utf-8")
    scratch.replace(file)
    _read.cache_clear()


@cache
def _read(file: Path) -> dict[str, dict[str, Any]]:
    try:
        return json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"[schedules] wants JSON in {file}, got {error}") from None


def search(
    start: Schedule, text: Callable[[Schedule], str], measure: Callable[[Schedule], float | None]
) -> dict[Schedule, float]:
    """Seconds of the schedules tried, one field at a time from the best so far; the declared one is the first.

    text: what a schedule compiles to; one that compiles to a text tried already is measured again only for its cap.
    measure: seconds, or None for a schedule that does not run. Raises RuntimeError if ``start`` does not.
    """
    first = measure(start)
    if first is None:
        raise RuntimeError(f"[tune] wants a declared schedule that runs, got {start}")
    spent, tried, here = {start: first}, {start}, start
    for field in ORDER:
        for value in FIELDS[field]:
            other = attrs.evolve(here, **{field: value})
            if other in tried or (field != "cap" and text(other) == text(here)):
                continue
            tried.add(other)
            if (seconds := measure(other)) is not None:
                spent[other] = seconds
        here = min(spent, key=spent.__getitem__)
    return spent
