from ..op import Op, op
from ..spec import DTYPES, Out
from .moe_combine import Experts, weighted


@op
class MOESum(Experts, Op):
    """y = Σ scores·d_routed + sigmoid(shared_gate_logit)·d_shared: moe_combine of one shard, without the residual.

    T is a field: every input is f32, so the output's dtype cannot be read from the call.
    """

    T: str = "bf16"

    y = Out("B, H")

    def reference(self, d_routed, d_shared, scores, shared_gate_logit):
        return weighted(d_routed, d_shared, scores, shared_gate_logit).astype(DTYPES[self.T])
