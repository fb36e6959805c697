"""Faults that people reported of this kind of software: each has its input as a test, here or where CASES says."""

import threading
from pathlib import Path

import mlx.core as mx
import pytest
from conftest import inputs, make_model, rms
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import ArraysCache, BatchKVCache, KVCache, QuantizedKVCache, make_prompt_cache

from qfuse import fuse, models
from qfuse.backends.kernel import Lowered

HERE = "test_cases.py"
CASES = {
    1: (HERE, "test_dims_come_from_the_arrays_of_a_sharded_moe"),
    2: ("test_fuse.py", "test_a_part_alone_gives_what_the_layer_gives"),
    3: ("test_parity.py", "test_key_and_value_heads"),
    4: (HERE, "test_the_residual_is_added_once_over_two_ranks"),
    5: ("test_upstream.py", "test_another_body_is_refused_with_both_versions"),
    6: ("test_geometry.py", "test_a_layer_of_each_kind_at_true_widths"),
    7: ("test_references.py", "test_rope_turns_the_first_dims_only_by_each_rows_position"),
    8: ("test_parity.py", "test_the_configs_eps_is_used"),
    9: (HERE, "test_a_rollback_restores_state_and_conv_state"),
    10: (HERE, "test_warmup_compiles_what_a_step_needs_and_a_second_call_builds_nothing"),
    11: ("test_fuse.py", "test_only_instances_change_and_remove_is_exact"),
    12: (HERE, "test_rows_join_and_leave_between_steps"),
    13: ("test_parity.py", "test_512_steps_keep_the_state_in_f32_and_near_upstreams"),
    14: ("test_kernel_faults.py", "test_a_bf16_state_is_refused"),
    15: (HERE, "test_a_quantised_kv_cache_keeps_the_moe_fused"),
    16: ("test_kernel_text.py", "test_names_differ_when_any_constant_does"),
    17: ("test_references.py", "test_qk_norm_adds_eps_to_the_sum_of_squares"),
    18: ("test_kernel_faults.py", "test_no_threadgroup_has_more_than_512_threads"),
    19: ("test_parity.py", "test_layer_in_half_precision_is_as_close_to_f32_as_upstream"),
    20: (HERE, "test_many_steps_leak_nothing_and_advance_once_each"),
    21: ("test_fuse.py", "test_conv_state_keeps_a_dtype_of_its_own"),
    22: ("test_fuse.py", "test_conv_state_is_contiguous_and_a_copied_cache_stays_behind"),
    23: (HERE, "test_a_hybrid_cache_is_never_trimmed"),
    24: ("test_fuse.py", "test_a_cache_of_the_wrong_class_is_a_clear_error"),
    25: (HERE, "test_a_quantised_kv_cache_with_a_padding_mask"),
    26: (HERE, "test_an_int_offset_with_several_rows"),
    27: ("test_references.py", "test_rope_turns_the_first_dims_only_by_each_rows_position"),
    28: ("test_fuse.py", "test_weights_are_the_models_own_arrays"),
    29: ("test_fuse.py", "test_a_part_that_cannot_be_fused_stays_upstreams_with_the_reason"),
    30: ("test_ops.py", "test_projections_of_any_shape"),
    31: (HERE, "test_biases_that_are_a_strided_view"),
    32: (HERE, "test_every_width_of_code_in_one_model"),
    33: (HERE, "test_attention_where_a_cache_grows"),
    34: (HERE, "test_built_on_one_thread_and_run_on_another"),
    35: ("test_fuse.py", "test_what_a_step_cannot_fuse_is_upstreams_with_the_reason"),
    36: ("test_geometry.py", "test_a_layer_of_each_kind_at_true_widths"),
    37: ("test_parity.py", "test_each_row_of_a_batch_is_its_own_single_run"),
    38: ("test_fuse.py", "test_report_counts_layers_dispatches_and_calls"),
    39: ("test_default_model.py", "test_64_greedy_tokens"),
    40: ("test_references.py", "test_moe_graphs_are_upstreams_block_at_every_width"),
}


def test_every_case_has_its_test():
    assert sorted(CASES) == list(range(1, 41))
    for file, name in CASES.values():
        assert f"def {name}(" in (Path(__file__).parent / file).read_text("utf-8"), (file, name)


def agree(model, run, tolerance=2e-5, **options):
    """What ``run()`` gives upstream and fused, and what became of the fused calls."""
    wanted = run()
    mx.eval(wanted)
    with fuse(model, backends="reference", **options) as fusion:
        got = run()
        mx.eval(got)
        calls = [dict(layer.calls) for layer in fusion.report().layers]
    for a, b in zip(got, wanted, strict=True):
        assert rms(a - b) <= tolerance * rms(b)
    return calls


def halved(layer, rank):
    """Leave a rank its half of a layer's experts, along their width, as tensor parallelism does; attributes stay."""
    moe = layer.mlp
    for part, axis in (("gate_proj", -2), ("up_proj", -2), ("down_proj", -1)):
        for block in (moe.switch_mlp, moe.shared_expert):
            module = getattr(block, part)
            for name in ("weight", "scales", "biases"):
                array = module[name]
                setattr(module, name, mx.contiguous(mx.split(array, 2, axis=axis)[rank]))


@pytest.mark.parametrize("rank", [0, 1])
def test_dims_come_from_the_arrays_of_a_sharded_moe(rank):
    model = make_model()
    for layer in model.layers:
        halved(layer, rank)
    x = inputs(1, 2, 1)
    assert models.adapt(model.layers[0], fold_router=False).dims["I"] == 64
    agree(model, lambda: [model.layers[0](x, None, ArraysCache(2)), model.layers[3](x, None, KVCache())], strict=True)


def test_the_residual_is_added_once_over_two_ranks():
    """h comes out of each rank's layer, so a sum over ranks takes one residual away: both ways say the same."""
    x = inputs(1, 2, 1)
    whole = make_model().layers[0](x, None, ArraysCache(2))
    parts, residuals = [], []
    for rank in (0, 1):
        model = make_model()
        layer = model.layers[0]
        h = x + layer.linear_attn(layer.input_layernorm(x), None, ArraysCache(2))
        halved(layer, rank)
        with fuse(model, backends="reference", strict=True):
            parts.append(layer(x, None, ArraysCache(2)))
        residuals.append(h)
    assert rms(parts[0] + parts[1] - residuals[0] - whole) < 2e-5 * rms(whole)


def test_a_rollback_restores_state_and_conv_state():
    model = make_model()
    tokens = mx.array([[5, 6, 7, 8, 9, 10]])

    def run():
        cache = make_prompt_cache(model)
        model(tokens, cache=cache)
        kept = [list(c.cache) if isinstance(c, ArraysCache) else None for c in cache]
        for token in (1, 2, 3):
            model(mx.array([[token]]), cache=cache)
        for c, before in zip(cache, kept, strict=True):
            if before is None:
                c.trim(3)
            else:
                c.cache = list(before)
        return [model(mx.array([[1]]), cache=cache), model(mx.array([[4]]), cache=cache)]

    agree(model, run, strict=True)
    with fuse(model, backends="reference"):
        again, fresh = run()[0], make_prompt_cache(model)
        model(tokens, cache=fresh)
        assert rms(again - model(mx.array([[1]]), cache=fresh)) < 2e-5 * rms(again)


def test_warmup_compiles_what_a_step_needs_and_a_second_call_builds_nothing(monkeypatch, sim):
    model = make_model()
    prepared = []
    right = Lowered.prepare
    monkeypatch.setattr(Lowered, "prepare", lambda self, *a: prepared.append(self.op.name) or right(self, *a))
    with fuse(model, backends=sim, probe=False) as fusion:
        fusion.warmup((1, 2))
        assert {"gdn_step", "sdpa_partial", "expert_down"} <= set(prepared)
        assert not any(layer.calls for layer in fusion.report().layers)
        count = len(prepared)
        fusion.warmup((1, 2))
        cache = make_prompt_cache(model)
        mx.eval(model(mx.array([[3]]), cache=cache))
        assert len(prepared) == count
        with pytest.raises(ValueError, match=r"^\[warmup.rows\] wants 1 to 8, got 9$"):
            fusion.warmup((9,))


def test_rows_join_and_leave_between_steps():
    model = make_model()
    gdn, gqa = model.layers[0], model.layers[3]

    def run():
        outs = []
        for layer, make in ((gdn, lambda: ArraysCache(2, left_padding=[0])), (gqa, lambda: BatchKVCache([0]))):
            caches = []
            for seed, rows in ((1, 1), (2, 2)):
                cache = make() if rows == 1 else type(make())(*([2] if layer is gdn else []), left_padding=[0] * rows)
                x = inputs(seed, rows, 4)
                layer(x, mask=create_attention_mask(x, cache) if layer is gqa else None, cache=cache)
                caches.append(cache)
            first, second = caches
            first.extend(second)
            outs.append(step(layer, inputs(3, 3, 1), first))
            first.filter(mx.array([0, 2]))
            outs.append(step(layer, inputs(4, 2, 1), first))
        return outs

    def step(layer, x, cache):
        return layer(x, mask=create_attention_mask(x, cache) if layer is gqa else None, cache=cache)

    calls = agree(model, run, strict=True)
    assert calls[0]["fused"] == calls[3]["fused"] == 2


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_quantised_kv_cache_keeps_the_moe_fused(bits, swapped):
    model = make_model()
    layer = model.layers[3]

    def run():
        cache = KVCache() if swapped else QuantizedKVCache(64, bits)
        layer(inputs(1, 1, 5), mask="causal", cache=cache)
        outs = [layer(inputs(2, 1, 1), None, cache)]
        if swapped:
            cache = cache.to_quantized(64, bits)
        return [*outs, layer(inputs(3, 1, 1), None, cache)]

    calls = agree(model, run)[3]
    assert calls["MoE alone: QuantizedKVCache is not fused"] == (1 if swapped else 2)
    assert calls.get("fused", 0) == (1 if swapped else 0)


def test_a_quantised_kv_cache_with_a_padding_mask():
    model = make_model()
    for dtype in (mx.bool_, mx.float32):
        mask = mx.array([[True] * 6, [False] * 2 + [True] * 4])[:, None, None]
        mask = mask if dtype == mx.bool_ else mx.where(mask, 0.0, -1e9)

        def run(mask=mask):
            cache = QuantizedKVCache(64, 8)
            model.layers[3](inputs(1, 2, 5), mask="causal", cache=cache)
            return [model.layers[3](inputs(2, 2, 1), mask, cache)]

        assert agree(model, run)[3]["MoE alone: QuantizedKVCache is not fused"] == 1


def test_many_steps_leak_nothing_and_advance_once_each():
    model = make_model()
    layer, x = model.layers[0], inputs(1, 1, 1)

    class Counting(ArraysCache):
        steps = 0

        def advance(self, N):
            self.steps += N
            super().advance(N)

    cache = Counting(2)
    with fuse(model, backends="reference", strict=True):
        memory = []
        for n in range(2000):
            mx.eval(layer(x, None, cache), cache.cache)
            if n in (100, 1999):
                mx.clear_cache()
                memory.append(mx.get_active_memory())
    assert cache.steps == 2000
    assert memory[1] <= memory[0] + 4096


def test_a_hybrid_cache_is_never_trimmed():
    cache = make_prompt_cache(make_model())
    assert not cache[0].is_trimmable()
    model = make_model()
    with fuse(model, backends="reference", strict=True):
        outs = []
        for _ in range(2):  # what is made anew is what a reset gives
            fresh = make_prompt_cache(model)
            outs.append(model(mx.array([[3]]), cache=fresh))
        assert mx.array_equal(*outs)


def test_an_int_offset_with_several_rows():
    model = make_model()
    layer, x, new = model.layers[3], inputs(1, 3, 5), inputs(2, 3, 1)
    with fuse(model, backends="reference", strict=True):
        cache = KVCache()
        layer(x, mask="causal", cache=cache)
        together = layer(new, None, cache)
        for row in range(3):
            alone = KVCache()
            layer(x[row : row + 1], mask="causal", cache=alone)
            single = layer(new[row : row + 1], None, alone)
            assert rms(together[row] - single[0]) < 2e-5 * rms(single)


def test_biases_that_are_a_strided_view(sim):
    model = make_model()
    projection = model.layers[3].self_attn.v_proj
    wide = mx.stack([projection.biases, projection.biases + 1], axis=-1)
    projection.biases = wide[..., 0]
    x = inputs(1, 1, 1)
    wanted = model.layers[3](x, None, KVCache())
    with fuse(model, backends=sim, probe=False, strict=True):
        assert rms(model.layers[3](x, None, KVCache()) - wanted) < 2e-5 * rms(wanted)


def test_every_width_of_code_in_one_model(sim):
    model = make_model()
    layer = model.layers[0]
    widths = {"gate": 8, "shared_expert.gate_proj": 6, "shared_expert.up_proj": 5, "shared_expert.down_proj": 6,
              "switch_mlp.gate_proj": 2, "switch_mlp.up_proj": 3, "switch_mlp.down_proj": 4}  # fmt: skip
    for path, bits in widths.items():
        owner, _, name = path.rpartition(".")
        block = getattr(layer.mlp, owner) if owner else layer.mlp
        module = getattr(block, name)
        dense = mx.dequantize(module.weight, module.scales, module.biases, module.group_size, module.bits)
        module.weight, module.scales, module.biases = mx.quantize(dense, 64, bits)
        module.bits = bits
    x = inputs(1, 2, 1)
    wanted = layer(x, None, ArraysCache(2))
    for backend in ("reference", sim):
        with fuse(model, backends=backend, probe=False, strict=True):
            assert rms(layer(x, None, ArraysCache(2)) - wanted) < 2e-5 * rms(wanted)


@pytest.mark.parametrize("N", [1023, 1024, 1025, 4095, 4096, 4097])
def test_attention_where_a_cache_grows(N, sim):
    model = make_model()
    layer = model.layers[3]
    heads, width = layer.self_attn.num_key_value_heads, layer.self_attn.head_dim

    def filled():
        cache = KVCache()
        cache.update_and_fetch(*(inputs(seed, heads, N - 1, width)[None] for seed in (1, 2)))
        return cache

    outs = {}
    for backend in (None, sim):
        fusion = fuse(model, backends=backend, probe=False, strict=True) if backend else None
        cache = filled()
        outs[backend] = [layer(inputs(seed, 1, 1), None, cache) for seed in (3, 4)]
        mx.eval(outs[backend])
        if fusion:
            fusion.remove()
    for got, wanted in zip(outs[sim], outs[None], strict=True):
        assert rms(got - wanted) < 2e-5 * rms(wanted)


def test_built_on_one_thread_and_run_on_another():
    model = make_model()
    wanted = model(mx.array([[3]]), cache=make_prompt_cache(model))
    mx.eval(wanted)
    fusion = fuse(model, backends="reference", strict=True)
    got = []

    def run():
        with mx.stream(mx.new_stream(mx.cpu)):
            got.append(model(mx.array([[3]]), cache=make_prompt_cache(model)))
            mx.eval(got)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    fusion.remove()
    assert rms(got[0] - wanted) < 2e-5 * rms(wanted)
