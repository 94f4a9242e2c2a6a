"""The law of evidence: ``log_evidence`` is the exact one, for every method that returns one."""

from __future__ import annotations

import math

import pyro.distributions as dist
import pytest
import torch
from helpers import seeded

import pyrobnn as pb

X = torch.linspace(-2, 2, 100, dtype=torch.float64)[:, None]
NOISE = 0.2
PRIOR = 1.0


def tanh_net(units: int) -> tuple[pb.BNN, torch.Tensor]:
    """A net without biases: given its first weights, its output is linear in the others."""
    with seeded(0):
        net = torch.nn.Sequential(
            torch.nn.Linear(1, units, bias=False),
            torch.nn.Tanh(),
            torch.nn.Linear(units, 1, bias=False),
        ).double()
    y = 1.5 * torch.tanh(0.7 * X) - (0.8 * torch.tanh(3 * X) if units == 2 else 0.0)
    y = y + NOISE * torch.randn(
        X.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    model = pb.BNN(
        net,
        pb.priors.IIDPrior(dist.Normal(0.0, PRIOR)),
        pb.likelihoods.HomoskedasticGaussian(NOISE),
    )
    return model, y


def exact(units: int, y: torch.Tensor) -> float:
    """By the trapezoid over the first weights; a normal density of y for each of them."""
    axis = torch.linspace(-4, 4, 801, dtype=torch.float64)
    w = torch.cartesian_prod(*[axis] * units).reshape(-1, units)
    total = []
    for part in w.split(4000):
        h = torch.tanh(part[:, None] * X)  # (weight, datum, unit)
        density = torch.distributions.LowRankMultivariateNormal(
            torch.zeros(len(X), dtype=torch.float64),
            PRIOR * h,
            torch.full((len(X),), NOISE**2).double(),
        )
        total.append(density.log_prob(y[:, 0]) + dist.Normal(0.0, PRIOR).log_prob(part).sum(1))
    return float(torch.cat(total).logsumexp(0) + units * (axis[1] - axis[0]).log())


def test_laplace_has_the_evidence_of_one_mode_and_smc_that_of_all():
    model, y = tanh_net(1)
    one = pb.Laplace(num_steps=100, compile=False).fit(model, X, y, num_draws=50)
    assert one.log_evidence + math.log(2) == pytest.approx(exact(1, y), abs=0.1)
    whole = pb.SMC(num_particles=256, num_islands=4, compile=False).fit(model, X, y)
    error = max(whole.meta["log_evidence_error"], 0.05)
    assert whole.log_evidence == pytest.approx(exact(1, y), abs=4 * error)
