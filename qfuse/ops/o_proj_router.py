import mlx.core as mx

from ..op import Op, Schedule, op
from ..spec import In, Out, Quant, QWeight, Weight


@op
class OProjRouter(Op):
    """Attention output projection, residual, and the router folded through both.

    h = x + w_o·a, hw = h · w_norm, x2 = partial sums of h² over ``part`` columns each, router_dot = M1·a + Wf·x

    With Wf = W_router·diag(w_norm) and M1 = Wf·w_o, the router's logits are r · router_dot, where
    r = 1/√(mean h² + eps) comes from x2 in the next dispatch.
    """

    H: int
    Ka: int
    E: int
    part: int = 16

    a = In("B, Ka")
    x = In("B, H")
    w_o: Quant = QWeight("H, Ka")
    w_norm = Weight("H")
    M1 = Weight("E, Ka")
    Wf = Weight("E, H")
    h = Out("B, H")
    hw = Out("B, H")
    x2 = Out("B, (H + part - 1) // part", "f32")
    router_dot = Out("B, E", "f32")

    accuracy = "approximate"  # M1 and Wf are rounded when they are folded
    kernel_needs = ("w_o.bits in (2, 3, 4, 5, 6, 8)", "Ka % 32 == 0", "H % 8 == 0")
    tiles = "(H + part - 1) // part + (E + simdgroups - 1) // simdgroups"
    schedules = {"metal": Schedule(rows=2, simdgroups=8), "cuda": Schedule(rows=2, simdgroups=8, take=16)}
    samples = {
        "production": {"H": 2048, "Ka": 4096, "E": 256, "B": 1},
        "small": {"H": 128, "Ka": 64, "E": 8, "B": 2},
        "odd": {"H": 104, "Ka": 320, "E": 7, "B": 3},
    }

    def reference(self, a, x, w_o, w_norm, M1, Wf):
        h = x + w_o.linear(a)
        dot = sum(v.astype(mx.float32) @ w.astype(mx.float32).T for v, w in ((a, M1), (x, Wf)))
        return h, h * w_norm.astype(h.dtype), partial_squares(h, self.part), dot


def partial_squares(h: mx.array, part: int) -> mx.array:
    """Σ h² over each run of ``part`` columns: h [B, H] → f32 [B, ceil(H/part)]."""
    squares = h.astype(mx.float32) ** 2
    squares = mx.pad(squares, [(0, 0), (0, -h.shape[1] % part)])
    return squares.reshape(h.shape[0], -1, part).sum(axis=-1)
