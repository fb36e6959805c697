"""Faults in a run: a kernel that gives NaN, a launch that is rejected, an interrupt. The model is usable afterwards."""

import re
import signal
from urllib.error import HTTPError
from urllib.request import urlopen

import mlx.core as mx
import pytest
from conftest import make_model
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import make_prompt_cache
from test_serve import chat, running

from qfuse import backends, fuse
from qfuse.backends.metal import MetalBackend
from qfuse.backends.reference import ReferenceBackend
from qfuse.fuse import is_fused

PROMPT = [72, 101, 108, 108, 111]
each_way = pytest.mark.parametrize("options", [{}, {"segments": True}], ids=["layers", "segments"])


class Faulty(ReferenceBackend):
    """The references as if they were kernels, with a fault in one op at one of its calls after arm()."""

    name = "faulty"
    probes = True

    def __init__(self, op, fault):
        self.op, self.fault, self.left = op, fault, 0

    def arm(self, call=1):
        self.left = call

    def lower(self, op, weights):
        right = super().lower(op, weights)

        def call(*inputs):
            self.left -= 1
            return self.fault(right, *inputs) if self.left == 0 else right(*inputs)

        return call if op.name == self.op else right


def rejected(right, *inputs):
    raise RuntimeError("launch rejected")


def interrupted(right, *inputs):
    signal.raise_signal(signal.SIGINT)
    return right(*inputs)


@pytest.fixture
def faulty(monkeypatch):
    def put(op, fault):
        backend = Faulty(op, fault)
        monkeypatch.setitem(backends.BACKENDS, "faulty", backend)
        return backend

    return put


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(autouse=True)
def given_back(model):
    yield
    if is_fused(model.layers[0]):
        model.layers[0]._qfuse.fusion.remove()


@pytest.fixture(scope="module")
def wanted(model):
    return tokens(model)


def tokens(model, n=8, **options):
    return [token for token, _ in generate_step(mx.array(PROMPT), model, max_tokens=n, **options)]


def said(report):
    """A report's text without the table's borders and the breaks within its cells."""
    return re.sub(r"[│\s]+", " ", str(report))


def usable(model, fusion, wanted):
    """Right fused, and right and itself after remove()."""
    assert tokens(model) == wanted
    fusion.remove()
    assert not any(is_fused(layer) for layer in model.layers)
    assert tokens(model) == wanted


@each_way
def test_a_kernel_that_gives_nan_is_off_before_the_first_token(model, wanted, faulty, options):
    def nan(right, *inputs):
        return tuple(x * mx.nan for x in right(*inputs))

    faulty("gdn_step", nan).arm()
    fusion = fuse(model, backends="faulty", **options)
    assert tokens(model) == wanted
    report = str(fusion.report())
    assert re.search(r"gdn_step: not on faulty: probe: \[gdn_step\.y\] at \[.*\] wants \S+, got nan", report)
    usable(model, fusion, wanted)


@each_way
@pytest.mark.parametrize("op", ["gdn_step", "sdpa_partial", "expert_down"])
def test_a_launch_rejected_in_a_step_says_where_and_the_next_run_is_right(model, wanted, faulty, op, options):
    backend = faulty(op, rejected)
    fusion = fuse(model, backends="faulty", **options)
    backend.arm()  # with segments at the trace of a step, which must not be kept half done
    with pytest.raises(RuntimeError, match="launch rejected") as caught:
        tokens(model)
    (note,) = caught.value.__notes__
    place = r"\d+\.\S+ to \d+\.\S+ of chain" if options else rf"{op} of (gdn|gqa)_layer"
    assert re.fullmatch(rf"qfuse: at {place}, on (library, )?faulty(, library)?", note)
    report = fusion.report()
    counts = [report.chain] if options else [layer.calls for layer in report.layers]
    assert sum(calls.get("raised RuntimeError: launch rejected", 0) for calls in counts) == 1
    assert "1 raised RuntimeError: launch rejected" in said(report)
    usable(model, fusion, wanted)


def test_a_launch_rejected_after_some_tokens_leaves_a_batch_that_can_be_made_anew(model, faulty):
    def served():
        batch = BatchGenerator(model)
        batch.insert([PROMPT, [9, 8]], [6, 6])
        try:
            found = []
            while responses := batch.next_generated():
                found += [(each.uid, each.token) for each in responses]
        finally:
            batch.close()
        return found

    right = served()
    backend = faulty("gdn_step", rejected)
    with fuse(model, backends="faulty"):
        backend.arm(10)
        with pytest.raises(RuntimeError, match="launch rejected"):
            served()
        assert served() == right
    assert served() == right


def test_launches_that_are_rejected_when_evaluated_raise_and_leave_the_model_as_it_was(model, wanted, monkeypatch):
    if mx.metal.is_available():
        pytest.skip("there is a device")

    class Metal(MetalBackend):
        """Says that there is a device. MLX says otherwise when a kernel is evaluated."""

        def unavailable(self):
            return None

    monkeypatch.setitem(backends.BACKENDS, "metal", Metal())
    fusion = fuse(model, backends="metal", probe=False)
    with pytest.raises(RuntimeError, match=r"No Metal back-end"):
        tokens(model)
    fusion.remove()
    assert tokens(model) == wanted
    fusion = fuse(model, backends="metal")  # the probe sees it
    assert "not on metal: probe: RuntimeError: [metal_kernel] No Metal back-end." in str(fusion.report())
    usable(model, fusion, wanted)


@each_way
def test_an_interrupt_within_a_step(model, wanted, faulty, options):
    backend = faulty("expert_down", interrupted)
    fusion = fuse(model, backends="faulty", **options)
    backend.arm(1 if options else 6)
    with pytest.raises(KeyboardInterrupt):
        tokens(model)
    assert "1 raised KeyboardInterrupt" in said(fusion.report())
    usable(model, fusion, wanted)


@each_way
def test_an_interrupt_between_two_tokens_leaves_a_cache_to_go_on_from(model, wanted, options):
    def stopped():
        cache, found = make_prompt_cache(model), []

        def run():
            for token, _ in generate_step(mx.array(PROMPT), model, prompt_cache=cache):
                found.append(token)
                if len(found) == 4:
                    signal.raise_signal(signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            run()
        return found, [token for token, _ in generate_step(mx.array([33]), model, max_tokens=4, prompt_cache=cache)]

    expected = stopped()
    fusion = fuse(model, backends="reference", **options)
    assert stopped() == expected
    usable(model, fusion, wanted)


def test_a_step_that_raises_ends_the_servers_thread_and_health_says_so(checkpoint, faulty, caplog):
    backend = faulty("gdn_step", rejected)
    with running("--model", str(checkpoint), backends="faulty") as (url, _):
        assert chat(url, "abc", tokens=2)[0] == ";<"
        backend.arm()
        with pytest.raises((HTTPError, ConnectionError, AssertionError, IndexError)):
            chat(url, "abcd")
        with pytest.raises(HTTPError) as health:
            urlopen(f"{url}/health")
        assert health.value.code == 503
    assert "generation thread died: launch rejected" in caplog.text
    assert "qfuse: at gdn_step of gdn_layer, on faulty" in caplog.text
