"""Whole decoder layers, composed of a mixer and a MoE, their two halves where upstream runs the other, and chains."""

from __future__ import annotations

from collections.abc import Sequence

from ..op import Ref
from .gdn import gdn, gdn_mixer
from .gqa import gqa, gqa_mixer
from .graph import Dims, Graph
from .moe import experts, moe_5, moe_only, on_ranks, projected

MIXERS = {"gdn": (gdn_mixer, gdn), "gqa": (gqa_mixer, gqa)}


def layer(kind: str, dims: Dims, *, masked: bool = False, moe: str = "moe_4", part: str = "layer") -> Graph:
    """A decoder layer of ``kind`` gdn (9 nodes) or gqa (10 nodes): x → out, and the state that goes with the kind.

    masked: take a mask, as the kind's mixer does. moe: ``moe_4``, or ``moe_5`` with the output projection a plain layer
    (one node more). part: ``layer``; ``mixer``, which ends with the output projection, x → r; or ``moe``, r, x → out.
    dims["mixer_group"], dims["moe_group"]: the ranks that a part is sharded over, an mx.distributed.Group. A sum over
    them comes between the output projection and the router, so that such a layer has moe_5's form whatever ``moe`` is.
    """
    if part == "moe":
        return moe_only(dims)
    mixer, joined = MIXERS[kind]
    if part == "mixer":
        g = Graph(f"{kind}_mixer_layer{on_ranks(dims, 'mixer')}")
        m = vars(g.include(mixer(dims, masked=masked), **g.inputs_of(mixer(dims, masked=masked))))
        g.output(r=projected(dims, m.pop("a")), **m)
        return g
    ranks = on_ranks(dims, "mixer", "moe")
    folded = moe == "moe_4" and not ranks
    g = Graph(f"{kind}_layer" if folded else f"{kind}_layer_moe_5{ranks}")
    inputs = g.inputs_of(mixer(dims, masked=masked))
    if folded:
        m = vars(g.include(joined(dims, masked=masked), **inputs))
        seam = {name: m.pop(name) for name in ("h", "hw", "x2", "router_dot")}
        out = g.include(experts(dims), **seam).out
    else:
        m = vars(g.include(mixer(dims, masked=masked), **inputs))
        out = g.include(moe_5(dims), a=m.pop("a"), x=inputs["x"]).out
    g.output(out=out, **m)
    return g


def chain(layers: Sequence[Graph]) -> Graph:
    """Layers one after another, x → out. Nodes and the other inputs and outputs get a number: ``i.mask``."""
    g = Graph("chain")
    x, others = g.input("x", "B, H"), dict[str, Ref]()
    for i, each in enumerate(layers):
        made = vars(g.include(each, f"{i}.", x=x, **g.inputs_of(each, f"{i}.", but="x")))
        x = made.pop("out")
        others |= {f"{i}.{name}": ref for name, ref in made.items()}
    g.output(out=x, **others)
    return g
