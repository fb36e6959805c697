import mlx.core as mx

from ..op import Op, op
from ..spec import In, Out, Quant, QWeight
from .route_swiglu import swiglu


@op
class Swiglu(Op):
    """Gate and up projections with SwiGLU of the experts in ``indices`` and of the shared one, on a normed input.

    act = silu(w_gate·n) · (w_up·n)
    """

    H: int
    E: int
    k: int
    I: int
    Is: int

    n = In("B, H")
    indices = In("B, k", "u32", domain="[0, E)")
    w_gate: Quant = QWeight("E, I, H")
    w_up: Quant = QWeight("E, I, H")
    ws_gate: Quant = QWeight("Is, H")
    ws_up: Quant = QWeight("Is, H")
    act_routed = Out("B, k, I", "f32")
    act_shared = Out("B, Is", "f32")

    touched = {"w_gate": "B*k, I, H", "w_up": "B*k, I, H"}
    kernel_needs = (
        "w_gate.bits in (4, 8)",
        "w_up.bits in (4, 8)",
        "ws_gate.bits in (4, 8)",
        "ws_up.bits in (4, 8)",
        "H % 32 == 0",
    )
    tiles = "(B * k * ((I + rows - 1) // rows) + (Is + rows - 1) // rows + simdgroups - 1) // simdgroups"
    samples = {
        "production": {"H": 2048, "E": 16, "k": 8, "I": 512, "Is": 512, "B": 1},
        "small": {"H": 128, "E": 8, "k": 2, "I": 64, "Is": 32, "B": 2},
        "odd": {"H": 320, "E": 7, "k": 3, "I": 33, "Is": 65, "B": 3},
    }

    def reference(self, n, indices, w_gate, w_up, ws_gate, ws_up):
        one = mx.array(1.0)
        routed = swiglu(one, w_gate.gather(n[:, None], indices), w_up.gather(n[:, None], indices))
        return routed, swiglu(one, ws_gate.linear(n), ws_up.linear(n))
