"""The command ``qfuse``."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import __version__
from .configs import CONFIGS

OUT = Console(highlight=False)
ERR = Console(stderr=True, highlight=False)
STARTED = time.perf_counter()

# Options that several commands have.
MODEL = click.option(
    "--model", metavar="PATH", help="Checkpoint folder. Default: the small one that comes with qfuse, in f32."
)
MODE = click.option(
    "--mode", type=click.IntRange(0, 2), default=2, show_default=True, help="0 off, 1 the MoE, 2 whole layers."
)
BACKENDS = click.option(
    "--backend", "backends", multiple=True, metavar="NAME", help="In order of preference. Default: see doctor."
)
MOE = click.option("--moe", type=click.Choice(["moe_4", "moe_5"]), default="moe_4", show_default=True)
STRICT = click.option("--strict", is_flag=True, help="Fail on anything that is refused.")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """Fused decode kernels for Qwen3.5-MoE on MLX."""


@cli.command()
@MODEL
@click.option("--prompt", default="Once upon a time", show_default=True, help="Text to go on from.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=64, show_default=True)
@MODE
@BACKENDS
@MOE
@STRICT
@click.option(
    "--compare", "against_vanilla", is_flag=True, help="Run vanilla mlx-lm too and compare tokens and logits."
)
def generate(
    model: str | None,
    prompt: str,
    max_tokens: int,
    mode: int,
    backends: tuple[str, ...],
    moe: str,
    strict: bool,
    against_vanilla: bool,
) -> None:
    """Generate text with a fused model, then say what was fused and how fast it ran."""
    import mlx.core as mx

    from . import backends as backend_table
    from . import generate as running
    from .fuse import fuse
    from .load import DEFAULT, locate
    from .show import comparison_lines, layers_table, refusal_lines

    if not prompt:
        raise click.UsageError("[prompt] wants some text, got nothing")
    for name in backends:
        backend_table.get(name)
    folder = locate(model) if model is not None else DEFAULT
    with _loading(folder) as (net, tokenizer):
        tokens = running.encode(tokenizer, prompt)
    if model is None:  # MLX sums bf16 products in bf16 on a CPU: slow, and tokens would differ by near ties
        net.set_dtype(mx.float32)
    if not tokens:
        raise click.UsageError("[prompt] wants at least one token, got none")

    vanilla = None
    if against_vanilla:
        with ERR.status("vanilla mlx-lm"):
            vanilla = running.generate(net, tokenizer, tokens, max_tokens, keep_logits=True)
    fusion = fuse(net, mode=mode, backends=backends or None, moe=moe, strict=strict)
    OUT.print(prompt, style="dim", end="", markup=False, soft_wrap=True)
    run = running.generate(
        net, tokenizer, tokens, max_tokens, keep_logits=against_vanilla,
        on_text=lambda text: OUT.out(text, end=""),
    )  # fmt: skip
    OUT.print("\n")

    report = fusion.report()
    OUT.print(layers_table(report))
    for line in refusal_lines(report):
        OUT.print(line, markup=False, soft_wrap=True)
    speed = Table("", "tokens", "prompt tok/s", "decode tok/s", title=f"on {_device()}", title_justify="left")
    for label, each in (("vanilla mlx-lm", vanilla), (f"qfuse mode {mode}, {', '.join(report.backends)}", run)):
        if each is not None:
            speed.add_row(label, str(len(each.tokens)), f"{each.prompt_tps:.1f}", f"{each.tps:.1f}")
    OUT.print(speed)
    if report.backends == ("reference",) and mode:
        OUT.print("The reference backend is for checking, not for speed.")
    if vanilla is not None:
        for line in comparison_lines(running.compare(vanilla, run)):
            OUT.print(line)


@cli.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@MODEL
@MODE
@BACKENDS
@MOE
@click.option("--segments", is_flag=True, help="Compile what lies between two updates of a kv cache into one call.")
@STRICT
@click.pass_context
def serve(
    context: click.Context,
    model: str | None,
    mode: int,
    backends: tuple[str, ...],
    moe: str,
    segments: bool,
    strict: bool,
) -> None:
    """Run mlx_lm.server with the model fused; all other options are its own, see mlx_lm.server --help.

    At most 8 rows of a batch are fused: --decode-concurrency 8 keeps to that.
    """
    from . import serve as serving

    args = serving.arguments([*context.args, *(("--model", model) if model is not None else ())])
    options = {"mode": mode, "backends": backends or None, "moe": moe, "segments": segments, "strict": strict}
    provider = serving.FusedProvider(args, options, lambda report: OUT.print(str(report), markup=False, soft_wrap=True))
    provider.load_default()  # here and not in the server's own thread, so that what is wrong with it ends the command
    serving.serve(provider, lambda url, _: OUT.print(f"listening on {url}", markup=False, soft_wrap=True))


@cli.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--force", is_flag=True, help="Write into a folder that has files in it.")
def tiny(folder: Path, seed: int, force: bool) -> None:
    """Write a small untrained qwen3_5_moe checkpoint to FOLDER, about 5 MB, that mlx-lm opens like any other."""
    from . import tiny as maker

    if folder.exists() and not folder.is_dir():
        raise click.UsageError(f"[folder] wants a folder, got the file {folder}")
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise click.UsageError(f"[folder] wants an empty folder or --force, got {folder} with files in it")
    maker.write(folder, seed)
    size = sum(path.stat().st_size for path in folder.iterdir())
    OUT.print(f"wrote {folder}: {size / 1e6:.1f} MB, seed {seed}", markup=False, soft_wrap=True)


@cli.command()
@click.argument("ops", nargs=-1, metavar="[OP]...")
@click.option("--backend", metavar="NAME", help="Default: the GPU's where there is one, otherwise sim.")
@click.option("--full", is_flag=True, help="All the checks that the backend has of the kernel itself: sim's, which see "
    "races, reads of what nobody wrote, accesses out of bounds, and more.")  # fmt: skip
@click.option("--model", metavar="PATH", help="Check the distinct ops of this checkpoint, with its own weights.")
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "f16", "f32"]),
    help="Default: the checkpoint's, or bf16; f32 on the reference, whose 16-bit sums are as good as MLX's own.",
)
@click.option(
    "--sample", type=click.Choice(["small", "odd", "production", "all"]), help="Shapes of the ops; default small."
)
@click.option("--until", metavar="NODE", help="Run one layer node by node to NODE, and name the first that differs.")
@click.option("--layer", type=click.IntRange(min=0), metavar="N", help="Of --model or --until, this layer alone.")
def check(
    ops: tuple[str, ...],
    backend: str | None,
    full: bool,
    model: str | None,
    dtype: str | None,
    sample: str | None,
    until: str | None,
    layer: int | None,
) -> None:
    """Check each OP's kernel against its reference on random data, by default all; exit status 1 if one fails."""
    from . import backends as backend_table
    from . import check as checking
    from .load import DEFAULT, locate
    from .op import REGISTRY
    from .show import check_table

    backend = backend or next(name for name in (*backend_table.default(), "sim") if backend_table.find(name).probes)
    chosen = backend_table.get(backend, full=full)
    for unknown in [op for op in ops if op not in REGISTRY]:
        raise click.UsageError(f"[check] wants one of {', '.join(sorted(REGISTRY))}, got {unknown}")
    if until is not None and (ops or sample):
        raise click.UsageError("[check] wants ops and samples, or --until, got both")
    if layer is not None and model is None and until is None:
        raise click.UsageError("[check] wants --layer with --model or --until, got it alone")
    if not chosen.probes and (model is not None or until is not None):
        raise click.UsageError(f"[backend] wants one that compiles kernels for --model and --until, got {backend}")
    samples = ("small", "odd", "production") if sample == "all" else (sample or "small",)

    done: list[checking.Check] = []
    if model is None and until is None:
        dtype = dtype or ("bf16" if chosen.probes else "f32")
        checks = checking.check_registry(ops or sorted(REGISTRY), samples, chosen, dtype)
    else:
        folder = locate(model) if model is not None else DEFAULT
        with _loading(folder) as (net, _):
            pass
        if until is not None:
            checks = checking.walk_layer(net, checking.layer_with(net, until, layer), until, chosen, dtype)
        else:
            found, done = checking.layer_ops(net, ops, dtype, layer)
            checks = checking.check_layers(found, samples, chosen)

    with ERR.status("checking") as status:
        for each in checks:
            done.append(each)
            status.update(f"checked {each.op}")
    OUT.print(check_table(done, f"{dtype or 'its own dtype'} on {backend}{', full checks' * full}"))
    failed = [each for each in done if each.fault]
    for each in failed:
        where = f" in layer {each.layers}" * bool(each.layers) + f", {each.sample} sample" * bool(each.sample)
        OUT.print(f"FAIL {each.op}{where}: {each.fault}", markup=False, soft_wrap=True)
    if failed:
        ERR.print(f"qfuse: {len(failed)} of {sum(not each.skipped for each in done)} failed", markup=False)
        raise click.exceptions.Exit(1)


FORMATS = ("table", "mermaid", "dot", "svg", "png", "html", "json")


@cli.command()
@click.argument("part", type=click.Choice(["gdn", "gqa", "moe", "layer", "model"]), default="layer")
@click.option(
    "--mode", type=click.IntRange(0, 2), default=2, show_default=True, help="0 vanilla, 1 the MoE, 2 whole layers."
)
@click.option("--config", metavar="NAME", help="A published config, no weights. Default qwen3.5-35b-a3b.")
@click.option("--model", metavar="PATH", help="A checkpoint folder instead; its weights are not read.")
@click.option("--bits", type=click.Choice(["2", "3", "4", "5", "6", "8"]), help="Of a --config. Default 8.")
@click.option("--rows", type=click.IntRange(1, 8), default=1, show_default=True, help="Sequences decoded together.")
@click.option("--keys", type=click.IntRange(min=1), default=1024, show_default=True, help="Keys in the kv caches.")
@click.option("--backend", "backends", multiple=True, metavar="NAME", help="In order of preference; default metal.")
@MOE
@click.option("--device", metavar="NAME", help="Estimate a token's time there, such as m3-ultra or h200.")
@click.option("--committed", is_flag=True, help="On a CUDA GPU: run a few layers and count the kernels launched.")
@click.option("--format", "form", type=click.Choice(FORMATS), help="Default: by the ending of FILE, or a table.")
@click.option("-o", "--output", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path))
def graph(
    part: str,
    mode: int,
    config: str | None,
    model: str | None,
    bits: str | None,
    rows: int,
    keys: int,
    backends: tuple[str, ...],
    moe: str,
    device: str | None,
    committed: bool,
    form: str | None,
    output: Path | None,
) -> None:
    """Show what a decode step runs, as a table or a picture: nodes, dispatches, bytes. Nothing is run."""
    from .picture import Request

    if output is not None and not output.absolute().parent.is_dir():
        raise click.UsageError(f"[output] wants a file in a folder that exists, got {output}")
    if form is None:
        form = "table" if output is None else {"mmd": "mermaid"}.get(output.suffix[1:], output.suffix[1:])
        if form not in FORMATS:
            raise click.UsageError(f"[format] wants one of {', '.join(FORMATS)}, got {output}")
    request = Request(
        part=part, mode=mode, config=config, model=model, bits=int(bits) if bits else None, rows=rows, keys=keys,
        backends=backends or ("cuda" if committed else "metal",), moe=moe, device=device, committed=committed,
    )  # fmt: skip
    made = request.table(OUT.width if output is None else 120) if form == "table" else request.render(form)
    if output is not None:
        output.write_bytes(made)
        ERR.print(f"wrote {output}: {len(made) / 1e3:.1f} kB", markup=False, soft_wrap=True)
    elif form == "png" and sys.stdout.isatty():
        raise click.UsageError("[output] wants a file for png, got a terminal")
    else:
        click.echo(made, nl=False)


@cli.command()
@click.option("--config", type=click.Choice(list(CONFIGS)), help="A model's config, built with random weights.")
@click.option("--model", metavar="PATH", help="A checkpoint folder in place of a config.")
@click.option("--bits", type=click.Choice(["4", "8"]), multiple=True, help="Of the random weights; default 8.")
@click.option("--batch", type=click.IntRange(1), multiple=True, help="Rows of a decode step; default 1.")
@click.option("--context", type=click.IntRange(1), multiple=True, help="Tokens before the timed ones; default 64.")
@click.option("--prefill", type=click.IntRange(2), multiple=True, help="Time prompts of this many tokens too.")
@click.option("--steps", type=click.IntRange(1), default=32, show_default=True, help="Tokens of a round.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Pairs of a vanilla and a fused.")
@click.option("--backend", "backends", multiple=True, metavar="NAME", help="Default cuda, metal or reference.")
@click.option("--segments", is_flag=True, help="Compile the nodes on both sides of a kv cache's update into one call.")
@click.option("--ops", is_flag=True, help="Time each op by itself instead.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Put the numbers into this JSON file.")
def bench(
    config: str | None,
    model: str | None,
    bits: tuple[str, ...],
    batch: tuple[int, ...],
    context: tuple[int, ...],
    prefill: tuple[int, ...],
    steps: int,
    rounds: int,
    backends: tuple[str, ...],
    segments: bool,
    ops: bool,
    out: Path | None,
) -> None:
    """Time vanilla mlx-lm against the fused model, alternated in one process."""
    if config is not None and model is not None:
        raise click.UsageError("[bench] wants --config or --model, got both")
    if model is not None and bits:
        raise click.UsageError("[bench.bits] wants a --config, got a --model, whose bits are its own")
    if ops:  # graphs would run launches of different layers side by side
        os.environ.setdefault("MLX_USE_CUDA_GRAPHS", "0")
    from . import backends as backend_table
    from . import bench as benchmark
    from .show import bench_tables

    found = [name for name in ("cuda", "metal") if backend_table.find(name).unavailable() is None]
    names = backends or tuple(found[:1]) or ("reference",)
    for name in names:
        backend_table.get(name)
    config = config or ("qwen3.5-35b-a3b" if found else "tiny")
    rows: list[dict[str, Any]] = []
    timed: list[dict[str, Any]] = []
    for width in bits or ("8",):
        net, what = _model(config, model, int(width))
        with _saying() as say:
            both = benchmark.Bench(net, names, say, segments=segments)
            for B in batch or (1,):
                for length in context or (64,):
                    if ops:
                        timed += [what | row for row in both.ops(B, length)]
                    else:
                        rows.append(what | both.decode(B, length, steps=steps, rounds=rounds))
                for length in () if ops else prefill:
                    rows.append(what | both.prefill(B, length, rounds=max(1, rounds // 3)))
    for row in rows:
        row["lowering"] = ", ".join([*names, "segments"] if segments else names)
    speed = benchmark.copy_speed() if ops else None
    for table in bench_tables(rows, timed, speed):
        OUT.print(table)
    OUT.print(f"on {benchmark.device_name()}, mlx {metadata.version('mlx')}, mlx-lm {metadata.version('mlx-lm')}")
    if out is not None:
        benchmark.save(out, rows, timed)


@cli.command()
@click.option("--config", type=click.Choice(list(CONFIGS)), help="A model's config, built with random weights.")
@click.option("--model", metavar="PATH", help="A checkpoint folder in place of a config.")
@click.option("--bits", type=click.Choice(["4", "8"]), default="8", show_default=True, help="Of the random weights.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Rows of a decode step.")
@click.option("--context", type=click.IntRange(1), default=1024, show_default=True, help="Tokens in the caches.")
@click.option("--backend", metavar="NAME", help="Default cuda or metal.")
@click.option("--op", "only", multiple=True, metavar="NAME", help="Tune this op alone; may be given several times.")
def tune(
    config: str | None,
    model: str | None,
    bits: str,
    batch: int,
    context: int,
    backend: str | None,
    only: tuple[str, ...],
) -> None:
    """Search the schedule of each kernel on this device and keep the best for every later run.

    Takes some minutes. A schedule is for one op at one shape: tune each model, width and batch that matters.
    """
    os.environ.setdefault("MLX_USE_CUDA_GRAPHS", "0")
    from . import backends as backend_table
    from . import bench as benchmark
    from . import tune as tuning
    from .backends.kernel import KernelBackend
    from .op import REGISTRY
    from .show import tuned_table

    for unknown in [name for name in only if name not in REGISTRY]:
        raise click.UsageError(f"[tune.op] wants one of {', '.join(sorted(REGISTRY))}, got {unknown}")
    names = [backend] if backend else [n for n in ("cuda", "metal") if backend_table.find(n).unavailable() is None]
    if not names:
        raise click.UsageError("[tune] wants a GPU or a --backend, got neither")
    chosen = backend_table.get(names[0])
    if not isinstance(chosen, KernelBackend):
        raise click.UsageError(f"[tune.backend] wants one that compiles kernels, got {names[0]}")
    net, _ = _model(config or "qwen3.5-35b-a3b", model, int(bits))
    with _saying() as say:
        rows = benchmark.tune_ops(benchmark.Bench(net, names, say), chosen, batch, context, only)
    OUT.print(tuned_table(rows))
    OUT.print(f"kept in {tuning.path()}", soft_wrap=True)


@cli.command()
def doctor() -> None:
    """Print versions, the device, and which backends run here."""
    from .backends import BACKENDS, default

    table = Table("", "", show_header=False, box=None)
    table.add_row("qfuse", __version__)
    for package in ("mlx", "mlx-lm", "networkx", "attrs"):
        table.add_row(package, metadata.version(package))
    table.add_row("python", platform.python_version())
    table.add_row("system", platform.platform())
    table.add_row("device", _device())
    for name, backend in BACKENDS.items():
        reason = backend.unavailable()
        chosen = " (default)" if name in default() else ""
        table.add_row(f"backend {name}", f"no: {reason}" if reason else f"yes{chosen}")
    OUT.print(table)


def main() -> None:
    """Run the command; a user's mistake is one line on stderr and exit status 2."""
    from .load import CheckpointError

    try:
        status = cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        sys.exit(_say(error.format_message()))
    except (CheckpointError, ValueError, RuntimeError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            sys.exit(1)
        # A message in the project's own form is for the user; anything else is a fault with its traceback.
        if not str(error).startswith("[") and not isinstance(error, OSError):
            raise
        sys.exit(_say(str(error)))
    sys.exit(status if isinstance(status, int) else 0)


def _say(message: str) -> int:
    ERR.print(f"qfuse: {' '.join(message.split())}", markup=False, soft_wrap=True)
    return 2


@contextmanager
def _saying() -> Iterator[Callable[[str], None]]:
    """What is under way, on stderr: one line that changes, or where that is no terminal one after another, timed."""
    if ERR.is_terminal:
        with ERR.status("") as status:
            yield status.update
    else:
        yield lambda text: ERR.print(f"{time.perf_counter() - STARTED:6.1f} s  {text}", markup=False, soft_wrap=True)


@contextmanager
def _loading(folder: Path) -> Iterator[tuple]:  # type: ignore[type-arg]
    from .load import load

    columns = (TextColumn("loading {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=ERR, transient=True, disable=not ERR.is_terminal) as progress:
        task = progress.add_task(folder.name, total=None)
        loaded = load(folder, lambda done, total: progress.update(task, completed=done, total=total))
    yield loaded


def _model(config: str, model: str | None, bits: int) -> tuple[Any, dict[str, Any]]:
    """A checkpoint, or a config with random weights, and what a result calls it."""
    from .bench import random_model
    from .load import locate

    if model is not None:
        with _loading(locate(model)) as (net, _):
            return net, {"config": Path(model).name, "bits": None}
    with _saying() as say:
        say(f"{config} with random {bits}-bit weights")
        return random_model(CONFIGS[config], bits=bits), {"config": config, "bits": bits}


def _device() -> str:
    import mlx.core as mx

    info = mx.device_info()
    return str(info.get("device_name") or info.get("architecture") or mx.default_device())
