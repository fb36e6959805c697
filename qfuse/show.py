"""Text for people: tables of what is fused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from .check import Check
    from .count import Count, ModelCount
    from .describe import GraphData
    from .devices import Device
    from .fuse import FusionReport, LayerReport
    from .generate import Comparison

CHECK_COLUMNS = ("op", "layers", "sample", "error/allowed", "allowed", "findings", "ms", "result")


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
    table = Table(title=report.headline, title_justify="left")
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
            graph = f"{first.graph}; refused: {first.reason}" if first.reason else first.graph
            cells = (escape(graph), str(first.nodes), str(first.dispatches), run_by)
        else:
            cells = (escape(f"refused: {first.reason}"), "", "", "mlx-lm")
        table.add_row(indices, first.kind, *cells, escape("; ".join(f"{n} {what}" for what, n in calls.most_common())))
    return table


def fusion_text(report: FusionReport) -> str:
    """A FusionReport as the text that ``str()`` gives: the table, then each backend's refusals by node."""
    lines = [*refusal_lines(report), *_chain_lines(report), f"new memory: {report.new_bytes / 1e6:.2f} MB"]
    return to_text(layers_table(report), *map(escape, lines))


def refusal_lines(report: FusionReport) -> list[str]:
    """A line for each op that a backend was asked for and does not run, with the reason."""
    passed = Counter(
        f"{node}: not on {backend}: {reason}"
        for layer in report.layers
        for node, refusals in layer.refusals.items()
        for backend, reason in refusals.items()
    )
    return [f"{text} ({count} layer{'s' * (count > 1)})" for text, count in passed.items()]


def _chain_lines(report: FusionReport) -> list[str]:
    calls = "; ".join(f"{count} {how}" if count else how for how, count in report.chain.items())
    return [f"segments across layers: {calls}"] if calls else []


def check_table(checks: Sequence[Check], title: str) -> Table:
    """A row for each op checked: how much of its allowance the worst output uses, and what that allowance is."""
    rows = []
    for check in checks:
        row = {"op": check.op, "layers": check.layers, "sample": check.sample}
        if worst := check.worst:
            row |= {"error/allowed": f"{worst.ratio:.3g}", "allowed": f"{worst.allowed:.2g}"}
        if check.findings:
            row["findings"] = f"{len(check.findings)}, first {check.findings[0].kind}"
        if not check.skipped:
            row["ms"] = f"{1e3 * check.seconds:.0f}"
        rows.append(row | {"result": check.skipped or ("FAIL" if check.fault else "pass")})
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    names = [name for name in CHECK_COLUMNS if any(row.get(name) for row in rows)]
    for name in names:
        number = name in ("error/allowed", "allowed", "ms")
        table.add_column(name, justify="right" if number else "left", overflow="fold", no_wrap=name in ("op", "layers"))
    for row in rows:
        table.add_row(*[escape(row.get(name, "")) for name in names])
    return table


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


def bench_tables(
    rows: Sequence[Mapping[str, Any]], ops: Sequence[Mapping[str, Any]], speed: float | None
) -> list[RenderableType]:
    """Rows of whole steps and of single ops, as ``qfuse bench`` measures them. speed: bytes a second of a copy."""
    tables: list[RenderableType] = []
    if rows:
        table = _right("ms a step", "vanilla", "fused", "ratio", "host", "GB", "experts", title=rows[0]["lowering"])
        for row in rows:
            table.add_row(
                f"{row['what']} {_conditions(row)}", f"{row['vanilla_ms']:.2f}", f"{row['fused_ms']:.2f}",
                f"{row['ratio']:.2f}", f"{row['fused_build_ms'] + row['fused_submit_ms']:.2f}",
                f"{row['vanilla_peak_gb']:.2f}/{row['fused_peak_gb']:.2f}",
                "-".join(map(str, sorted(set(row.get("experts", ()))))),
            )  # fmt: skip
        tables.append(table)
    for title in dict.fromkeys(map(_conditions, ops)):
        table = _right("op", "layers", "µs", "MB", "GB/s", "of copy", title=f"each op alone, {title}")
        for row in ops:
            if _conditions(row) == title:
                table.add_row(
                    row["op"], str(row["layers"]), f"{row['us']:.1f}", f"{row['mb']:.2f}", str(row["gb_s"]),
                    f"{100 * row['share']:.0f} %",
                )  # fmt: skip
        tables.append(table)
    if speed:
        tables.append(f"copy speed {speed / 1e9:.0f} GB/s")
    return tables


def tuned_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """What ``qfuse tune`` found: rows, simdgroups, take, depth and cap of the declared and of the best schedule."""
    title = "schedules: rows, simdgroups, take, depth, cap"
    table = _right("op", "declared", "µs", "best", "µs", "tried", title=title)
    for row in rows:
        declared, best = (", ".join(map(str, row[name].values())) for name in ("declared", "best"))
        table.add_row(row["op"], declared, f"{row['declared_us']:.1f}", best, f"{row['us']:.1f}", str(row["tried"]))
    return table


def _conditions(row: Mapping[str, Any]) -> str:
    bits = f"{row['bits']}-bit " if row["bits"] else ""
    return f"{bits}B {row['batch']} N {row['context']}"


def _right(*columns: str, title: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    return table


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
