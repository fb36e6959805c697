"""Graph: a builder over networkx. Inputs, weights and outputs are nodes too, so a drawing shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, TypeVar

import attrs
import networkx as nx

from ..op import Op, Ref
from ..spec import DTYPES, Handle, In, Spec, SpecError

AnOp = TypeVar("AnOp", bound=Op)


@attrs.frozen
class Node:
    """One op call of a graph: where each input comes from, as (node, tensor)."""

    name: str
    op: Op
    inputs: Mapping[str, tuple[str, str]]

    def weight_names(self) -> dict[str, str]:
        """Spec name → the name that the graph's weights go by, ``node.spec``."""
        return {spec: f"{self.name}.{spec}" for spec in self.op.weights()}


Dims = Mapping[str, Any]
"""The numbers of a layer: dims and other op fields by name (``H``, ``eps``), quantisation by weight (``node.spec``)."""


def make(cls: type[AnOp], dims: Dims, node: str | None = None) -> AnOp:
    """An op with its fields from ``dims``, by name. Raises SpecError when a field without default is not there."""
    fields = {}
    for field in attrs.fields(cls):  # type: ignore[arg-type]
        key = f"{node or cls.name}.{field.name}" if "spec" in field.metadata else field.name
        if key in dims:
            fields[field.name] = dims[key]
        elif field.default is attrs.NOTHING:
            raise SpecError(f"[{node or cls.name}.{field.name}] wants a value among the dims, got none")
    return cls(**fields)


class Graph:
    """A layer, or a part of one, as a directed graph of op calls.

    ``graph`` is the nx.MultiDiGraph: nodes carry ``kind`` (input, weight, op, output) and, for ops, ``call``, a Node;
    edges carry ``tensor`` and ``arg`` and are keyed ``tensor->arg``, since two tensors may join the same two nodes.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.graph = nx.MultiDiGraph(name=name)

    def input(self, name: str, dims: str, dtype: str = "T", *, optional: bool = False) -> Ref:
        """Declare a graph input. Raises SpecError if the name is taken."""
        return self._input(name, In(dims, dtype, optional=optional))

    def handle(self, name: str) -> Ref:
        """Declare an input that is an object, such as a kv cache."""
        return self._input(name, Handle())

    def inputs_of(self, other: Graph, prefix: str = "", but: str = "") -> dict[str, Ref]:
        """Declare the inputs of another graph, all except ``but``, by the same names after a prefix."""
        return {name: self._input(prefix + name, spec) for name, spec in other.inputs().items() if name != but}

    def output(self, **refs: Ref) -> None:
        """Name outputs of the graph, in order."""
        for name, ref in refs.items():
            self._own(f"output {name}", ref)
            self._new_node(f"output:{name}", kind="output", name=name)
            self.graph.add_edge(ref.node, f"output:{name}", f"{ref.tensor}->{name}", tensor=ref.tensor, arg=name)

    def add(self, op: Op, node: str | None, inputs: Mapping[str, Any]) -> Any:
        """Add a node for ``op``; what calling an op with refs does. An absent optional input is left out or None.

        Returns a Ref, or a named tuple of Refs. Raises SpecError when the wiring does not fit.
        """
        name = node or op.name
        wired = {arg: ref for arg, ref in inputs.items() if ref is not None}
        for arg in wired.keys() - op.inputs().keys():
            raise SpecError(f"[{self.name}.{name}] wants {', '.join(op.inputs())}, got {arg}")
        constants = op.constants()
        for arg, spec in op.inputs().items():
            if arg in wired:
                self._own(f"{name}.{arg}", wired[arg])
                self._fits(f"{self.name}.{name}.{arg}", spec, constants, wired[arg])
            elif not spec.optional:
                raise SpecError(f"[{self.name}.{name}.{arg}] wants {spec.text(constants)}, got nothing")
        call = Node(name, op, {arg: (ref.node, ref.tensor) for arg, ref in wired.items()})
        self._new_node(name, kind="op", call=call)
        for arg, ref in wired.items():
            self.graph.add_edge(ref.node, name, f"{ref.tensor}->{arg}", tensor=ref.tensor, arg=arg)
        for spec_name, weight in call.weight_names().items():
            self._new_node(weight, kind="weight", spec=op.specs[spec_name])
            self.graph.add_edge(weight, name, f"{spec_name}->{spec_name}", tensor=spec_name, arg=spec_name)
        return op.outputs(Ref(self, name, out, spec, constants) for out, spec in op.select("out").items())

    def include(self, other: Graph, prefix: str = "", /, **inputs: Ref | None) -> SimpleNamespace:
        """Copy the ops of another graph into this one, its inputs taken from ``inputs``; returns its outputs by name.

        prefix: put before the names of its nodes.
        Raises SpecError if an input is missing or unknown, or a node name is taken.
        """
        place = f"{self.name}.{other.name}"
        for name in inputs.keys() - other.inputs().keys():
            raise SpecError(f"[{place}] wants {', '.join(other.inputs())}, got {name}")
        made: dict[tuple[str, str], Ref | None] = {}
        for name, spec in other.inputs().items():
            if inputs.get(name) is None and not spec.optional:
                raise SpecError(f"[{place}.{name}] wants {spec.text({})}, got nothing")
            made[name, name] = inputs.get(name)
        for node in other.nodes():
            refs = self.add(node.op, prefix + node.name, {arg: made[source] for arg, source in node.inputs.items()})
            for out, ref in zip(node.op.select("out"), node.op.as_tuple(refs), strict=True):
                made[node.name, out] = ref
        return SimpleNamespace(**{name: made[source] for name, source in other.outputs().items()})

    def nodes(self) -> Iterator[Node]:
        """Op calls in the order they run: topological, ties by insertion."""
        order = {name: i for i, name in enumerate(self.graph)}
        for name in nx.lexicographical_topological_sort(self.graph, key=order.__getitem__):
            if self.graph.nodes[name]["kind"] == "op":
                yield self.graph.nodes[name]["call"]

    def inputs(self) -> dict[str, Spec]:
        """The declared inputs by name, in order."""
        return {n: data["spec"] for n, data in self.graph.nodes(data=True) if data["kind"] == "input"}

    def weights(self) -> dict[str, Spec]:
        """What a plan must be given once, by ``node.spec`` name."""
        return {n: data["spec"] for n, data in self.graph.nodes(data=True) if data["kind"] == "weight"}

    def outputs(self) -> dict[str, tuple[str, str]]:
        """The named outputs and where each comes from."""
        found = {}
        for name, data in self.graph.nodes(data=True):
            if data["kind"] == "output":
                source, _, edge = next(iter(self.graph.in_edges(name, data=True)))
                found[data["name"]] = (source, edge["tensor"])
        return found

    def dispatches(self) -> int:
        """GPU launches declared by the ops."""
        return sum(node.op.dispatches for node in self.nodes())

    def __len__(self) -> int:
        return sum(1 for _ in self.nodes())

    def __repr__(self) -> str:
        return f"<Graph {self.name}: {' → '.join(node.name for node in self.nodes())}>"

    def _input(self, name: str, spec: Spec) -> Ref:
        self._new_node(name, kind="input", spec=spec)
        return Ref(self, name, name, spec, {})

    def _new_node(self, key: str, /, **data: Any) -> None:
        if key in self.graph:
            kind = self.graph.nodes[key]["kind"]
            raise SpecError(f"[{self.name}] wants a new node name, got {key}: there is one of kind {kind}")
        self.graph.add_node(key, **data)

    def _own(self, place: str, ref: Any) -> None:
        if not isinstance(ref, Ref):
            raise SpecError(f"[{self.name}.{place}] wants a tensor of this graph, got {type(ref).__name__}")
        if ref.graph is not self:
            raise SpecError(f"[{self.name}.{place}] wants a tensor of this graph, got {ref.tensor} of another")

    def _fits(self, place: str, wanted: Spec, constants: Mapping[str, Any], ref: Ref) -> None:
        # Only what both sides know is compared; dims and tokens of the call are bound when arrays arrive.
        want = [dim.partial(constants) for dim in wanted.dims]
        got = [dim.partial(ref.constants) for dim in ref.spec.dims]
        known = [(w, g) for w, g in zip(want, got, strict=False) if isinstance(w, int) and isinstance(g, int)]
        sizes = len(want) == len(got) and all(w == g for w, g in known)
        dtypes = {constants.get(wanted.dtype, wanted.dtype), ref.constants.get(ref.spec.dtype, ref.spec.dtype)}
        clash = len(dtypes) == 2 and dtypes <= DTYPES.keys()
        if not sizes or clash or (wanted.kind == "handle") != (ref.spec.kind == "handle"):
            got_text = ref.spec.text(ref.constants)
            raise SpecError(f"[{place}] wants {wanted.text(constants)}, got {got_text} from {ref.node}.{ref.tensor}")
