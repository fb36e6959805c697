"""Pictures of graphs from their plain data: Mermaid and DOT texts, SVG and PNG by Graphviz, and a self-contained page.

One node a dispatch or more, coloured by what runs it; edges carry the tensor's name, shape and dtype; state is dashed.
"""

from __future__ import annotations

import html
import json
import os
import re
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from typing import Any

from .describe import EdgeData, GraphData, NodeData

COLOURS = {
    "library": "#dfe6ee",
    "mlx": "#dfe6ee",
    "metal": "#bfe3c6",
    "cuda": "#d9ecb0",
    "sim": "#d8cff0",
    "reference": "#fbe7b5",
    "refused": "#f6b3ae",
    "": "#ffffff",
}
"""Fill of a node by what runs it; a refused node has its own, whatever runs it instead."""

TITLES = {
    "library": "MLX's own op",
    "mlx": "MLX or mlx-lm",
    "reference": "reference, in MLX ops",
    "refused": "refused by the backend asked for",
    "": "not planned",
}


class PictureError(ValueError):
    """A picture that cannot be drawn here; the text says what to install."""


def to_dot(graphs: Sequence[GraphData], *, title: str = "") -> str:
    """DOT text, top to bottom, each graph in a frame of its own, and a legend of what occurs."""
    lines = [
        "digraph qfuse {",
        "  graph [rankdir=TB, fontname=Arial, fontsize=16, labelloc=t, nodesep=0.4, ranksep=0.5,",
        f"    label={_quote(title)}];",
        '  node [shape=box, style=filled, fontname=Arial, fontsize=12, margin="0.1,0.04", color="#5b6770"];',
        '  edge [fontname=Arial, fontsize=10, color="#5b6770", fontcolor="#33404a", arrowsize=0.7];',
    ]
    for number, graph in enumerate(graphs):
        lines += _dot_graph(graph, f"g{number}", framed=len(graphs) > 1)
    lines += _dot_legend(graphs)
    return "\n".join([*lines, "}"]) + "\n"


def to_mermaid(graphs: Sequence[GraphData]) -> str:
    """A Mermaid flowchart, left to right, which GitHub draws."""
    lines = ["flowchart LR"]
    kinds: dict[str, list[str]] = {}
    for place, graph in enumerate(graphs):
        ids = {node.name: f"g{place}n{i}" for i, node in enumerate(graph.nodes)}
        if len(graphs) > 1:
            lines.append(f'  subgraph g{place}["{graph.name}"]')
        for node in graph.nodes:
            text = "<br/>".join(html.escape(line).replace("#", "#35;") for line in caption(node))
            lines.append(f'  {ids[node.name]}(["{text}"])' if node.kind != "op" else f'  {ids[node.name]}["{text}"]')
            kinds.setdefault(kind(node) if node.kind == "op" else "end", []).append(ids[node.name])
        for edge, labels in _merged(graph):
            arrow = "-.->" if edge.state else "-->"
            text = "<br/>".join(html.escape(label) for label in labels)
            lines.append(f'  {ids[edge.source]} {arrow}|"{text}"| {ids[edge.target]}')
        if len(graphs) > 1:
            lines.append("  end")
    for name, members in kinds.items():
        if name != "end":
            style = name.replace("+", "_") or "plain"
            lines.append(f"  classDef {style} fill:{_colour(name)},stroke:#5b6770,color:#1d2429")
            lines.append(f"  class {','.join(members)} {style}")
    return "\n".join(lines) + "\n"


def render(dot: str, form: str) -> bytes:
    """DOT text as ``svg`` or ``png``. Raises PictureError without the extra ``picture``."""
    try:
        import pygraphviz
    except ImportError:
        raise PictureError(f"[graph] wants Graphviz for {form}, got none: pip install 'qfuse[picture]'") from None
    options = "-Gdpi=120" if form == "png" else ""
    with _quiet() as said:
        try:
            return bytes(pygraphviz.AGraph(string=dot).draw(format=form, prog="dot", args=options))
        except (OSError, ValueError) as error:
            text = " ".join(f"{error} {said()}".split())
            raise PictureError(f"[graph] wants Graphviz to draw {form}, got {text[:300]}") from error


@contextmanager
def _quiet() -> Iterator[Callable[[], str]]:
    """Keep what C libraries write on stderr, such as fontconfig's warnings; gives a function that returns it."""
    with tempfile.TemporaryFile() as kept:
        saved = os.dup(2)
        os.dup2(kept.fileno(), 2)

        def said() -> str:
            kept.seek(0)
            return kept.read().decode(errors="replace")

        try:
            yield said
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def to_html(left: Sequence[GraphData], right: Sequence[GraphData], *, title: str, notes: Sequence[str] = ()) -> str:
    """One page: the graphs of ``left`` beside those of ``right``, details of a node where the pointer is."""
    pairs = []
    details: dict[str, Any] = {}
    for side, graphs in (("left", left), ("right", right)):
        for graph in graphs:
            svg = render(to_dot([graph]), "svg").decode()
            svg = svg[svg.index("<svg") :]
            prefix = f"{side}-{len(details)}-"
            svg = re.sub(r'id="(g0n\d+)"', rf'id="{prefix}\1"', svg)
            svg = re.sub(r"<title>.*?</title>\n?", "", svg)
            for i, node in enumerate(graph.nodes):
                details[f"{prefix}g0n{i}"] = _details(graph, node)
            pairs.append((side, graph, svg))
    template = resources.files(__package__).joinpath("page.html").read_text("utf-8")
    columns = {
        side: "\n".join(
            f"<section><h2>{html.escape(graph.name)}</h2><p>{html.escape(summary(graph))}</p>"
            f'<div class="graph">{svg}</div></section>'
            for where, graph, svg in pairs
            if where == side
        )
        for side in ("left", "right")
    }
    filled = {
        "TITLE": html.escape(title),
        "NOTES": "".join(f"<p>{html.escape(note)}</p>" for note in notes),
        "LEFT": columns["left"],
        "RIGHT": columns["right"],
        # "</" would end the script element that the data is in.
        "DETAILS": json.dumps(details, ensure_ascii=False).replace("</", "<\\/"),
    }
    return re.sub("|".join(f"@{name}@" for name in filled), lambda m: filled[m[0].strip("@")], template)


def kind(node: NodeData) -> str:
    """What a node is coloured by."""
    return "refused" if node.refusals else node.backend


def summary(graph: GraphData) -> str:
    """``9 dispatches, 73.7 MB read and written``."""
    count = f"{graph.dispatches} dispatches"
    return count if graph.bytes is None else f"{count}, {size(graph.bytes)} read and written"


def caption(node: NodeData) -> list[str]:
    """The lines that a node shows."""
    if node.kind != "op":
        return [node.name]
    lines = [f"{numbers(node)} {node.name}".strip()]
    if not node.op:  # a run of layers
        lines.append(node.formula)
    elif not node.name.startswith(node.op):
        lines.append(node.op)
    if node.reads is not None and node.writes is not None:
        lines.append(f"reads {size(node.reads)}, writes {size(node.writes)}")
    lines = [line for line in lines if line]
    lines += [f"not on {backend}: {reason}" for backend, reason in node.refusals.items()]
    return [*lines, f"run by {node.backend}"] if node.refusals and kind(node) != node.backend else lines


def numbers(node: NodeData) -> str:
    """Its dispatch numbers: ``4``, ``4-5``, or nothing."""
    if not node.first or not node.dispatches:
        return ""
    return str(node.first) if node.dispatches == 1 else f"{node.first}-{node.first + node.dispatches - 1}"


def size(count: int) -> str:
    """Bytes for people: ``512 B``, ``8.2 kB``, ``27.0 MB``, ``3.30 GB``."""
    for unit, scale, digits in (("GB", 1e9, 2), ("MB", 1e6, 1), ("kB", 1e3, 1)):
        if count >= scale:
            return f"{count / scale:.{digits}f} {unit}"
    return f"{count} B"


def _merged(graph: GraphData) -> list[tuple[EdgeData, list[str]]]:
    """Edges between the same two nodes as one, with a label for each tensor."""
    found: dict[tuple[str, str, bool], tuple[EdgeData, list[str]]] = {}
    for edge in graph.edges:
        tensor = graph.tensor(edge.tensor)
        name = tensor.name.rpartition(".")[2]
        label = tensor.label() if name.isdigit() or (name == "out" and edge.arg == "x") else f"{name} {tensor.label()}"
        if edge.arg.endswith(" times"):
            label = edge.arg
        _, labels = found.setdefault((edge.source, edge.target, edge.state), (edge, []))
        if label not in labels:
            labels.append(label)
    return list(found.values())


def _dot_graph(graph: GraphData, prefix: str, *, framed: bool) -> list[str]:
    ids = {node.name: f"{prefix}n{i}" for i, node in enumerate(graph.nodes)}
    lines = []
    if framed:
        lines += [
            f"  subgraph cluster_{prefix} {{",
            f"  label={_quote(f'{graph.name}: {summary(graph)}')}; fontsize=13;",
            '  style=rounded; color="#9aa5ad"; margin=44;',
        ]
    for node in graph.nodes:
        head, *rest = (_escape(line) for line in _wrapped(caption(node)))
        more = "".join(f'<tr><td><font point-size="10">{line}</font></td></tr>' for line in rest)
        look = f'id={ids[node.name]}, fillcolor="{_colour(kind(node))}"'
        if node.kind == "op":
            table = 'border="0" cellborder="0" cellspacing="0" cellpadding="1"'
            label = f"<<table {table}><tr><td><b>{head}</b></td></tr>{more}</table>>"
        else:
            label, look = f"<{head}>", f'id={ids[node.name]}, shape=ellipse, fillcolor="#ffffff"'
        if node.refusals:
            look += ', color="#c0281c", penwidth=2'
        lines.append(f"  {ids[node.name]} [{look}, label={label}];")
    for edge, labels in _merged(graph):
        text = "".join(f"  {_escaped(label)}\\l" for label in labels)  # spaces keep it off the line
        style = ", style=dashed" if edge.state else ""
        free = ", constraint=false" if edge.arg.endswith(" times") else ""
        lines.append(f'  {ids[edge.source]} -> {ids[edge.target]} [label="{text}"{style}{free}];')
    return [*lines, "  }"] if framed else lines


def _dot_legend(graphs: Sequence[GraphData]) -> list[str]:
    """A table of the colours and line styles that the graphs use."""
    kinds = list(dict.fromkeys(kind(node) for graph in graphs for node in graph.ops))
    rows = [
        f'<tr><td bgcolor="{_colour(name)}" width="26"></td><td align="left">{_escape(_title(name))}</td></tr>'
        for name in kinds
    ]
    rows += [
        '<tr><td>1-2</td><td align="left">numbers of its GPU dispatches</td></tr>',
        '<tr><td>- - -</td><td align="left">state, kept from token to token</td></tr>',
    ]
    table = f'<<table border="0" cellborder="0" cellspacing="3">{"".join(rows)}</table>>'
    return [f'  legend [shape=box, style=rounded, color="#9aa5ad", margin=0.05, fontsize=10, label={table}];']


def _colour(name: str) -> str:
    """A layer in two colours, such as metal+mlx, has that of the first which is not MLX's own."""
    parts = [part for part in name.split("+") if part not in ("mlx", "library")] or ["mlx"]
    return COLOURS.get(parts[0], COLOURS[""]) if name else COLOURS[""]


def _title(name: str) -> str:
    parts = name.split("+")
    return " and ".join(TITLES.get(part, f"{part} kernel") for part in parts)


def _wrapped(lines: Iterable[str], width: int = 46) -> list[str]:
    return [part for line in lines for part in textwrap.wrap(line, width)]


def _details(graph: GraphData, node: NodeData) -> dict[str, Any]:
    """What the page shows of a node."""
    ins = [
        f"{edge.arg}: {graph.tensor(edge.tensor).label()} from {edge.source}"
        for edge in graph.edges
        if edge.target == node.name
    ]
    outs = [f"{tensor.name}: {tensor.label()}" for tensor in graph.tensors if tensor.name.startswith(f"{node.name}.")]
    weights = [f"{w.name.rpartition('.')[2]}: {w.label()}, {size(w.bytes or 0)}" for w in node.weights]
    is_op = node.kind == "op"
    return {
        "title": " ".join(filter(None, (numbers(node), node.name))),
        "formula": node.formula,
        "rows": [
            [name, value]
            for name, value in (
                ("op", node.op),
                ("run by", node.backend),
                ("dispatches", str(node.dispatches) if is_op else ""),
                ("reads", size(node.reads or 0) if is_op else ""),
                ("writes", size(node.writes or 0) if is_op else ""),
                *(("refused", f"{backend}: {reason}") for backend, reason in node.refusals.items()),
            )
            if value
        ],
        "inputs": ins,
        "weights": weights,
        "outputs": outs,
    }


def _escape(text: str) -> str:
    return html.escape(text, quote=False)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _quote(text: str) -> str:
    return f'"{_escaped(text)}"'
