import mlx.core as mx

from ..op import Op, Schedule, op
from ..spec import In, Out


@op
class GDNQKNorm(Op):
    """q = Dk^-½ · q/√(Σq² + l2_eps), k = k/√(Σk² + l2_eps), per key head.

    l2_eps is added to the sum of squares, as in flash-linear-attention's l2norm; it is not the config's rms_norm_eps.
    """

    Hk: int
    Dk: int
    Nv: int
    l2_eps: float = 1e-6

    qkv = In("B, 2*Hk*Dk + Nv")
    q = Out("B, Hk, Dk")
    k = Out("B, Hk, Dk")

    touched = {"qkv": "B, 2*Hk*Dk"}
    tiles = "(B * 2 * Hk + simdgroups - 1) // simdgroups"
    schedules = {"metal": Schedule(simdgroups=1)}
    samples = {
        "production": {"Hk": 16, "Dk": 128, "Nv": 4096, "B": 1},
        "small": {"Hk": 2, "Dk": 64, "Nv": 64, "B": 2},
        "odd": {"Hk": 3, "Dk": 96, "Nv": 7, "B": 3},
    }

    def reference(self, qkv):
        heads = qkv[:, : 2 * self.Hk * self.Dk].reshape(-1, 2, self.Hk, self.Dk).astype(mx.float32)
        unit = heads * mx.rsqrt((heads * heads).sum(axis=-1, keepdims=True) + self.l2_eps)
        return (unit[:, 0] * self.Dk**-0.5).astype(qkv.dtype), unit[:, 1].astype(qkv.dtype)
