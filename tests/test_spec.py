import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qfuse.spec import In, QArray, Quant, SpecError, bind, interval, parse, parse_dims


@given(a=st.integers(1, 99), b=st.integers(1, 99), c=st.integers(1, 99))
def test_dim_arithmetic_is_pythons(a, b, c):
    env = {"a": a, "b": b, "c": c}
    for text in ("2*a*b + c", "(a + b - 1) // b", "a % b", "a*b - c"):
        assert parse(text).value(env) == eval(text, {}, env)


def test_dim_keeps_its_text_until_every_name_is_known():
    assert parse("2*Hk + Nv").partial({"Hk": 2}) == "2 * Hk + Nv"
    assert parse("2*Hk + Nv").partial({"Hk": 2, "Nv": 1}) == 5
    assert parse_dims("") == ()


@pytest.mark.parametrize("text", ["", "2*", "f(x)", "x[0]", "a if b else c", "lambda: 1", "'a' + b"])
def test_only_integer_expressions_are_dims(text):
    with pytest.raises(SpecError, match=r"\[dim\] wants an integer expression, got "):
        parse(text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"x": mx.zeros((2, 4)), "y": mx.zeros((3, 4))}, r"\[op\.y\] wants \(B=2, H=4\) f32, got \(3, 4\) f32"),
        ({"x": mx.zeros((2, 5)), "y": mx.zeros((2, 4))}, r"\[op\.x\] wants \(B=2, H=4\) f32, got \(2, 5\) f32"),
        ({"x": mx.zeros((2, 4)), "y": mx.zeros((2, 4), mx.float16)}, r"\[op\.y\] wants .* f32, got \(2, 4\) f16"),
        ({"x": mx.zeros((8,)), "y": mx.zeros((2, 4))}, r"\[op\.x\] wants \(B, H=4\) T, got \(8,\) f32"),
        ({"x": mx.zeros((2, 4))}, r"\[op\.y\] wants \(B=2, H=4\) f32, got nothing"),
        ({"x": 3, "y": mx.zeros((2, 4))}, r"\[op\.x\] wants \(B, H=4\) T, got int"),
    ],
)
def test_bind_names_place_wanted_and_got(values, message):
    with pytest.raises(SpecError, match=message):
        bind("op", {"x": In("B, H"), "y": In("B, H")}.items(), values, {"H": 4})


def test_bind_solves_dims_and_tokens():
    specs = {"q": In("2*B, H"), "x": In("B, H", "S"), "skip": In("Z", optional=True)}
    values = {"q": mx.zeros((6, 4)), "x": mx.zeros((3, 4), mx.bfloat16)}
    env = bind("op", specs.items(), values, {"H": 4})
    assert (env["B"], env["T"], env["S"]) == (3, "f32", "bf16")
    assert "Z" not in env


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_qarray_is_what_mlx_dequantises(bits, group):
    w = mx.random.normal((3, 5, 256), key=mx.random.key(bits))
    q = QArray(*mx.quantize(w, group, bits), Quant(bits, group))
    assert q.shape == (3, 5, 256)
    assert q.nbytes == sum(part.nbytes for part in q.parts())
    x = mx.random.normal((2, 1, 256), key=mx.random.key(1))
    indices = mx.array([[0, 2], [1, 1]], mx.uint32)
    expected = mx.einsum("bok,bink->bin", x, q.dense()[indices])
    assert mx.allclose(q.gather(x, indices), expected, atol=1e-4)
    one = QArray(q.weight[0], q.scales[0], q.biases[0], q.quant)
    assert mx.allclose(one.linear(x[:, 0]), x[:, 0] @ one.dense().T, atol=1e-4)


def test_qarray_takes_plain_weights_and_keeps_the_dtype_of_x():
    w = mx.random.normal((4, 6, 64), key=mx.random.key(0)).astype(mx.bfloat16)
    plain = QArray(w)
    x = mx.random.normal((2, 64), key=mx.random.key(1)).astype(mx.bfloat16)
    indices = mx.array([[0, 3], [1, 1]], mx.uint32)
    assert plain.gather(x[:, None], indices).shape == (2, 2, 6)
    assert QArray(w[0]).linear(x).dtype == mx.bfloat16
    quantised = QArray(*mx.quantize(w[0], 64, 8), Quant(8, 64))
    assert quantised.linear(x.astype(mx.float16)).dtype == mx.float16


def test_intervals():
    assert interval("[0, E)", {"E": 8}) == (0, 8)
    assert interval("[1, A]", {"A": 8}) == (1, 9)
    with pytest.raises(SpecError, match=r"\[domain\] wants an interval"):
        interval("0..1", {})
