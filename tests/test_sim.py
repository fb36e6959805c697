"""The simulator: clean kernels run, and each kind of fault that it claims to see is seen."""

import mlx.core as mx
import pytest

from qfuse.backends.sim import Kernel, SimBackend, SimulationError

pytestmark = pytest.mark.skipif(bool(SimBackend().unavailable()), reason=str(SimBackend().unavailable()))

AT = "const uint i = thread_position_in_grid.x;\n"


def run(source, n=64, threads=64, dtype=mx.float32, x=None, seconds=20):
    kernel = Kernel("probe", ["x"], ["y"], AT + source, seconds=seconds)
    x = mx.arange(n).astype(dtype) if x is None else x
    return kernel(inputs=[x], grid=(n, 1, 1), threadgroup=(threads, 1, 1), output_shapes=[(n,)], output_dtypes=[dtype])[
        0
    ]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_a_clean_elementwise_kernel(dtype):
    source = "using T = {}; y[i] = static_cast<T>(2.0f * static_cast<float>(x[i]));"
    name = {mx.float32: "float", mx.float16: "half", mx.bfloat16: "bfloat16_t"}[dtype]
    assert mx.array_equal(run(source.format(name), dtype=dtype), 2 * mx.arange(64).astype(dtype))


def test_a_clean_reduction_over_a_simdgroup():
    out = run("y[i] = simd_sum(x[i]) + simd_max(x[i]) - simd_min(x[i]);", 128)
    sums = mx.arange(128).reshape(4, 32).sum(axis=1) + 31
    assert mx.array_equal(out.reshape(4, 32), mx.broadcast_to(sums[:, None], (4, 32)).astype(mx.float32))


def test_a_clean_reduction_through_threadgroup_memory():
    out = run(
        "threadgroup float all[64];\n"
        "const uint t = thread_position_in_threadgroup.x;\n"
        "all[t] = x[i];\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "y[i] = all[63 - t];",
        128,
    )
    assert mx.array_equal(out, mx.arange(128).reshape(2, 64)[:, ::-1].flatten().astype(mx.float32))


def test_shapes_and_shuffles():
    out = run("y[i] = simd_shuffle_xor(x[i], 1) + x_shape[0];")
    assert out.tolist()[:4] == [65, 64, 67, 66]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("y[i] = x[i + 4096];", "a read or write out of bounds"),
        ("y[i] = x[i]; if (i == 63) y[i + 1] = 0;", "a read or write out of bounds"),
        ("const device float* p = nullptr; y[i] = p[i];", "a read or write out of bounds"),
        ("y[i] = x[i]; if (i < 8) threadgroup_barrier(mem_flags::mem_threadgroup);", "is not reached by every thread"),
        ("y[i] = i < 8 ? simd_sum(x[i]) : x[i];", "is not reached by every thread"),
        ("y[i] = x[i]; while (y[i] >= 0) { y[i] = y[i] < 3 ? 1 : 2; }", "1 s passed"),
        ("y[i] = undeclared;", "'?.?undeclared.?'? was not declared"),
    ],
)
def test_a_fault_is_found_and_ends_no_process(source, message):
    with pytest.raises(SimulationError, match=rf"\[probe\] wants .*{message}"):
        run(source, seconds=1)
    assert run("y[i] = x[i];").tolist() == list(range(64))


def test_float_does_not_become_bfloat_by_itself():
    with pytest.raises(SimulationError, match=r"\[probe\] wants a text that compiles, got: .*bfloat16_t"):
        run("y[i] = 1.5f;", dtype=mx.bfloat16)


def test_an_output_that_is_not_written_is_nan():
    assert mx.isnan(run("if (i != 5) y[i] = x[i];")).tolist() == [i == 5 for i in range(64)]


def test_what_it_cannot_run_it_refuses():
    with pytest.raises(SimulationError, match="wants a 1-D grid of whole threadgroups"):
        run("y[i] = x[i];", 48, 32)


def test_generate_runs_the_default_model_through_the_metal_texts(monkeypatch, capsys, checkpoint):
    from qfuse import cli

    command = ["qfuse", "generate", "--model", str(checkpoint), "--backend", "sim", "--max-tokens", "2", "--compare"]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert "qfuse mode 2, sim" in out
    assert "tokens: equal, all 2" in out
