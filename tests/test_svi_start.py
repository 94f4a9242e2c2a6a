"""A richer guide starts where mean-field has arrived, and never ends below it by more than its error."""

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
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.inference.vi.fit import build_elbo

RICHER = ("low_rank", "full_rank", "flow")


@pytest.mark.parametrize("guide", RICHER)
def test_held_at_its_mean_field_member_it_has_the_objective_of_mean_field(guide):
    x, y = toy()
    problem = prepare(toy_model(), x, y, points="free")
    plain, start = build_elbo(pb.SVI(), problem, None, 0)
    richer, theta = build_elbo(pb.SVI(guide=guide), problem, None, 0)
    with seeded(1):
        theta = theta + 0.1 * torch.randn_like(theta)
    one, same = torch.ones((), dtype=torch.float64), len(start)
    with seeded(2):
        expected = plain(theta[:same], one)[1]

    def objective(theta, opened):
        return richer(theta, one, opened=opened)

    with seeded(2):
        slope, tracked = torch.func.grad(objective, has_aux=True)(theta, torch.tensor(0.0))
    assert bool((slope[same:] == 0).all()) and bool((slope[:same] != 0).all())
    torch.testing.assert_close(tracked[1], expected[1])  # the KL, in closed form
    if guide != "low_rank":  # which draws its noise in another order
        torch.testing.assert_close(tracked[0], expected[0])
    with seeded(2):
        slope, _ = torch.func.grad(objective, has_aux=True)(theta, torch.tensor(1.0))
    assert bool((slope[same:] != 0).any())


@pytest.mark.parametrize("guide", RICHER)
def test_stopped_before_it_opens_it_is_its_mean_field_member(guide):
    x, y = toy()
    seen = []

    def stop(step, metrics):
        seen.append(metrics["snapshot"]().approximation.covariance(range(2)))
        return step >= 4

    method = pb.SVI(guide=guide, num_steps=12, log_every=2, mean_field_start=0.5, compile=False)
    posterior = method.fit(toy_model(), x, y, num_draws=20, callbacks=[stop])
    assert posterior.meta["mean_field_steps"] == 6 and posterior.meta["num_steps"] == 4
    if guide == "flow":  # every coupling is the identity
        state = posterior.approximation.state()[1]
        assert all(bool((value == 0).all()) for name, value in state.items() if name[0].isdigit())
    else:
        for cov in (*seen, posterior.approximation.covariance(range(5))):
            assert bool((cov == cov.diag().diag()).all())
    assert math.isfinite(posterior.log_evidence)


def test_patience_counts_from_the_step_that_opens_the_guide():
    x, y = toy()
    method = pb.SVI(
        guide="full_rank",
        num_steps=30,
        mean_field_start=0.5,
        patience=2,
        min_delta=1e9,
        log_every=1,
        compile=False,
    )
    posterior = method.fit(toy_model(), x, y, num_draws=5)
    assert (posterior.meta["stopped"], posterior.meta["num_steps"]) == ("plateau", 15 + 4)


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
        mean, spread = pyro.sample("mean", dist.Normal(0.0, 5.0)), pyro.sample("spread", dist.HalfCauchy(5.0))
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
@pytest.mark.filterwarnings("ignore:the ELBO ends", "ignore:.*(did not converge|the weights use up)")
@pytest.mark.parametrize("name", SIX)
@pytest.mark.parametrize("guide", RICHER)
def test_a_richer_guide_is_never_worse_than_mean_field(name, guide):
    model, *data = SIX[name]()
    richer, plain = pb.SVI(guide=guide, num_steps=3000).fit(model, *data, num_draws=50), _mean_field(name)
    error = math.hypot(richer.meta["elbo_error"], plain.meta["elbo_error"])
    assert richer.log_evidence > plain.log_evidence - 3 * error
