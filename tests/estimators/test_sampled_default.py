"""The regressor's default on small tables: draws of the posterior itself where short chains arrive at it."""

from __future__ import annotations

import warnings

import numpy as np
import pyro.distributions as dist
import pytest
import torch

import pyrobnn as pb
from pyrobnn.data import Dataset, Standardizer
from pyrobnn.estimators import chains_of_fit, estimator
from pyrobnn.estimators.empirical_bayes import fit_by_evidence, is_exact
from pyrobnn.estimators.estimator import Estimator


@pytest.mark.slow
def test_the_first_block_of_the_readme_ends_in_a_pass():
    data = pb.data.gap(num_data=100)
    model = pb.BNNRegressor(random_state=0).fit(data.x, data.y[:, 0])
    assert model.posterior_.meta["kind"] == "chains" and model.posterior_.meta["refine"]["arrived"]
    assert "arrived at the posterior" in model.method_reason_
    assert model.verdict_.draws == "pass", model.verdict_


@pytest.mark.slow
def test_a_cubic_of_twenty_rows_is_found_as_a_gaussian_process_finds_it():
    """Of a net under a prior of width one the error was 8.6, of a Gaussian process 5.2."""
    generator = np.random.default_rng(0)
    x = generator.uniform(-4, 4, (20, 1))
    y = x[:, 0] ** 3 + 9 * generator.normal(size=20)
    grid = np.linspace(-4, 4, 81)[:, None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = pb.BNNRegressor(random_state=0).fit(x, y)
    error = np.sqrt(np.mean((model.predict(grid) - grid[:, 0] ** 3) ** 2))
    assert error < 7.5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_where_no_net_does_better_the_linear_model_is_sampled():
    """Chains do not arrive where the noise tends to nothing; NUTS of the net that was refused took minutes."""
    x = np.random.default_rng(0).normal(size=(30, 3))
    y = x @ [1.0, 2.0, -1.0] + 0.5
    model = pb.BNNRegressor(random_state=0).fit(x, y)
    assert model.posterior_.bnn.num_weights == 4
    np.testing.assert_allclose(model.predict(x), y, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_chains_that_cannot_be_paid_for_leave_the_approximation(monkeypatch):
    generator = np.random.default_rng(0)
    x = generator.uniform(-2, 2, (60, 1))
    y = np.sin(2 * x[:, 0]) + 0.1 * generator.normal(size=60)
    monkeypatch.setattr(chains_of_fit, "_WORK", 1e-3)
    model = pb.BNNRegressor(random_state=0, compile=False).fit(x, y)
    assert model.posterior_.meta["method"] == "Laplace" and "arrived" not in model.method_reason_


@pytest.mark.parametrize("gained", [True, False])
def test_rows_that_a_function_passes_through_are_not_sampled_for_minutes(gained, monkeypatch):
    x = np.linspace(0.0, 19.0, 15)[:, None]
    y = 2.0 * x[:, 0] + 1.0
    fit_nets = Estimator._fit_nets

    def decided(self, *arguments):
        net, _, why = fit_nets(self, *arguments)
        return net, gained, why

    monkeypatch.setattr(Estimator, "_fit_nets", decided)
    monkeypatch.setattr(estimator, "at_posterior", lambda *_: None)  # as its chains do not arrive
    fitted = pb.BNNRegressor(random_state=0).fit(x, y)
    assert isinstance(fitted.method_, pb.Laplace)
    assert "passes through every target" in fitted.method_reason_
    mean, sd = fitted.predict(x, return_std=True)
    np.testing.assert_allclose(mean, y, atol=1e-3 * y.std())
    assert (sd < 1e-3 * y.std()).all()


@pytest.mark.parametrize(("noise", "exact"), [(0.0, True), (1e-2, False)])
def test_a_fit_is_exact_whose_noise_is_the_least_to_resolve(noise, exact):
    x = torch.linspace(0.0, 1.0, 15, dtype=torch.float64)[:, None]
    y = 3.0 * x + noise * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).double()
    units = Standardizer.fit(Dataset(x, y, "line", "regression", ("x",)))
    likelihood = pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0))
    model = pb.BNN(
        pb.networks.mlp(1, (), 1, seed=0).double(),
        pb.priors.FanInNormal(),
        likelihood,
        standardizer=units,
    )
    posterior, _ = fit_by_evidence(pb.Laplace(tune="marginal_likelihood"), model, x, y, {"seed": 0})
    assert is_exact(posterior, x, y) == exact
