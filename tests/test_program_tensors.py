"""What programs do with tensors that autograd or a batch of points refuses: writes in recursions, bad matrices."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyrobnn as pb
from pyrobnn.density import Density


def test_a_matrix_without_a_cholesky_factor_ends_no_run():
    """A kernel matrix is singular in float32 at some points: one such start refused the whole fit."""
    x = torch.linspace(0.0, 1.0, 12)

    def program(x, y):
        length = pyro.sample("length", dist.LogNormal(0.0, 3.0))
        cov = torch.exp(-0.5 * ((x[:, None] - x) / length) ** 2)
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(len(x)), cov), obs=y)

    density = Density(program, (x, torch.sin(9.0 * x)))
    z = torch.tensor([[-2.0], [7.0]])
    with pytest.raises(ValueError):
        pyro.poutine.trace(pyro.poutine.condition(program, {"length": z[1, 0].exp()})).get_trace(
            *density.args
        )
    value = torch.func.vmap(density.log_joint)(z)
    assert value[0].isfinite() and not value[1].isfinite()
    posterior = pb.NUTS(num_chains=2, num_warmup=40, compile=False).fit(program, *density.args, num_draws=5)
    assert posterior.sample_stats["lp"].isfinite().all()
