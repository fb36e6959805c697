"""Dim expressions and tensor specs: what an op declares of its tensors, and the only parser of either.

A dim is an integer expression over names, such as ``2*Hk*Dk + Hv*Dv``. A name that is a field of the op is a constant;
any other name is read from the arrays of the call. A dtype is fixed (``f32``) or a token (``T``), by the same rule.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import CodeType
from typing import Any, Self

import attrs
import mlx.core as mx

DTYPES: dict[str, mx.Dtype] = {
    "f32": mx.float32,
    "bf16": mx.bfloat16,
    "f16": mx.float16,
    "i32": mx.int32,
    "u32": mx.uint32,
    "bool": mx.bool_,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_NODES = (
    ast.Expression, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.Name, ast.Load, ast.Constant,
    ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.Tuple, ast.BoolOp, ast.And, ast.Or,
    ast.Attribute, ast.UnaryOp, ast.USub, ast.Not,
)  # fmt: skip


class SpecError(ValueError):
    """A declaration or a call that does not fit; the text reads ``[place] wants …, got …``."""


@attrs.frozen
class Dim:
    """One integer expression, or, in an op's ``needs``, one condition."""

    text: str
    names: frozenset[str]
    code: CodeType = attrs.field(eq=False, repr=False)

    def value(self, env: Mapping[str, Any]) -> int:
        """The expression under ``env``; every name must be in it."""
        return int(eval(self.code, {"__builtins__": {}}, env))

    def partial(self, env: Mapping[str, Any]) -> int | str:
        """A number where ``env`` holds every name, otherwise the expression's text."""
        return self.value(env) if self.names <= env.keys() else self.text

    def __str__(self) -> str:
        return self.text


@cache
def parse(text: str) -> Dim:
    """Parse one expression. Raises SpecError on anything but integer arithmetic, comparisons and names."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError:
        raise SpecError(f"[dim] wants an integer expression, got {text!r}") from None
    for node in ast.walk(tree):
        if not isinstance(node, _NODES) or (isinstance(node, ast.Constant) and not isinstance(node.value, int)):
            raise SpecError(f"[dim] wants an integer expression, got {type(node).__name__} in {text!r}")
    names = frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    return Dim(ast.unparse(tree), names, compile(tree, "<dim>", "eval"))


def parse_dims(text: str) -> tuple[Dim, ...]:
    """``"B, 2*Hk*Dk"`` as a tuple of dims; the empty text is a 0-d array."""
    return tuple(parse(part) for part in text.split(",")) if text.strip() else ()


@attrs.frozen
class Quant:
    """Affine quantisation of one linear layer.

    bits: width of a code, 2 to 8; 0 says that the array is not quantised. group: inputs that share a scale and a bias.
    """

    bits: int = 8
    group: int = 64

    def __str__(self) -> str:
        return f"{self.bits}-bit gs {self.group}" if self.bits else "unquantised"


@attrs.frozen(eq=False)
class QArray:
    """The arrays of one linear layer, [..., N, K]: packed codes with scales and biases, or plain weights.

    weight: uint32 [..., N, K·bits/32], or a float array [..., N, K] when ``quant.bits`` is 0.
    scales, biases: [..., N, K/group] of a float dtype, or None.
    """

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    quant: Quant = Quant(0, 0)

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape [..., N, K]."""
        *rest, words = self.weight.shape
        return (*rest, words * 32 // self.quant.bits if self.quant.bits else words)

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of the scales, or of plain weights."""
        return self.weight.dtype if self.scales is None else self.scales.dtype

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.weight, self.scales, self.biases) if part is not None)

    def parts(self) -> list[mx.array]:
        """The arrays that exist, in buffer order."""
        return [part for part in (self.weight, self.scales, self.biases) if part is not None]

    def map(self, change: Callable[[mx.array], mx.array]) -> Self:
        """The same layer with each of its arrays changed."""
        scales, biases = (None if part is None else change(part) for part in (self.scales, self.biases))
        return attrs.evolve(self, weight=change(self.weight), scales=scales, biases=biases)

    def dense(self) -> mx.array:
        """The float array [..., N, K]: ``scale·code + bias`` (MLX's mx.dequantize)."""
        if self.scales is None:
            return self.weight
        return mx.dequantize(self.weight, self.scales, self.biases, self.quant.group, self.quant.bits)

    def linear(self, x: mx.array) -> mx.array:
        """``x · wᵀ`` for x [..., K] → [..., N], in the dtype of x."""
        if self.scales is None:
            return x @ self.weight.T
        return mx.quantized_matmul(x, *self._matched(x), True, self.quant.group, self.quant.bits)

    def gather(self, x: mx.array, indices: mx.array) -> mx.array:
        """``x · w[indices]ᵀ``: x [B, 1|k, K], indices [B, k] → [B, k, N], in the dtype of x."""
        if self.scales is None:
            out = mx.gather_mm(x[..., None, :], self.weight.swapaxes(-1, -2), rhs_indices=indices)
        else:
            out = mx.gather_qmm(
                x[..., None, :],
                *self._matched(x),
                rhs_indices=indices,
                transpose=True,
                group_size=self.quant.group,
                bits=self.quant.bits,
            )
        return out.squeeze(-2)

    def astype(self, dtype: mx.Dtype) -> QArray:
        """The same codes with float parts of another dtype."""
        if self.scales is None:
            return attrs.evolve(self, weight=self.weight.astype(dtype))
        assert self.biases is not None
        return attrs.evolve(self, scales=self.scales.astype(dtype), biases=self.biases.astype(dtype))

    def _matched(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        # MLX promotes mixed dtypes to f32; the layer's own dtype is what callers expect back.
        assert self.scales is not None
        assert self.biases is not None
        return self.weight, self.scales.astype(x.dtype), self.biases.astype(x.dtype)


_ORDER = itertools.count()


@attrs.frozen
class Spec:
    """One tensor of an op: its dims, its dtype, and the values it may hold.

    kind: in, out, weight, qweight or handle. dtype: a fixed one (``f32``), a token bound by the call (``T``), or ``""``
    for any floating dtype. domain: an interval such as ``(0, 1)`` or ``[0, E)``; what samples are drawn from.
    """

    kind: str
    dims: tuple[Dim, ...]
    dtype: str
    optional: bool = False
    domain: str = ""
    order: int = attrs.field(factory=lambda: next(_ORDER), init=False, eq=False, repr=False)

    def text(self, env: Mapping[str, Any]) -> str:
        """``(B=1, Hv=32, 128) f32``: the shape with what ``env`` knows, for messages."""
        if self.kind == "handle":
            return "a cache object"
        parts = []
        for dim in self.dims:
            value = dim.partial(env)
            parts.append(str(value) if str(value) == dim.text else f"{dim.text}={value}")
        return f"({', '.join(parts)}) {env.get(self.dtype, self.dtype) or 'float'}"


# The five ways to declare a tensor read as types do in an op's body, hence the capitals.
def In(dims: str, dtype: str = "T", *, optional: bool = False, domain: str = "") -> Spec:  # noqa: N802
    """An input that changes at every call."""
    return Spec("in", parse_dims(dims), dtype, optional, domain)


def Out(dims: str, dtype: str = "T") -> Spec:  # noqa: N802
    """An output."""
    return Spec("out", parse_dims(dims), dtype)


def Handle() -> Spec:  # noqa: N802
    """An object, such as a kv cache, handed through as it is."""
    return Spec("handle", (), "")


def Weight(dims: str, dtype: str = "", *, domain: str = "") -> Spec:  # noqa: N802
    """A plain array bound once, by default of any floating dtype."""
    return Spec("weight", parse_dims(dims), dtype, domain=domain)


def QWeight(dims: str) -> Any:  # noqa: N802
    """Declare a linear layer as ``name: Quant = QWeight("N, K")``: the field holds the layer's quantisation."""
    spec = Spec("qweight", parse_dims(dims), "")
    return attrs.field(default=Quant(), metadata={"spec": spec}, validator=attrs.validators.instance_of(Quant))


def parts(array: mx.array | QArray) -> list[mx.array]:
    """The arrays of a QArray, or a plain array alone."""
    return array.parts() if isinstance(array, QArray) else [array]


def describe(value: Any) -> str:
    """``(1, 32, 128) bf16`` for an array or a QArray, the type's name for anything else."""
    if isinstance(value, QArray):
        return f"{tuple(value.shape)} {value.quant}"
    if isinstance(value, mx.array):
        return f"{tuple(value.shape)} {DTYPE_NAMES.get(value.dtype, str(value.dtype))}"
    return type(value).__name__


def bind(
    place: str, specs: Iterable[tuple[str, Spec]], values: Mapping[str, Any], constants: Mapping[str, Any]
) -> dict[str, Any]:
    """Solve dims and dtype tokens from ``values`` and check each value against its spec.

    place: the name put before the argument in errors. constants: the op's fields. Returns constants and what was bound.
    Raises SpecError at the first value that does not fit.
    """
    env = dict(constants)
    pairs = [(name, spec, values.get(name)) for name, spec in specs if spec.kind != "handle"]
    present = []
    for name, spec, value in pairs:
        if value is None:
            if not spec.optional:
                raise SpecError(f"[{place}.{name}] wants {spec.text(env)}, got nothing")
            continue
        wanted_type = QArray if spec.kind == "qweight" else mx.array
        if not isinstance(value, wanted_type):
            raise SpecError(f"[{place}.{name}] wants {spec.text(env)}, got {describe(value)}")
        if len(value.shape) != len(spec.dims):
            raise SpecError(f"[{place}.{name}] wants {spec.text(env)}, got {describe(value)}")
        present.append((name, spec, value))
        for dim, size in zip(spec.dims, value.shape, strict=True):
            if dim.text.isidentifier():
                env.setdefault(dim.text, size)
        if spec.dtype and spec.dtype not in DTYPES:
            env.setdefault(spec.dtype, DTYPE_NAMES.get(value.dtype, str(value.dtype)))
    for name, spec, value in present:
        if isinstance(value, QArray) and constants.get(name, value.quant) != value.quant:
            raise SpecError(f"[{place}.{name}] wants {constants[name]}, got {value.quant}")
        same_shape = all(dim.partial(env) == size for dim, size in zip(spec.dims, value.shape, strict=True))
        if not same_shape or not dtype_fits(spec, value.dtype, env):
            raise SpecError(f"[{place}.{name}] wants {spec.text(env)}, got {describe(value)}")
    return env


def dtype_fits(spec: Spec, dtype: mx.Dtype, env: Mapping[str, Any]) -> bool:
    """Whether ``dtype`` is what the spec names, ``""`` being any floating dtype."""
    if not spec.dtype:
        return bool(mx.issubdtype(dtype, mx.floating))
    return DTYPES.get(env.get(spec.dtype, spec.dtype)) == dtype


_INTERVAL = re.compile(r"([(\[])\s*(.+?)\s*,\s*(.+?)\s*([)\]])$")


def interval(domain: str, env: Mapping[str, Any]) -> tuple[float, float]:
    """The bounds of ``[0, E)`` and the like under ``env``; a closed integer end is widened by one by the caller."""
    match = _INTERVAL.match(domain)
    if not match:
        raise SpecError(f"[domain] wants an interval such as [0, E), got {domain!r}")
    low, high = (parse(text).value(env) for text in match.group(2, 3))
    return low, high + (match.group(4) == "]")
