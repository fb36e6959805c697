import mlx.core as mx

from ..op import Op, Schedule, op
from ..spec import In, Out


@op
class SDPAPartial(Op):
    """Softmax attention of one query per head over the first ``length`` keys, in blocks: key j is of block j % blocks.

    Per block, over its keys: max = max s, sum = Σ exp(s − max), o = Σ exp(s − max) · v, with s = D^-½ · q·k.
    A key outside length or with a false mask counts for nothing; a block with no key gives max = −inf, sum = 0, o = 0.
    The online softmax of Milakov & Gimelshein 2018, arXiv:1805.02867.
    """

    Hq: int
    Hkv: int
    D: int
    blocks: int = 32

    q_rot = In("B, Hq, D")
    k_cache = In("B, Hkv, A, D")
    v_cache = In("B, Hkv, A, D")
    length = In("1", "i32", domain="[1, A]")
    mask = In("B, N", "bool", optional=True)
    o_part = Out("B, Hq, blocks, D", "f32")
    sum_part = Out("B, Hq, blocks", "f32")
    max_part = Out("B, Hq, blocks", "f32")

    touched = {"k_cache": "B, Hkv, N, D", "v_cache": "B, Hkv, N, D"}
    needs = ("Hq % Hkv == 0",)
    kernel_needs = ("D % 32 == 0", "Hq <= 32 * Hkv")
    tiles = "B * Hkv * blocks"
    dynamic = ("A", "N")
    schedules = {"metal": Schedule(rows=1, simdgroups=8, take=32), "cuda": Schedule(rows=8, simdgroups=4, take=32)}
    samples = {
        "production": {"Hq": 16, "Hkv": 2, "D": 256, "A": 1024, "N": 1024, "B": 1},
        "small": {"Hq": 4, "Hkv": 2, "D": 64, "A": 256, "N": 200, "B": 2},
        "odd": {"Hq": 3, "Hkv": 1, "D": 96, "A": 37, "N": 37, "B": 3, "blocks": 5},
    }

    def reference(self, q_rot, k_cache, v_cache, length, mask):
        B, _, A, D = k_cache.shape
        strides = -(-A // self.blocks)
        q = q_rot.reshape(B, self.Hkv, self.Hq // self.Hkv, D).astype(mx.float32)
        scores = D**-0.5 * (q @ k_cache.astype(mx.float32).swapaxes(-1, -2))
        live = (mx.arange(A) < length)[None]
        if mask is not None:
            live = live & mx.pad(mask[:, :A], [(0, 0), (0, max(0, A - mask.shape[1]))])
        scores = mx.where(live[:, None, None], scores, -mx.inf)

        tail = strides * self.blocks - A
        scores = mx.pad(scores, [(0, 0)] * 3 + [(0, tail)], constant_values=-mx.inf)
        scores = scores.reshape(*scores.shape[:3], strides, self.blocks).swapaxes(-1, -2)
        values = mx.pad(v_cache.astype(mx.float32), [(0, 0), (0, 0), (0, tail), (0, 0)])
        values = values.reshape(B, self.Hkv, strides, self.blocks, D).transpose(0, 1, 3, 2, 4)

        top = scores.max(axis=-1)
        weights = mx.exp(scores - mx.where(top == -mx.inf, 0.0, top)[..., None])
        o = (weights.swapaxes(2, 3) @ values).swapaxes(2, 3)
        heads = (B, self.Hq, self.blocks)
        return o.reshape(*heads, D), weights.sum(axis=-1).reshape(heads), top.reshape(heads)
