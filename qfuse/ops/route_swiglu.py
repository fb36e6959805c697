from typing import ClassVar

import attrs
import mlx.core as mx
import mlx.nn as nn

from ..op import Op, Schedule, op
from ..spec import In, Out, Quant, QWeight


@attrs.frozen(kw_only=True)
class GateUp:
    """What every op with the gate and up projections of experts has: their dims, weights, conditions and samples."""

    H: int
    E: int
    k: int
    I: int
    Is: int

    w_gate: Quant = QWeight("E, I, H")
    w_up: Quant = QWeight("E, I, H")
    ws_gate: Quant = QWeight("Is, H")
    ws_up: Quant = QWeight("Is, H")

    touched: ClassVar[dict[str, str]] = {"w_gate": "B*k, I, H", "w_up": "B*k, I, H"}
    kernel_needs: ClassVar[tuple[str, ...]] = (
        "w_gate.bits in (2, 3, 4, 5, 6, 8)",
        "w_up.bits in (2, 3, 4, 5, 6, 8)",
        "ws_gate.bits in (2, 3, 4, 5, 6, 8)",
        "ws_up.bits in (2, 3, 4, 5, 6, 8)",
        "H % 32 == 0",
    )
    samples: ClassVar[dict[str, dict[str, int]]] = {
        "production": {"H": 2048, "E": 16, "k": 8, "I": 512, "Is": 512, "B": 1},
        "small": {"H": 128, "E": 8, "k": 2, "I": 64, "Is": 32, "B": 2},
        "odd": {"H": 320, "E": 7, "k": 3, "I": 33, "Is": 65, "B": 3},
    }


@op
class RouteSwiglu(GateUp, Op):
    """Routing, then gate and up projections with SwiGLU of the k chosen experts and of the shared one.

    r = 1/√(Σx2/H + eps), p = softmax(r · router_dot); indices = the k largest of r · router_dot, larger first,
    ties to the lower index, NaN last; scores = p[indices], divided by their sum if norm_topk.
    act = silu(r · w_gate·hw) · (r · w_up·hw), shared_gate_logit = r · w_shared_gate·hw.
    """

    eps: float = 1e-6
    norm_topk: bool = True
    part: int = 16

    hw = In("B, H")
    x2 = In("B, (H + part - 1) // part", "f32", domain="(8, 24)")
    router_dot = In("B, E", "f32")
    w_shared_gate: Quant = QWeight("1, H")
    act_routed = Out("B, k, I", "f32")
    act_shared = Out("B, Is", "f32")
    indices = Out("B, k", "u32")
    scores = Out("B, k", "f32")
    shared_gate_logit = Out("B", "f32")

    needs = ("k <= E",)
    kernel_needs = (*GateUp.kernel_needs, "w_shared_gate.bits in (2, 3, 4, 5, 6, 8)", "H >= 64", "E <= 1024", "k <= 32")
    tiles = "(B * k * ((I + rows - 1) // rows) + (Is + rows - 1) // rows + 1 + simdgroups - 1) // simdgroups"
    schedules = {"cuda": Schedule(rows=2, simdgroups=4, take=16)}

    def reference(self, hw, x2, router_dot, w_gate, w_up, ws_gate, ws_up, w_shared_gate):
        r = mx.rsqrt(x2.sum(axis=-1, keepdims=True) / self.H + self.eps)
        indices, scores = choose_experts(r * router_dot, self.k, self.norm_topk)
        routed = swiglu(r[..., None], w_gate.gather(hw[:, None], indices), w_up.gather(hw[:, None], indices))
        shared = swiglu(r, ws_gate.linear(hw), ws_up.linear(hw))
        gate = (r * w_shared_gate.linear(hw).astype(mx.float32)).squeeze(-1)
        return routed, shared, indices, scores, gate


def choose_experts(logits: mx.array, k: int, norm_topk: bool) -> tuple[mx.array, mx.array]:
    """The k largest of logits f32 [B, E] as u32 [B, k], and their softmax probabilities f32 [B, k]."""
    ranked = mx.where(mx.isnan(logits), -mx.inf, logits)
    indices = mx.argsort(-ranked, axis=-1)[:, :k].astype(mx.uint32)
    scores = mx.take_along_axis(mx.softmax(logits, axis=-1, precise=True), indices, axis=-1)
    return indices, scores / scores.sum(axis=-1, keepdims=True) if norm_topk else scores


def swiglu(r: mx.array, gate: mx.array, up: mx.array) -> mx.array:
    """silu(r·gate) · (r·up) in f32."""
    return nn.silu(r * gate.astype(mx.float32)) * (r * up.astype(mx.float32))
