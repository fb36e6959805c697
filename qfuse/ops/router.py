import mlx.core as mx

from ..op import Op, op
from ..spec import In, Out, Quant, QWeight
from .route_swiglu import choose_experts


@op
class Router(Op):
    """Routing by MLX's own ops on a normed input: logits, softmax, the k largest, and the shared expert's gate.

    indices and scores as in route_swiglu; shared_gate_logit = w_shared_gate·n.
    """

    H: int
    E: int
    k: int
    norm_topk: bool = True

    n = In("B, H")
    w_router: Quant = QWeight("E, H")
    w_shared_gate: Quant = QWeight("1, H")
    indices = Out("B, k", "u32")
    scores = Out("B, k", "f32")
    shared_gate_logit = Out("B", "f32")

    library = True
    dispatches = 12
    samples = {"production": {"H": 2048, "E": 256, "k": 8, "B": 1}, "small": {"H": 64, "E": 8, "k": 2, "B": 2}}

    def reference(self, n, w_router, w_shared_gate):
        indices, scores = choose_experts(w_router.linear(n.astype(mx.float32)), self.k, self.norm_topk)
        return indices, scores, w_shared_gate.linear(n).astype(mx.float32).squeeze(-1)
