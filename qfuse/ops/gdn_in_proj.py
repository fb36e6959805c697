import attrs
import mlx.core as mx
import mlx.nn as nn

from ..op import Op, Schedule, op
from ..spec import In, Out, Quant, QWeight, Weight


@attrs.frozen(kw_only=True)
class Projections:
    """What gdn_in_proj and its merged form share."""

    H: int
    C: int
    Hv: int
    Dv: int
    Kc: int = 4

    n = In("B, H")
    conv_state = In("B, Kc-1, C", "S")
    mask = In("B", "bool", optional=True)
    w_conv = Weight("C, Kc, 1")
    A_log = Weight("Hv", domain="(-1, 3)")
    dt_bias = Weight("Hv")
    qkv = Out("B, C")
    z = Out("B, Hv*Dv", "f32")
    beta = Out("B, Hv", "f32")
    g = Out("B, Hv", "f32")
    conv_state_next = Out("B, Kc-1, C", "S")


def projected(conv_state, mask, w_conv, A_log, dt_bias, new, z, b, a):
    """The outputs from the four products."""
    dtype = new.dtype
    if mask is not None:
        new = mx.where(mask[:, None], new, mx.zeros_like(new))
    window = mx.concatenate([conv_state, new[:, None].astype(conv_state.dtype)], axis=1)
    taps = w_conv.squeeze(-1).T.astype(mx.float32)
    conv = (window.astype(mx.float32) * taps).sum(axis=1)
    a = a.astype(mx.float32) + dt_bias.astype(mx.float32)
    return (
        nn.silu(conv).astype(dtype),
        nn.silu(z.astype(mx.float32)),
        mx.sigmoid(b.astype(mx.float32)),
        mx.exp(-mx.exp(A_log.astype(mx.float32)) * nn.softplus(a)),
        mx.contiguous(window[:, 1:]),
    )


@op
class GDNInProj(Projections, Op):
    """The four input projections of a gated delta net, each with its epilogue.

    qkv = silu(causal depth-wise conv over [conv_state, w_qkv·n]), Kc taps, oldest first; the window moves on by one
    z = silu(w_z·n), beta = sigmoid(w_b·n), g = exp(−exp(A_log) · softplus(w_a·n + dt_bias))

    A row whose mask is false puts 0 into its window. Formulas: Yang et al. 2024, arXiv:2412.06464, as in
    mlx-lm's GatedDeltaNet; its gated norm takes silu(z), which is computed here.
    """

    w_qkv: Quant = QWeight("C, H")
    w_z: Quant = QWeight("Hv*Dv, H")
    w_b: Quant = QWeight("Hv, H")
    w_a: Quant = QWeight("Hv, H")

    kernel_needs = (
        "w_qkv.bits in (2, 3, 4, 5, 6, 8)",
        "w_z.bits in (2, 3, 4, 5, 6, 8)",
        "w_b.bits in (2, 3, 4, 5, 6, 8)",
        "w_a.bits in (2, 3, 4, 5, 6, 8)",
        "H % 32 == 0",
        "H >= 64",
        "Kc >= 2",
    )
    tiles = (
        "((C + rows - 1) // rows + (Hv*Dv + rows - 1) // rows + 2 * ((Hv + rows - 1) // rows)"
        " + simdgroups - 1) // simdgroups"
    )
    schedules = {"cuda": Schedule(rows=2, simdgroups=4, take=16)}
    samples = {
        "production": {"H": 2048, "C": 8192, "Hv": 32, "Dv": 128, "B": 1},
        "small": {"H": 128, "C": 256, "Hv": 4, "Dv": 32, "B": 2},
        "odd": {"H": 320, "C": 102, "Hv": 3, "Dv": 33, "B": 3, "Kc": 3},
    }

    def reference(self, n, conv_state, mask, w_conv, A_log, dt_bias, w_qkv, w_z, w_b, w_a):
        products = (w.linear(n) for w in (w_qkv, w_z, w_b, w_a))
        return projected(conv_state, mask, w_conv, A_log, dt_bias, *products)
