import mlx.core as mx

from ..op import Op, op
from ..spec import In, Out, Quant, QWeight, Weight
from .o_proj_router import partial_squares


@op
class NormRouter(Op):
    """Residual, norm weight and router of a MoE whose mixer's output r is ready: h = x + r, hw = h · w_norm.

    x2 = partial sums of h² over ``part`` columns each, router_dot = w_router·hw; the norm's factor
    1/√(mean h² + eps) follows in the next dispatch. The same outputs as o_proj_router, with no folded weights.
    """

    H: int
    E: int
    part: int = 16

    r = In("B, H")
    x = In("B, H")
    w_norm = Weight("H")
    w_router: Quant = QWeight("E, H")
    h = Out("B, H")
    hw = Out("B, H")
    x2 = Out("B, (H + part - 1) // part", "f32")
    router_dot = Out("B, E", "f32")

    kernel_needs = ("w_router.bits in (2, 3, 4, 5, 6, 8)", "H % 32 == 0")
    tiles = "((E + rows - 1) // rows + B * ((H + part - 1) // part) + simdgroups - 1) // simdgroups"
    samples = {
        "production": {"H": 2048, "E": 256, "B": 1},
        "small": {"H": 128, "E": 8, "B": 2},
        "odd": {"H": 320, "E": 7, "B": 3},
    }

    def reference(self, r, x, w_norm, w_router):
        h = x + r
        hw = h * w_norm.astype(h.dtype)
        return h, hw, partial_squares(h, self.part), w_router.linear(hw.astype(mx.float32))
