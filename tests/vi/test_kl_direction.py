"""KL(prior‖q) in the place of KL(q‖prior): its value, its optimum, and where there is none."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import toy, toy_model
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from torch.distributions import kl_divergence

import pyrobnn as pb
from pyrobnn.core.checks import Refused
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.inference.fitting.rng import Noise
from pyrobnn.inference.vi.forward_kl import NUM_DRAWS
from pyrobnn.inference.vi.guide_fit import build_elbo
from pyrobnn.inference.vi.start import own_start

KEY = torch.zeros((), dtype=torch.int64)
LOC = torch.tensor([0.5, -1.0, 0.0])
SCALE = torch.tensor([1.0, 2.0, 0.5])


def weights(noise=1e3):
    """Three weights with normal priors, which data of such noise say next to nothing about."""

    def program(x, y):
        w = pyro.sample("w", dist.Normal(LOC, SCALE).to_event(1))
        pyro.sample("y", dist.Normal(w.sum() * x, noise).to_event(1), obs=y)

    return program


def scaled(x, y):
    """A hierarchy: a positive site, and a normal one whose prior depends on it."""
    tau = pyro.sample("tau", dist.LogNormal(0.3, 0.6))
    w = pyro.sample("w", dist.Normal(0.0, tau))
    pyro.sample("y", dist.Normal(w * x, 1e3).to_event(1), obs=y)


def data():
    x = torch.linspace(-1, 1, 5)
    return x, 0.5 * x


def built(model, **options):
    problem = prepare(model, *data(), points="free")
    options = {"kl_direction": "forward", "compile": False, "init_scale": 0.4} | options
    elbo, theta, *_ = build_elbo(pb.SVI(**options), problem, own_start(problem).point, 0)
    return elbo, theta


def moments_of(elbo, theta):
    return elbo.family.draw(theta[: elbo.family.size], Noise(KEY)).moments


@pytest.mark.parametrize("guide", ["mean_field", AutoNormal])
def test_from_normal_priors_it_is_torchs_closed_form_and_has_no_noise(guide):
    elbo, theta = built(weights(), guide=guide)
    moments = moments_of(elbo, theta)
    q = dist.Normal(moments.mean, moments.var.sqrt())
    expected = kl_divergence(dist.Normal(LOC, SCALE), q).sum()
    values = [elbo.parts(theta, key)[1] for key in (KEY, KEY + 1)]
    torch.testing.assert_close(values[0].float(), expected)
    assert torch.equal(*values)
    # the other direction is another number
    reverse, theta = built(weights(), guide=guide, kl_direction="reverse")
    backwards = kl_divergence(q, dist.Normal(LOC, SCALE)).sum()
    torch.testing.assert_close(reverse.parts(theta, KEY)[1].float(), backwards)
    assert abs(float(expected - backwards)) > 1


def test_the_loss_weighs_it_as_the_schedule_says():
    elbo, theta = built(weights())
    log_likelihood, kl = elbo.parts(theta, KEY)
    loss, tracked = elbo(theta, torch.tensor(0.25), KEY)
    torch.testing.assert_close(loss, 0.25 * kl - log_likelihood)
    torch.testing.assert_close(tracked[0], log_likelihood - kl)


@pytest.mark.parametrize("kl", ["auto", "monte_carlo"])
def test_elsewhere_it_is_the_mean_over_draws_from_the_prior(kl):
    elbo, theta = built(scaled, kl=kl)
    moments = moments_of(elbo, theta)
    q = dist.Normal(moments.mean.double(), moments.var.double().sqrt())
    generator = torch.Generator().manual_seed(1)
    # sites stand in the vector in the order of the program: log tau, then w
    normals = torch.randn(400_000, 2, generator=generator, dtype=torch.float64)
    log_tau = 0.3 + 0.6 * normals[:, 0]
    w = log_tau.exp() * normals[:, 1]
    log_p = dist.Normal(0.3, 0.6).log_prob(log_tau) + dist.Normal(0.0, log_tau.exp()).log_prob(w)
    gaps = log_p - q.log_prob(torch.stack([log_tau, w], 1)).sum(1)
    error = float(gaps.std()) / math.sqrt(NUM_DRAWS)
    assert abs(float(elbo.parts(theta, KEY)[1]) - float(gaps.mean())) < 5 * error


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_without_data_its_optimum_has_the_moments_of_the_prior(compile):
    method = pb.SVI(
        kl_direction="forward", num_steps=1500, lr=0.05, init_scale=0.5, compile=compile
    )
    posterior = method.fit(weights(), *data(), num_draws=50)
    _, state = posterior.approximation.state()
    torch.testing.assert_close(state["loc"], LOC, rtol=0.01, atol=0.01)
    torch.testing.assert_close(state["scale"], SCALE, rtol=0.01, atol=0.01)
    fitted = method.fit(scaled, *data(), num_draws=50).approximation.state()[1]
    # of log tau, and of w: its variance is the mean of exp(2 log tau)
    expected = torch.tensor([0.6, math.exp(0.3 + 0.36)])
    torch.testing.assert_close(fitted["scale"], expected, rtol=0.15, atol=0.0)


def test_it_is_no_bound_and_says_so():
    x, y = toy()
    options = {"num_steps": 60, "compile": False}
    forward = pb.SVI(kl_direction="forward", **options).fit(toy_model(), x, y, num_draws=20)
    reverse = pb.SVI(**options).fit(toy_model(), x, y, num_draws=20)
    assert forward.log_evidence is None and forward.meta["elbo_error"] is None
    assert "log_evidence_kind" not in forward.meta
    assert forward.meta["kl_direction"] == "forward" and reverse.meta["kl_direction"] == "reverse"
    assert reverse.log_evidence is not None and reverse.meta["log_evidence_kind"] == "elbo"
    assert forward.log_q().shape == (1, 20) and forward.predict(x).mean.shape == y.shape
    # noise that is free has no second course, whose ELBO there would be nothing to compare with
    learned = toy_model(pb.likelihoods.HomoskedasticGaussian("learned"))
    fit = pb.SVI(kl_direction="forward", **options).fit(learned, x, y, num_draws=20)
    assert "noise_held" not in fit.meta and fit.log_evidence is None


@pytest.mark.slow
def test_compiled_equals_eager():
    x, y = toy()
    fits = [
        pb.SVI(kl_direction="forward", num_steps=40, compile=flag).fit(toy_model(), x, y)
        for flag in (True, False)
    ]
    torch.testing.assert_close(fits[0].draws, fits[1].draws, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("guide", ["low_rank", "full_rank", "flow", pb.Guide("low_rank", rank=2)])
def test_a_guide_of_correlated_weights_is_refused_when_it_is_made(guide):
    with pytest.raises(ValueError, match="independent normals"):
        pb.SVI(kl_direction="forward", guide=guide)
    with pytest.raises(ValueError, match="'kl_direction'"):
        pb.SVI(kl_direction="backwards")


def learned_prior(x, y):
    rate = pyro.param("rate", torch.tensor(1.0), constraint=dist.constraints.positive)
    w = pyro.sample("w", dist.Exponential(rate))
    pyro.sample("y", dist.Normal(w * x, 1.0).to_event(1), obs=y)


def heavy(x, y):
    w = pyro.sample("w", dist.Cauchy(0.0, 1.0))
    pyro.sample("y", dist.Normal(w * x, 1.0).to_event(1), obs=y)


def rescaled(x, y):
    with pyro.poutine.scale(scale=0.5):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(w * x, 1.0).to_event(1), obs=y)


@pytest.mark.parametrize(
    ("program", "guide", "words"),
    [
        (weights(), AutoMultivariateNormal, "independent normals"),
        (learned_prior, "mean_field", "'w' depends on a learned parameter"),
        (heavy, "mean_field", "'w' has no finite variance"),
        (rescaled, "mean_field", "'w' is masked or scaled"),
    ],
)
def test_where_there_is_none_is_refused_by_name(program, guide, words):
    with pytest.raises(Refused, match=words):
        pb.SVI(kl_direction="forward", guide=guide, compile=False).fit(program, *data())
