"""Tasks of sbibm whose likelihoods are known, as Pyro programs (Lueckmann et al., 2021, appendix T)."""

from __future__ import annotations

import math
from math import sqrt

import pyro
import pyro.distributions as dist
import torch

import pyrobnn as pb


def box(size, bound):
    """A uniform prior."""
    return pyro.sample("theta", dist.Uniform(-bound, bound).expand([size]).to_event(1))


def gaussian_mixture(x, y):
    """One mean, and a noise of sd 1 or 0.1."""
    theta = box(2, 10.0)
    wide = dist.Normal(theta, 1.0).log_prob(y).sum()
    narrow = dist.Normal(theta, 0.1).log_prob(y).sum()
    pyro.factor("likelihood", torch.logaddexp(wide, narrow))


def two_moons(x, y):
    """A crescent, seen through |theta[1] + theta[2]|: two of them, with edges."""
    theta = box(2, 1.0)
    u = y[0] + (theta[0] + theta[1]).abs() / sqrt(2) - 0.25
    r = torch.hypot(u, y[1] + (theta[0] - theta[1]) / sqrt(2))
    density = dist.Normal(0.1, 0.01).log_prob(r) - r.log()
    pyro.factor("likelihood", torch.where(u >= 0, density, torch.full_like(u, -math.inf)))


def slcp(x, y):
    """Four points of a normal whose sds are squares: four modes."""
    theta = box(5, 3.0)
    z, w = ((y.reshape(4, 2) - theta[:2]) / theta[2:4] ** 2).unbind(-1)
    rho = theta[4].tanh()
    square = (z**2 - 2 * rho * z * w + w**2) / (1 - rho**2)
    pyro.factor(
        "likelihood",
        -square.sum() / 2 - 8 * theta[2:4].abs().log().sum() - 2 * torch.log1p(-(rho**2)),
    )


def bernoulli_glm(x, y):
    """A logistic regression with a smooth filter as prior; ``x`` is the design."""
    size = x.shape[1] - 1
    step = torch.eye(size) - torch.ones(size - 1).diag(-1)
    factor = step @ step + (torch.arange(size) / size).sqrt().diag()
    precision = torch.block_diag(torch.tensor([[0.5]]), factor.T @ factor)
    theta = pyro.sample(
        "theta", dist.MultivariateNormal(torch.zeros(size + 1), precision_matrix=precision)
    )
    with pyro.plate("data", len(y)):
        pyro.sample(
            "y",
            dist.Bernoulli(logits=x @ theta),
            obs=y,
        )


def log_path(coupling, rate, start, num_steps, size):
    """Logs of two populations (num_steps, 2), the first of which feeds the second, by Runge-Kutta steps."""

    def slope(z):
        return torch.tensor([-1.0, 1.0]) * (coupling * z.flip(0).exp() - rate)

    def step(z, _):
        a = slope(z)
        b = slope(z + size / 2 * a)
        c = slope(z + size / 2 * b)
        z = z + size / 6 * (a + 2 * b + 2 * c + slope(z + size * c))
        return z, z

    return pb.scan(
        step,
        torch.tensor(start).log(),
        length=num_steps,
    )[1]


def sir(x, y):
    """An epidemic: the share of infected, by a thousand tests every 17 days."""
    theta = pyro.sample(
        "theta",
        dist.LogNormal(torch.tensor([0.4, 0.125]).log(), torch.tensor([0.5, 0.2])).to_event(1),
    )
    rate = torch.stack([torch.zeros(()), theta[1]])
    log_share = log_path(theta[0], rate, [1 - 1e-6, 1e-6], 153, 1.0)[16::17, 1]
    pyro.sample(
        "y",
        dist.Binomial(1000, logits=log_share - (-log_share.exp()).log1p()).to_event(1),
        obs=y[1:],
    )


def lotka_volterra(x, y):
    """Prey and predators, seen every 2.1 time units with an error of 10 %."""
    theta = pyro.sample("theta", dist.LogNormal(torch.tensor([-0.125, -3.0] * 2), 0.5).to_event(1))
    path = log_path(theta[1::2], theta[::2], [30.0, 1.0], 189, 0.1)
    pyro.sample(
        "y",
        dist.LogNormal(path[20::21], 0.1).to_event(2),
        obs=y.reshape(2, 10).T[1:],
    )


SBIBM = {
    program.__name__: program
    for program in (gaussian_mixture, two_moons, slcp, bernoulli_glm, sir, lotka_volterra)
}
