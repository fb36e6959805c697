import mlx.core as mx
import mlx.nn as nn

from qfuse import In, Op, Out, Quant, QWeight, Weight, op


@op
class NormSwiglu(Op):
    """act = silu(w_gate·n) · (w_up·n), where n = w_norm · h/√(mean h² + eps)."""

    H: int
    I: int
    eps: float = 1e-6

    h = In("B, H")
    w_norm = Weight("H")
    w_gate: Quant = QWeight("I, H")
    w_up: Quant = QWeight("I, H")
    act = Out("B, I", "f32")

    kernel_needs = ("w_gate.bits in (4, 8)", "w_up.bits in (4, 8)", "H % 32 == 0")
    tiles = "((I + rows - 1) // rows + simdgroups - 1) // simdgroups"
    samples = {
        "production": {"H": 4096, "I": 12288, "B": 1},
        "small": {"H": 128, "I": 64, "B": 2},
        "odd": {"H": 320, "I": 33, "B": 3},
    }

    def reference(self, h, w_norm, w_gate, w_up):
        r = mx.rsqrt((h.astype(mx.float32) ** 2).mean(axis=-1, keepdims=True) + self.eps)
        hw = h * w_norm.astype(h.dtype)
        gate, up = (r * w.linear(hw).astype(mx.float32) for w in (w_gate, w_up))
        return nn.silu(gate) * up
