"""Where qfuse keeps what it makes once and uses again: the default checkpoint, the simulator's programs."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def root() -> Path:
    """``$QFUSE_CACHE_DIR``, or the user's cache folder. It need not be there yet."""
    return Path(os.environ.get("QFUSE_CACHE_DIR") or platformdirs.user_cache_dir("qfuse"))
