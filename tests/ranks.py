"""One rank of the tests that start several: ``python ranks.py FOLDER NAME…`` writes FOLDER/RANK.json."""

import json
import sys
from functools import cache
from pathlib import Path

import exo_like
import mlx.core as mx
from conftest import make_model
from families import DENSE, NEXT
from mlx_lm.generate import generate_step

from qfuse import fuse, tiny

# Heads for four ranks, and whole groups of 32 in a quarter of every row.
HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
TWO = HEADS | {"num_hidden_layers": 2, "full_attention_interval": 2}
PROMPT, STEPS = [5, 6, 7], 4


def model_of(config):
    """The same model on every rank."""
    return make_model(group=32, **config)


def generated(model):
    """Greedy tokens by mlx-lm's own loop, and the log-probabilities of the last of them."""
    pairs = list(generate_step(mx.array(PROMPT), model, max_tokens=STEPS))
    return [int(token) for token, _ in pairs], pairs[-1][1]


@cache
def alone(family, *more):
    """What the model gives whole, vanilla and in this process."""
    return generated(model_of(FAMILIES[family] | dict(more)))


def scenario(group, family, more, spread, **options):
    """A model spread over the ranks and fused, against the same model whole."""
    expected, logprobs = alone(family, *more.items())
    model = model_of(FAMILIES[family] | more)
    spread(model, group)
    with fuse(model, backends="reference", **options) as fusion:
        tokens, got = generated(model)
        report = fusion.report()
    return {
        "expected": expected,
        "tokens": tokens,
        "removed": generated(model)[0],
        "error": mx.abs(got - logprobs).max().item(),
        "layers": [[each.index, each.graph, each.reason, dict(each.calls)] for each in report.layers],
        "chain": dict(report.chain),
    }


def sharded(model, group):
    model.shard(group)


def pipelined(model, group):
    model.model.pipeline(group)


FAMILIES = {"moe": tiny.CONFIG, "dense": DENSE | {"intermediate_size": 256}, "next": NEXT}
SCENARIOS = {
    "sharded": ("moe", TWO, sharded, {"strict": True}),
    "sharded, segments": ("moe", TWO, sharded, {"strict": True, "segments": True}),
    "sharded, mode 1": ("moe", TWO, sharded, {"strict": True, "mode": 1}),
    "sharded, dense": ("dense", TWO, sharded, {"strict": True}),
    "pipelined": ("moe", HEADS, pipelined, {"strict": True}),
    "pipelined, segments": ("moe", HEADS, pipelined, {"segments": True}),
    "pipelined, next": ("next", HEADS, pipelined, {"strict": True}),
    "exo, tensor": ("moe", TWO, exo_like.tensor, {"strict": True}),
    "exo, tensor, next": ("next", TWO, exo_like.tensor, {"strict": True}),
    "exo, pipeline": ("moe", HEADS, exo_like.pipeline, {"strict": True}),
}


def main(folder: Path, names: list[str]) -> None:
    group = mx.distributed.init(backend="ring", strict=True)
    found = {}
    for name in names:
        *what, options = SCENARIOS[name]
        found[name] = scenario(group, *what, **options)
    (folder / f"{group.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
