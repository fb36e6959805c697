"""Write docs/graphs.md and docs/pictures: python docs/generate.py. A test holds both against what the code gives."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import mlx.core as mx

from qfuse import devices, draw, hollow
from qfuse.configs import CONFIGS
from qfuse.count import Count, ModelCount, count_model
from qfuse.describe import GraphData
from qfuse.picture import Request

DOCS = Path(__file__).parent
PICTURES = {
    "gdn": ("The gated delta net and its seam to the MoE", Request(part="gdn")),
    "gqa": ("Gated attention and its seam to the MoE", Request(part="gqa")),
    "moe": ("The MoE", Request(part="moe")),
}

HEAD = """# The graphs

Written by `python docs/generate.py`; do not edit. Numbers are of Qwen3.5-35B-A3B, 8-bit, one row, 1024 keys in the kv
caches, counted without running anything: `qfuse graph`.

## Dispatches and bytes of a token

{counts}

Dispatches declared / traced, by mode: declared is what the ops say, traced is counted in what MLX records for the whole
call. Upstream's layers are traced as a Metal GPU would run them, and their primitives counted by what MLX's Metal
backend does: a view launches nothing, a reshape copies what is not contiguous, a concatenation launches once per input,
a kernel copies a strided input first, a function made by `mx.compile` is as many kernels as MLX fuses it into, and
attention over 1024 keys or more takes two on the larger chips. Bytes are what a launch has to read and write once: of
experts those chosen, of a kv cache the used keys.

On an H200 the kernels were counted in the graphs that MLX committed for a step of 3 GDN and 1 GQA layers of this model,
with embedding and output (MLX 0.32.4 on CUDA 13, mlx-lm 0.32.2, cuda backend): {committed}. The one more is a table of
pointers for a batched product. `qfuse graph model --committed` counts them on a GPU at hand.
"""

TIME = """## An estimate of the time

`seconds = bytes / memory speed + dispatches · cost of one`. It says where the time can go, not what a kernel reaches.

{estimates}

{sources}

Held against what was measured on an H200 ({setting}), with MLX's launches for vanilla counted as on CUDA:

{measured}

The cost of a launch is of a kernel with two inputs. {launches} launches of this design's kernels, with their real
inputs of up to 18 arrays and empty bodies, took {empty} ms there, twice the {estimated:.1f} ms that it gives: take the
estimate of mode 2 as a lower bound.
"""


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, the first column to the left and the rest to the right."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def counts() -> str:
    count = PICTURES["moe"][1].count
    parts = [(f"{layer.kind} layer × {len(layer.layers)}", layer.modes) for layer in count.layers]
    parts += [(name, dict.fromkeys((0, 1, 2), part)) for name, part in around(count)]
    rows = []
    for name, modes in parts:
        row = [name]
        for mode, part in sorted(modes.items()):
            declared = part.traced if part.declared is None else part.declared
            row += [f"{declared} / {part.traced}" if mode else str(part.traced), f"{(part.bytes or 0) / 1e6:.1f}"]
        rows.append(row)
    row = ["**token**"]
    for mode in (0, 1, 2):
        traced = count.dispatches(mode)
        row += [f"{count.dispatches(mode, declared=True)} / {traced}" if mode else str(traced)]
        row += [f"{(count.bytes(mode) or 0) / 1e6:.1f}"]
    return table(["", "vanilla", "MB", "mode 1", "MB", "mode 2", "MB"], [*rows, row])


def around(count: ModelCount) -> list[tuple[str, Count]]:
    return [("embedding", count.before), ("norm and output", count.after)]


def committed() -> str:
    config = {**CONFIGS["qwen3.5-35b-a3b"], "num_hidden_layers": 4}
    net = hollow.model_of(config, bits=8, group=64, dtype=mx.bfloat16)
    traced = count_model(net, "", keys=4, gpu="cuda")
    return ", ".join(
        f"{count} in {f'mode {mode}' if mode else 'vanilla'} ({traced.dispatches(mode)} by the trace)"
        for mode, count in devices.COMMITTED.items()
    )


def nodes(graph: GraphData) -> str:
    rows = [
        [draw.numbers(node), f"`{node.name}`", f"{draw.size(node.reads or 0)}", f"{draw.size(node.writes or 0)}"]
        for node in graph.ops
    ]
    text = table(["dispatch", "node", "reads", "writes"], rows)
    formulas = {node.op: node.formula for node in graph.ops}
    return text + "\n\n" + "\n".join(f"- `{name}`: {formula}" for name, formula in formulas.items())


def time() -> str:
    rows, sources = [], []
    for name, device in devices.DEVICES.items():
        count = Request(device=name).count
        times = [device.seconds(count.dispatches(mode), count.bytes(mode) or 0) for mode in (0, 1, 2)]
        rows.append([f"`{name}`", *[f"{1e3 * seconds:.1f} ms" for seconds in times]])
        sources.append(f"- {device.sources()}")
    measured = []
    for step in devices.MEASURED:
        request = Request(config=step.config, bits=step.bits, rows=step.rows, keys=step.keys, device=step.device)
        estimate = 1e3 * devices.find(step.device).seconds(request.count.dispatches(0), request.count.bytes(0) or 0)
        got = f"{step.low:.1f}" if step.low == step.high else f"{step.low:.1f} to {step.high:.1f}"
        ratio = f"{2 * estimate / (step.low + step.high):.2f}"
        measured.append([f"{step.bits}-bit", str(step.rows), str(step.keys), got, f"{estimate:.1f}", ratio])
    launches, empty = devices.EMPTY
    return TIME.format(
        estimates=table(["estimate", "vanilla", "mode 1", "mode 2"], rows),
        sources="\n".join(sources),
        setting=devices.SETTING,
        measured=table(["weights", "rows", "keys", "measured, ms", "estimate, ms", "ratio"], measured),
        launches=launches,
        empty=empty,
        estimated=1e3 * devices.find("h200").seconds(launches, 0),
    )


def page() -> str:
    """The text of docs/graphs.md."""
    parts = [HEAD.format(counts=counts(), committed=committed())]
    for name, (title, request) in PICTURES.items():
        (graph,) = request.graphs()
        parts.append(f"## {title}\n\n![{title}](pictures/{name}.svg)\n\n{nodes(graph)}\n")
    parts.append(time())
    return "\n".join(parts)


def stamp(dot: str) -> str:
    """What tells whether a picture is of this DOT text."""
    return f"<!-- from DOT {hashlib.sha256(dot.encode()).hexdigest()[:16]} -->"


def main() -> None:
    (DOCS / "pictures").mkdir(exist_ok=True)
    for name, (_, request) in PICTURES.items():
        dot = request.render("dot").decode()
        svg = request.render("svg").decode()
        (DOCS / "pictures" / f"{name}.svg").write_text(f"{svg.rstrip()}\n{stamp(dot)}\n", "utf-8")
    (DOCS / "graphs.md").write_text(page(), "utf-8")


if __name__ == "__main__":
    sys.exit(main())
