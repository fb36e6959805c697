"""What ``qfuse check`` does: ops, those of a checkpoint, or a layer node by node, against their references."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn

from . import backends, models
from .backends.sim import Finding, SimulationError
from .compare import Arguments, Closeness, MismatchError, compare, sample
from .graphs import Graph, Node
from .models import Adapter, RefusedError
from .op import REGISTRY, Op
from .plan import Step, build
from .probe import distinct, draw
from .show import ranges
from .spec import DTYPE_NAMES, DTYPES
from .testing import opcheck

OWN = "MLX's own"
ROWS, PREFILL = 2, 5
"""Rows of the step that a layer is walked on, and the tokens that upstream ran before it."""


@attrs.frozen(kw_only=True)
class Check:
    """One op and what became of it. op: its name, or that of its node. sample: the shapes. layers: that it is of.

    found: the closeness of each output, where it came so far. findings: what a checking backend found in the kernel.
    fault: what is wrong, "" if it passed. skipped: why it was not checked.
    """

    op: str
    sample: str = ""
    layers: str = ""
    found: Mapping[str, Closeness] = attrs.field(factory=dict)
    findings: tuple[Finding, ...] = ()
    fault: str = ""
    skipped: str = ""
    seconds: float = 0.0

    @property
    def worst(self) -> Closeness | None:
        """The output that uses the most of its allowance."""
        return max(self.found.values(), key=lambda closeness: closeness.ratio, default=None)


@attrs.frozen
class LayerOp:
    """An op of a checkpoint, with the weights of the first of the ``layers`` that have it. dtype: of activations."""

    node: Node
    weights: backends.Weights
    dtype: str
    layers: list[int]


def check_registry(
    names: Iterable[str], samples: Sequence[str], backend: backends.Backend, dtype: str
) -> Iterator[Check]:
    """Check ops of the registry on random arguments and weights."""
    for op in map(REGISTRY.__getitem__, names):
        if op.library:
            yield Check(op=op.name, skipped=OWN)
            continue
        for name in samples:
            if name in op.samples:
                yield _check(backend, *sample(op, name, dtype=dtype), sample=name)
            else:
                yield Check(op=op.name, sample=name, skipped="no such sample")


def check_layers(ops: Iterable[LayerOp], samples: Sequence[str], backend: backends.Backend) -> Iterator[Check]:
    """Check ops of a checkpoint with its own weights. samples: that give the rows and lengths of the inputs."""
    for each in ops:
        op, layers = each.node.op, ranges(each.layers)
        if op.library:
            yield Check(op=op.name, layers=layers, skipped=OWN)
            continue
        for name in samples:
            arguments = draw(each.node, each.weights, name, each.dtype)
            yield _check(backend, op, arguments, sample=name, layers=layers)


def layer_ops(
    model: nn.Module, names: Sequence[str] = (), dtype: str | None = None, layer: int | None = None
) -> tuple[list[LayerOp], list[Check]]:
    """The distinct ops of a model's layers, or of one ``layer``, and the layers that cannot be fused.

    names: of the ops wanted, default all. dtype: of the activations, default the model's own.
    Raises ValueError on a layer or an op that is not there.
    """
    ops: dict[Hashable, LayerOp] = {}
    refused = []
    for index in range(len(models.decoder_layers(model))) if layer is None else [layer]:
        try:
            adapter = _adapt(model, index)
        except RefusedError as error:
            refused.append(Check(op="", layers=str(index), skipped=str(error)))
            continue
        refused += [Check(op="", layers=str(index), skipped=f"the {part}: {why}") for part, why in adapter.left.items()]
        kind = dtype or _own_dtype(adapter)
        for node in _graph(adapter, kind).nodes():
            weights = _weights(adapter, node)
            ops.setdefault(distinct(node, weights, kind), LayerOp(node, weights, kind, [])).layers.append(index)
    there = {each.node.op.name for each in ops.values()}
    for name in names:
        if name not in there:
            raise ValueError(f"[check] wants one of the model's {', '.join(sorted(there))}, got {name}")
    return [each for each in ops.values() if not names or each.node.op.name in names], refused


def layer_with(model: nn.Module, node: str, layer: int | None = None) -> int:
    """The first layer that has ``node``, or ``layer`` if that has it. Raises ValueError, naming the nodes there are."""
    seen: dict[str, None] = {}
    for index in range(len(models.decoder_layers(model))) if layer is None else [layer]:
        names = [each.name for each in _graph(_adapt(model, index, fold=False), "bf16").nodes()]
        if node in names:
            return index
        seen |= dict.fromkeys(names)
    raise ValueError(f"[until] wants one of {', '.join(seen)}, got {node}")


def walk_layer(
    model: nn.Module, index: int, until: str, backend: backends.Backend, dtype: str | None = None
) -> Iterator[Check]:
    """Run a layer's plan node by node to ``until`` or to the first that differs from the reference on the same inputs.

    The step is a random one of two rows, after a prefill by upstream. A node takes what the nodes before it gave, so
    that an error is the node's own, and small ones do not add up to another choice of experts.
    """
    adapter = _adapt(model, index)
    if adapter.part == "moe":
        raise RefusedError(f"[layers.{index}] wants a mixer it can fuse, got one refused: {adapter.left['mixer']}")
    kind = dtype or _own_dtype(adapter)
    x = mx.random.normal((ROWS, PREFILL + 1, adapter.dims["H"]), key=mx.random.key(0)).astype(DTYPES[kind])
    cache = models.prefilled(model, index, x[:, :-1])
    plan = build(_graph(adapter, kind), adapter.weights, (backend,))
    walk = plan.walk(*adapter.inputs(x[:, -1:], None, cache))
    for step in plan.steps:
        done = _run(backend, step.node.name, partial(_compare_next, walk, adapter))
        yield attrs.evolve(done, layers=str(index), skipped="" if done.fault else _skipped(step))
        if done.fault or step.node.name == until:
            return


def _skipped(step: Step) -> str:
    """Why a step's result is not compared: it is not a kernel's."""
    if step.node.op.library:
        return OWN
    return "".join(f"refused: {reason}" for reason in step.refusals.values())


def _compare_next(walk: Iterator[tuple[Step, Arguments, Arguments]], adapter: Adapter) -> Mapping[str, Closeness]:
    step, values, results = next(walk)
    if _skipped(step):
        return {}
    given = {name: x for name, x in values.items() if x is not None}
    return compare(step.node.op, results, given | _weights(adapter, step.node))


def _check(backend: backends.Backend, op: Op, arguments: Arguments, sample: str, layers: str = "") -> Check:
    if reason := backend.refuses(op):
        done = Check(op=op.name, skipped=f"refused: {reason}")
    else:
        done = _run(backend, op.name, partial(opcheck, op, arguments, backend))
    return attrs.evolve(done, sample=sample, layers=layers)


def _run(backend: backends.Backend, op: str, action: Callable[[], Mapping[str, Closeness]]) -> Check:
    already, start = len(getattr(backend, "findings", ())), time.perf_counter()
    found: Mapping[str, Closeness] = {}
    findings: Sequence[Finding] = ()
    fault = ""
    try:
        found = action()
    except Exception as error:  # whatever a compiler or a driver raises, it is this op that fails
        fault = str(error)
        if isinstance(error, MismatchError):
            found = error.found
        if isinstance(error, SimulationError):
            findings = error.findings
    findings = findings or getattr(backend, "findings", ())[already:]
    seconds = time.perf_counter() - start
    return Check(op=op, found=found, findings=tuple(findings), fault=fault, seconds=seconds)


def _adapt(model: nn.Module, index: int, *, fold: bool = True) -> Adapter:
    layers = models.decoder_layers(model)
    if index >= len(layers):
        raise ValueError(f"[layer] wants 0 to {len(layers) - 1}, got {index}")
    try:
        return models.adapt(layers[index], fold_router=fold)
    except RefusedError as error:
        raise RefusedError(f"[layers.{index}] wants a layer it can fuse, got one refused: {error}") from error


def _graph(adapter: Adapter, dtype: str) -> Graph:
    return adapter.graph(dtype)


def _weights(adapter: Adapter, node: Node) -> dict[str, Any]:
    return {spec: adapter.weights[name] for spec, name in node.weight_names().items()}


def _own_dtype(adapter: Adapter) -> str:
    return DTYPE_NAMES[adapter.weights["input_norm.w_norm"].dtype]
