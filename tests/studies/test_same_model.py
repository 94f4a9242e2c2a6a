"""Whether two programs are one model: up to a constant, by sites, and with a sentence where sites differ."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import seeded
from models import toy, toy_model

import pyrobnn as pb

X = torch.linspace(-1.0, 1.0, 20)
with seeded(0):
    Y = X + 0.3 * torch.randn(20)


def program(prior, name="tau", family=dist.Normal, scale=1.0, shape=()):
    def model(x, y):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        tau = pyro.sample(name, prior.expand(shape).to_event(len(shape)) if shape else prior)
        with pyro.plate("row", len(x)):
            pyro.sample("y", family(slope * x, scale * tau.sum().rsqrt()), obs=y)

    return model


def by_factor(x, y):
    """The same model, its likelihood without the constant."""
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.Gamma(2.0, 3.0))
    density = 0.5 * len(x) * tau.log() - 0.5 * tau * (y - slope * x).square().sum()
    pyro.factor("likelihood", density)


GAMMA = dist.Gamma(2.0, 3.0)


def test_one_model_is_one_model():
    outcome = pb.same_model(program(GAMMA), program(GAMMA), X, Y)
    assert outcome.same and outcome.site is None and outcome.constant == 0.0
    assert "one model" in str(outcome)


def test_a_constant_is_no_difference():
    outcome = pb.same_model(program(GAMMA), by_factor, X, Y)
    assert outcome.same and abs(outcome.constant + 10.0 * math.log(2 * math.pi)) < 1e-4


@pytest.mark.parametrize(
    "other, site",
    [
        (program(dist.InverseGamma(2.0, 3.0)), "tau"),
        (program(dist.Gamma(2.0, 1 / 3.0)), "tau"),
        (program(GAMMA, family=dist.Laplace), "y"),
        (program(GAMMA, scale=1.01), "y"),
        (program(dist.Normal(1.0, 1.0)), "tau"),
    ],
)
def test_what_differs_is_named(other, site):
    outcome = pb.same_model(program(GAMMA), other, X, Y)
    assert not outcome.same and outcome.site == site and outcome.difference > 1e-3
    assert repr(site) in str(outcome)


def test_a_large_likelihood_hides_no_difference_of_the_priors():
    def line(scale):
        def model(x, y):
            slope = pyro.sample("slope", dist.Normal(0.0, scale))
            pyro.sample("y", dist.Normal(slope * x, 0.01).to_event(1), obs=y)

        return model

    x = torch.linspace(-1.0, 1.0, 1000)
    outcome = pb.same_model(line(10.0), line(12.0), x, 3.0 * x)
    assert not outcome.same and outcome.site == "slope" and 0.1 < outcome.difference < 10.0
    assert pb.same_model(line(10.0), line(10.0), x, 3.0 * x).constant == 0.0


def test_a_support_that_one_alone_has_is_infinitely_far():
    def level(prior):
        def model(x, y):
            mean = pyro.sample("mean", prior)
            pyro.sample("y", dist.Normal(mean * x, 1.0).to_event(1), obs=y)

        return model

    outcome = pb.same_model(level(dist.Normal(0.0, 1.0)), level(dist.HalfNormal(1.0)), X, Y)
    assert outcome.difference == math.inf == outcome.sites["mean"]


def test_the_random_state_stays():
    before = torch.get_rng_state()
    pb.same_model(program(GAMMA), program(GAMMA), X, Y)
    assert torch.equal(before, torch.get_rng_state())


def test_renamed_and_missing_sites_are_a_sentence():
    with pytest.raises(ValueError, match="'tau' of the first program alone and 'precision' of the"):
        pb.same_model(program(GAMMA), program(GAMMA, name="precision"), X, Y)
    with pytest.raises(ValueError, match="'precision' may be 'tau': give both one name"):
        pb.same_model(program(GAMMA), program(GAMMA, name="precision"), X, Y)
    with pytest.raises(
        ValueError, match=r"'tau' has shape \(\) in the first.*\(3,\) in the second"
    ):
        pb.same_model(program(GAMMA), program(GAMMA, shape=(3,)), X, Y)
    with pytest.raises(TypeError, match="'program_b' must be a Pyro program"):
        pb.same_model(program(GAMMA), 3, X, Y)


def test_a_net_is_itself():
    x, y = toy()
    assert pb.same_model(toy_model(), toy_model(), x, y).same
