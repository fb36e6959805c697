"""Whole decoder layers, composed of a mixer and a MoE."""

from __future__ import annotations

from .gdn import gdn, gdn_mixer
from .gqa import gqa, gqa_mixer
from .graph import Dims, Graph
from .moe import experts, moe_5


def layer(kind: str, dims: Dims, *, masked: bool = False, moe: str = "moe_4") -> Graph:
    """A decoder layer of ``kind`` gdn (9 nodes) or gqa (10 nodes): x → out, and the state that goes with the kind.

    moe: ``moe_4``, or ``moe_5`` with the output projection a plain layer (one node more).
    """
    g = Graph(f"{kind}_layer" if moe == "moe_4" else f"{kind}_layer_{moe}")
    mixer, joined = {"gdn": (gdn_mixer, gdn), "gqa": (gqa_mixer, gqa)}[kind]
    inputs = g.inputs_of(mixer(dims, masked=masked))
    if moe == "moe_4":
        m = vars(g.include(joined(dims, masked=masked), **inputs))
        seam = {name: m.pop(name) for name in ("h", "hw", "x2", "router_dot")}
        out = g.include(experts(dims), **seam).out
    else:
        m = vars(g.include(mixer(dims, masked=masked), **inputs))
        out = g.include(moe_5(dims), a=m.pop("a"), x=inputs["x"]).out
    g.output(out=out, **m)
    return g
