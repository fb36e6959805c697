import mlx.core as mx

from ..op import Op, Schedule, op
from ..spec import In, Out, Weight


@op
class GDNGatedNorm(Op):
    """a = w · y/√(mean y² + eps) · z, per value head; z comes through SiLU already."""

    Hv: int
    Dv: int
    eps: float = 1e-6

    y = In("B, Hv, Dv")
    z = In("B, Hv*Dv", "f32")
    w_norm = Weight("Dv")
    a = Out("B, Hv*Dv")

    tiles = "(B * Hv + simdgroups - 1) // simdgroups"
    schedules = {"metal": Schedule(simdgroups=1)}
    samples = {
        "production": {"Hv": 32, "Dv": 128, "B": 1},
        "small": {"Hv": 4, "Dv": 64, "B": 2},
        "odd": {"Hv": 3, "Dv": 96, "B": 3},
    }

    def reference(self, y, z, w_norm):
        normed = mx.fast.rms_norm(y, w_norm.astype(y.dtype), self.eps).astype(mx.float32)
        return (normed * z.reshape(normed.shape)).astype(y.dtype).reshape(z.shape)
