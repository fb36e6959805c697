from ..op import Op, op
from ..spec import Handle, In, Out


@op
class KVUpdate(Op):
    """Append one key and one value to the cache, by the cache's own update_and_fetch.

    Gives the cache's allocated buffers, not the used part: slicing them would make every reader copy.
    """

    Hkv: int
    D: int

    k_rot = In("B, Hkv, D")
    values = In("B, Hkv, D")
    cache = Handle()
    k_cache = Out("B, Hkv, A, D")
    v_cache = Out("B, Hkv, A, D")

    touched = {"k_cache": "B, Hkv, 1, D", "v_cache": "B, Hkv, 1, D"}
    library = True
    accuracy = "exact"
    dispatches = 2

    def reference(self, k_rot, values, cache):
        cache.update_and_fetch(k_rot[:, :, None], values[:, :, None])
        return cache.keys, cache.values
