import mlx.core as mx

from ..op import Op, op
from ..spec import In, Out
from .route_swiglu import GateUp, swiglu


@op
class Swiglu(GateUp, Op):
    """Gate and up projections with SwiGLU of the experts in ``indices`` and of the shared one, on a normed input.

    act = silu(w_gate·n) · (w_up·n)
    """

    n = In("B, H")
    indices = In("B, k", "u32", domain="[0, E)")
    act_routed = Out("B, k, I", "f32")
    act_shared = Out("B, Is", "f32")

    tiles = "(B * k * ((I + rows - 1) // rows) + (Is + rows - 1) // rows + simdgroups - 1) // simdgroups"

    def reference(self, n, indices, w_gate, w_up, ws_gate, ws_up):
        one = mx.array(1.0)
        routed = swiglu(one, w_gate.gather(n[:, None], indices), w_up.gather(n[:, None], indices))
        return routed, swiglu(one, ws_gate.linear(n), ws_up.linear(n))
