"""A richer guide begins where mean-field ends, and says so where it ends below it."""

from __future__ import annotations

import functools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import seeded
from models import normal_prior, toy, toy_model
from sklearn.datasets import load_iris

import pyrobnn as pb
from pyrobnn.inference.optim.training import Optimizer
from pyrobnn.inference.svi import Guide

RICHER = ("low_rank", "full_rank", "flow")


def _fit(guide="full_rank", **options):
    options = {"num_steps": 20, "compile": False} | options
    fit = {name: options.pop(name) for name in ("callbacks", "progress") if name in options}
    return pb.SVI(guide=guide, **options).fit(toy_model(), *toy(), num_draws=20, **fit)


@pytest.mark.parametrize("guide", RICHER)
def test_it_begins_at_the_very_end_of_mean_field(guide):
    seen = {}

    def look(step, metrics):
        seen[step] = metrics["snapshot"]().approximation

    posterior = _fit(guide, callbacks=[look])
    plain = _fit("mean_field")
    assert posterior.meta["mean_field_steps"] == 20 and posterior.meta["num_steps"] == 40
    assert sorted(seen) == list(range(2, 41, 2))
    (_, state) = plain.approximation.state()
    (name, reached) = seen[20].state()
    assert name == "normal" and torch.equal(reached["loc"], state["loc"])
    assert torch.equal(posterior.history["elbo"][:20], plain.history["elbo"])
    begun = state["loc"]
    (name, state) = seen[26].state()
    assert (
        name == guide and 0 < float((state["loc"] - begun).abs().max()) < 0.07
    )  # six steps of the rate


def test_stopped_before_the_guide_begins_it_is_mean_field():
    posterior = _fit(callbacks=[lambda step, metrics: step >= 4])
    assert (posterior.meta["mean_field_steps"], posterior.meta["num_steps"]) == (4, 4)
    assert (
        posterior.meta["stopped"] == "callback"
        and posterior.meta["settings"]["guide"] == "full_rank"
    )
    assert posterior.approximation.state()[0] == "normal" and math.isfinite(posterior.log_evidence)
    meta = _fit(
        Guide("full_rank", mean_field_start=0.0), callbacks=[lambda step, metrics: True]
    ).meta
    assert (meta["mean_field_steps"], meta["num_steps"]) == (0, 2)


def test_a_guide_that_ends_below_its_start_says_so_and_is_not_returned():
    def spoil(step):  # the rate of the second half of both, which mean-field's average forgives
        return 1.0 if step < 55 else 30.0

    guide = Guide("full_rank", mean_field_start=0.9)
    optimizer = Optimizer("adam", spoil, average=0.0)
    with pytest.warns(UserWarning, match="the ELBO ends at .* and was at least"):
        posterior = _fit(guide, num_steps=60, lr=0.03, optimizer=optimizer)
    assert (posterior.meta["mean_field_steps"], posterior.meta["num_steps"]) == (54, 114)
    assert [each["code"] for each in posterior.meta["findings"]].count("elbo_below_best") == 1
    assert (
        posterior.log_evidence > posterior.meta["findings"][0]["elbo"]
    )  # mean-field is what it returns
    assert posterior.approximation.log_prob(posterior.draws).isfinite().all()


def test_an_interrupt_and_the_end_are_told_of_both_parts():
    ends = []

    class Press:
        def __call__(self, step, metrics):
            if step >= at:
                raise KeyboardInterrupt

        def end(self):
            ends.append(at)

    for at in (4, 26):
        with pytest.warns(UserWarning, match=f"interrupted by Ctrl-C after {at} of 40 steps"):
            posterior = _fit(callbacks=[Press()])
        assert posterior.meta["interrupted"] and posterior.meta["num_steps"] == at
    assert ends == [4, 26]


def _line():
    generator = torch.Generator().manual_seed(0)
    x = 3 + torch.rand(40, 1, generator=generator)
    y = 2 * x - 1 + 0.3 * torch.randn(40, 1, generator=generator)
    with seeded(0):
        net = torch.nn.Linear(1, 1)
    return pb.BNN(net, normal_prior(3.0), pb.likelihoods.HomoskedasticGaussian(0.3)), x, y


def _schools():
    effect = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    error = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])

    def program(x=None, y=None):
        mean = pyro.sample("mean", dist.Normal(0.0, 5.0))
        spread = pyro.sample("spread", dist.HalfCauchy(5.0))
        with pyro.plate("schools", 8):
            school = pyro.sample("school", dist.Normal(mean, spread))
            return pyro.sample("effect", dist.Normal(school, error), obs=effect)

    return (program,)


def _net(likelihood, x, y, inputs=1, hidden=10, out=1):
    with seeded(0):
        net = torch.nn.Sequential(
            torch.nn.Linear(inputs, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, out)
        )
    return pb.BNN(net, normal_prior(), likelihood), x, y


def _sine(slope=0.0, **options):
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(120, 1, generator=generator) * 6 - 3
    noise = (0.2 + slope * (x + 3)) * torch.randn(120, 1, generator=generator)
    return _net(x=x, y=torch.sin(x) + noise, **options)


def _iris():
    x, y = load_iris(return_X_y=True)
    x = torch.tensor((x - x.mean(0)) / x.std(0)).float()
    return _net(pb.likelihoods.Categorical(), x, torch.tensor(y), inputs=4, hidden=8, out=3)


def _counts():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(200, 1, generator=generator) + 0.2 * torch.randn(200, 6, generator=generator)
    y = torch.poisson((0.5 + 0.15 * x.sum(1, keepdim=True)).exp(), generator=generator)
    with seeded(0):
        net = torch.nn.Linear(6, 1)
    return pb.BNN(net, normal_prior(), pb.likelihoods.Poisson()), x, y


SIX = {
    "line": _line,
    "hierarchical program": _schools,
    "homoskedastic": functools.partial(
        _sine, likelihood=pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0))
    ),
    "heteroskedastic": functools.partial(
        _sine, 0.1, likelihood=pb.likelihoods.HeteroskedasticGaussian(), out=2
    ),
    "classes": _iris,
    "correlated counts": _counts,
}


@functools.cache
def _mean_field(name):
    model, *data = SIX[name]()
    return pb.SVI(num_steps=3000).fit(model, *data, num_draws=50)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:the (ELBO ends|[a-z_]* guide ended)", "ignore:.*(did not converge|the weights use up)"
)
@pytest.mark.parametrize("name", SIX)
@pytest.mark.parametrize("guide", RICHER)
def test_a_richer_guide_is_never_worse_than_mean_field(name, guide):
    model, *data = SIX[name]()
    richer = pb.SVI(guide=guide, num_steps=3000).fit(model, *data, num_draws=50)
    plain = _mean_field(name)
    error = math.hypot(richer.meta["elbo_error"], plain.meta["elbo_error"])
    assert richer.log_evidence > plain.log_evidence - 3 * error
