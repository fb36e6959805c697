import mlx.core as mx

from ..op import Op, Schedule, op
from ..spec import In, Out, Quant, QWeight


@op
class GQAInProj(Op):
    """Query, gate, key and value projections of gated attention; gate = sigmoid of its rows.

    The rows of w_q are interleaved per head: D of the query, then D of the gate.
    """

    H: int
    Hq: int
    Hkv: int
    D: int

    n = In("B, H")
    w_q: Quant = QWeight("2*Hq*D, H")
    w_k: Quant = QWeight("Hkv*D, H")
    w_v: Quant = QWeight("Hkv*D, H")
    queries = Out("B, Hq, D")
    gate = Out("B, Hq*D", "f32")
    keys = Out("B, Hkv, D")
    values = Out("B, Hkv, D")

    kernel_needs = (
        "w_q.bits in (2, 3, 4, 5, 6, 8)",
        "w_k.bits in (2, 3, 4, 5, 6, 8)",
        "w_v.bits in (2, 3, 4, 5, 6, 8)",
        "H % 32 == 0",
    )
    tiles = "((2*Hq*D + rows - 1) // rows + 2 * ((Hkv*D + rows - 1) // rows) + simdgroups - 1) // simdgroups"
    schedules = {"cuda": Schedule(rows=2, simdgroups=4, take=16)}
    samples = {
        "production": {"H": 2048, "Hq": 16, "Hkv": 2, "D": 256, "B": 1},
        "small": {"H": 128, "Hq": 4, "Hkv": 2, "D": 32, "B": 2},
        "odd": {"H": 320, "Hq": 3, "Hkv": 1, "D": 33, "B": 3},
    }

    def reference(self, n, w_q, w_k, w_v):
        heads = w_q.linear(n).reshape(-1, self.Hq, 2, self.D)
        gate = mx.sigmoid(heads[:, :, 1].astype(mx.float32)).reshape(-1, self.Hq * self.D)
        keys, values = (w.linear(n).reshape(-1, self.Hkv, self.D) for w in (w_k, w_v))
        return heads[:, :, 0], gate, keys, values
