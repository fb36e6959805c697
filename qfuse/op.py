"""Op: what a fused kernel computes. A subclass declares dims as fields, tensors as specs, a reference in plain MLX."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, dataclass_transform

import attrs

from .spec import QWeight, Spec, SpecError, bind, parse

REGISTRY: dict[str, type[Op]] = {}
"""Every op by name, the snake_case of its class; an op enters when its module is imported."""


class GraphLike(Protocol):
    """What an op call needs of a graph."""

    def add(self, op: Op, node: str | None, inputs: Mapping[str, Ref]) -> Any: ...


class Ref(NamedTuple):
    """A tensor of a graph under construction: output ``tensor`` of ``node``."""

    graph: GraphLike
    node: str
    tensor: str
    spec: Spec
    constants: Mapping[str, Any]


@attrs.frozen
class Schedule:
    """How a kernel's work is split on one backend; the algorithm does not depend on it.

    rows: output rows of a simdgroup at a time. simdgroups: 32-thread groups of a threadgroup, 1 to 16.
    take: inputs that a lane takes at a time, 8, 16 or 32. depth: times that it does so before it computes with the
    first, 1 to 8, so that those loads are under way together. cap: most threadgroups of a launch, 0 for one per tile.
    """

    rows: int = 4
    simdgroups: int = 2
    take: int = 8
    depth: int = 1
    cap: int = 0

    def __attrs_post_init__(self) -> None:
        needs = ("1 <= rows", "1 <= simdgroups <= 16", "take in (8, 16, 32)", "1 <= depth <= 8", "0 <= cap")
        if reason := unmet(needs, attrs.asdict(self)):
            raise SpecError(f"[schedule] {reason}")


ACCURACIES = ("exact", "rounding", "approximate")


class Op:
    """Base of all ops. Write a subclass under :func:`op`; see docs/adding-an-op.md.

    Class attributes a subclass may set:

    needs: conditions on the fields, such as ``"Dk % 32 == 0"``; checked when an instance is made.
    library: the op stands for MLX's own kernels and has no text of ours.
    dispatches: GPU launches of one call.
    samples: named shapes for tests, each a dict of fields and of dims of the call.
    touched: of tensors that one call reads or writes in part, the dims of that part; what bytes are counted by.

    And for the kernel, whose text is NAME.metal beside the module:

    kernel_needs: conditions under which the text can be used; elsewhere the reference runs, and the report says why.
    tiles: the tiles that threadgroups walk, an expression over fields, dims of the call and the schedule.
    dynamic: dims of the call that the text reads from shapes; the others are constants of the text.
    schedules: by backend, default :class:`Schedule`.
    accuracy: what its reference may differ in from upstream's own ops: ``exact``, nothing; ``rounding``, where values
        are rounded to the working dtype; ``approximate``, in weights that were themselves rounded when folded.
    """

    name: ClassVar[str]
    specs: ClassVar[dict[str, Spec]]
    needs: ClassVar[tuple[str, ...]] = ()
    library: ClassVar[bool] = False
    dispatches: ClassVar[int] = 1
    samples: ClassVar[dict[str, dict[str, Any]]] = {}
    touched: ClassVar[dict[str, str]] = {}
    kernel_needs: ClassVar[tuple[str, ...]] = ()
    tiles: ClassVar[str] = "1"
    dynamic: ClassVar[tuple[str, ...]] = ()
    schedules: ClassVar[dict[str, Schedule]] = {}
    accuracy: ClassVar[str] = "rounding"
    Outputs: ClassVar[Callable[..., Any]]

    reference: Callable[..., Any]

    @classmethod
    def __attrs_init_subclass__(cls) -> None:
        cls.name = snake_case(cls.__name__)
        fields = attrs.fields(cls)  # type: ignore[arg-type]
        declared = {k: v for base in reversed(cls.__mro__) for k, v in vars(base).items() if isinstance(v, Spec)}
        declared |= {f.name: f.metadata["spec"] for f in fields if "spec" in f.metadata}
        cls.specs = dict(sorted(declared.items(), key=lambda item: item[1].order))
        cls.Outputs = NamedTuple(f"{cls.__name__}Outputs", [(n, Any) for n in cls.select("out")])  # type: ignore[misc, assignment]
        _check(cls, {f.name for f in fields})
        if cls.name in REGISTRY and REGISTRY[cls.name].__module__ != cls.__module__:
            raise SpecError(f"[{cls.name}] wants a name of its own, got that of {REGISTRY[cls.name].__module__}")
        REGISTRY[cls.name] = cls

    @classmethod
    def select(cls, *kinds: str) -> dict[str, Spec]:
        """The specs of these kinds, in buffer order."""
        return {name: spec for name, spec in cls.specs.items() if spec.kind in kinds}

    @classmethod
    def inputs(cls) -> dict[str, Spec]:
        """What changes at every call: inputs and handles."""
        return cls.select("in", "handle")

    @classmethod
    def weights(cls) -> dict[str, Spec]:
        """What is bound once."""
        return cls.select("weight", "qweight")

    @classmethod
    def source(cls) -> Path:
        """The op's Metal text, beside its module."""
        return Path(sys.modules[cls.__module__].__file__ or "").with_name(f"{cls.name}.metal")

    def __attrs_post_init__(self) -> None:
        if reason := unmet(self.needs, self.constants()):
            raise SpecError(f"[{self.name}] {reason}")

    @classmethod
    def schedule(cls, backend: str) -> Schedule:
        """The backend's own schedule, or Metal's."""
        return cls.schedules.get(backend) or cls.schedules.get("metal") or Schedule()

    def unmet(self) -> str | None:
        """The first of ``kernel_needs`` that does not hold, as ``wants …, got …``; None when a kernel can be made."""
        return unmet(self.kernel_needs, self.constants())

    def constants(self) -> dict[str, Any]:
        """The fields by name."""
        return attrs.asdict(self, recurse=False)  # type: ignore[arg-type]

    def bind(self, values: Mapping[str, Any], place: str | None = None) -> dict[str, Any]:
        """Check arguments by name against the specs and return every dim and dtype token. Raises SpecError."""
        given = self.inputs() | self.weights()
        for name in values.keys() - given.keys():
            raise SpecError(f"[{place or self.name}] wants {', '.join(given)}, got {name}")
        return bind(place or self.name, given.items(), values, self.constants())

    def __call__(self, *, node: str | None = None, **inputs: Any) -> Any:
        """Run the reference on arrays, or add a node (named ``node``) to the graph of the refs.

        Returns the output, or a named tuple of outputs. Raises SpecError on arguments or results that do not fit.
        """
        graph = next((value.graph for value in inputs.values() if isinstance(value, Ref)), None)
        if graph is not None:
            return graph.add(self, node, inputs)
        env = self.bind(inputs)
        results = self.as_tuple(self.reference(**{name: inputs.get(name) for name in self.inputs() | self.weights()}))
        outs = self.select("out")
        bind(f"{self.name} reference", outs.items(), dict(zip(outs, results, strict=True)), env)
        return self.outputs(results)

    def as_tuple(self, results: Any) -> tuple[Any, ...]:
        """A reference's result as a tuple, whether it has one output or several."""
        return (results,) if len(self.select("out")) == 1 else tuple(results)

    @classmethod
    def outputs(cls, results: Iterable[Any]) -> Any:
        """One output as it is, several as a named tuple."""
        results = tuple(results)
        return results[0] if len(results) == 1 else cls.Outputs(*results)


def unmet(needs: Iterable[str], env: Mapping[str, Any]) -> str | None:
    """The first condition that does not hold under ``env``, as ``wants …, got …``."""
    for need in needs:
        if not parse(need).value(env):
            got = ", ".join(f"{name}={env[name]}" for name in sorted(parse(need).names))
            return f"wants {need}, got {got}"
    return None


C = TypeVar("C", bound=type)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(attrs.field, QWeight))
def op(cls: C) -> C:
    """Class decorator: a frozen, keyword-only attrs class, checked and registered at import."""
    return attrs.frozen(cls, kw_only=True)


@cache
def snake_case(name: str) -> str:
    """GDNQKNorm → gdn_qk_norm, with the initialisms of the field kept whole."""
    name = re.sub(r"(GDN|GQA|MOE|SDPA|QK|KV|RMS)(?=[A-Z])", r"\1_", name)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _check(cls: type[Op], fields: set[str]) -> None:
    """Import fails here, with one line, when a declaration does not hold together."""
    place = f"{cls.__module__}.{cls.__name__}"
    if "reference" not in vars(cls):
        raise SpecError(f"[{place}] wants a reference method, got none")
    wanted = [*cls.inputs(), *cls.weights()]
    got = list(inspect.signature(cls.reference).parameters)[1:]
    if got != wanted:
        raise SpecError(f"[{place}.reference] wants ({', '.join(wanted)}), got ({', '.join(got)})")
    if not cls.select("out"):
        raise SpecError(f"[{place}] wants an output, got none")
    if taken := [name for name in attrs.fields_dict(Schedule) if name in fields or name in cls.specs]:
        raise SpecError(f"[{place}] wants names that a schedule leaves free, got {', '.join(taken)}")
    if cls.accuracy not in ACCURACIES:
        raise SpecError(f"[{place}.accuracy] wants {', '.join(ACCURACIES)}, got {cls.accuracy}")
    if unknown := cls.touched.keys() - cls.specs.keys():
        raise SpecError(f"[{place}.touched] wants tensors of the op, got {', '.join(sorted(unknown))}")
    read = {d.text for s in (cls.inputs() | cls.weights()).values() for d in s.dims if d.text.isidentifier()}
    for name, spec in cls.specs.items():
        if spec.kind == "out" and cls.select("handle"):
            continue  # a handle brings dims of its own, such as the rows that a cache has allocated
        for dim in spec.dims:
            for free in sorted(dim.names - fields - read):
                raise SpecError(f"[{place}.{name}] wants dims of fields and inputs, got {free} in {dim}")
