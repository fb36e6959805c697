import mlx.core as mx

from ..op import Op, Schedule, op
from ..spec import In, Out, Quant, QWeight


@op
class ExpertDown(Op):
    """Down projections of the chosen experts and of the shared one: d = w_down·act."""

    H: int
    E: int
    k: int
    I: int
    Is: int

    act_routed = In("B, k, I", "f32")
    act_shared = In("B, Is", "f32")
    indices = In("B, k", "u32", domain="[0, E)")
    w_down: Quant = QWeight("E, H, I")
    ws_down: Quant = QWeight("H, Is")
    d_routed = Out("B, k, H", "f32")
    d_shared = Out("B, H", "f32")

    touched = {"w_down": "B*k, H, I"}
    kernel_needs = (
        "w_down.bits in (2, 3, 4, 5, 6, 8)",
        "ws_down.bits in (2, 3, 4, 5, 6, 8)",
        "I % 32 == 0",
        "Is % 32 == 0",
    )
    tiles = "((B * k + 1) * ((H + rows - 1) // rows) + simdgroups - 1) // simdgroups"
    schedules = {"cuda": Schedule(rows=2, simdgroups=4, take=16)}
    samples = {
        "production": {"H": 2048, "E": 16, "k": 8, "I": 512, "Is": 512, "B": 1},
        "small": {"H": 33, "E": 8, "k": 2, "I": 128, "Is": 64, "B": 2},
        "odd": {"H": 100, "E": 7, "k": 3, "I": 320, "Is": 96, "B": 3},
    }

    def reference(self, act_routed, act_shared, indices, w_down, ws_down):
        routed = w_down.gather(act_routed.astype(w_down.dtype), indices)
        shared = ws_down.linear(act_shared.astype(ws_down.dtype))
        return routed.astype(mx.float32), shared.astype(mx.float32)
