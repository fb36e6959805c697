"""What MLX records of a computation, without running it, and what a GPU would launch for that.

A trace on a CPU differs from a GPU's in three ways, which ``gpu_shaped`` evens out: MLX's fast ops fall apart into
small ones, mlx-lm's own kernels do not exist, and what mx.compile fuses is recorded unfused. The rules of ``launches``
are those of MLX's Metal backend (mlx/backend/metal and mlx/backend/gpu, 0.32). On CUDA mlx-lm has no kernel for the
recurrence, MLX has none for attention on heads wider than 128, and a gather_qmm copies row numbers that are broadcast.
"""

from __future__ import annotations

import io
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import attrs
import mlx.core as mx

from . import models
from .backends.kernel import KernelText
from .backends.metal import MetalBackend
from .plan import VIEWS, Primitive, Traced, _primitive

SDPA_TWO_PASS = 1024
"""Keys from which Max and Ultra chips run attention in two launches; other chips do so from 4096 on."""

MAKES_CONTIGUOUS = {"CustomKernel", "RMSNorm", "QuantizedMatmul", "GatherQMM", "ScaledDotProductAttention"}
"""What copies an input that is not laid out row after row, one launch each; everything else reads strides."""


@attrs.frozen
class Recording:
    """One traced function. inputs, outputs: its arrays, in order."""

    primitives: tuple[Primitive, ...]
    inputs: tuple[Traced, ...]
    outputs: tuple[Traced, ...]


@attrs.frozen(kw_only=True)
class Launched:
    """One primitive that launches something.

    kernel: a CustomKernel's name, "" for what stands in for MLX's own. dispatches, reads, writes: launches and bytes,
    with those that only make an input contiguous.
    """

    name: str
    kernel: str
    dispatches: int
    reads: int
    writes: int
    inputs: tuple[Traced, ...]
    outputs: tuple[Traced, ...]


def record(function: Callable[..., Sequence[mx.array]], *arrays: mx.array) -> Recording:
    """The primitives that MLX records for one call of ``function``, in order, without running any of them."""
    primitives: list[Primitive] = []
    ends: dict[str, tuple[Traced, ...]] = {}

    def event(found: dict[str, Any]) -> None:
        if found["type"] == "primitive":
            primitives.append(_primitive(found))
        elif found["type"] in ("inputs", "outputs"):
            ends[found["type"]] = tuple(Traced(*array) for array in found[found["type"]])

    mx.export_function(event, function, *arrays)
    return Recording(tuple(primitives), ends["inputs"], ends["outputs"])


@contextmanager
def gpu_shaped(gpu: str = "metal") -> Iterator[None]:
    """While it lasts, a trace on a CPU records what a GPU would, ``metal`` or ``cuda``, by stand-in kernels.

    mx.fast's ops and mlx-lm's own kernels become one node each; a compiled function as many as MLX fuses it into.
    It replaces attributes of mlx and mlx_lm and puts them back; do not run a model in it.
    """
    stand_in = _StandIns()
    with ExitStack() as stack:
        # On a GPU's stream MLX's attention divides by the strides of its inputs, and hollow arrays have strides of 0.
        stack.enter_context(mx.stream(mx.cpu))
        fast = {"rms_norm": "RMSNorm", "rope": "RoPE", "scaled_dot_product_attention": "ScaledDotProductAttention"}
        if gpu == "cuda":
            del fast["scaled_dot_product_attention"]
        for name, primitive in fast.items():
            stack.enter_context(patch.object(mx.fast, name, stand_in.op(primitive, getattr(mx.fast, name))))
        stack.enter_context(patch.object(mx, "dequantize", stand_in.op("Dequantize", mx.dequantize)))
        stack.enter_context(patch.object(mx.metal, "is_available", lambda: gpu == "metal"))
        stack.enter_context(patch.object(mx, "default_device", lambda: mx.gpu))
        if gpu == "metal":
            for place, name, kernel in models.upstream_kernels():
                stack.enter_context(patch.object(place, name, kernel))
        # MLX cannot say of a Contiguous what it does, so it is recorded as a kernel on every machine.
        stack.enter_context(patch.object(mx, "contiguous", stand_in.op("Contiguous", mx.contiguous)))
        for place, name, function in _compiled_functions():
            stack.enter_context(patch.object(place, name, stand_in.compiled(name, function)))
        yield


def launches(recording: Recording, gpu: str = "metal") -> tuple[list[Launched], dict[str, str]]:
    """What a GPU launches for a recording made under :func:`gpu_shaped`, and what wrote each array, by ids.

    Views launch nothing. A reshape of an array that is not row-contiguous copies it. A concatenation launches once per
    input, a partial rotation once more when its input is still needed, attention twice from SDPA_TWO_PASS keys on.
    Bytes: what is read once and written once; of experts, those that are chosen; of a cache that is updated in place,
    the new part.
    """
    uses = Counter(array.id for primitive in recording.primitives for array in primitive.inputs)
    uses.update(array.id for array in recording.outputs)
    buffers: dict[str, _Buffer] = {}
    found: list[Launched] = []

    def buffer(array: Traced) -> _Buffer:
        return buffers.setdefault(array.id, _Buffer.new(array))

    for primitive in recording.primitives:
        name, fused = _name(primitive)
        ins = [buffer(array) for array in primitive.inputs]
        if views := _views(name, primitive, ins):
            buffers.update({array.id: view for array, view in zip(primitive.outputs, views, strict=True)})
            continue
        looked_at = ins if name == "CustomKernel" else ins[:1] if name in MAKES_CONTIGUOUS else []
        if name == "GatherQMM" and gpu == "cuda":
            looked_at = [ins[0], *ins[-2:]]
        copies = [x for x in looked_at if not x.row_contiguous]
        count = len(copies) + fused
        if name == "Concatenate":
            count = sum(x.size > 0 for x in ins)
        elif name == "RoPE":
            count += uses[primitive.inputs[0].id] > 1
        elif name == "ScaledDotProductAttention":
            count += ins[1].shape[-2] >= SDPA_TWO_PASS
        elif name == "DynamicSliceUpdate":
            count += 1
        reads, writes = _traffic(name, primitive, ins)
        found.append(
            Launched(
                name=name,
                kernel=primitive.kernel if name == "CustomKernel" else "",
                dispatches=count,
                reads=reads + sum(x.nbytes for x in copies),
                writes=writes + sum(x.size * x.itemsize for x in copies),
                inputs=primitive.inputs,
                outputs=primitive.outputs,
            )
        )
    return found, {array: place.source for array, place in buffers.items()}


@attrs.frozen
class _Buffer:
    """An array as a place in memory. source: the id of the array that was written there; whole: all bytes there."""

    source: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    whole: int

    @classmethod
    def new(cls, array: Traced) -> _Buffer:
        return cls(array.id, array.shape, _row_major(array.shape), array.dtype.size, array.nbytes)

    def view(self, shape: Sequence[int], strides: Sequence[int]) -> _Buffer:
        return attrs.evolve(self, shape=tuple(shape), strides=tuple(strides))

    def reshaped(self, shape: Sequence[int]) -> _Buffer | None:
        """The same memory under another shape, or None where only a copy has it."""
        strides = _reshape_strides(self.shape, self.strides, shape)
        return None if strides is None else self.view(shape, strides)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the distinct elements."""
        return self.itemsize * math.prod(n for n, stride in zip(self.shape, self.strides, strict=True) if stride)

    @property
    def row_contiguous(self) -> bool:
        pairs = zip(self.shape, self.strides, _row_major(self.shape), strict=True)
        return all(n == 1 or stride == dense for n, stride, dense in pairs)


def _views(name: str, primitive: Primitive, ins: list[_Buffer]) -> list[_Buffer] | None:
    """The outputs of a primitive that only looks at its first input in another way; None if it launches something."""
    shapes = [array.shape for array in primitive.outputs]
    if name == "Contiguous":
        # Shared unless that would keep much more memory alive than the array has.
        slack = ins[0].whole <= ins[0].nbytes + 16384
        return ins[:1] if ins[0].row_contiguous and slack else None
    if name not in VIEWS:
        return None
    x, arguments = ins[0], primitive.arguments
    if name == "Transpose":
        order = arguments[0]
        return [x.view(shapes[0], [x.strides[i] for i in order])]
    if name == "Slice":
        return [x.view(shapes[0], [stride * step for stride, step in zip(x.strides, arguments[2], strict=True)])]
    if name == "Split":
        return [x.view(shape, x.strides) for shape in shapes]
    if name == "Broadcast":
        lead = len(shapes[0]) - len(x.shape)
        sizes = [(1, 0)] * lead + list(zip(x.shape, x.strides, strict=True))
        return [x.view(shapes[0], [s if n == m else 0 for (n, s), m in zip(sizes, shapes[0], strict=True)])]
    if name in ("Reshape", "Flatten", "Unflatten", "ExpandDims", "Squeeze"):
        view = x.reshaped(shapes[0])
        return None if view is None else [view]
    if name == "AsStrided":
        return [x.view(shapes[0], arguments[1])]
    return [x for _ in shapes]


def _traffic(name: str, primitive: Primitive, ins: list[_Buffer]) -> tuple[int, int]:
    """Bytes read and written by one launch."""
    distinct = {array.id: x.nbytes for array, x in zip(primitive.inputs, ins, strict=True)}
    written = sum(array.nbytes for array in primitive.outputs)
    if name in ("GatherQMM", "GatherMM"):
        rows = ins[-1].size
        parts = [x.nbytes * min(rows, x.shape[0]) // x.shape[0] for x in ins[1:-2]]
        return ins[0].nbytes + sum(parts) + ins[-2].nbytes + ins[-1].nbytes, written
    if name in ("Gather", "GatherAxis"):
        return written + sum(x.nbytes for x in ins[1:]), written
    if name in ("SliceUpdate", "DynamicSliceUpdate"):
        return ins[1].nbytes, ins[1].nbytes
    return sum(distinct.values()), written


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _reshape_strides(shape: Sequence[int], strides: Sequence[int], new: Sequence[int]) -> tuple[int, ...] | None:
    """Strides of ``new`` over the same memory, or None where runs of dims that are not contiguous would be joined."""
    runs: list[list[int]] = []  # [size, stride of its last dim]
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == stride * size:
            runs[-1] = [runs[-1][0] * size, stride]
        else:
            runs.append([size, stride])
    found: list[int] = []
    left, stride = 1, 1
    for size in reversed(new):
        if size > 1 and left == 1:
            if not runs:
                return None
            left, stride = runs.pop()
        if size > 1 and left % size:
            return None
        found.append(stride)
        left //= size
        stride *= size
    return tuple(reversed(found))


class _StandIns:
    """Makes nodes of a trace that are named after what a GPU would run in their place."""

    def __init__(self) -> None:
        self._measuring = False
        self._kernels: dict[KernelText, Any] = {}
        self._shapes: dict[Any, tuple[int, list[mx.array]]] = {}

    def op(self, name: str, original: Callable[..., mx.array]) -> Callable[..., mx.array]:
        """``original`` as one node called ``name``."""

        def call(*args: Any, **kwargs: Any) -> mx.array:
            if self._measuring:
                return original(*args, **kwargs)
            return self._node(name, 1, args, kwargs, lambda *a, **k: [original(*a, **k)])[0]

        return call

    def compiled(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """A function made by mx.compile as the kernels that it is fused into, in one node."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._measuring:
                return original(*args, **kwargs)
            outs = self._node(f"Compiled_{name}", None, args, kwargs, lambda *a, **k: _as_list(original(*a, **k)))
            return outs[0] if len(outs) == 1 else outs

        return call

    def _node(self, name: str, count: int | None, args: Any, kwargs: Any, run: Callable[..., list[mx.array]]) -> Any:
        arrays = [x for x in (*args, *kwargs.values()) if isinstance(x, mx.array)]

        def hollow(x: Any) -> Any:
            return mx.broadcast_to(mx.zeros((), x.dtype), x.shape) if isinstance(x, mx.array) else x

        key = (name, *[(x.shape, x.dtype) if isinstance(x, mx.array) else repr(x) for x in (*args, *kwargs.values())])
        if key not in self._shapes:
            # Made outside the trace: there its arrays are real, and only their shapes are asked for.
            self._measuring = True
            try:
                inputs = [hollow(x) for x in args], {k: hollow(x) for k, x in kwargs.items()}
                mx.eval([x for x in (*inputs[0], *inputs[1].values()) if isinstance(x, mx.array)])
                outs = run(*inputs[0], **inputs[1])
                self._shapes[key] = (_fused_kernels(outs) if count is None else count), outs
            finally:
                self._measuring = False
        number, outs = self._shapes[key]
        text = KernelText(
            name=f"standin_{number}_{name}_end",
            header="",
            source="uint i = thread_position_in_grid.x;",
            inputs=tuple(f"in{i}" for i in range(len(arrays))),
            outputs=tuple(f"out{i}" for i in range(len(outs))),
        )
        if text not in self._kernels:
            self._kernels[text] = MetalBackend().compile(text)
        return self._kernels[text](
            inputs=arrays,
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[x.shape for x in outs],
            output_dtypes=[x.dtype for x in outs],
        )


def _name(primitive: Primitive) -> tuple[str, int]:
    """A primitive's name, seen through stand-ins, and how many launches it is."""
    found = re.match(r"custom_kernel_standin_(\d+)_(\w+)_end_", primitive.kernel)
    return (found[2], int(found[1])) if found else (primitive.name, 1)


def _fused_kernels(outs: list[mx.array]) -> int:
    """Launches of an unevaluated graph, which a compiled function's is as MLX has fused it."""
    text = io.StringIO()
    mx.export_to_dot(text, *outs)
    names = re.findall(r'label ="([^"]+)", shape=rectangle', text.getvalue())
    return sum(name not in VIEWS for name in names)


def _compiled_functions() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Functions made by mx.compile in mlx.nn and mlx_lm, each wherever a module has it."""
    kind = type(mx.compile(lambda x: x))
    return [
        (module, name, value)
        for module_name, module in list(sys.modules.items())
        if module_name.startswith(("mlx_lm", "mlx.nn"))
        for name, value in list(vars(module).items())
        if type(value) is kind
    ]


def _as_list(value: Any) -> list[mx.array]:
    return [value] if isinstance(value, mx.array) else list(value)
