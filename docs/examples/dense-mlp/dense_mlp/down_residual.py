from qfuse import In, Op, Out, Quant, QWeight, op


@op
class DownResidual(Op):
    """out = h + w_down·act."""

    H: int
    I: int

    h = In("B, H")
    act = In("B, I", "f32")
    w_down: Quant = QWeight("H, I")
    out = Out("B, H")

    kernel_needs = ("w_down.bits in (4, 8)", "I % 32 == 0")
    tiles = "((H + rows - 1) // rows + simdgroups - 1) // simdgroups"
    samples = {
        "production": {"H": 4096, "I": 12288, "B": 1},
        "small": {"H": 64, "I": 128, "B": 2},
        "odd": {"H": 33, "I": 320, "B": 3},
    }

    def reference(self, h, act, w_down):
        return h + w_down.linear(act.astype(w_down.dtype)).astype(h.dtype)
