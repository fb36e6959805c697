"""The mixture of experts in each of its modes."""

from __future__ import annotations

from typing import Any

from ..op import Ref
from ..ops import (
    AllSum,
    ExpertDown,
    Linear,
    MOECombine,
    MOESum,
    NormRouter,
    OProjRouter,
    Residual,
    RMSNorm,
    Router,
    RouteSwiglu,
    Swiglu,
)
from .graph import Dims, Graph, make


def experts(dims: Dims) -> Graph:
    """h, hw, x2, router_dot → out: what follows the router in moe_4 and moe_5, 3 dispatches.

    dims["moe_group"]: the ranks that hold a shard each of every expert, whose results are summed before the residual.
    """
    g = Graph("experts")
    h, hw = g.input("h", "B, H"), g.input("hw", "B, H")
    x2, router_dot = g.input("x2", "B, P", "f32"), g.input("router_dot", "B, E", "f32")
    s = make(RouteSwiglu, dims)(hw=hw, x2=x2, router_dot=router_dot)
    d = make(ExpertDown, dims)(act_routed=s.act_routed, act_shared=s.act_shared, indices=s.indices)
    parts = {**d._asdict(), "scores": s.scores, "shared_gate_logit": s.shared_gate_logit}
    if dims.get("moe_group") is None:
        out = make(MOECombine, dims)(**parts, h=h)
    else:
        out = make(Residual, dims)(h=h, y=_summed(dims, "moe", make(MOESum, dims)(**parts)))
    g.output(out=out)
    return g


def with_router(name: str, mixer: Graph, dims: Dims) -> Graph:
    """A mixer, which gives a [B, Ka] of x, joined to the MoE's first dispatch; the mixer's other outputs stay."""
    g = Graph(name)
    inputs = g.inputs_of(mixer)
    m = vars(g.include(mixer, **inputs))
    seam = make(OProjRouter, dims)(a=m.pop("a"), x=inputs["x"])
    g.output(**seam._asdict(), **m)
    return g


def moe_4(dims: Dims) -> Graph:
    """a [B, Ka], x → out: the 4-dispatch MoE, with the output projection and the folded router in its first."""
    return _routed("moe_4", OProjRouter, dims, a="B, Ka", x="B, H")


def moe_5(dims: Dims) -> Graph:
    """a [B, Ka], x → out: the output projection a plain layer, which an all-reduce may follow; no folded weights."""
    g = Graph("moe_5")
    a, x = g.input("a", "B, Ka"), g.input("x", "B, H")
    g.output(out=g.include(moe_only(dims), r=projected(dims, a), x=x).out)
    return g


def projected(dims: Dims, a: Ref) -> Any:
    """A mixer's output r [B, H] by its output projection, of a [B, Ka].

    dims["mixer_group"]: the ranks that hold a shard each of the mixer, whose results are summed.
    """
    r = make(Linear, {**dims, "N": dims["H"], "K": dims["Ka"]}, "o_proj")(x=a, node="o_proj")
    return r if dims.get("mixer_group") is None else _summed(dims, "mixer", r)


def on_ranks(dims: Dims, *parts: str) -> str:
    """``_on_2_ranks`` for a graph's name, where one of these parts is sharded."""
    sizes = {group.size() for part in parts if (group := dims.get(f"{part}_group")) is not None}
    return "".join(f"_on_{size}_ranks" for size in sorted(sizes))


def _summed(dims: Dims, part: str, x: Ref) -> Any:
    group = dims[f"{part}_group"]
    return AllSum(N=dims["H"], group=group)(x=x, node=f"{part}_all_sum")


def moe_only(dims: Dims) -> Graph:
    """r [B, H], x → out: the MoE of a layer whose mixer, with output r, is upstream's; 4 dispatches."""
    return _routed(f"moe_only{on_ranks(dims, 'moe')}", NormRouter, dims, r="B, H", x="B, H")


def _routed(name: str, cls: type[OProjRouter | NormRouter], dims: Dims, **inputs: str) -> Graph:
    """``inputs``, each with its shape → out: an op with the router in it, whose outputs the experts take."""
    g = Graph(name)
    refs: dict[str, Any] = {arg: g.input(arg, shape) for arg, shape in inputs.items()}
    seam = make(cls, dims)(**refs)
    g.output(out=g.include(experts(dims), **seam._asdict()).out)
    return g


def moe_swiglu_only(dims: Dims) -> Graph:
    """h [B, H] → out: routing by MLX's own ops, then fused gate, up, down and combine without the routing prologue."""
    g = Graph("moe_swiglu_only")
    h = g.input("h", "B, H")
    n = make(RMSNorm, dims, "post_norm")(x=h, node="post_norm")
    route = make(Router, dims)(n=n)
    s = make(Swiglu, dims)(n=n, indices=route.indices)
    d = make(ExpertDown, dims)(act_routed=s.act_routed, act_shared=s.act_shared, indices=route.indices)
    out = make(MOECombine, dims)(
        d_routed=d.d_routed, d_shared=d.d_shared, scores=route.scores, shared_gate_logit=route.shared_gate_logit, h=h
    )  # fmt: skip
    g.output(out=out)
    return g
