import mlx.core as mx

from ..op import Op, Schedule, op
from ..spec import In, Out, Weight


@op
class QKNormRope(Op):
    """RMSNorm per head with a learned weight, then rotary embedding of the first R dims.

    Dims p and p + R/2 turn by position · theta^(−2p/R); the dims past R stay. One position per row.
    Formula: Su et al. 2021, arXiv:2104.09864, in the half-split layout.
    """

    Hq: int
    Hkv: int
    D: int
    R: int
    theta: float = 1e7
    eps: float = 1e-6

    queries = In("B, Hq, D")
    keys = In("B, Hkv, D")
    position = In("B", "i32", domain="[0, 40000)")
    w_qnorm = Weight("D")
    w_knorm = Weight("D")
    q_rot = Out("B, Hq, D")
    k_rot = Out("B, Hkv, D")

    needs = ("R % 2 == 0", "R <= D")
    kernel_needs = ("R > 0",)
    tiles = "(B * (Hq + Hkv) + simdgroups - 1) // simdgroups"
    schedules = {"metal": Schedule(simdgroups=1)}
    samples = {
        "production": {"Hq": 16, "Hkv": 2, "D": 256, "R": 64, "B": 1},
        "small": {"Hq": 4, "Hkv": 2, "D": 64, "R": 16, "B": 2},
        "odd": {"Hq": 3, "Hkv": 1, "D": 96, "R": 48, "B": 3, "theta": 1e5},
    }

    def reference(self, queries, keys, position, w_qnorm, w_knorm):
        def rotate(x, weight):
            normed = mx.fast.rms_norm(x, weight.astype(x.dtype), self.eps)[:, :, None]
            rotated = mx.fast.rope(normed, self.R, traditional=False, base=self.theta, scale=1.0, offset=position)
            return rotated.squeeze(2)

        return rotate(queries, w_qnorm), rotate(keys, w_knorm)
