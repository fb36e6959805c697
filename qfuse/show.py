"""Text for people: tables of what is fused."""

from __future__ import annotations

from collections import Counter
from io import StringIO
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from .count import Count, ModelCount
    from .describe import GraphData
    from .devices import Device
    from .fuse import FusionReport, LayerReport
    from .generate import Comparison


def to_text(*parts: RenderableType, width: int = 120) -> str:
    """Rich renderables as plain text."""
    console = Console(file=StringIO(), width=width, highlight=False)
    for part in parts:
        console.print(part)
    return console.file.getvalue().rstrip()  # type: ignore[attr-defined]


def layers_table(report: FusionReport) -> Table:
    """One row for each group of layers that came out alike."""
    groups: dict[tuple[object, ...], list[LayerReport]] = {}
    for layer in report.layers:
        key = (layer.kind, layer.graph, layer.reason, layer.dispatches, tuple(sorted(layer.backends.items())))
        groups.setdefault(key, []).append(layer)
    table = Table(
        title=f"{report.fused} of {len(report.layers)} layers fused, mode {report.mode}", title_justify="left"
    )
    for name in ("layers", "kind", "graph", "nodes", "dispatches", "run by", "calls"):
        table.add_column(name, justify="right" if name in ("nodes", "dispatches") else "left")
    for layers in groups.values():
        first = layers[0]
        calls: Counter[str] = Counter()
        for layer in layers:
            calls.update(layer.calls)
        indices = ranges([layer.index for layer in layers])
        if first.graph:
            run_by = ", ".join(f"{count} {name}" for name, count in sorted(first.backends.items()))
            cells = (first.graph, str(first.nodes), str(first.dispatches), run_by)
        else:
            cells = (escape(f"refused: {first.reason}"), "", "", "mlx-lm")
        table.add_row(indices, first.kind, *cells, escape("; ".join(f"{n} {what}" for what, n in calls.most_common())))
    return table


def fusion_text(report: FusionReport) -> str:
    """A FusionReport as the text that ``str()`` gives: the table, then each backend's refusals by node."""
    parts: list[RenderableType] = [layers_table(report)]
    passed = Counter(
        f"{node}: not on {backend}: {reason}"
        for layer in report.layers
        for node, refusals in layer.refusals.items()
        for backend, reason in refusals.items()
    )
    parts += [escape(f"{text} ({count} layers)") for text, count in passed.items()]
    parts.append(f"new memory: {report.new_bytes / 1e6:.2f} MB")
    return to_text(*parts)


def ranges(numbers: list[int]) -> str:
    """``0-2, 4`` for [0, 1, 2, 4]."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def comparison_lines(result: Comparison) -> list[str]:
    """What a comparison with vanilla found, in two lines."""
    if result.same:
        first = f"tokens: equal, all {result.steps}"
    else:
        first = f"tokens: different from number {(result.first or 0) + 1} on"
    scale = f"over {result.steps} steps (largest logit {result.largest:.4g})"
    return [first, f"largest logit difference: {result.difference:.4g} {scale}"]


def nodes_table(graph: GraphData) -> Table:
    """One row a node: its dispatch numbers, what runs it, its bytes, and why a backend was passed over."""
    from .draw import numbers, size, summary

    table = Table(title=f"{graph.name}: {summary(graph)}", title_justify="left")
    for name, justify in (("", "right"), ("node", "left"), ("run by", "left"), ("reads", "right"), ("writes", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for node in graph.ops:
        why = "".join(f"; {backend} refused: {reason}" for backend, reason in node.refusals.items())
        sides = ["" if side is None else size(side) for side in (node.reads, node.writes)]
        style = "red" if node.refusals else None
        table.add_row(numbers(node), escape(node.name), escape(f"{node.backend}{why}"), *sides, style=style)
    return table


def counts_table(count: ModelCount, device: Device | None = None) -> Table:
    """Dispatches and bytes of one token, vanilla beside the modes; with a device, an estimate of the time."""
    modes = sorted(count.layers[0].modes)
    title = f"{count.name}, one token: {count.rows} rows, {count.keys} keys, {count.dtype}"
    table = Table(title=title.replace(" 1 rows", " 1 row"), title_justify="left")
    table.add_column("", no_wrap=True)
    for mode in modes:
        label = f"mode {mode}" if mode else "vanilla"
        for what in ("declared", "traced", "MB") if mode else ("traced", "MB"):
            table.add_column(f"{label}\n{what}", justify="right")

    def cells(part: Count, mode: int, times: int = 1) -> list[str]:
        declared = part.traced if part.declared is None else part.declared
        counts = [declared, part.traced] if mode else [part.traced]
        shown = ["-" if value is None else str(times * value) for value in counts]
        return [*shown, "-" if part.bytes is None else f"{times * part.bytes / 1e6:.1f}"]

    for layer in count.layers:
        row = [cell for mode in modes for cell in cells(layer.modes[mode], mode)]
        table.add_row(f"{layer.kind} layer × {len(layer.layers)}", *row)
    for name, part in (("embedding", count.before), ("norm and output", count.after)):
        table.add_row(name, *[cell for mode in modes for cell in cells(part, mode)], end_section=part is count.after)
    whole: list[str] = []
    times: list[str] = []
    for mode in modes:
        traced, size = count.dispatches(mode), count.bytes(mode)
        whole += [str(count.dispatches(mode, declared=True)), str(traced)] if mode else [str(traced)]
        whole.append("-" if size is None else f"{size / 1e6:.1f}")
        estimate = "-" if device is None or size is None else f"{1e3 * device.seconds(traced, size):.1f} ms"
        times += ["", "", estimate] if mode else ["", estimate]
    table.add_row("token", *whole, style="bold")
    if device is not None:
        table.add_row("estimate", *times)
    return table
