import mlx.core as mx

from ..op import Op, op
from ..spec import DTYPES, In, Out


@op
class SDPACombineGate(Op):
    """a = gate · Σ_b w_b·o_b / Σ_b w_b·sum_b, with w_b = exp(max_b − max over blocks).

    A block with no key has max = −inf and weight 0; a head with no key at all gives 0.
    T is a field: every input is f32, so the output's dtype cannot be read from the call.
    """

    Hq: int
    D: int
    blocks: int = 32
    T: str = "bf16"

    o_part = In("B, Hq, blocks, D", "f32")
    sum_part = In("B, Hq, blocks", "f32", domain="(1, 9)")
    max_part = In("B, Hq, blocks", "f32")
    gate = In("B, Hq*D", "f32", domain="(0, 1)")
    a = Out("B, Hq*D")

    tiles = "(B * Hq * ((D + 31) // 32) + simdgroups - 1) // simdgroups"
    samples = {
        "production": {"Hq": 16, "D": 256, "B": 1},
        "small": {"Hq": 4, "D": 64, "B": 2},
        "odd": {"Hq": 3, "D": 96, "B": 3, "blocks": 5},
    }

    def reference(self, o_part, sum_part, max_part, gate):
        top = max_part.max(axis=-1, keepdims=True)
        weight = mx.exp(max_part - mx.where(top == -mx.inf, 0.0, top))
        total = (weight * sum_part).sum(axis=-1)[..., None]
        o = (weight[..., None] * o_part).sum(axis=2)
        o = mx.where(total > 0, o / mx.where(total > 0, total, 1.0), 0.0)
        return (o.reshape(gate.shape) * gate).astype(DTYPES[self.T])
