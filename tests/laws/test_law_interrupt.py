"""The law of Ctrl-C: a fit that is interrupted raises KeyboardInterrupt or says that it was; never a silent stump."""

from __future__ import annotations

import functools
import signal
import warnings
from dataclasses import replace

import pytest
import torch
from helpers import seeded
from models import normal_prior
from test_contract import FEW, METHODS, X, Y, num_draws, one_of_each_kind
from torch import nn

import pyrobnn as pb

#: shares of a fit's calls of the net after which Ctrl-C is pressed: every phase of every method is met
MOMENTS = (0.0, 0.6, *(pytest.param(moment, marks=pytest.mark.slow) for moment in (0.3, 0.9, 1.0)))
SAID = "was interrupted by Ctrl-C"


@pytest.fixture(autouse=True)
def no_trace(monkeypatch):
    """Every call of the net is one of Python, where a traced graph would call it no more."""
    monkeypatch.setattr("pyrobnn.model.compile._REPAYS_TRACE", 10**9)


class Tripwire(nn.Tanh):
    """A layer that counts its calls in all copies of the net, and at some of them presses Ctrl-C."""

    calls = 0
    at: tuple[int, ...] = ()
    fired = 0
    number = signal.SIGINT

    def forward(self, x):
        Tripwire.calls += 1
        if Tripwire.calls in Tripwire.at:
            Tripwire.fired += 1
            signal.raise_signal(Tripwire.number)
        return super().forward(x)


def fit(name: str, *at: int, **options) -> tuple[pb.Posterior | None, list[str]]:
    """The posterior, or None after a KeyboardInterrupt, and what was warned of; Ctrl-C at these calls of the net."""
    with seeded(0):
        net = nn.Sequential(nn.Linear(1, 4), Tripwire(), nn.Linear(4, 1))
    model = pb.BNN(net, normal_prior(), pb.likelihoods.HomoskedasticGaussian(0.2))
    method = options.pop("method", METHODS[name])
    Tripwire.calls = 0
    Tripwire.fired = 0
    Tripwire.at = at
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            posterior = method.fit(model, X, Y, seed=3, **num_draws(name), **options)
        except KeyboardInterrupt:
            posterior = None
    Tripwire.at = ()
    return posterior, [str(warning.message) for warning in caught]


@functools.cache
def whole(name: str) -> tuple[pb.Posterior, int]:
    """The uninterrupted fit and its calls of the net."""
    posterior, _ = fit(name)
    return posterior, Tripwire.calls


def assert_marked(posterior: pb.Posterior, said: list[str]) -> None:
    assert posterior.meta["interrupted"] is True and posterior.meta["stopped"] == "interrupt"
    assert any(SAID in note for note in posterior.meta["warnings"])
    assert any(SAID in warning for warning in said)
    assert all(bool(torch.isfinite(draws).all()) for draws in posterior.draws.values())
    assert bool(torch.isfinite(posterior.predict(X).mean).all())


@pytest.mark.parametrize("name", one_of_each_kind(fast=FEW))
def test_an_uninterrupted_fit_is_not_marked(name):
    posterior, _ = whole(name)
    assert posterior.meta["interrupted"] is False and posterior.meta.get("stopped") != "interrupt"
    assert not any(SAID in note for note in posterior.meta["warnings"])


@pytest.mark.covering(3)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", one_of_each_kind())
def test_ctrl_c_is_never_swallowed(name, moment):
    _, calls = whole(name)
    posterior, said = fit(name, max(1, round(moment * calls)))
    assert Tripwire.fired == 1
    if posterior is not None:
        assert_marked(posterior, said)


class Alarm(RuntimeError):
    """What the handler of an alarm raises, as a time limit around a fit does; checks of programs catch its class."""


@pytest.fixture
def alarm(monkeypatch):
    def ring(*_):
        raise Alarm

    monkeypatch.setattr(Tripwire, "number", signal.SIGALRM)
    before = signal.signal(signal.SIGALRM, ring)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.covering(3)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", one_of_each_kind(fast=FEW))
def test_what_the_handler_of_an_alarm_raises_ends_the_fit(name, moment, alarm):
    _, calls = whole(name)
    with pytest.raises(Alarm):
        fit(name, max(1, round(moment * calls)))
    assert Tripwire.fired == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_ctrl_c_is_never_swallowed_wherever_it_comes(name):
    _, calls = whole(name)
    outcomes = set()
    for at in range(1, calls + 1, max(1, calls // 40)):
        posterior, said = fit(name, at)
        assert Tripwire.fired == 1
        outcomes.add(posterior is not None)
        if posterior is not None:
            assert_marked(posterior, said)
            pb.diagnose(posterior.to_datatree(X, Y))
    assert False in outcomes  # at the first call there is nothing yet


@pytest.mark.parametrize("name", one_of_each_kind(fast=FEW - {"SGLD"}))
def test_a_second_ctrl_c_always_stops(name):
    _, calls = whole(name)
    for first in (calls // 2, calls - 2):
        posterior, _ = fit(name, *range(first, 10 * calls))
        assert Tripwire.fired
        assert posterior is None or Tripwire.fired == 1


@pytest.mark.parametrize(
    "name", ["NUTS", "NUTS-pyro", "SGLD", pytest.param("SGHMC", marks=pytest.mark.slow)]
)
def test_the_draws_of_an_interrupted_chain_are_the_first_of_the_whole(name):
    posterior, calls = whole(name)
    short, said = fit(name, round(0.85 * calls))
    assert_marked(short, said)
    assert 0 < short.num_draws < posterior.num_draws and short.num_chains == posterior.num_chains
    for site, draws in short.draws.items():
        assert torch.equal(draws, posterior.draws[site][:, : short.num_draws])
    for statistic in {*short.sample_stats} - {"lp"}:
        values = posterior.sample_stats[statistic][:, : short.num_draws]
        assert torch.equal(short.sample_stats[statistic], values)
    assert f"after {short.num_draws} of {posterior.num_draws} draws" in said[0]


def test_chains_that_run_one_after_the_other_are_kept_whole():
    method = replace(METHODS["NUTS-pyro"], num_chains=3)
    full, _ = fit("NUTS-pyro", method=method)
    short, said = fit("NUTS-pyro", round(0.8 * Tripwire.calls), method=method)
    assert_marked(short, said)
    assert short.num_chains == 2 and "after 2 of 3 chains" in said[0]
    assert torch.equal(short.draws["net.0.weight"], full.draws["net.0.weight"][:2])


@pytest.mark.parametrize("moment", [0.3, 0.9])
def test_an_interrupted_run_with_a_checkpoint_goes_on_to_the_same_draws(moment, tmp_path):
    method = replace(METHODS["NUTS"], checkpoint_every=0.0)
    full, calls = whole("NUTS")
    path = tmp_path / "run"
    posterior, said = fit("NUTS", round(moment * calls), method=method, checkpoint=path)
    assert path.exists() and (posterior is None) == (moment < 0.5)
    if posterior is not None:
        assert f"checkpoint={str(path)!r} goes on" in said[0]
    again, _ = fit("NUTS", method=method, checkpoint=path)
    torch.testing.assert_close(again.draws, full.draws, rtol=0, atol=0)
    assert not again.meta["interrupted"]


@pytest.mark.parametrize("name", one_of_each_kind(sorted(METHODS.keys() - {"NUTS-pyro"})))
def test_an_interrupt_from_a_callback(name):
    def press(step, metrics):
        raise KeyboardInterrupt

    posterior, said = fit(name, callbacks=[press])
    if posterior is not None:
        assert_marked(posterior, said)


def test_an_interrupt_between_the_climb_and_the_draws_leaves_nothing():
    temperatures = []

    def count(step, metrics):
        if metrics["phase"] == "tempering":
            temperatures.append((metrics["beta"], Tripwire.calls))

    fit("SMC", callbacks=[count])
    beta, calls = temperatures[-1]
    assert beta == 1.0
    posterior, _ = fit("SMC", calls + 1)  # in the moves that show whether modes parted
    assert Tripwire.fired == 1 and posterior is None


def test_an_interrupt_of_losses_that_are_not_finite_leaves_nothing():
    method = replace(METHODS["MLE"], lr=1e30)
    assert fit("MLE", 5, method=method)[0] is None


#: where a callback stops each method
EARLY = dict.fromkeys(("MLE", "MAP", "DeepEnsemble", "SVI", "MCDropout"), 100)
EARLY |= {"SWA": 15, "SWAG": 15, "NUTS": 1, "SGLD": 25, "SGHMC": 25, "SMC": 1}


@pytest.mark.parametrize("name", one_of_each_kind(EARLY, FEW))
def test_a_callback_that_stops_is_no_interrupt(name):
    def stop(step, metrics):
        return (
            step >= EARLY[name] and metrics.get("phase") != "warm-up" and metrics.get("draws") != 0
        )

    longer = {"num_steps": 300} if EARLY[name] == 100 else {}
    posterior, said = fit(name, method=replace(METHODS[name], **longer), callbacks=[stop])
    assert posterior.meta["interrupted"] is False and posterior.meta["stopped"] == "callback"
    assert not any(SAID in warning for warning in said)
