"""Benchmarks: vanilla mlx-lm and the fused model alternated in one process, and each op by itself.

Both models share one set of weights. Their caches are filled with random keys and states instead of being run up to the
context, which vanilla mlx-lm would need minutes for.
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from . import tune
from .backends.kernel import KernelBackend, Lowered
from .fuse import FusedLayer, Fusion, fuse
from .models import conversion, filled_caches, make_cache, new_model, vocabulary
from .op import Op, Schedule
from .plan import Plan
from .spec import QArray
from .testing import compare, run, sample

WARM_UP = 4


def random_model(config: Mapping[str, Any], *, bits: int = 8, group: int = 64, seed: int = 0) -> nn.Module:
    """A bf16 model quantised as mlx-lm's convert does, its codes drawn at random on the device.

    A linear layer's weights have about the size 1/√K, the router's four times that, so that experts are told apart.
    """
    mx.random.seed(seed)
    model = new_model(config)
    keep, quantised = conversion(model)
    nn.quantize(model, group, bits, class_predicate=quantised)
    parameters = []
    for name, x in tree_flatten(model.parameters()):
        if name.endswith(("scales", "biases")) or x.dtype == mx.uint32:
            continue
        value = 1 + 0.1 * mx.random.normal(x.shape) if x.ndim == 1 else mx.random.normal(x.shape) * x.shape[1] ** -0.5
        parameters.append((name, value.astype(mx.bfloat16 if keep(name) else mx.float32)))
    model.update(tree_unflatten(parameters))
    mx.eval([x for _, x in parameters])
    for number, (name, module) in enumerate(model.named_modules()):
        if "scales" in module:
            codes, size = module.weight.shape, module.scales.shape
            width = (4 if name.endswith("mlp.gate") else 1) * (size[-1] * module.group_size) ** -0.5
            scale = width * 12**0.5 / 2**module.bits
            module.weight = mx.random.split(mx.random.key(number), -(-module.weight.size // 2)).reshape(codes)
            module.scales = (scale * mx.random.uniform(0.8, 1.2, size)).astype(mx.bfloat16)
            module.biases = module.scales * (-(2**module.bits - 1) / 2)
            mx.eval(module.parameters())
    model.eval()
    return model


@attrs.frozen
class Timing:
    """Seconds a token: the whole, building its graph in Python, handing it to the device. peak: bytes."""

    token: float
    build: float
    submit: float
    peak: int


def time_decode(model: nn.Module, cache: list[Any], tokens: mx.array, steps: int) -> Timing:
    """Greedy decode as mlx-lm's own loop does it: each token is awaited while the next is under way."""
    build, submit = [], []

    def step(y: mx.array) -> mx.array:
        start = time.perf_counter()
        logits = model(y, cache=cache)[:, -1]
        y = mx.argmax(logits, axis=-1)[:, None]
        built = time.perf_counter()
        mx.async_eval(y)  # type: ignore[no-untyped-call]
        build.append(built - start)
        submit.append(time.perf_counter() - built)
        return y

    y = step(tokens)
    for _ in range(WARM_UP):
        y, before = step(y), y
        mx.eval(before)
    mx.reset_peak_memory()
    start = time.perf_counter()
    for _ in range(steps):
        y, before = step(y), y
        mx.eval(before)
    spent = (time.perf_counter() - start) / steps
    peak = mx.get_peak_memory()
    mx.eval(y)
    return Timing(spent, statistics.median(build[-steps:]), statistics.median(submit[-steps:]), peak)


def time_prefill(model: nn.Module, tokens: mx.array) -> Timing:
    """One prompt, tokens [B, T], into a new cache, up to the last token's logits."""
    cache = make_cache(model)
    mx.synchronize()
    mx.reset_peak_memory()
    start = time.perf_counter()
    logits = model(tokens, cache=cache)[:, -1]
    built = time.perf_counter()
    mx.eval(logits, [c.state for c in cache])
    return Timing(time.perf_counter() - start, built - start, 0.0, mx.get_peak_memory())


def alternate(
    vanilla: Callable[[], Timing],
    fused: Callable[[], Timing],
    rounds: int,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, float]:
    """A B A B: medians in ms, and the median of vanilla over fused pair by pair. One round of each is not counted."""
    pairs = []
    for number in range(rounds + 1):
        say(f"round {number} of {rounds}, vanilla")
        first = vanilla()
        say(f"round {number} of {rounds}, fused")
        pairs.append((first, fused()))
    del pairs[0]
    row: dict[str, float] = {}
    for i, name in enumerate(("vanilla", "fused")):
        ours = [pair[i] for pair in pairs]
        row[f"{name}_ms"] = 1e3 * statistics.median(t.token for t in ours)
        row[f"{name}_build_ms"] = 1e3 * statistics.median(t.build for t in ours)
        row[f"{name}_submit_ms"] = 1e3 * statistics.median(t.submit for t in ours)
        row[f"{name}_peak_gb"] = max(t.peak for t in ours) / 1e9
    ratios = sorted(a.token / b.token for a, b in pairs)
    row |= {"ratio": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]}
    return {name: round(value, 4) for name, value in row.items()}


@attrs.frozen(eq=False)
class Use:
    """One call of an op in a step: what it was given and gave, by name, and how many experts its layer chose."""

    op: Op
    given: Mapping[str, mx.array | None]
    weights: Mapping[str, mx.array | QArray]
    gave: Mapping[str, mx.array]
    experts: int
    call: Callable[..., Any]

    def traffic(self) -> float:
        """Bytes that the call must move: of experts the chosen ones, of a kv cache the used part."""
        total = 0.0
        for name, value in {**self.given, **self.weights, **self.gave}.items():
            if value is None:
                continue
            dims = [dim.text for dim in self.op.specs[name].dims]
            part = 1.0
            if len(dims) == 3 and dims[0] == "E":
                part = self.experts / value.shape[0]
            elif "A" in dims and (length := self.given["length"]) is not None:
                part = float(np.array(length)[0]) / value.shape[2]
            total += part * value.nbytes
        return total


class Bench:
    """A model twice over one set of weights, vanilla and fused.

    segments: as of :func:`qfuse.fuse`. say: called with what is under way.
    """

    def __init__(
        self,
        model: nn.Module,
        backends: Sequence[str],
        say: Callable[[str], None] = lambda _: None,
        *,
        segments: bool = False,
    ) -> None:
        self.say = say
        say("fusing")
        self.vanilla = model
        self.fused = copy.deepcopy(model)  # shares every array
        self.fusion: Fusion = fuse(self.fused, backends=tuple(backends), strict=True, segments=segments)
        self.vocabulary = vocabulary(model)

    def decode(self, batch: int, context: int, *, steps: int, rounds: int) -> dict[str, Any]:
        """One row of decode at ``context`` tokens. experts: the fewest and the most that a layer chose."""
        place = f"decode, batch {batch}, context {context}"
        self.say(f"{place}: filling caches")
        fresh = filled_caches(self.vanilla, batch, context)
        tokens = self._tokens(batch, 1)
        row = alternate(
            lambda: time_decode(self.vanilla, fresh(), tokens, steps),
            lambda: time_decode(self.fused, fresh(), tokens, steps),
            rounds,
            lambda text: self.say(f"{place}: {text}"),
        )
        self.say(f"{place}: counting experts")
        new = self.fusion.report().new_bytes / 1e9
        row["vanilla_peak_gb"] = round(row["vanilla_peak_gb"] - new, 4)  # the fused model's own, beside it
        hit = [distinct(seen["route_swiglu.indices"]) for _, _, seen in self.observe(fresh(), tokens)]
        return {"what": "decode", "batch": batch, "context": context, **row, "experts": [min(hit), max(hit)]}

    def prefill(self, batch: int, length: int, *, rounds: int) -> dict[str, Any]:
        """One row of a prompt of ``length`` tokens."""
        tokens = self._tokens(batch, length)
        row = alternate(
            lambda: time_prefill(self.vanilla, tokens),
            lambda: time_prefill(self.fused, tokens),
            rounds,
            lambda text: self.say(f"prefill, batch {batch}, {length} tokens: {text}"),
        )
        return {"what": "prefill", "batch": batch, "context": length, **row}

    def observe(self, cache: list[Any], tokens: mx.array) -> list[tuple[FusedLayer, Plan, dict[str, Any]]]:
        """Each layer with its plan and every tensor of one step in it, by ``node.tensor``."""
        found = []

        class Observed:
            def __init__(self, layer: FusedLayer, plan: Plan) -> None:
                self.layer, self.plan = layer, plan

            def run(self, *inputs: Any) -> tuple[Any, ...]:
                seen = self.plan.debug(*inputs)
                found.append((self.layer, self.plan, seen))
                return tuple(seen[".".join(source)] for source in self.plan.graph.outputs().values())

        layers = [layer._qfuse for layer in self.fusion.layers.values()]
        text = self.fusion.text
        chain = text and text._qfuse
        try:
            if text:
                text._qfuse = lambda *_: None  # layer by layer
            for layer in layers:
                vars(layer)["plan"] = lambda *key, layer=layer: Observed(layer, FusedLayer.plan(layer, *key))
            mx.eval(self.fused(tokens, cache=cache))
        finally:
            for layer in layers:
                del vars(layer)["plan"]
            if text:
                text._qfuse = chain
        return found

    def uses(self, batch: int, context: int) -> dict[str, list[Use]]:
        """Every kernel call of one step by node name, each layer's with its own weights and what it was given there."""
        found: dict[str, list[Use]] = {}
        self.say(f"one step, batch {batch}, context {context}")
        observed = self.observe(filled_caches(self.fused, batch, context)(), self._tokens(batch, 1))
        for layer, plan, seen in observed:
            for step in plan.steps:
                op, sources = step.node.op, step.node.inputs
                if op.select("handle"):
                    continue
                tensors = {arg: n if n == tensor else f"{n}.{tensor}" for arg, (n, tensor) in sources.items()}
                use = Use(
                    op,
                    {name: seen.get(tensors.get(name, "")) for name in op.inputs()},
                    {spec: layer.adapter.weights[name] for spec, name in step.node.weight_names().items()},
                    {out: seen[f"{step.node.name}.{out}"] for out in op.select("out")},
                    distinct(seen["route_swiglu.indices"]),
                    step.call,
                )
                found.setdefault(step.node.name, []).append(use)
        return found

    def ops(self, batch: int, context: int) -> list[dict[str, Any]]:
        """Each op's time on the device, over all the layers that have it, so that their weights pass through the cache.

        One launch after another in one stream; on CUDA set MLX_USE_CUDA_GRAPHS=0, or launches of different layers,
        which depend on nothing here, run side by side. mb: what must be read and written, once each.
        """
        speed = copy_speed()
        rows = []
        for name, uses in self.uses(batch, context).items():
            self.say(name)
            spent = time_calls([partial(use.call, *use.given.values()) for use in uses], speed)
            size = statistics.mean(use.traffic() for use in uses)
            rows.append({
                "op": name, "batch": batch, "context": context, "layers": len(uses), "us": round(1e6 * spent, 2),
                "mb": round(size / 1e6, 3), "gb_s": round(size / spent / 1e9), "share": round(size / spent / speed, 3),
            })  # fmt: skip
        return rows

    def _tokens(self, batch: int, length: int) -> mx.array:
        return mx.random.randint(0, self.vocabulary, (batch, length), key=mx.random.key(1))


def distinct(indices: mx.array) -> int:
    """How many different numbers an array holds."""
    return len(set(np.array(indices).ravel().tolist()))


def copy_speed(size: int | None = None) -> float:
    """Bytes per second, read and written, of an elementwise kernel over a buffer far larger than any cache."""
    return _copying(16, size)[1]


def _copying(count: int, size: int | None = None) -> tuple[float, float]:
    """Seconds of ``count`` passes over the buffer one after another, and their speed."""
    gpu = mx.default_device() == mx.gpu
    n = (size or (1 << 30 if gpu else 1 << 24)) // 4
    spent = []
    source = mx.random.normal((n,))
    for _ in range(6):
        x = source
        for _ in range(count):
            x = -x
        start = time.perf_counter()
        mx.eval(x)
        spent.append(time.perf_counter() - start)
    best = statistics.median(spent[1:])
    return best, 8 * n * count / best


def time_calls(calls: Sequence[Callable[[], Any]], speed: float, least: int = 300) -> float:
    """Seconds of a call on the device, one after another; what the host does meanwhile is hidden.

    A long copy runs first, while the calls are being handed over, and its own time is taken off. speed: of that copy.
    """
    gpu = mx.default_device() == mx.gpu
    n = (1 << 30 if gpu else 1 << 22) // 4
    repeats = -(-least // len(calls)) if gpu else 1
    count = max(1, round((5e-3 + 12e-6 * repeats * len(calls)) * speed / (8 * n))) if gpu else 1
    source = mx.random.normal((n,))
    mx.eval(source, [call() for call in calls])

    def run(work: list[Any]) -> float:
        x = source
        for _ in range(count):
            x = -x
        start = time.perf_counter()
        mx.async_eval(x)  # type: ignore[no-untyped-call]
        mx.eval(work)
        mx.eval(x)
        return time.perf_counter() - start

    alone = statistics.median(run([]) for _ in range(5))
    spent = statistics.median(run([call() for _ in range(repeats) for call in calls]) for _ in range(5))
    return max(spent - alone, 1e-9) / (repeats * len(calls))


def device_name() -> str:
    """The device that MLX runs on by default."""
    info = mx.device_info()
    return str(info.get("device_name") or info.get("architecture") or mx.default_device())


def tune_ops(
    bench: Bench,
    backend: KernelBackend,
    batch: int,
    context: int,
    only: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Search the schedule of each kernel of one step, and keep the fastest that agrees with the reference.

    A row an op: its text, the declared and the best schedule, and the µs of both. only: ops by name, by default all.
    """
    speed = copy_speed()
    rows, kept = [], {}
    for name, uses in bench.uses(batch, context).items():
        op, declared = uses[0].op, uses[0].op.schedule(backend.name)
        if op.library or backend.refuses(op) or (only and op.name not in only):
            continue
        bench.say(f"tuning {name}")
        lowered, inputs = Lowered(backend, op, uses[0].weights), list(uses[0].given.values())
        spent = tune.search(
            declared,
            lambda schedule, lowered=lowered, inputs=inputs: lowered.text(schedule, *inputs).source,  # type: ignore[misc]
            partial(_measured, backend, uses, speed),
        )
        drawn = _few_experts(op, batch)
        right = (s for s in sorted(spent, key=spent.__getitem__) if s == declared or _agrees(backend, *drawn, s))
        best, text = next(right), lowered.text(declared, *inputs).name
        kept[text] = best
        rows.append({
            "op": name, "text": text, "declared": attrs.asdict(declared), "best": attrs.asdict(best),
            "declared_us": round(1e6 * spent[declared], 2), "us": round(1e6 * spent[best], 2), "tried": len(spent),
        })  # fmt: skip
    tune.keep(backend.name, kept)
    return rows


def _measured(backend: KernelBackend, uses: Sequence[Use], speed: float, schedule: Schedule) -> float | None:
    """Seconds of a call under a schedule, or None where it does not run."""
    try:
        calls = [partial(Lowered(backend, u.op, u.weights, schedule), *u.given.values()) for u in uses]
        return time_calls(calls, speed)
    except RuntimeError:
        return None


def _agrees(backend: KernelBackend, op: Op, arguments: dict[str, Any], schedule: Schedule) -> bool:
    try:
        compare(op, run(op, arguments, backend, schedule), arguments)
    except (AssertionError, RuntimeError):
        return False
    return True


def _few_experts(op: Op, batch: int) -> tuple[Op, dict[str, Any]]:
    """The op and random arguments, with 16 experts at most: the reference of all of them would take minutes."""
    constants = op.constants()
    if "E" in constants:
        op = attrs.evolve(op, E=min(constants["E"], max(constants.get("k", 1), 16)))  # type: ignore[misc]
    return sample(op, "production", B=batch, M=batch)


def save(path: Path, rows: Sequence[Mapping[str, Any]], ops: Sequence[Mapping[str, Any]]) -> None:
    """Put rows and ops into a results file, each with its date: it replaces the one measured so before."""
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    old = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    of_row = ("config", "bits", "batch", "context", "what", "lowering")
    of_op = ("config", "bits", "batch", "context", "op")
    fields = {
        "device": device_name(),
        "versions": {name: metadata.version(name) for name in ("mlx", "mlx-lm")},
        "date": today,
        "rows": _merged(old.get("rows", []), [{**row, "date": today} for row in rows], of_row),
        "ops": _merged(old.get("ops", []), [{**op, "date": today} for op in ops], of_op),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(fields, indent=1) + "\n", "utf-8")


def _merged(old: Sequence[Any], new: Sequence[Any], keys: Sequence[str]) -> list[Any]:
    def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(k) for k in keys)

    return [*[row for row in old if key(row) not in set(map(key, new))], *new]
