from ..op import Op, Schedule, op
from ..spec import DTYPES, In, Out
from .moe_combine import weighted


@op
class MOESum(Op):
    """y = Σ scores·d_routed + sigmoid(shared_gate_logit)·d_shared: moe_combine of one shard, without the residual.

    T is a field: every input is f32, so the output's dtype cannot be read from the call.
    """

    H: int
    k: int
    T: str = "bf16"

    d_routed = In("B, k, H", "f32")
    d_shared = In("B, H", "f32")
    scores = In("B, k", "f32", domain="(0, 1)")
    shared_gate_logit = In("B", "f32")
    y = Out("B, H")

    tiles = "(B * H + 32 * simdgroups - 1) // (32 * simdgroups)"
    schedules = {"metal": Schedule(simdgroups=8)}
    samples = {
        "production": {"H": 2048, "k": 8, "B": 1},
        "small": {"H": 64, "k": 2, "B": 2},
        "odd": {"H": 101, "k": 3, "B": 3},
    }

    def reference(self, d_routed, d_shared, scores, shared_gate_logit):
        return weighted(d_routed, d_shared, scores, shared_gate_logit).astype(DTYPES[self.T])
