"""One rank of the tests that start several: ``python ranks.py FOLDER NAME…`` writes FOLDER/RANK.json."""

import json
import os
import sys
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
    return [int(token) for token, _ in pairs], pairs[-1][1].tolist()


def scenario(group, config, spread, **options):
    """What a rank gives of a model that is spread over all and fused."""
    # What MLX compiles for a CPU takes it a second a kernel.
    (mx.enable_compile if options.get("segments") else mx.disable_compile)()
    model = model_of(config)
    spread(model, group)
    chosen = {name: value(group) if callable(value) else value for name, value in options.items()}
    with fuse(model, backends="reference", **chosen) as fusion:
        tokens, logprobs = generated(model)
        report = fusion.report()
    return {
        "tokens": tokens,
        "logprobs": logprobs,
        "layers": [[each.index, each.graph, each.reason, dict(each.calls)] for each in report.layers],
        "chain": dict(report.chain),
    }


def sharded(model, group):
    model.shard(group)


def pipelined(model, group):
    model.model.pipeline(group)


SCENARIOS = {
    "sharded": (tiny.CONFIG | TWO, sharded, {"strict": True}),
    "sharded, segments": (tiny.CONFIG | TWO, sharded, {"strict": True, "segments": True}),
    "sharded, mode 1": (tiny.CONFIG | TWO, sharded, {"strict": True, "mode": 1}),
    "sharded, a mode a rank": (tiny.CONFIG | TWO, sharded, {"strict": True, "mode": lambda group: 1 + group.rank()}),
    "sharded, dense": (DENSE | TWO, sharded, {"strict": True}),
    "pipelined": (tiny.CONFIG | HEADS, pipelined, {"strict": True}),
    "pipelined, segments": (tiny.CONFIG | HEADS, pipelined, {"segments": True}),
    "pipelined, next": (NEXT | HEADS, pipelined, {"strict": True}),
    "exo, tensor": (tiny.CONFIG | TWO, exo_like.tensor, {"strict": True}),
    "exo, tensor, next": (NEXT | TWO, exo_like.tensor, {"strict": True}),
    "exo, pipeline": (tiny.CONFIG | HEADS, exo_like.pipeline, {"strict": True}),
}


def main(folder: Path, names: list[str]) -> None:
    group = mx.distributed.init(backend="ring", strict=True)
    compiled = folder / f"compiled{group.rank()}"  # two ranks may not make the same file at once
    compiled.mkdir()
    os.environ["TMPDIR"] = str(compiled)
    found = {}
    for name in names:
        *what, options = SCENARIOS[name]
        found[name] = scenario(group, *what, **options)
    (folder / f"{group.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
