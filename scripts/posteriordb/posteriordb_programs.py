"""The models of posteriordb (Magnusson, Bürkner & Vehtari, 2023) and of radon levels as Pyro programs of (x, y)."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import constraints


def flat(size=None, support=constraints.real):
    """A constant density over ``support``, a scalar or a vector."""
    return dist.ImproperUniform(support, (), () if size is None else (size,))


def linear(prior, scale):
    """Linear regression of a design matrix, with a prior of the coefficients and one of the noise."""

    def program(x, y):
        beta = pyro.sample("beta", prior(x.shape[1]))
        sigma = pyro.sample("sigma", scale())
        with pyro.plate("data", len(y)):
            pyro.sample(
                "y",
                dist.Normal(x @ beta, sigma),
                obs=y,
            )

    return program


flat_linear = linear(flat, lambda: flat(support=constraints.positive))
cauchy_linear = linear(flat, lambda: dist.HalfCauchy(2.5))
blr = linear(
    lambda size: dist.Normal(0.0, 10.0).expand([size]).to_event(1), lambda: dist.HalfNormal(10.0)
)


def autoregression(x, y):
    """AR(K) with ``x`` the lagged values (time, K)."""
    alpha = pyro.sample("alpha", dist.Normal(0.0, 10.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 10.0).expand([x.shape[1]]).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfCauchy(2.5))
    with pyro.plate("data", len(y)):
        pyro.sample(
            "y",
            dist.Normal(alpha + x @ beta, sigma),
            obs=y,
        )


def trend(x, y):
    """A line with given normal priors; ``x`` is (inputs, prior means and sds of intercept and slope)."""
    inputs, (a, sa, b, sb) = x
    alpha = pyro.sample("alpha", dist.Normal(a, sa))
    beta = pyro.sample("beta", dist.Normal(b, sb))
    sigma = pyro.sample("sigma", flat(support=constraints.positive))
    with pyro.plate("data", len(y)):
        pyro.sample(
            "y",
            dist.Normal(alpha + beta * inputs, sigma),
            obs=y,
        )


def schools(centred):
    """Eight schools; ``x`` holds the standard errors."""

    def program(x, y):
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        with pyro.plate("schools", len(y)):
            if centred:
                theta = pyro.sample("theta", dist.Normal(mu, tau))
            else:
                theta = mu + tau * pyro.sample("theta_trans", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(theta, x), obs=y)

    return program


def garch(x, y):
    """GARCH(1, 1); ``x`` is the first sd."""
    mu = pyro.sample("mu", flat())
    alpha0 = pyro.sample("alpha0", flat(support=constraints.positive))
    alpha1 = pyro.sample("alpha1", dist.Uniform(0.0, 1.0))
    beta1 = pyro.sample("beta1", flat(support=constraints.interval(0.0, 1.0 - alpha1)))
    var = [x**2]
    for t in range(1, len(y)):
        var.append(alpha0 + alpha1 * (y[t - 1] - mu) ** 2 + beta1 * var[-1])
    pyro.sample(
        "y",
        dist.Normal(mu, torch.stack(var).sqrt()).to_event(1),
        obs=y,
    )


def gaussian_process(x, y):
    """Squared-exponential kernel; sigma is the noise variance."""
    rho = pyro.sample("rho", dist.Gamma(25.0, 4.0))
    alpha = pyro.sample("alpha", dist.HalfNormal(2.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    cov = alpha**2 * torch.exp(-0.5 * ((x[:, None] - x) / rho) ** 2) + sigma * torch.eye(
        len(y), dtype=x.dtype
    )
    pyro.sample(
        "y",
        dist.MultivariateNormal(torch.zeros_like(y), cov),
        obs=y,
    )


def mixture(x, y):
    """Two normals; ``theta`` is the weight of the lower one."""
    mu = pyro.sample("mu", flat(2, constraints.ordered_vector))
    pyro.factor("mu_prior", dist.Normal(0.0, 2.0).log_prob(mu).sum())
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0).expand([2]).to_event(1))
    theta = pyro.sample("theta", dist.Beta(5.0, 5.0))
    parts = dist.Normal(mu, sigma).log_prob(y[:, None])
    log_density = torch.logaddexp(theta.log() + parts[:, 0], torch.log1p(-theta) + parts[:, 1])
    pyro.factor("likelihood", log_density.sum())


def radon(centered):
    """Levels in houses by soil, floor and the county's mean floor (the first columns), and effects of the counties."""

    def program(x, y):
        mean = pyro.sample("county_effect_mean", dist.Normal(0.0, 1.0))
        spread = pyro.sample("county_effect_scale", dist.Uniform(0.0, 100.0))
        if centered:
            effect = pyro.sample(
                "county_effect", dist.Normal(mean, spread).expand([85]).to_event(1)
            )
        else:
            z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([85]).to_event(1))
            effect = pyro.deterministic("county_effect", mean + spread * z)
        weight = pyro.sample("weight", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        noise = pyro.sample("log_radon_scale", dist.Uniform(0.0, 100.0))
        pyro.sample(
            "y",
            dist.Normal(x[:, :-1] @ weight + effect[x[:, -1].long()], noise).to_event(1),
            obs=y,
        )

    return program
