import mlx.core as mx

from ..op import Op, op
from ..spec import Quant, QWeight
from .gdn_in_proj import Projections, projected


@op
class GDNInProjMerged(Projections, Op):
    """gdn_in_proj with its weights as Qwen3-Next keeps them: q, k, v and z of a key head together, and its b and a.

    Rows of w_qkvz, per key head: Dk of q, Dk of k, Hv/Hk·Dv of v, as many of z. Rows of w_ba: Hv/Hk of b, as many of a.
    The outputs are in the order of gdn_in_proj. Layout: mlx-lm's Qwen3NextGatedDeltaNet.fix_query_key_value_ordering.
    """

    Hk: int
    Dk: int

    w_qkvz: Quant = QWeight("C + Hv*Dv, H")
    w_ba: Quant = QWeight("2*Hv, H")

    needs = ("C == 2*Hk*Dk + Hv*Dv", "Hv % Hk == 0")
    kernel_needs = (
        "w_qkvz.bits in (2, 3, 4, 5, 6, 8)",
        "w_ba.bits in (2, 3, 4, 5, 6, 8)",
        "H % 32 == 0",
        "H >= 64",
        "Kc >= 2",
    )
    tiles = "((C + Hv*Dv + rows - 1) // rows + (2*Hv + rows - 1) // rows + simdgroups - 1) // simdgroups"
    samples = {
        "production": {"H": 2048, "C": 8192, "Hv": 32, "Dv": 128, "Hk": 16, "Dk": 128, "B": 1},
        "small": {"H": 128, "C": 256, "Hv": 4, "Dv": 32, "Hk": 2, "Dk": 32, "B": 2},
        "odd": {"H": 320, "C": 219, "Hv": 3, "Dv": 33, "Hk": 1, "Dk": 60, "B": 3, "Kc": 3},
    }

    def reference(self, n, conv_state, mask, w_conv, A_log, dt_bias, w_qkvz, w_ba):
        share = self.Hv // self.Hk
        heads = w_qkvz.linear(n).reshape(-1, self.Hk, (self.C + self.Hv * self.Dv) // self.Hk)
        ends = [self.Dk, 2 * self.Dk, 2 * self.Dk + share * self.Dv]
        q, k, v, z = (part.flatten(1) for part in mx.split(heads, ends, axis=-1))
        b, a = (part.flatten(1) for part in mx.split(w_ba.linear(n).reshape(-1, self.Hk, 2 * share), 2, axis=-1))
        new = mx.concatenate([q, k, v], axis=-1)
        return projected(conv_state, mask, w_conv, A_log, dt_bias, new, z, b, a)
