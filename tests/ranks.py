"""One rank of the tests that start several: python ranks.py FOLDER runs every scenario and writes FOLDER/RANK.json."""

import json
import sys
from pathlib import Path

import exo_like
import mlx.core as mx
from conftest import make_model
from families import DENSE, NEXT
from mlx_lm.generate import generate_step

from qfuse import fuse, tiny

CONFIG = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
PROMPT, STEPS = [5, 6, 7, 8, 9], 6


def model_of(config=tiny.CONFIG, dtype=mx.float32):
    """The same model on every rank; groups of 32, so that a shard of a quarter has whole ones."""
    return make_model(dtype=dtype, group=32, **(config | CONFIG))


def generated(model):
    """Greedy tokens by mlx-lm's own loop, and the log-probabilities of the last of them."""
    pairs = list(generate_step(mx.array(PROMPT), model, max_tokens=STEPS))
    return [int(token) for token, _ in pairs], pairs[-1][1]


def scenario(group, config, spread, **options):
    """A model spread over the ranks, vanilla and fused, against the same model whole in this process."""
    alone, expected = generated(model_of(config))
    model = model_of(config)
    spread(model, group)
    vanilla, _ = generated(model)
    with fuse(model, backends="reference", **options) as fusion:
        tokens, got = generated(model)
        report = fusion.report()
    restored, _ = generated(model)
    return {
        "alone": alone,
        "vanilla": vanilla,
        "fused": tokens,
        "removed": restored,
        "error": mx.abs(got - expected).max().item(),
        "layers": [[each.index, each.graph, each.reason, dict(each.calls)] for each in report.layers],
        "chain": dict(report.chain),
        "new_bytes": report.new_bytes,
    }


def sharded(model, group):
    model.shard(group)


def pipelined(model, group):
    model.model.pipeline(group)


SCENARIOS = {
    "sharded": (tiny.CONFIG, sharded, {"strict": True}),
    "sharded, moe_5 and segments": (tiny.CONFIG, sharded, {"strict": True, "moe": "moe_5", "segments": True}),
    "sharded, mode 1": (tiny.CONFIG, sharded, {"strict": True, "mode": 1}),
    "sharded, dense": (DENSE, sharded, {"strict": True}),
    "pipelined": (tiny.CONFIG, pipelined, {"strict": True}),
    "pipelined, segments": (tiny.CONFIG, pipelined, {"segments": True}),
    "pipelined, next": (NEXT, pipelined, {"strict": True}),
    "exo, tensor": (tiny.CONFIG, exo_like.tensor, {"strict": True}),
    "exo, tensor, next": (NEXT, exo_like.tensor, {"strict": True}),
    "exo, pipeline": (tiny.CONFIG, exo_like.pipeline, {"strict": True}),
}


def main(folder: Path) -> None:
    group = mx.distributed.init(backend="ring", strict=True)
    found = {name: scenario(group, config, spread, **options) for name, (config, spread, options) in SCENARIOS.items()}
    (folder / f"{group.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
