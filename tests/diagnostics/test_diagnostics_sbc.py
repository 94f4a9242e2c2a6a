"""Simulation-based calibration accepts an exact posterior and rejects wrong ones."""

from __future__ import annotations

import zlib

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from helpers import assert_mean_within, assert_var_within, seeded
from torch import nn

import pyrobnn as pb
from pyrobnn.posterior import Posterior
from pyrobnn.studies.sbc import fit_batch, replicate, simulate, uniformity

NOISE = 0.5
NUM_RANKED = 49
REPLICATIONS = 150


class Conjugate:
    """Draws from the exact posterior of a linear model, its sd multiplied and its mean moved (in sd)."""

    def __init__(self, stretch=1.0, shift=0.0):
        self.stretch = stretch
        self.shift = shift

    @staticmethod
    def exact(x, y):
        design = torch.cat([x, torch.ones_like(x[:, :1])], 1)
        precision = design.T @ design / NOISE**2 + torch.eye(design.shape[1], dtype=x.dtype)
        covariance = torch.linalg.inv(precision)
        return covariance @ design.T @ y.squeeze(-1) / NOISE**2, covariance

    def fit(self, model, x, y, *, num_draws, seed):
        mean, covariance = self.exact(x, y)
        factor = torch.linalg.cholesky(covariance)
        generator = torch.Generator().manual_seed(seed)
        z = torch.randn(1, num_draws, len(mean), dtype=x.dtype, generator=generator)
        weights = mean + self.shift * covariance.diagonal().sqrt() + self.stretch * z @ factor.T
        return Posterior(
            model, {"net.weight": weights[..., None, :-1], "net.bias": weights[..., -1:]}
        )


def ranks_of(method):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 2, dtype=torch.float64, generator=generator)
    probes = torch.tensor([[1.0, 0.0], [2.0, -2.0]], dtype=torch.float64)
    prior = pb.priors.IIDPrior(dist.Normal(0.0, 1.0))
    with seeded(0):
        net = nn.Linear(2, 1).double()
    model = pb.BNN(net, prior, pb.likelihoods.HomoskedasticGaussian(NOISE))
    each = [
        replicate(
            model,
            method,
            x,
            probes,
            num_draws=NUM_RANKED,
            num_ranked=NUM_RANKED,
            seed=zlib.crc32(f"t/{i}".encode()),
        )
        for i in range(REPLICATIONS)
    ]
    return {name: np.array([ranks[name] for ranks in each]) for name in each[0]}


def verdicts(method):
    return {name: uniformity(ranks, NUM_RANKED) for name, ranks in ranks_of(method).items()}


def test_an_exact_posterior_is_uniform():
    found = verdicts(Conjugate())
    assert set(found) == {"f0.0", "f1.0", "log_joint"}
    assert (
        len(found) * min(result.p_value for result in found.values()) > 1e-3
    )  # Bonferroni: they are dependent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "seen_by"), [(Conjugate(stretch=0.5), "f0.0"), (Conjugate(shift=0.7), "f0.0")]
)
def test_narrow_and_biased_posteriors_are_rejected(wrong, seen_by):
    result = verdicts(wrong)[seen_by]
    assert result.p_value < 1e-3 and result.outside


@pytest.mark.slow
def test_the_band_holds_simultaneously_at_its_level():
    rng = np.random.default_rng(0)
    outside = [uniformity(rng.integers(0, 100, 100), 99).outside for _ in range(60)]
    assert sum(outside) <= 11  # P(Binomial(60, 0.05) > 11) < 1e-4


def test_bad_ranks_and_too_few_draws_are_named():
    with pytest.raises(ValueError, match="at least 10 ranks"):
        uniformity(np.arange(5), 99)
    with pytest.raises(ValueError, match="0 … 9"):
        uniformity(np.arange(20), 9)
    prior = pb.priors.IIDPrior(dist.Normal(0.0, 1.0))
    with seeded(0):
        model = pb.BNN(nn.Linear(2, 1), prior, pb.likelihoods.HomoskedasticGaussian(0.5))
    with pytest.raises(ValueError, match="num_ranked"):
        replicate(model, Conjugate(), torch.zeros(3, 2), torch.zeros(1, 2), num_draws=5)


@pytest.mark.slow
def test_replications_fitted_as_one_batch_have_their_own_posteriors():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(12, 2, dtype=torch.float64, generator=generator)
    with seeded(0):
        net = nn.Linear(2, 1).double()
    model = pb.BNN(
        net, pb.priors.IIDPrior(dist.Normal(0.0, 1.0)), pb.likelihoods.HomoskedasticGaussian(NOISE)
    )
    targets = [simulate(model, x, seed)[1] for seed in range(3)]
    method = pb.NUTS(num_chains=4, num_warmup=150, compile=False)
    for y, fit in zip(targets, fit_batch(method, model, x, targets, num_draws=300), strict=True):
        mean, covariance = Conjugate.exact(x, y)
        draws = torch.cat([fit.draws["net.weight"].flatten(2), fit.draws["net.bias"]], -1)
        assert_mean_within(draws, mean)
        assert_var_within(draws, covariance.diagonal(), mean=mean)
