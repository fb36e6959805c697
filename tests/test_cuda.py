"""The cuda backend where there is no GPU: the translated text, and that NVRTC compiles every op's as MLX would."""

import re

import mlx.core as mx
import pytest
from test_ops import KERNELS, VARIANTS

from qfuse import REGISTRY, backends
from qfuse.backends.cuda import translate
from qfuse.backends.kernel import KernelText, _dtype, render
from qfuse.op import Schedule
from qfuse.spec import parts
from qfuse.testing import sample

BOUNDS = "#undef __global__\n#define __global__ __attribute__((global)) __launch_bounds__({})\n"


def text_of(name, shape="small", schedule=None, **kwargs):
    """The rendered text with what it is launched on: arrays in, dtypes out."""
    op, arguments = sample(REGISTRY[name], shape, **kwargs)
    present = frozenset(n for n in op.inputs() if n in arguments)
    env = op.bind(arguments)
    inputs = [part for n in (op.inputs() | op.weights()) if n in arguments for part in parts(arguments[n])]
    outputs = [_dtype(spec, env) for spec in op.select("out").values()]
    return render(op, env, present, schedule or op.schedule("cuda")), inputs, outputs


def test_it_is_refused_where_there_is_no_cuda(monkeypatch):
    monkeypatch.setattr(mx.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="got cuda: MLX has no CUDA device on this machine"):
        backends.get("cuda")


def test_a_text_is_given_only_the_words_that_it_uses():
    text = KernelText("probe", "", "y[0] = simd_max(metal::exp(x[0]));", ("x",), ("y",))
    header, source = translate(text)
    assert re.findall(r"(?:inline \w+|using) (\w+)", header) == ["uint", "simd_max", "simd_max", "exp"]
    assert source == text.source


def test_a_line_of_the_shim_brings_the_words_that_it_needs_itself():
    header, source = translate(KernelText("probe", "", "threadgroup_barrier(mem_flags::mem_threadgroup);", (), ("y",)))
    assert header.index("enum class mem_flags") < header.index("void threadgroup_barrier")
    assert "uint" not in header + source
    header, source = translate(KernelText("probe", "", "y[thread_index_in_simdgroup] = 0;", (), ("y",)))
    assert "using uint" in header
    assert source.startswith("const uint thread_index_in_simdgroup = threadIdx.x % 32;")


@pytest.mark.parametrize("name", KERNELS)
def test_a_text_is_the_one_that_metal_is_given(name):
    text, *_ = text_of(name)
    header, source = translate(text)
    assert header.removesuffix(BOUNDS.format(text.threads)).endswith(f"{text.header}\n")
    assert source.endswith(text.source)
    assert len(header) + len(source) < len(text.header) + len(text.source) + 2300


@pytest.fixture(scope="module")
def nvrtc():
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: pip install '.[nvrtc]'")
    import nvrtc

    return nvrtc


@pytest.mark.parametrize("name", ["route_swiglu", "sdpa_partial"])
def test_one_program_compiles_as_mlx_makes_it(nvrtc, name):
    text, inputs, outputs = text_of(name)
    function = nvrtc.function(text, inputs, outputs, inline=False)
    assert len(function) < 1000
    assert list(nvrtc.compile_program(nvrtc.START + function, "sm_90a")) == [text.name]


def test_what_metal_refuses_or_cuda_lacks_is_an_error_of_the_compiler(nvrtc):
    text = KernelText("probe_00000000", "", "y[0] = float3(0.0f).x;", ("x",), ("y",))
    with pytest.raises(AssertionError, match="float3"):
        nvrtc.compile_program(nvrtc.START + nvrtc.function(text, [mx.zeros(8)], [mx.float32]), "sm_90a")


@pytest.mark.parametrize(("arch", "variant"), [*(("sm_90a", variant) for variant in VARIANTS), ("sm_80", "bf16")])
def test_every_op_compiles(nvrtc, arch, variant):
    texts = {name: text_of(name, **VARIANTS[variant]) for name in KERNELS}
    found = nvrtc.compile_together([nvrtc.function(*text) for text in texts.values()], arch)
    assert found.keys() == {text.name for text, *_ in texts.values()}


def test_a_block_of_many_threads_leaves_each_the_registers_that_there_are(nvrtc):
    made = text_of("route_swiglu", "odd", Schedule(rows=8, simdgroups=16, take=32))
    program = nvrtc.START + nvrtc.function(*made)
    bounds = BOUNDS.format(512)
    assert bounds in program
    (with_bounds,) = nvrtc.compile_program(program, "sm_90a").values()
    (without,) = nvrtc.compile_program(program.replace(bounds, ""), "sm_90a").values()
    assert with_bounds.registers * 512 <= 65536 < without.registers * 512


@pytest.mark.parametrize("B", [1, 8])
def test_at_production_size_all_is_in_registers_and_blocks_fit(nvrtc, B):
    texts = {name: text_of(name, "production", B=B, **({"M": B} if name == "gdn_step" else {})) for name in KERNELS}
    found = nvrtc.compile_together([nvrtc.function(*text) for text in texts.values()], "sm_90a")
    for name, (text, *_) in texts.items():
        taken = found[text.name]
        threads = 32 * REGISTRY[name].schedule("cuda").simdgroups
        assert taken.stack == taken.spills == 0, f"{name} {taken}"
        assert taken.registers * threads <= 65536, f"{name} {taken}"
        assert taken.shared <= 32768, f"{name} {taken}"
