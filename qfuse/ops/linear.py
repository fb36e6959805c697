from ..op import Op, op
from ..spec import In, Out, Quant, QWeight


@op
class Linear(Op):
    """y = w·x, MLX's own matrix product: a projection that is left as it is, such as one followed by an all-reduce."""

    N: int
    K: int

    x = In("B, K")
    w: Quant = QWeight("N, K")
    y = Out("B, N")

    library = True
    accuracy = "exact"
    samples = {"production": {"N": 2048, "K": 4096, "B": 1}, "small": {"N": 8, "K": 128, "B": 2}}

    def reference(self, x, w):
        return w.linear(x)
