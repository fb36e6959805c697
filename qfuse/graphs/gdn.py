"""The gated delta net's side of a layer: norm, projections, recurrence, gated norm, and the seam to the MoE."""

from __future__ import annotations

from ..ops import GDNGatedNorm, GDNInProj, GDNInProjMerged, GDNQKNorm, GDNStep, RMSNorm
from .graph import Dims, Graph, make
from .moe import with_router


def gdn_mixer(dims: Dims, *, masked: bool = False) -> Graph:
    """x [B, H], conv_state, state → a [B, Hv·Dv], conv_state_next, state_next: 5 dispatches.

    masked: take a mask [B], false for rows that stand still. dims["merged"]: the projections are Qwen3-Next's.
    """
    g = Graph("gdn_mixer")
    x = g.input("x", "B, H")
    conv_state = g.input("conv_state", "B, Kc-1, C", "S")
    state = g.input("state", "B, Hv, Dv, Dk", "f32")
    mask = g.input("mask", "B", "bool") if masked else None

    n = make(RMSNorm, dims, "input_norm")(x=x, node="input_norm")
    p = make(GDNInProjMerged if dims.get("merged") else GDNInProj, dims)(n=n, conv_state=conv_state, mask=mask)
    q, k = make(GDNQKNorm, dims)(qkv=p.qkv)
    s = make(GDNStep, dims)(q=q, k=k, qkv=p.qkv, g=p.g, beta=p.beta, state=state, mask=mask)
    a = make(GDNGatedNorm, dims)(y=s.y, z=p.z)

    g.output(a=a, conv_state_next=p.conv_state_next, state_next=s.state_next)
    return g


def gdn(dims: Dims, *, masked: bool = False) -> Graph:
    """The 6-dispatch GDN layer: the mixer and o_proj_router, whose outputs the experts take."""
    return with_router("gdn", gdn_mixer(dims, masked=masked), dims)
