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


def _many(**options):
    """Many chains, few steps: the quick way to a large ESS without a compiler."""
    return NUTS(num_chains=32, num_warmup=150, compile=False, **options)


def _correlated(x, y):
    decay = 0.9 ** (torch.arange(50.0)[:, None] - torch.arange(50.0)).abs()
    pyro.sample("z", dist.MultivariateNormal(torch.arange(50.0) / 10, decay))


def _gumbel(x, y):
    pyro.sample("z", dist.Gumbel(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 3.0])).to_event(1))


def _scales(x, y):
    pyro.sample("z", dist.Normal(torch.zeros(7), torch.logspace(-3, 0, 7)).to_event(1))


def _funnel(x, y):
    log_scale = pyro.sample("log_scale", dist.Normal(0.0, 3.0))
    raw = pyro.sample("raw", dist.Normal(torch.zeros(5), 1.0).to_event(1))
    pyro.deterministic("z", raw * (log_scale / 2).exp())


def test_fifty_correlated_dimensions():
    draws = _many().fit(_correlated, num_draws=150).draws["z"]
    assert_mean_within(draws, torch.arange(50.0) / 10)
    assert_var_within(draws, torch.ones(50), mean=torch.arange(50.0) / 10)


def test_dense_mass_matrix_shortens_the_trees():
    options = {"num_chains": 32, "num_warmup": 150, "compile": False}
    dense = NUTS(mass_matrix="dense", **options).fit(_correlated, num_draws=50)
    diag = NUTS(**options).fit(_correlated, num_draws=50)
    assert_mean_within(dense.draws["z"], torch.arange(50.0) / 10)
    assert dense.sample_stats["n_steps"].double().mean() < 0.5 * diag.sample_stats["n_steps"].double().mean()


def test_asymmetric_target():
    draws = _many().fit(_gumbel, num_draws=200).draws["z"].double()
    loc, scale = torch.tensor([0.0, 2.0]), torch.tensor([1.0, 3.0])
    mean = loc + EULER * scale
    assert_mean_within(draws, mean)
    assert_var_within(draws, math.pi**2 / 6 * scale**2, mean=mean)
    # the third moment: a sign error would flip it. E(z - m)^3 = 2 zeta(3) b^3
    assert_mean_within((draws - mean) ** 3, 2 * 1.2020569 * scale.double() ** 3, min_ess=300)


def test_scales_from_one_to_a_thousand():
    draws = _many().fit(_scales, num_draws=150).draws["z"]
    scale = torch.logspace(-3, 0, 7, dtype=torch.float64)
    assert_mean_within(draws / scale, torch.zeros(7))
    assert_var_within(draws / scale, torch.ones(7), mean=torch.zeros(7))


def test_funnel_non_centred():
    draws = _many().fit(_funnel, num_draws=150).draws
    assert_mean_within(draws["log_scale"], 0.0)
    assert_var_within(draws["log_scale"], 9.0, mean=0.0)
    assert_mean_within(draws["raw"], torch.zeros(5))


def test_funnel_centred_reports_divergences():
    def centred(x, y):
        log_scale = pyro.sample("log_scale", dist.Normal(0.0, 3.0))
        pyro.sample("z", dist.Normal(torch.zeros(5), (log_scale / 2).exp()).to_event(1))

    posterior = _many().fit(centred, num_draws=100)
    assert posterior.sample_stats["diverging"].sum() > 0


def test_eight_schools_non_centred():
    effect = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    error = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])

    def schools(x, y):
        mean = pyro.sample("mean", dist.Normal(0.0, 5.0))
        scale = pyro.sample("scale", dist.HalfNormal(5.0))
        raw = pyro.sample("raw", dist.Normal(torch.zeros(8), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(mean + scale * raw, error).to_event(1), obs=effect)

    draws = _many().fit(schools, num_draws=200).draws
    # given the scale everything is Gaussian: one-dimensional quadrature gives the exact moments
    tau = np.linspace(1e-4, 40.0, 20001)
    y, s2 = effect.numpy()[:, None], error.numpy()[:, None] ** 2 + tau**2
    precision = (1 / s2).sum(0) + 1 / 25
    centre = (y / s2).sum(0) / precision
    log_p = -0.5 * np.log(s2).sum(0) - 0.5 * (y**2 / s2).sum(0) + 0.5 * centre**2 * precision
    log_p += -0.5 * np.log(precision) - 0.5 * tau**2 / 25
    weight = np.exp(log_p - log_p.max())
    weight /= weight.sum()
    assert_mean_within(draws["mean"], (weight * centre).sum(), name="mean")
    assert_mean_within(draws["scale"], (weight * tau).sum(), name="scale")


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


@pytest.mark.parametrize("trajectory", [None, 8])
def test_regression_with_unknown_noise_against_quadrature(trajectory):
    x, y = _regression_data()
    posterior = _many(trajectory=trajectory).fit(_regression, x, y, num_draws=150)
    mean, sigma = _regression_moments(x, y)
    assert_mean_within(posterior.draws["weight"], mean)
    assert_mean_within(posterior.draws["scale"], sigma)
    if trajectory:
        assert (posterior.sample_stats["n_steps"] == trajectory).all()


def test_compiled_and_eager_make_the_same_draws():
    x, y = _regression_data()
    # no adaptation: rounding cannot be amplified through the step size
    options = {"num_chains": 3, "num_warmup": 0, "step_size": 0.1}
    fast = NUTS(**options).fit(_regression, x, y, num_draws=12)
    slow = NUTS(compile=False, **options).fit(_regression, x, y, num_draws=12)
    torch.testing.assert_close(fast.draws["weight"], slow.draws["weight"], atol=1e-3, rtol=1e-3)
    assert torch.equal(fast.sample_stats["n_steps"], slow.sample_stats["n_steps"])


def test_pyro_engine_agrees():
    x, y = _regression_data()
    posterior = NUTS(engine="pyro", num_chains=2, num_warmup=100).fit(_regression, x, y, num_draws=250)
    mean, sigma = _regression_moments(x, y)
    assert_mean_within(posterior.draws["weight"], mean, min_ess=100)
    assert_mean_within(posterior.draws["scale"], sigma, min_ess=100)
    ours = NUTS(num_chains=2, num_warmup=0, compile=False).fit(_regression, x, y, num_draws=2)
    assert set(posterior.sample_stats) == set(ours.sample_stats)
    for name, value in posterior.sample_stats.items():
        assert value.shape == (2, 250) and value.dtype == ours.sample_stats[name].dtype
        assert value.isfinite().all()


def test_same_seed_same_draws_and_chains_do_not_depend_on_company():
    x, y = _regression_data()
    options = {"num_warmup": 0, "step_size": 0.2, "compile": False}
    first = NUTS(num_chains=2, **options).fit(_regression, x, y, num_draws=5, seed=4)
    again = NUTS(num_chains=2, **options).fit(_regression, x, y, num_draws=9, seed=4)
    other = NUTS(num_chains=2, **options).fit(_regression, x, y, num_draws=5, seed=5)
    assert torch.equal(first.draws["weight"], again.draws["weight"][:, :5])
    assert not torch.equal(first.draws["weight"], other.draws["weight"])


def test_sixty_four_short_chains_agree_with_four_long_ones():
    x, y = _regression_data()
    mean, sigma = _regression_moments(x, y)
    for chains, draws in ((64, 50), (4, 800)):
        config = NUTS(num_chains=chains, num_warmup=200, compile=False)
        posterior = config.fit(_regression, x, y, num_draws=draws)
        assert_mean_within(posterior.draws["weight"], mean, name=f"{chains} chains")
        assert_mean_within(posterior.draws["scale"], sigma, name=f"{chains} chains")


def test_energy_statistics_are_consistent():
    x, y = _regression_data()
    posterior = _many().fit(_regression, x, y, num_draws=50)
    stats = posterior.sample_stats
    kinetic = stats["energy"] + stats["lp"]
    assert (kinetic > 0).all()
    assert_mean_within(kinetic, 4 / 2, min_ess=300, name="kinetic energy of 4 dimensions")
    steps, depth = stats["n_steps"], stats["tree_depth"]
    assert (steps >= 2**depth - 1).all() and (steps <= 2 ** (depth + 1) - 1).all()
