"""The text that a compiler is given: its size, its name, what MLX records for it, and rules that keep it portable."""

import re
from pathlib import Path

import attrs
import mlx.core as mx
import pytest

import qfuse.ops
from qfuse import REGISTRY, Quant
from qfuse.backends.kernel import Lowered, _load, render
from qfuse.backends.metal import MetalBackend
from qfuse.backends.sim import SimBackend
from qfuse.op import Schedule
from qfuse.testing import compare, run, sample, trace

KERNELS = sorted(name for name, cls in REGISTRY.items() if not cls.library)
TOKEN = re.compile(r"\w+|[-+*/%<>=!&|^?:]+|[^\w\s]")
FILES = sorted(path for kind in ("*.metal", "*.h") for path in Path(qfuse.ops.__file__).parent.glob(kind))

# Header and body as compiled for Metal at production size, bf16, 8 bits in groups of 64, with masks.
BYTES = {
    "expert_down": 4227,
    "gdn_gated_norm": 578,
    "gdn_in_proj": 5284,
    "gdn_in_proj_merged": 5315,
    "gdn_qk_norm": 705,
    "gdn_step": 1066,
    "gqa_in_proj": 4428,
    "moe_combine": 401,
    "moe_sum": 380,
    "norm_router": 4634,
    "o_proj_router": 5189,
    "qk_norm_rope": 1294,
    "route_swiglu": 7005,
    "sdpa_combine_gate": 1054,
    "sdpa_partial": 5787,
    "swiglu": 4824,
}

MOST = 7168  # MLX reads it all at each launch, but for CUDA, where it is included from a file; 4 KB is the aim


def text_of(name, shape="production", schedule=None, **kwargs):
    op, arguments = sample(REGISTRY[name], shape, **kwargs)
    present = frozenset(n for n in op.inputs() if n in arguments)
    return render(op, op.bind(arguments), present, schedule or op.schedule("metal"))


@pytest.mark.parametrize("name", KERNELS)
def test_bytes_of_a_kernel(name):
    text = text_of(name)
    assert len(text.header) + len(text.source) == BYTES[name]
    assert BYTES[name] <= MOST


@pytest.mark.parametrize("name", KERNELS)
def test_names_differ_when_any_constant_does(name):
    cls = REGISTRY[name]
    op, arguments = sample(cls, "small")
    present = frozenset(n for n in op.inputs() if n in arguments)
    env, schedule = op.bind(arguments), op.schedule("metal")
    base = render(op, env, present, schedule)
    names = {base.name}
    variants = [(op, env, present, attrs.evolve(schedule, simdgroups=schedule.simdgroups + 1))]
    for key, value in env.items():
        changed = {
            Quant: lambda v: Quant(v.bits, v.group // 2),
            bool: lambda v: not v,
            int: lambda v: v + 1,
            float: lambda v: v * 2,
            str: lambda v: "f16" if v != "f16" else "bf16",
        }[type(value)](value)
        used = re.search(rf"\b{key}(_bits|_group)?\b", base.source)
        if key not in cls.dynamic and used:
            variants.append((op, {**env, key: changed}, present, schedule))
        if isinstance(value, Quant):
            variants.append((op, {**env, key: Quant(12 - value.bits, value.group)}, present, schedule))
    if present - {n for n, spec in op.inputs().items() if not spec.optional}:
        required = frozenset(n for n, spec in op.inputs().items() if not spec.optional)
        variants.append((op, env, required, schedule))
    if name == "moe_combine":  # one thread a column, however many there are
        variants.pop(0)
    for variant in variants:
        names.add(render(*variant).name)
    assert len(names) == len(variants) + 1


@pytest.mark.parametrize("name", KERNELS)
def test_a_dynamic_dim_makes_no_new_text(name):
    cls = REGISTRY[name]
    dims = dict.fromkeys(cls.dynamic, 4)
    more = dict.fromkeys(cls.dynamic, 8)
    assert text_of(name, "small", **dims).name == text_of(name, "small", **more).name


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("name", KERNELS)
def test_metal_records_one_kernel_and_nothing_else(name, masked):
    op, arguments = sample(REGISTRY[name], "small", optional=masked)
    (primitive,) = trace(op, arguments)
    present = frozenset(n for n in op.inputs() if n in arguments)
    env, schedule = op.bind(arguments), op.schedule("metal")
    text = render(op, env, present, schedule)
    launch = Lowered(MetalBackend(), op, {n: arguments[n] for n in op.weights()}, schedule).prepare(
        *[arguments.get(n) for n in op.inputs()]
    )
    assert text.name in primitive.kernel
    assert text.source in primitive.source
    assert primitive.grid == launch.grid
    assert primitive.threadgroup == launch.threadgroup == (32 * schedule.simdgroups, 1, 1)


# Threads in x and threads of a threadgroup, at production size on Metal.
LAUNCHES = {
    "expert_down": (147456, 64),
    "gdn_gated_norm": (1024, 32),
    "gdn_in_proj": (98816, 64),
    "gdn_in_proj_merged": (98816, 64),
    "gdn_qk_norm": (1024, 32),
    "gdn_step": (131072, 128),
    "gqa_in_proj": (73728, 64),
    "moe_combine": (2048, 256),
    "moe_sum": (2048, 256),
    "norm_router": (6144, 64),
    "o_proj_router": (40960, 256),
    "qk_norm_rope": (576, 32),
    "route_swiglu": (36928, 64),
    "sdpa_combine_gate": (4096, 64),
    "sdpa_partial": (16384, 256),
    "swiglu": (36864, 64),
}


@pytest.mark.parametrize("name", KERNELS)
def test_golden_launch(name):
    (primitive,) = trace(*sample(REGISTRY[name], "production"))
    assert (primitive.grid[0], primitive.threadgroup[0]) == LAUNCHES[name]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_text_keeps_to_the_dialect(path):
    text = re.sub(r"//.*", "", path.read_text("ascii"))
    for word in ("double", "std::", "return;", "goto", "new ", "fast::", "__", "lambda", "float2", "float4", "half4"):
        assert word not in text, word
    assert max(map(len, path.read_text().splitlines())) <= 120
    if path.suffix == ".metal":
        assert "per_grid" in text, "walks its tiles with the stride of the grid"
        assert not re.search(r"\b(2048|4096|512|256|128)\b", text), "model sizes are constants of the op"


@pytest.mark.parametrize("name", KERNELS)
def test_a_tightened_text_has_the_same_tokens(name):
    op, arguments = sample(REGISTRY[name], "small")
    present = frozenset(n for n in op.inputs() if n in arguments)
    texts = [render(op, op.bind(arguments), present, op.schedule("metal"), lines=lines) for lines in (True, False)]
    for part in ("header", "source"):
        plain, tight = (re.sub(r"#line.*", "", getattr(text, part)) for text in texts)
        assert [t for t in TOKEN.findall(plain) if t] == [t for t in TOKEN.findall(tight) if t]
        assert len(tight) <= len(plain)


@pytest.mark.parametrize("name", KERNELS)
def test_a_tightened_text_runs(name, sim):
    class Tight(SimBackend):
        lines = False

    op, arguments = sample(REGISTRY[name], "odd")
    compare(op, run(op, arguments, Tight()), arguments)


def test_a_directive_keeps_its_line(tmp_path):
    (tmp_path / "a.metal").write_text("int  a = (1);\n#if (HAS_MASK)\nb = 2;\n#endif\n  c = {\n 3};\n")
    assert _load(tmp_path / "a.metal", False) == ("", "int  a=(1);\n#if (HAS_MASK)\nb=2;\n#endif\nc={3};")


def test_a_schedule_with_a_cap_launches_fewer_threadgroups():
    op, arguments = sample(REGISTRY["moe_combine"], "production")
    weights = [arguments[n] for n in op.inputs()]
    launch = Lowered(MetalBackend(), op, {}, Schedule(simdgroups=2, cap=3)).prepare(*weights)
    assert launch.grid == (3 * 64, 1, 1)


def test_no_array_of_a_kernel_may_be_small_enough_for_the_constant_address_space_where_it_is_cast():
    """MLX puts arrays of under 8 elements there, and the GEMV reads its packed weights as vectors of device memory."""
    for name in KERNELS:
        for shape in REGISTRY[name].samples:
            op, arguments = sample(REGISTRY[name], shape, quant=Quant(4, 32), B=1)
            for key in op.select("qweight"):
                assert arguments[key].weight.size >= 8
    assert sample(REGISTRY["gdn_in_proj"], H=32)[0].unmet() == "wants H >= 64, got H=32"
    assert mx.array(0).size < 8
