"""Models under test: real structure, few and narrow layers, seeded random weights; never a checkpoint from a hub."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from qfuse import REGISTRY, backends, models, tiny

# MLX keeps what it compiles for a CPU in the temporary folder, where two processes may not make the same file at once.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    folder = Path(tempfile.gettempdir(), f"qfuse-tests-{worker}")
    folder.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = str(folder)


def make_model(
    seed: int = 0, *, dtype: mx.Dtype = mx.float32, bits: int = 8, group: int = 64, **config: Any
) -> nn.Module:
    """A tiny model with some of its config changed."""
    model = models.new_model(tiny.CONFIG | config)
    tiny.randomise(model, seed)
    tiny.settle(model, bits=bits, group=group, dtype=dtype)
    return model


def rms(x: mx.array) -> float:
    return mx.sqrt((x.astype(mx.float32) ** 2).mean()).item()


def inputs(seed: int, B: int, S: int, H: int = tiny.HIDDEN, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Hidden states [B, S, H] of unit size."""
    return mx.random.normal((B, S, H), key=mx.random.key(seed)).astype(dtype)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny.write(folder)
    return folder


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory):
    """Nothing that a test makes lands in the user's cache, and all tests of a run share one."""
    root = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("QFUSE_CACHE_DIR", str(root))


@pytest.fixture
def sim() -> str:
    """The name of the simulator's backend; the test is skipped, with the reason, where there is none."""
    if reason := backends.BACKENDS["sim"].unavailable():
        pytest.skip(reason)
    return "sim"


@pytest.fixture
def no_6_bits(monkeypatch: pytest.MonkeyPatch):
    """Kernels that refuse weights of 6 bits, to see what becomes of a refusal."""
    for cls in REGISTRY.values():
        needs = tuple(need.replace("5, 6, 8)", "5, 8)") for need in cls.kernel_needs)
        monkeypatch.setattr(cls, "kernel_needs", needs)
