"""NUTS and HMC: right answers on targets with known moments, through the ESS-gated helper."""

from __future__ import annotations

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import assert_mean_within, assert_var_within

from pyrobnn.inference.nuts import NUTS

EULER = 0.57721566490153286
EFFECT = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERROR = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def _zoo(x, y):
    """Independent targets side by side: one compilation for all."""
    pyro.sample("gumbel", dist.Gumbel(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 3.0])).to_event(1))
    pyro.sample("scales", dist.Normal(torch.zeros(7), torch.logspace(-3, 0, 7)).to_event(1))
    pyro.sample("funnel_log_scale", dist.Normal(0.0, 3.0))
    pyro.sample("funnel_raw", dist.Normal(torch.zeros(5), 1.0).to_event(1))
    mean = pyro.sample("schools_mean", dist.Normal(0.0, 5.0))
    scale = pyro.sample("schools_scale", dist.HalfNormal(5.0))
    raw = pyro.sample("schools_raw", dist.Normal(torch.zeros(8), 1.0).to_event(1))
    pyro.sample("schools", dist.Normal(mean + scale * raw, ERROR).to_event(1), obs=EFFECT)
    _regression(x, y)


def _correlated(x, y):
    distance = (torch.arange(50.0)[:, None] - torch.arange(50.0)).abs()
    pyro.sample("z", dist.MultivariateNormal(torch.arange(50.0) / 10, 0.9**distance))


@pytest.fixture(scope="module")
def zoo():
    return NUTS(num_chains=16, num_warmup=300).fit(_zoo, *_regression_data(), num_draws=500)


def test_asymmetric_target(zoo):
    draws = zoo.draws["gumbel"].double()
    scale = torch.tensor([1.0, 3.0])
    mean = torch.tensor([0.0, 2.0]) + EULER * scale
    assert_mean_within(draws, mean)
    assert_var_within(draws, math.pi**2 / 6 * scale**2, mean=mean)
    # a sign error would flip the third moment, 2 zeta(3) b^3
    assert_mean_within((draws - mean) ** 3, 2 * 1.2020569 * scale.double() ** 3)


def test_scales_from_one_to_a_thousand(zoo):
    scale = torch.logspace(-3, 0, 7)
    assert_mean_within(zoo.draws["scales"] / scale, torch.zeros(7))
    assert_var_within(zoo.draws["scales"] / scale, torch.ones(7), mean=torch.zeros(7))


def test_funnel_non_centred(zoo):
    assert_mean_within(zoo.draws["funnel_log_scale"], 0.0)
    assert_var_within(zoo.draws["funnel_log_scale"], 9.0, mean=0.0)
    assert_mean_within(zoo.draws["funnel_raw"], torch.zeros(5))


def test_eight_schools_non_centred(zoo):
    # given the scale everything is Gaussian: one-dimensional quadrature gives the exact moments
    tau = np.linspace(1e-4, 40.0, 20001)
    y, var = EFFECT.numpy()[:, None], ERROR.numpy()[:, None] ** 2 + tau**2
    precision = (1 / var).sum(0) + 1 / 25
    centre = (y / var).sum(0) / precision
    log_p = -0.5 * np.log(var).sum(0) - 0.5 * (y**2 / var).sum(0) + 0.5 * centre**2 * precision
    log_p += -0.5 * np.log(precision) - 0.5 * tau**2 / 25
    weight = np.exp(log_p - log_p.max())
    weight /= weight.sum()
    assert_mean_within(zoo.draws["schools_mean"], (weight * centre).sum())
    assert_mean_within(zoo.draws["schools_scale"], (weight * tau).sum())


def test_regression_with_unknown_noise(zoo):
    mean, sigma = _regression_moments(*_regression_data())
    assert_mean_within(zoo.draws["weight"], mean)
    assert_mean_within(zoo.draws["scale"], sigma)


def test_energy_statistics_are_consistent(zoo):
    stats = zoo.sample_stats
    kinetic = stats["energy"] + stats["lp"]
    assert (kinetic > 0).all()
    dim = 2 + 7 + 6 + 10 + 4
    assert_mean_within(kinetic, dim / 2)
    steps, depth = stats["n_steps"], stats["tree_depth"]
    assert (steps >= 2**depth - 1).all() and (steps <= 2 ** (depth + 1) - 1).all()
    assert not stats["diverging"].any()
    # the adapted step size meets its target
    assert 0.7 < stats["acceptance_rate"].mean() < 0.9


@pytest.mark.parametrize("mass_matrix", ["diag", "dense"])
def test_fifty_correlated_dimensions(mass_matrix):
    config = NUTS(num_chains=16, num_warmup=300, mass_matrix=mass_matrix)
    posterior = config.fit(_correlated, num_draws=300)
    assert_mean_within(posterior.draws["z"], torch.arange(50.0) / 10)
    assert_var_within(posterior.draws["z"], torch.ones(50), mean=torch.arange(50.0) / 10)
    # whitening makes the trees short
    steps = posterior.sample_stats["n_steps"].double().mean()
    assert steps < 8 if mass_matrix == "dense" else steps > 12


@pytest.mark.filterwarnings("ignore:.*(maximum tree depth|diverged)")
def test_funnel_centred_reports_divergences():
    def centred(x, y):
        log_scale = pyro.sample("log_scale", dist.Normal(0.0, 3.0))
        pyro.sample("z", dist.Normal(torch.zeros(5), (log_scale / 2).exp()).to_event(1))

    config = NUTS(num_chains=64, num_warmup=0, step_size=0.7, max_tree_depth=5, compile=False)
    posterior = config.fit(centred, num_draws=10)
    assert posterior.sample_stats["diverging"].sum() > 0


def _regression(x, y):
    weight = pyro.sample("weight", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x @ weight, scale), obs=y)


def _regression_data():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 3, generator=generator)
    return x, x @ torch.tensor([1.0, -0.5, 0.2]) + 0.4 * torch.randn(40, generator=generator)


def _regression_moments(x, y):
    sigma = torch.linspace(0.1, 1.5, 4001, dtype=torch.float64)
    x, y = x.double(), y.double()
    precision = x.T @ x / sigma[:, None, None] ** 2 + torch.eye(3, dtype=torch.float64)
    mean = torch.linalg.solve(precision, (x.T @ y / sigma[:, None] ** 2)[..., None])[..., 0]
    log_p = -40 * sigma.log() - 0.5 * (y @ y) / sigma**2 - 0.5 * torch.logdet(precision) - 0.5 * sigma**2
    log_p += 0.5 * torch.einsum("si,sij,sj->s", mean, precision, mean)
    weight = (log_p - log_p.max()).exp()
    weight = weight / weight.sum()
    return (weight[:, None] * mean).sum(0), (weight * sigma).sum()


def test_plain_hmc():
    x, y = _regression_data()
    config = NUTS(num_chains=64, num_warmup=50, trajectory=5, compile=False)
    posterior = config.fit(_regression, x, y, num_draws=40)
    mean, sigma = _regression_moments(x, y)
    assert_mean_within(posterior.draws["weight"], mean)
    assert_mean_within(posterior.draws["scale"], sigma)
    assert posterior.sample_stats["n_steps"].double().median() == 5


def test_compiled_and_eager_make_the_same_draws():
    x, y = _regression_data()
    # no adaptation: rounding cannot be amplified through the step size
    options = {"num_chains": 3, "num_warmup": 0, "step_size": 0.1}
    fast = NUTS(**options).fit(_regression, x, y, num_draws=12)
    slow = NUTS(compile=False, **options).fit(_regression, x, y, num_draws=12)
    torch.testing.assert_close(fast.draws["weight"], slow.draws["weight"], atol=1e-3, rtol=1e-3)
    assert torch.equal(fast.sample_stats["n_steps"], slow.sample_stats["n_steps"])


@pytest.mark.filterwarnings("ignore:.*(maximum tree depth|diverged)")
def test_pyro_engine_agrees():
    x, y = _regression_data()
    posterior = NUTS(engine="pyro", num_chains=2, num_warmup=50).fit(_regression, x, y, num_draws=80)
    mean, sigma = _regression_moments(x, y)
    assert_mean_within(posterior.draws["weight"], mean, min_ess=25)
    assert_mean_within(posterior.draws["scale"], sigma, min_ess=25)
    ours = NUTS(num_chains=2, num_warmup=0, step_size=0.01, compile=False).fit(_regression, x, y, num_draws=2)
    assert set(posterior.sample_stats) == set(ours.sample_stats)
    for name, value in posterior.sample_stats.items():
        assert value.shape == (2, 80) and value.dtype == ours.sample_stats[name].dtype
        assert value.isfinite().all()


@pytest.mark.filterwarnings("ignore:.*(maximum tree depth|diverged)")
def test_same_seed_same_draws_and_chains_do_not_depend_on_company():
    x, y = _regression_data()
    options = {"num_warmup": 0, "step_size": 0.02, "compile": False}
    first = NUTS(num_chains=2, **options).fit(_regression, x, y, num_draws=5, seed=4)
    again = NUTS(num_chains=2, **options).fit(_regression, x, y, num_draws=9, seed=4)
    other = NUTS(num_chains=2, **options).fit(_regression, x, y, num_draws=5, seed=5)
    assert torch.equal(first.draws["weight"], again.draws["weight"][:, :5])
    assert not torch.equal(first.draws["weight"], other.draws["weight"])


def test_sixty_four_short_chains_agree_with_four_long_ones():
    x, y = _regression_data()
    mean, sigma = _regression_moments(x, y)
    for chains, draws in ((64, 50), (4, 800)):
        posterior = NUTS(num_chains=chains, num_warmup=200).fit(_regression, x, y, num_draws=draws)
        assert_mean_within(posterior.draws["weight"], mean, name=f"{chains} chains")
        assert_mean_within(posterior.draws["scale"], sigma, name=f"{chains} chains")
