import attrs
import mlx.core as mx

from ..op import Op, Schedule, op
from ..spec import In, Out


@attrs.frozen(kw_only=True)
class Experts:
    """What moe_combine and moe_sum share."""

    H: int
    k: int

    d_routed = In("B, k, H", "f32")
    d_shared = In("B, H", "f32")
    scores = In("B, k", "f32", domain="(0, 1)")
    shared_gate_logit = In("B", "f32")

    tiles = "(B * H + 32 * simdgroups - 1) // (32 * simdgroups)"
    schedules = {"metal": Schedule(simdgroups=8)}
    samples = {
        "production": {"H": 2048, "k": 8, "B": 1},
        "small": {"H": 64, "k": 2, "B": 2},
        "odd": {"H": 101, "k": 3, "B": 3},
    }


@op
class MOECombine(Experts, Op):
    """out = Σ scores·d_routed + sigmoid(shared_gate_logit)·d_shared + h."""

    h = In("B, H")
    out = Out("B, H")

    def reference(self, d_routed, d_shared, scores, shared_gate_logit, h):
        return (weighted(d_routed, d_shared, scores, shared_gate_logit) + h.astype(mx.float32)).astype(h.dtype)


def weighted(d_routed, d_shared, scores, shared_gate_logit):
    """What the experts give together, [B, H] f32."""
    return (scores[..., None] * d_routed).sum(axis=1) + mx.sigmoid(shared_gate_logit)[:, None] * d_shared
