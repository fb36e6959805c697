"""Every kernel under the simulator's full checks: right, and with nothing found in it, not even a warning."""

import attrs
import pytest
from test_ops import KERNELS, VARIANTS, made

from qfuse import REGISTRY
from qfuse.backends.sim import SimBackend, SimulationError
from qfuse.testing import compare, run

pytestmark = pytest.mark.skipif(bool(SimBackend().unavailable()), reason=str(SimBackend().unavailable()))


def check(op, arguments, schedule=None):
    backend = SimBackend(full=True)
    compare(op, run(op, arguments, backend, schedule), arguments)
    assert backend.findings == []


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", ["small", "odd"])
@pytest.mark.parametrize("name", KERNELS)
def test_nothing_is_found_in(name, shape, variant):
    check(*made(name, shape, **VARIANTS[variant]))


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_is_found_at_production_size_in(name):
    check(*made(name, "production"))


@pytest.mark.parametrize("simdgroups", [1, 3, 16])
@pytest.mark.parametrize("name", KERNELS)
def test_nothing_is_found_with_few_threadgroups_of_another_size_in(name, simdgroups):
    op, arguments = made(name, "odd", dtype="f32")
    check(op, arguments, attrs.evolve(op.schedule("sim"), simdgroups=simdgroups, cap=2))


class Without(SimBackend):
    """Leaves one barrier out of every kernel, by its number in the text."""

    def __init__(self, number):
        super().__init__(full=True)
        self.number = number

    def compile(self, text):
        parts = text.source.split(BARRIER)
        assert len(parts) > self.number + 1
        source = BARRIER.join(parts[: self.number + 1]) + BARRIER.join(parts[self.number + 1 :])
        return super().compile(attrs.evolve(text, name=f"{text.name}_{self.number}", source=source))


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
WITH_BARRIERS = [
    (name, number) for name in KERNELS for number in range(REGISTRY[name].source().read_text().count(BARRIER))
]


@pytest.mark.parametrize(("name", "number"), WITH_BARRIERS)
def test_no_barrier_can_be_left_out_of(name, number):
    op, arguments = made(name, "odd")
    schedule = attrs.evolve(op.schedule("sim"), cap=2)  # several tiles to a threadgroup
    with pytest.raises(SimulationError, match=r"error: (race|uninitialised read): "):
        run(op, arguments, Without(number), schedule)
