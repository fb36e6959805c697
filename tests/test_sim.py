"""The simulator: clean kernels have no finding, and one seeded fault of each kind is found, by name and at its line."""

import platform

import mlx.core as mx
import pytest

from qfuse.backends.sim import Kernel, SimBackend, SimulationError, build

pytestmark = pytest.mark.skipif(bool(SimBackend().unavailable()), reason=str(SimBackend().unavailable()))

AT = "const uint i = thread_position_in_grid.x, t = thread_position_in_threadgroup.x;\n"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def run(source, n=64, threads=64, dtype=mx.float32, x=None, header="", full=False, out=None, **options):
    """One output y of n elements of one input x; the first line of ``source`` is line 2."""
    kernel = Kernel(
        "probe", ["x"], ["y"], AT + source, header, full=full, seconds=options.pop("seconds", 20), **options
    )
    x = mx.arange(n).astype(dtype) if x is None else x
    (y,) = kernel(
        inputs=[x], grid=(n, 1, 1), threadgroup=(threads, 1, 1), output_shapes=[out or (n,)], output_dtypes=[dtype]
    )
    return y, kernel.findings


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_a_clean_elementwise_kernel(dtype, full):
    source = "using T = {}; y[i] = static_cast<T>(2.0 * static_cast<float>(x[i]));"
    name = {mx.float32: "float", mx.float16: "half", mx.bfloat16: "bfloat16_t"}[dtype]
    y, findings = run(source.format(name), dtype=dtype, full=full)
    assert mx.array_equal(y, 2 * mx.arange(64).astype(dtype))
    assert findings == []


@pytest.mark.parametrize("full", [False, True])
def test_a_clean_reduction_over_a_simdgroup(full):
    y, findings = run("y[i] = simd_sum(x[i]) + simd_max(x[i]) - simd_min(x[i]);", 128, full=full)
    sums = mx.arange(128).reshape(4, 32).sum(axis=1) + 31
    assert mx.array_equal(y.reshape(4, 32), mx.broadcast_to(sums[:, None], (4, 32)).astype(mx.float32))
    assert findings == []


@pytest.mark.parametrize("full", [False, True])
def test_a_clean_reduction_through_threadgroup_memory(full):
    source = f"threadgroup float all[64];\nall[t] = x[i];\n{BARRIER}\ny[i] = all[63 - t];"
    y, findings = run(source, 128, full=full)
    assert mx.array_equal(y, mx.arange(128).reshape(2, 64)[:, ::-1].flatten().astype(mx.float32))
    assert findings == []


@pytest.mark.parametrize("full", [False, True])
def test_a_clean_exchange_within_a_simdgroup(full):
    barrier = "simdgroup_barrier(mem_flags::mem_threadgroup);"
    source = f"threadgroup float all[64];\nall[t] = x[i];\n{barrier}\ny[i] = all[t ^ 31];"
    y, findings = run(source, full=full)
    assert mx.array_equal(y, mx.arange(64).reshape(2, 32)[:, ::-1].flatten().astype(mx.float32))
    assert findings == []


def test_shapes_strides_and_shuffles():
    y, _ = run("y[i] = simd_shuffle_xor(x[i], 1) + x_shape[0] + x_strides[0] + x_ndim;", full=True)
    assert y.tolist()[:4] == [67, 66, 69, 68]
    y, _ = run("y[i] = simd_prefix_inclusive_sum(x[i]) - simd_broadcast(x[i], 1) + (simd_any(x[i] == 63) ? 100 : 0);")
    assert y.tolist()[30:34] == [464, 495, 32 - 33 + 100, 65 - 33 + 100]


def test_every_attribute_in_three_dimensions():
    names = {
        "thread_position_in_grid": 3,
        "thread_position_in_threadgroup": 3,
        "threadgroup_position_in_grid": 3,
        "threads_per_threadgroup": 3,
        "dispatch_threads_per_threadgroup": 3,
        "threadgroups_per_grid": 3,
        "threads_per_grid": 3,
        "thread_index_in_threadgroup": 1,
        "thread_index_in_simdgroup": 1,
        "simdgroup_index_in_threadgroup": 1,
        "simdgroups_per_threadgroup": 1,
        "threads_per_simdgroup": 1,
    }
    terms = [f"{name}.{axis}" for name, n in names.items() if n == 3 for axis in "xyz"]
    terms += [name for name, n in names.items() if n == 1]
    place = "((thread_position_in_grid.z * 5 + thread_position_in_grid.y) * 40 + thread_position_in_grid.x)"
    source = "\n".join(f"y[{place} * {len(terms)} + {k}] = {term};" for k, term in enumerate(terms))
    kernel = Kernel("attributes", [], ["y"], source)
    (y,) = kernel(
        inputs=[], grid=(40, 5, 2), threadgroup=(16, 2, 2), output_shapes=[(2, 5, 40, len(terms))],
        output_dtypes=[mx.uint32],
    )  # fmt: skip
    last = dict(zip(terms, y[1, 4, 39].tolist(), strict=True))
    assert [last[f"thread_position_in_grid.{axis}"] for axis in "xyz"] == [39, 4, 1]
    assert [last[f"thread_position_in_threadgroup.{axis}"] for axis in "xyz"] == [7, 0, 1]
    assert [last[f"threadgroup_position_in_grid.{axis}"] for axis in "xyz"] == [2, 2, 0]
    assert [last[f"threads_per_threadgroup.{axis}"] for axis in "xyz"] == [8, 1, 2]
    assert [last[f"dispatch_threads_per_threadgroup.{axis}"] for axis in "xyz"] == [16, 2, 2]
    assert [last[f"threadgroups_per_grid.{axis}"] for axis in "xyz"] == [3, 3, 1]
    assert [last[f"threads_per_grid.{axis}"] for axis in "xyz"] == [40, 5, 2]
    scalars = {name: last[name] for name, n in names.items() if n == 1}
    assert list(scalars.values()) == [15, 15, 0, 1, 32]


# What, source from line 2 on, kind, line, and further arguments of run().
FAULTS = [
    ("a read past the end", "y[i] =\n x[i + 1];", "out of bounds", 3, {}),
    ("a read far past the end", "y[i] = x[i + 1000000];", "out of bounds", 2, {}),
    ("a read before the start", "const int at = int(i) - 1;\ny[i] = x[at];", "out of bounds", 3, {}),
    ("a write past the end", "y[i] = x[i];\nif (i == 63) y[i + 1] = 0;", "out of bounds", 3, {}),
    ("a write before the start", "y[i] = x[i];\ny[int(i) - 1] = 0;", "out of bounds", 3, {}),
    (
        "a read past a threadgroup array",
        f"threadgroup float a[64];\nthreadgroup float b[64];\na[t] = b[t] = x[i];\n{BARRIER}\ny[i] = a[t + 1];",
        "out of bounds",
        6,
        {},
    ),
    (
        "a write before a threadgroup array",
        "threadgroup float a[64];\nthreadgroup float* p = a;\np[int(t) - 1] = 0;\ny[i] = x[i];",
        "out of bounds",
        4,
        {},
    ),
    ("past a thread's own array", "float a[4] = {0, 1, 2, 3};\ny[i] = a[int(x[i])];", "out of bounds", 3, {}),
    ("an output not written", "if (i != 5) y[i] = x[i];", "unwritten output", 0, {}),
    (
        "a read of threadgroup memory that nobody wrote",
        f"threadgroup float a[64];\nif (t > 0) a[t] = x[i];\n{BARRIER}\ny[i] = a[t];",
        "uninitialised read",
        5,
        {},
    ),
    ("a read of an output before it is written", "y[i] = y[i] + x[i];", "uninitialised read", 2, {}),
    ("a race on threadgroup memory", "threadgroup float a[64];\na[t] = x[i];\ny[i] = a[63 - t];", "race", 4, {}),
    ("a race on device memory", "y[i] = x[i];\nif (y[63 - i] < 0) y[i] = 1;", "race", 3, {"threads": 32}),
    (
        "the second round of a shared reduction without a barrier",
        f"threadgroup float a[2];\nfloat s = simd_sum(x[i]);\nif (t % 32 == 0) a[t / 32] = s;\n{BARRIER}\n"
        f"s = a[0] + a[1];\nconst float m = simd_max(x[i]);\nif (t % 32 == 0) a[t / 32] = m;\n{BARRIER}\n"
        "y[i] = s + a[0] + a[1];",
        "race",
        8,
        {},
    ),
    (
        "a barrier that orders no memory",
        "threadgroup float a[64];\na[t] = x[i];\nthreadgroup_barrier(mem_flags::mem_none);\ny[i] = a[63 - t];",
        "missing fence",
        5,
        {},
    ),
    (
        "a barrier that orders the other memory",
        f"y[i] = x[i];\n{BARRIER}\nif (y[63 - i] < 0) y[i] = 1;",
        "missing fence",
        4,
        {},
    ),
    ("a barrier that some threads skip", f"y[i] = x[i];\nif (i < 8) {BARRIER}", "divergent barrier", 3, {}),
    ("a barrier after a return", f"y[i] = x[i];\nif (i < 8) return;\n{BARRIER}", "divergent barrier", 4, {}),
    (
        "two barriers for one",
        f"y[i] = x[i];\nif (i < 32)\n{BARRIER}\nelse\n{BARRIER}",
        "divergent barrier",
        6,
        {},
    ),
    (
        "a SIMD operation that live lanes miss",
        "y[i] = i % 32 < 8 ?\nsimd_sum(x[i]) : x[i];",
        *("divergent SIMD operation", 3),
        {},
    ),
    (
        "a SIMD operation while others wait at a barrier",
        f"float s = 0;\nif (t < 8)\n s = simd_sum(x[i]);\n{BARRIER}\ny[i] = s;",
        "divergent SIMD operation",
        4,
        {},
    ),
    (
        "a shuffle from a lane that has left",
        "y[i] = 0;\nif (t % 32 > 15) return;\ny[i] = simd_shuffle_xor(x[i], 16);",
        "inactive lane",
        4,
        {},
    ),
    ("float given to bfloat", "y[i] =\n1.5f;", "compile", 3, {"dtype": mx.bfloat16}),
    ("a name that is nowhere", "y[i] =\nundeclared;", "compile", 3, {}),
    ("double", "const float a = x[i];\nconst double b = a;\ny[i] = b;", "double", 3, {}),
    ("std", "y[i] = x[i];\nstd::abs(1);", "standard library", 3, {}),
    ("goto", "y[i] = x[i];\ngoto done;\ndone:;", "goto", 3, {}),
    ("a static local", "static float a = 1;\ny[i] = x[i] + a;", "static local", 2, {}),
    (
        "an initialised threadgroup variable",
        "threadgroup float a = 1;\ny[i] = a;",
        "initialised threadgroup variable",
        2,
        {},
    ),
    (
        "a threadgroup variable in a helper",
        "y[i] = half_of(x[i]);",
        "threadgroup variable in a helper",
        2,
        {"header": "inline float half_of(float x) {\nthreadgroup float a[2];\nreturn x / 2;\n}"},
    ),
    (
        "recursion",
        "y[i] = down(x[i]);",
        "recursion",
        2,
        {"header": "inline float down(float x) {\nreturn x < 1 ? x : down(x - 1);\n}"},
    ),
    (
        "a variable of the program",
        "y[i] = x[i] * scale;",
        "program-scope variable",
        2,
        {"header": "constant constexpr int one = 1;\nconstexpr float scale = 2;"},
    ),
    (
        "an attribute in the header only",
        "y[i] = x[i];",
        "undeclared attribute",
        2,
        {"header": "#define HERE \\\n(thread_index_in_simdgroup)"},
    ),
    ("an endless loop", "y[i] = x[i];\nwhile (y[i] >= 0) y[i] = y[i] < 3 ? 1 : 2;", "endless loop", 3, {"seconds": 1}),
    ("a null pointer", "const device float* p = nullptr;\ny[i] = p[i];", "null dereference", 3, {}),
    ("a division by zero", "const int zero = int(x[0]);\ny[i] = int(i) / zero;", "arithmetic", 3, {}),
    ("a write to an input", "device float* p = (device float*)x;\np[i] = y[i] = 1;", "write to an input", 3, {}),
    ("an odd address", "y[i] =\n*(const device uint*)((const device uchar*)x + 2);", "misaligned access", 3, {}),
    (
        "too much threadgroup memory",
        "threadgroup float a[8000];\nthreadgroup float b[8000];\na[t] = b[t] = x[i];\ny[i] = a[t] + b[t];",
        "threadgroup memory",
        3,
        {},
    ),
    (
        "a result that depends on the order of threads",
        "y[i] = x[i];\ny[0] = i;",
        "order of threads",
        0,
        {},
    ),
]


@pytest.mark.parametrize(("source", "kind", "line", "options"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_a_fault_is_found_by_name_and_at_its_line(source, kind, line, options):
    with pytest.raises(SimulationError, match=r"^\[probe\] wants a kernel without a fault, got: ") as error:
        run(source, full=True, **options)
    errors = [(f.kind, f.line) for f in error.value.findings if f.severity == "error"]
    assert (kind, line) in errors, [str(f) for f in error.value.findings]


FATAL = ["a read far past the end", "a null pointer", "an endless loop", "a write to an input"]
if platform.machine() == "x86_64":  # elsewhere the processor goes on with a zero
    FATAL.append("a division by zero")


@pytest.mark.parametrize("what", FATAL)
def test_a_run_without_full_checks_finds_what_it_cannot_go_past(what):
    _, source, kind, line, options = next(fault for fault in FAULTS if fault[0] == what)
    with pytest.raises(SimulationError) as error:
        run(source, **options)
    assert [(f.kind, f.line) for f in error.value.findings if f.severity == "error"] == [(kind, line)]


@pytest.mark.skipif(build.clang() is None, reason="the package ziglang is not there")
@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("device float* p = y;\nthread float* q = p;\ny[i] = q[i] + x[i];", 3),
        (f"threadgroup float a[64];\na[t] = x[i];\n{BARRIER}\ndevice float* p = a;\ny[i] = p[t];", 5),
        ("const constant float* p = x;\ny[i] = p[i];", 2),
    ],
)
def test_a_pointer_keeps_its_address_space(source, line):
    with pytest.raises(SimulationError) as error:
        run(source, full=True)
    assert ("address space", line) in [(f.kind, f.line) for f in error.value.findings]


def test_a_small_input_is_constant_as_in_mlx():
    source = "const device float* p = x;\ny[i] = p[i];"
    y, _ = run(source, 8, 8, full=True)
    assert y.tolist() == list(range(8))
    if build.clang():
        with pytest.raises(SimulationError, match="address space"):
            run(source, 7, 7, full=True)
    kernel = Kernel("scalar", ["x", "k"], ["y"], AT + "y[i] = x[i] * k;")
    (y,) = kernel(
        inputs=[mx.arange(32.0), 3.0], grid=(32, 1, 1), threadgroup=(32, 1, 1), output_shapes=[(32,)],
        output_dtypes=[mx.float32],
    )  # fmt: skip
    assert y.tolist() == [3 * i for i in range(32)]


@pytest.mark.parametrize(
    ("source", "kind", "line"),
    [
        ("y[i] = x[i];\nif (i < 2) y[7] = x[7];", "two writers", 3),
        ("y[i] = x[i];\nif (t % 32 > 15) return;\ny[i] = simd_sum(x[i]);", "SIMD operation after return", 4),
        ("y[i] = *((const device float*)x + i);", "address space of a small input", 2),
        ("y[i] = float(1u << (32 + int(x[i]) * 0));", "arithmetic", 2),
    ],
)
def test_a_warning_is_kept_and_stops_nothing(source, kind, line):
    y, findings = run(source, full=True)
    assert y.shape == (64,)
    assert (kind, "warning", line) in [(f.kind, f.severity, f.line) for f in findings], list(map(str, findings))


def test_a_finding_of_a_race_names_both_lines():
    with pytest.raises(
        SimulationError, match=r"probe.metal:4: error: race: in threadgroup memory: .* at probe.metal:3"
    ):
        run("threadgroup float a[64];\na[t] = x[i];\ny[i] = a[63 - t];", full=True)


def test_more_buffers_than_metal_binds():
    names = [f"x{k}" for k in range(31)]
    kernel = Kernel("many", names, ["y"], f"y[0] = {' + '.join(f'{name}[0]' for name in names)};")
    with pytest.raises(SimulationError, match="too many buffers: 32"):
        kernel(
            inputs=[mx.ones(1)] * 31, grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)],
            output_dtypes=[mx.float32],
        )  # fmt: skip


def test_templates_atomics_and_initial_values():
    kernel = Kernel(
        "histogram", ["x"], ["y"],
        "const uint i = thread_position_in_grid.x;\n"
        "if (EVERY) atomic_fetch_add_explicit(&y[uint(x[i]) % N], static_cast<T>(1), memory_order_relaxed);",
        atomic_outputs=True,
    )  # fmt: skip
    (y,) = kernel(
        inputs=[mx.arange(100)], grid=(100, 1, 1), threadgroup=(32, 1, 1), output_shapes=[(7,)],
        output_dtypes=[mx.float32], template=[("T", mx.float32), ("N", 7), ("EVERY", True)], init_value=0,
    )  # fmt: skip
    assert y.tolist() == [15, 15, 14, 14, 14, 14, 14]
    assert kernel.findings == []


def test_geometry_out_of_limits():
    with pytest.raises(SimulationError, match="geometry: at least 1 thread and at most 1024"):
        run("y[i] = x[i];", 2048, 2048)


def test_an_output_that_is_not_written_is_nan_without_full_checks():
    y, _ = run("if (i != 5) y[i] = x[i];")
    assert mx.isnan(y).tolist() == [i == 5 for i in range(64)]


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
