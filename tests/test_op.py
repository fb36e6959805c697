"""What an op declaration checks when its module is imported, when an instance is made, and when it is called."""

import mlx.core as mx
import pytest

from qfuse import REGISTRY, In, Op, Out, SpecError, op
from qfuse.op import snake_case
from qfuse.ops import GDNQKNorm, GDNStep, RMSNorm


@pytest.fixture
def registry():
    """Ops that a test declares are gone after it."""
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


def test_every_op_is_registered_under_its_files_name():
    for name, cls in REGISTRY.items():
        assert cls.__module__ == f"qfuse.ops.{name}"
        assert snake_case(cls.__name__) == name


def test_every_op_has_a_formula_and_samples():
    for name, cls in REGISTRY.items():
        assert cls.__doc__, name
        assert cls.samples or name == "kv_update"


def test_specs_come_in_the_order_they_are_written():
    assert list(GDNStep.inputs()) == ["q", "k", "qkv", "g", "beta", "state", "mask"]
    assert list(GDNStep.select("out")) == ["y", "state_next"]


def test_a_call_runs_the_reference_and_names_its_outputs():
    q, k = out = GDNQKNorm(Hk=2, Dk=32, Nv=0)(qkv=mx.ones((1, 128)))
    assert out._fields == ("q", "k")
    assert q.shape == k.shape == (1, 2, 32)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"x": In("B"), "y": Out("B")}, "wants a reference method, got none"),
        ({"x": In("B"), "y": Out("B"), "reference": lambda self, z: z}, r"wants \(x\), got \(z\)"),
        ({"x": In("B"), "reference": lambda self, x: x}, "wants an output, got none"),
        ({"x": In("B"), "y": Out("Q"), "reference": lambda self, x: x}, "wants dims of fields and inputs, got Q in Q"),
        (
            {"x": In("B"), "rows": Out("B"), "reference": lambda self, x: x},
            "that a schedule leaves free, got rows",
        ),
        ({"x": In("2*B"), "y": Out("B"), "reference": lambda self, x: x}, "got B in 2 . B"),
    ],
)
def test_a_declaration_that_does_not_hold_together_fails_at_import(body, message):
    with pytest.raises(SpecError, match=message):
        op(type("Bad", (Op,), body))


@pytest.mark.usefixtures("registry")
def test_two_ops_of_one_name_are_refused():
    body = {"x": In("B"), "y": Out("B"), "reference": lambda self, x: x, "__module__": "elsewhere"}
    with pytest.raises(SpecError, match=r"\[rms_norm\] wants a name of its own, got that of qfuse\.ops\.rms_norm"):
        op(type("RMSNorm", (Op,), body))


def test_needs_are_checked_when_an_instance_is_made():
    with pytest.raises(SpecError, match=r"\[gdn_step\] wants Hv % Hk == 0, got Hk=3, Hv=4"):
        GDNStep(Hk=3, Hv=4, Dk=32, Dv=32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": mx.ones((1, 8))}, r"\[rms_norm\.w_norm\] wants \(H=8\) float, got nothing"),
        ({"x": mx.ones((1, 8)), "w_norm": mx.ones((8,), mx.int32)}, r"\[rms_norm\.w_norm\] wants .* got \(8\,\) i32"),
        ({"x": mx.ones((1, 9)), "w_norm": mx.ones((8,))}, r"\[rms_norm\.x\] wants \(B=1, H=8\) f32, got \(1, 9\) f32"),
        ({"y": mx.ones((1, 8))}, r"\[rms_norm\] wants x, w_norm, got y"),
    ],
)
def test_arguments_that_do_not_fit(arguments, message):
    with pytest.raises(SpecError, match=message):
        RMSNorm(H=8)(**arguments)


@pytest.mark.usefixtures("registry")
def test_a_reference_that_breaks_its_own_specs_is_caught():
    body = {"x": In("B"), "y": Out("B"), "reference": lambda self, x: x[:1]}
    broken = op(type("Broken", (Op,), body))
    with pytest.raises(SpecError, match=r"\[broken reference\.y\] wants \(B=3\) f32, got \(1,\) f32"):
        broken()(x=mx.ones(3))
