"""An alarm or Ctrl-C while a function is traced or compiled ends the fit, as what the handler raised."""

from __future__ import annotations

import signal
import time

import pytest
import torch

import pyrobnn as pb
from pyrobnn.core import private
from pyrobnn.model.compile import compiled, inductor
from pyrobnn.model.compile.interrupts import raised_by_handlers


class Alarm(Exception):
    """What a user's handler raises."""


def ring(number, frame):
    raise Alarm


@pytest.fixture
def alarm():
    before = signal.signal(signal.SIGALRM, ring)
    yield
    assert signal.getsignal(signal.SIGALRM) is ring
    signal.signal(signal.SIGALRM, before)


def raising(number):
    """Stands for a stage of torch's compiler, which catches every exception and goes on."""

    def stage(*args, **options):
        try:
            signal.raise_signal(number)
        except Exception:
            pytest.fail("the compiler has swallowed it")

    return stage


STAGES = {
    "tracing": "pyrobnn.core.private_trace.trace",
    "small products": "pyrobnn.model.compile.inductor.size",
    "looking for a compiler": "pyrobnn.core.private.lacks_compiler",
    "inductor": "pyrobnn.core.private.compile_graph",
    "the check": "pyrobnn.model.compile.disagreement",
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "number, error", [(signal.SIGALRM, Alarm), (signal.SIGINT, KeyboardInterrupt)]
)
def test_what_a_handler_raises_ends_every_stage_of_a_compile(
    stage, number, error, alarm, monkeypatch
):
    monkeypatch.setattr(STAGES[stage], raising(number))
    inductor.RIGHT.clear()
    with pytest.raises(error):
        compiled(lambda z: z.sin() * 0.1234, torch.ones(3))


@pytest.mark.parametrize(
    "method",
    [
        pb.NUTS(num_chains=1, num_warmup=5, compile=True),
        pb.SVI(num_steps=3, compile=True),
        pb.MAP(num_steps=3, compile=True),
    ],
)
def test_an_alarm_ends_a_fit_that_compiles(method, alarm, monkeypatch):
    monkeypatch.setattr(private, "compile_graph", raising(signal.SIGALRM))
    net = pb.networks.mlp(1, (2,), seed=0)
    model = pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.1))
    with pytest.raises(Alarm):
        method.fit(model, torch.ones(4, 1), torch.ones(4, 1))


@pytest.mark.slow
@pytest.mark.parametrize("oldest", [inductor.OLDEST, "99.0"], ids=["ours", "torch's"])
@pytest.mark.parametrize("seconds", [0.02, 0.3, 1.0])
def test_an_alarm_at_any_time_ends_a_compile(oldest, seconds, alarm, monkeypatch):
    """On the torch that is installed: its compiler swallows nothing."""
    monkeypatch.setattr(inductor, "OLDEST", oldest)
    compiled(lambda z: z.cos() * 0.5, torch.ones(3))  # whose imports an alarm would leave half done
    inductor.RIGHT.clear()
    factor = time.time() % 1  # of no function that was compiled before
    signal.setitimer(signal.ITIMER_REAL, seconds)
    with pytest.raises(Alarm):
        compiled(lambda z: (factor * z.sin() + z.exp().cumsum(0)).tanh().sum(), torch.ones(30))
        time.sleep(2.0)  # where the compile took less


@pytest.mark.parametrize("error", [MemoryError, TimeoutError])
def test_what_is_no_error_of_a_compiler_is_not_answered_by_slower_code(error, monkeypatch):
    def broken(*_):
        wrapped = RuntimeError("backend='inductor' raised")
        wrapped.inner_exception = error("no room")
        raise wrapped

    monkeypatch.setattr(private, "compile_graph", broken)
    with pytest.raises(error, match="no room"):
        compiled(lambda z: z.sin() * 0.4321, torch.ones(3))


def test_a_handler_that_sets_another_has_its_way():
    def other(number, frame):
        pass

    before = signal.signal(
        signal.SIGALRM, lambda number, frame: signal.signal(signal.SIGALRM, other)
    )
    with raised_by_handlers():
        signal.raise_signal(signal.SIGALRM)
    assert signal.getsignal(signal.SIGALRM) is other
    signal.signal(signal.SIGALRM, before)


def test_one_inside_of_another_leaves_the_exception_to_the_outer_one(alarm):
    def swallowing():
        try:
            with raised_by_handlers():
                signal.raise_signal(signal.SIGALRM)
        except Exception:
            pytest.fail("taken for another's between the two")

    with pytest.raises(Alarm), raised_by_handlers():
        swallowing()
