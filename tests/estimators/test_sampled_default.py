"""The regressor's default on small tables: draws of the posterior itself where short chains arrive at it."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import pyrobnn as pb
from pyrobnn.estimators import chains_of_fit


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
