"""The metric in its two forms, and the one that a program takes."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import seeded

import pyrobnn as pb
from pyrobnn.inference.hmc.metric import form_of, pulled, standard_deviations, unwhiten, whiten

with seeded(3):
    FORMS = {
        "diag": 0.5 + torch.rand(6, dtype=torch.float64),
        "dense": torch.linalg.cholesky(
            torch.cov(torch.randn(6, 30, dtype=torch.float64))
        ).contiguous(),
    }


@pytest.mark.parametrize("form", FORMS)
def test_the_forms_are_the_same_arithmetic(form):
    a = FORMS[form]
    matrix = torch.diag(a) if form == "diag" else a
    with seeded(1):
        q = torch.randn(3, 6, dtype=torch.float64)
    torch.testing.assert_close(unwhiten(q, a), q @ matrix.T)
    torch.testing.assert_close(pulled(q, a), q @ matrix)
    torch.testing.assert_close(whiten(unwhiten(q, a), a), q)
    torch.testing.assert_close(standard_deviations(a), (matrix @ matrix.T).diagonal().sqrt())


def test_a_small_program_takes_a_dense_metric_and_a_net_a_diagonal():
    assert form_of("auto", False, 100) == "dense"
    assert form_of("auto", False, 101) == form_of("auto", True, 5) == "diag"
    assert form_of("dense", True, 1000) == "dense"


def _line(x, y):
    """A regression on uncentred inputs, whose intercept and slope correlate by -0.99."""
    a = pyro.sample("a", dist.Normal(0.0, 5.0))
    b = pyro.sample("b", dist.Normal(0.0, 5.0))
    pyro.sample("y", dist.Normal(a + b * x, 1.0).to_event(1), obs=y)


@pytest.mark.slow
def test_a_correlated_program_takes_short_trees_and_leaves_its_metric():
    x = torch.linspace(5.0, 7.0, 30)
    nuts = pb.NUTS(num_chains=4, num_warmup=60, compile=False)
    posterior = nuts.fit(_line, x, 2 + 0.5 * x, num_draws=60, seed=0)
    assert float(posterior.sample_stats["n_steps"].double().mean()) < 6  # 16 with the diagonal
    assert posterior.meta["mass_matrix"] == "dense"
    design = torch.stack([torch.ones(30), x], 1).double()
    exact = torch.linalg.inv(design.T @ design + 0.04 * torch.eye(2))  # the prior's share
    both = torch.stack([posterior.draws["a"], posterior.draws["b"]], -1).double().flatten(0, 1)
    torch.testing.assert_close(
        torch.cov(both.T) / exact, torch.ones(2, 2).double(), rtol=0, atol=0.5
    )
    a = posterior.history["warmup_metric"].reshape(2, 2).double()
    torch.testing.assert_close(a @ a.T / exact, torch.ones(2, 2).double(), rtol=0, atol=0.6)
