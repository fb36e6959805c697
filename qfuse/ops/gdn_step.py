import mlx.core as mx

from ..op import Op, Schedule, op
from ..spec import In, Out


@op
class GDNStep(Op):
    """The gated delta rule over T = M/B steps, per value head h with key head h // (Hv/Hk), all in f32.

    S ← g·S; m = S·k; d = beta·(v − m); S ← S + d·kᵀ; y = S·q

    Rows are batch-major: M = B·T. v is the end of qkv. A row whose mask is false leaves S alone and gives y = 0.
    Formula: Yang et al. 2024, arXiv:2412.06464, eq. 10.
    """

    Hk: int
    Hv: int
    Dk: int
    Dv: int

    q = In("M, Hk, Dk")
    k = In("M, Hk, Dk")
    qkv = In("M, 2*Hk*Dk + Hv*Dv")
    g = In("M, Hv", "f32", domain="(0, 1)")
    beta = In("M, Hv", "f32", domain="(0, 1)")
    state = In("B, Hv, Dv, Dk", "f32")
    mask = In("M", "bool", optional=True)
    y = Out("M, Hv, Dv")
    state_next = Out("B, Hv, Dv, Dk", "f32")

    touched = {"qkv": "M, Hv*Dv"}
    needs = ("Hv % Hk == 0",)
    kernel_needs = ("Dk % 32 == 0",)
    tiles = "(B * Hv * Dv + simdgroups - 1) // simdgroups"
    dynamic = ("M", "B")
    schedules = {"metal": Schedule(simdgroups=4)}
    samples = {
        "production": {"Hk": 16, "Hv": 32, "Dk": 128, "Dv": 128, "M": 1, "B": 1},
        "small": {"Hk": 2, "Hv": 4, "Dk": 64, "Dv": 64, "M": 2, "B": 2},
        "odd": {"Hk": 1, "Hv": 3, "Dk": 96, "Dv": 32, "M": 6, "B": 2},
    }

    def reference(self, q, k, qkv, g, beta, state, mask):
        B, steps, repeat = state.shape[0], q.shape[0] // state.shape[0], self.Hv // self.Hk

        def by_step(x):
            return x.reshape(B, steps, *x.shape[1:]).astype(mx.float32)

        q, k = (mx.repeat(by_step(x), repeat, axis=2) for x in (q, k))
        v = by_step(qkv[:, 2 * self.Hk * self.Dk :].reshape(-1, self.Hv, self.Dv))
        g, beta = by_step(g)[..., None, None], by_step(beta)[..., None]
        ys = []
        for t in range(steps):
            decayed = state * g[:, t]
            d = (v[:, t] - (decayed * k[:, t, :, None]).sum(axis=-1)) * beta[:, t]
            new = decayed + d[..., None] * k[:, t, :, None]
            y = (new * q[:, t, :, None]).sum(axis=-1)
            if mask is not None:
                live = mask.reshape(B, steps)[:, t, None, None]
                y, new = mx.where(live, y, 0.0), mx.where(live[..., None], new, state)
            ys.append(y)
            state = new
        y = ys[0] if steps == 1 else mx.stack(ys, axis=1)
        return y.reshape(-1, self.Hv, self.Dv).astype(qkv.dtype), state
