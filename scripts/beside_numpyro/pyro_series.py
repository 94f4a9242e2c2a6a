"""Series and processes, as users of Pyro write them."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import torch
from pyro.ops.indexing import Vindex


def hidden_markov(x, y):
    """Two states by ``pyro.markov``, summed by enumeration."""
    with pyro.plate("states", 2):
        moves = pyro.sample("moves", dist.Dirichlet(torch.ones(2)))
        means = pyro.sample("means", dist.Normal(torch.tensor([-2.0, 2.0]), 1.0))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    state = 0
    for t in pyro.markov(range(len(y))):
        state = pyro.sample(
            f"state_{t}", dist.Categorical(Vindex(moves)[state]), infer={"enumerate": "parallel"}
        )
        pyro.sample(f"y_{t}", dist.Normal(Vindex(means)[state], noise), obs=y[t])


def poisson_process(x, y):
    """A Gaussian process of log rates by its Cholesky factor."""
    length = pyro.sample("length", dist.InverseGamma(5.0, 5.0))
    height = pyro.sample("height", dist.HalfNormal(1.0))
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    squares = ((x[:, None] - x) / length) ** 2
    cov = height**2 * torch.exp(-0.5 * squares) + 1e-4 * torch.eye(len(x))
    z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([len(x)]).to_event(1))
    f = pyro.deterministic("f", mean + torch.linalg.cholesky(cov) @ z)
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Poisson(f.exp()), obs=y)


def autoregression(x, y):
    """An AR(1) whose missing values are latent."""
    level = pyro.sample("level", dist.Normal(0.0, 1.0))
    keep = pyro.sample("keep", dist.Normal(0.0, 1.0))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    missing = torch.isnan(y)
    filled = pyro.sample("filled", dist.Normal(0.0, 5.0).expand([int(missing.sum())]).to_event(1))
    full = y.clone()
    full[missing] = filled
    with pyro.plate("steps", len(y) - 1):
        pyro.sample("y", dist.Normal(level + keep * full[:-1], noise), obs=full[1:])


def stochastic_volatility(x, y):
    """Returns whose log variance is an AR(1), by a loop over time."""
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    keep = pyro.sample("keep", dist.Beta(20.0, 1.5))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([len(y)]).to_event(1))
    log_variance = [mean + scale * z[0] / (1 - keep**2).sqrt()]
    for t in range(1, len(y)):
        log_variance.append(mean + keep * (log_variance[-1] - mean) + scale * z[t])
    h = pyro.deterministic("h", torch.stack(log_variance))
    with pyro.plate("times", len(y)):
        pyro.sample("y", dist.Normal(0.0, (h / 2).exp()), obs=y)


def gaussian_process(x, y):
    """Regression by a Gaussian process, integrated out: the whole series is one event."""
    length = pyro.sample("length", dist.InverseGamma(5.0, 5.0))
    height = pyro.sample("height", dist.HalfNormal(1.0))
    noise = pyro.sample("noise", dist.HalfNormal(0.5))
    squares = ((x[:, None] - x) / length) ** 2
    cov = height**2 * torch.exp(-0.5 * squares) + (noise**2 + 1e-5) * torch.eye(len(x))
    pyro.sample("y", dist.MultivariateNormal(torch.zeros(len(x)), cov), obs=y)


def seasonal_series(x, y):
    """Monthly values: a level that walks at random, and a season of two waves."""
    drift = pyro.sample("drift", dist.HalfNormal(0.2))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    start = pyro.sample("start", dist.Normal(0.0, 2.0))
    weight = pyro.sample("weight", dist.Normal(0.0, 1.0).expand([4]).to_event(1))
    with pyro.plate("steps", len(y)):
        step = pyro.sample("step", dist.Normal(0.0, 1.0))
    level = pyro.deterministic("level", start + drift * step.cumsum(-1))
    angle = 2 * math.pi * x / 12
    waves = torch.stack([angle.sin(), angle.cos(), (2 * angle).sin(), (2 * angle).cos()], -1)
    with pyro.plate("months", len(y)):
        pyro.sample("y", dist.Normal(level + waves @ weight, noise), obs=y)


def change_point(x, y):
    """Yearly counts whose rate changes in a year that is summed over."""
    early = pyro.sample("early", dist.Exponential(0.5))
    late = pyro.sample("late", dist.Exponential(0.5))
    years = torch.arange(len(y))
    uniform = dist.Categorical(torch.ones(len(y)))
    change = pyro.sample("change", uniform, infer={"enumerate": "parallel"})
    with pyro.plate("years", len(y)):
        rate = torch.where(years < change, early, late)
        pyro.sample("y", dist.Poisson(rate), obs=y)
