"""Convert what train.py wrote by mlx-lm, measure it, and write it with its model card into the package.

    python publish.py --trained trained --corpus corpus

Writes the 8-bit checkpoint over qfuse/default_model, and the 4-bit one to --four-bit if that is given. Every number of
the card is measured here or comes from train.json. Needs the package with the cpu extra.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shutil
import tempfile
import textwrap
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.convert import convert
from mlx_lm.sample_utils import make_sampler

PACKAGE = Path(__file__).parents[2] / "qfuse" / "default_model"
LENGTH = 512
KINDS = ("novels", "bible")
PROMPTS = ("Once upon a time", "She was not a woman to", "In those days the king")


def size(files: Iterable[Path]) -> int:
    """Bytes in all."""
    return sum(file.stat().st_size for file in files)


def predicate(bits: int) -> Callable[[str, nn.Module], dict[str, int]]:
    """Groups of 64, and of 32 where rows are no longer than 64; router and shared gate in 8-bit, as mlx-lm has it.

    A row of one group of 64 is multiplied wrongly by MLX 0.32.4 on a Hopper GPU, see docs/performance.md.
    """

    def choose(path: str, module: nn.Module) -> dict[str, int]:
        row = module.weight.shape[-1]
        group = 64 if row > 64 and row % 64 == 0 else 32
        return {"group_size": group, "bits": 8 if path.endswith(("mlp.gate", "shared_expert_gate")) else bits}

    return choose


def quantise(trained: Path, folder: Path, bits: int) -> None:
    """An mlx-lm checkpoint in a new folder."""
    convert(str(trained), str(folder), quantize=True, q_group_size=32, q_bits=bits, quant_predicate=predicate(bits))
    for made in [*folder.glob("README.md"), *folder.glob("generation_config.json")]:
        made.unlink()  # the card is ours, and the settings for sampling are none
    for file in folder.iterdir():
        file.chmod(0o644)


class Seen(nn.Module):
    """A router that counts its choices."""

    def __init__(self, gate: nn.Module, top_k: int) -> None:
        super().__init__()
        self.gate = gate
        self._top_k, self._counts = top_k, mx.zeros(gate.weight.shape[0])

    def __call__(self, x: mx.array) -> mx.array:
        logits = self.gate(x)
        chosen = mx.argpartition(logits, kth=-self._top_k, axis=-1)[..., -self._top_k :]
        self._counts = self._counts.at[chosen.flatten()].add(1.0)
        return logits

    def load(self) -> mx.array:
        """Each expert's share of the choices, as a multiple of an even share."""
        return self._counts / self._counts.mean()


def nats(model: nn.Module, tokenizer: Any, files: list[Path]) -> float:
    """Of these texts, an end of text around each, in windows of 512 tokens that know nothing of what came before."""
    ids = [tokenizer.eos_token_id]
    for file in files:
        ids += [*tokenizer.encode(file.read_text()), tokenizer.eos_token_id]
    windows = [ids[i : i + LENGTH + 1] for i in range(0, len(ids) - 1, LENGTH)]
    total = 0.0
    for size in {len(window) for window in windows}:
        rows = mx.array([window for window in windows if len(window) == size])
        for part in mx.split(rows, range(16, len(rows), 16)):
            logits = model(part[:, :-1]).astype(mx.float32)
            total += nn.losses.cross_entropy(logits, part[:, 1:], reduction="sum").item()
    return total


def measure(folder: Path, groups: list[list[Path]]) -> tuple[list[float], list[mx.array]]:
    """Bits per byte of each group of texts and of all, and each layer's load."""
    model, tokenizer = mlx_lm.load(str(folder))
    model.set_dtype(mx.float32)  # eight times as fast as bf16 on a CPU
    for layer in model.layers:
        layer.mlp.gate = Seen(layer.mlp.gate, layer.mlp.top_k)
    bits = [nats(model, tokenizer, files) / math.log(2) for files in groups]
    sizes = [size(files) for files in groups]
    figures = [a / b for a, b in zip([*bits, sum(bits)], [*sizes, sum(sizes)], strict=True)]
    return figures, [layer.mlp.gate.load() for layer in model.layers]


def sample(model: nn.Module, tokenizer: Any, prompt: str, temperature: float) -> str:
    """100 tokens; temperature 0 is what ``qfuse generate`` does."""
    mx.random.seed(0)
    text = mlx_lm.generate(model, tokenizer, prompt, max_tokens=100, sampler=make_sampler(temperature))
    space = " " if text[:1].isalnum() else ""  # mlx-lm leaves out the one that the text begins with
    return textwrap.fill(f"**{prompt}**{space}{text}", 110, initial_indent="> ", subsequent_indent="> ")


def card(record: dict[str, Any], **measured: Any) -> str:
    """The model card, from what train.py recorded and what was measured here."""
    best = record["history"][-1]
    template = Path(__file__).with_name("card.md").read_text()
    return template.format(
        **record["options"],
        **{name: record[name] for name in ("epochs", "device", "torch", "transformers", "date")},
        millions=record["parameters"] / 1e6,
        tokens=record["train_tokens"] / 1e6,
        step=best["step"],
        seconds=best["seconds"],
        trained_bits=best["heldout_bits_per_byte"],
        machine=platform.machine(),
        mlx=metadata.version("mlx"),
        mlx_lm=metadata.version("mlx-lm"),
        **measured,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trained", type=Path, default=Path("trained"), help="what train.py wrote")
    parser.add_argument("--corpus", type=Path, default=Path("corpus"), help="what corpus.py wrote")
    parser.add_argument("--out", type=Path, default=PACKAGE, help="written anew")
    parser.add_argument("--four-bit", type=Path, help="a new folder for the 4-bit checkpoint")
    options = parser.parse_args()

    record = json.loads((options.trained / "train.json").read_text())
    heldout = [sorted((options.corpus / "heldout").glob(f"{kind}-*.txt")) for kind in KINDS]
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for bits in (4, 8):
            folder = Path(scratch) / f"{bits}-bit"
            quantise(options.trained, folder, bits)
            figures, loads = measure(folder, heldout)
            rows.insert(0, f"| {bits}-bit | {' | '.join(f'{figure:.3f}' for figure in figures)} |")
            print(rows[0], flush=True)
        model, tokenizer = mlx_lm.load(str(folder))
        model.set_dtype(mx.float32)
        text = card(
            record,
            **{kind: size([*(options.corpus / "train").glob(f"{kind}-*.txt")]) / 1e6 for kind in KINDS},
            heldout=sum(map(size, heldout)) / 1e3,
            bits="\n".join(rows),
            loads="\n".join(f"| {i} | {x.max().item():.2f} | {x.min().item():.2f} |" for i, x in enumerate(loads)),
            greedy=sample(model, tokenizer, PROMPTS[0], 0.0),
            sampled="\n\n".join(sample(model, tokenizer, prompt, 0.7) for prompt in PROMPTS),
        )
        (folder / "README.md").write_text(text)
        shutil.rmtree(options.out, ignore_errors=True)
        shutil.copytree(folder, options.out)
        if options.four_bit:
            shutil.copytree(Path(scratch) / "4-bit", options.four_bit)
    print(f"{options.out}: {size(options.out.iterdir()) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
