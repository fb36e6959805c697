"""The declared layers: each function takes the numbers of a layer and returns its graph."""

from .gdn import gdn, gdn_mixer
from .gqa import gqa, gqa_mixer
from .graph import Dims, Graph, Node, make
from .layer import chain, layer
from .moe import experts, moe_4, moe_5, moe_only, moe_swiglu_only

__all__ = [
    "Dims",
    "Graph",
    "Node",
    "chain",
    "experts",
    "gdn",
    "gdn_mixer",
    "gqa",
    "gqa_mixer",
    "layer",
    "make",
    "moe_4",
    "moe_5",
    "moe_only",
    "moe_swiglu_only",
]
