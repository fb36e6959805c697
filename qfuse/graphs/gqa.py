"""Gated grouped-query attention's side of a layer, and the seam to the MoE."""

from __future__ import annotations

from ..ops import GQAInProj, KVUpdate, QKNormRope, RMSNorm, SDPACombineGate, SDPAPartial
from .graph import Dims, Graph, make
from .moe import with_router


def gqa_mixer(dims: Dims, *, masked: bool = False) -> Graph:
    """x [B, H], position [B], length, cache → a [B, Hq·D]: 6 nodes, of which the cache's own update is 2 dispatches.

    length: keys in the cache once this token's is there. masked: take a mask [B, N] over the keys.
    """
    g = Graph("gqa_mixer")
    x = g.input("x", "B, H")
    position = g.input("position", "B", "i32")
    length = g.input("length", "1", "i32")
    cache = g.handle("cache")
    mask = g.input("mask", "B, N", "bool") if masked else None

    n = make(RMSNorm, dims, "input_norm")(x=x, node="input_norm")
    p = make(GQAInProj, dims)(n=n)
    q_rot, k_rot = make(QKNormRope, dims)(queries=p.queries, keys=p.keys, position=position)
    k_cache, v_cache = make(KVUpdate, dims)(k_rot=k_rot, values=p.values, cache=cache)
    part = make(SDPAPartial, dims)(q_rot=q_rot, k_cache=k_cache, v_cache=v_cache, length=length, mask=mask)
    a = make(SDPACombineGate, dims)(
        o_part=part.o_part, sum_part=part.sum_part, max_part=part.max_part, gate=p.gate
    )  # fmt: skip

    g.output(a=a)
    return g


def gqa(dims: Dims, *, masked: bool = False) -> Graph:
    """The GQA layer: the mixer and o_proj_router, whose outputs the experts take."""
    return with_router("gqa", gqa_mixer(dims, masked=masked), dims)
