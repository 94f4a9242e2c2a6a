"""What programs do with tensors that autograd or a batch of points refuses: writes in recursions, bad matrices."""

from __future__ import annotations

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import pyrobnn as pb
from pyrobnn.model import Density


@pytest.mark.slow
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
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        posterior = pb.NUTS(num_chains=2, num_warmup=40, compile=False).fit(
            program, *density.args, num_draws=5
        )
    assert any("'covariance_matrix' of the site 'y'" in str(warning.message) for warning in told)
    assert posterior.sample_stats["lp"].isfinite().all()


@pytest.mark.parametrize(
    "method", [pb.NUTS(compile=False), pb.MAP(compile=False), pb.SVI(compile=False)], ids=repr
)
def test_a_recursion_in_place_is_refused_with_the_remedy(method):
    """Autograd has no gradient of values that were overwritten; ``torch.stack`` of a list has."""

    def program(x, y):
        level = pyro.sample("slope", dist.Normal(0.0, 1.0)) * torch.ones(len(y))
        for t in range(1, len(y)):
            level[t] = torch.tanh(level[t - 1]) * level[0]
        pyro.sample("y", dist.Normal(level, 0.5).to_event(1), obs=y)

    with pytest.raises(pb.Refused, match="torch.stack"):
        method.fit(program, None, torch.ones(5))


def test_data_that_are_arguments_of_a_trace_are_no_constants_of_it():
    def program(x, y):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        pyro.factor("count", slope * (x > 0).sum() + (x[:2] * slope).sum())

    x = torch.tensor([1.0, -1.0, 2.0])
    y = torch.zeros(3)
    z = torch.tensor([[0.3], [0.4]])
    density = Density(program, (x, y))
    slope = torch.func.vmap(torch.func.grad_and_value(density.log_joint), in_dims=(0, None, None))
    for found, expected in zip(make_fx(slope)(z, x, y)(z, -x, y), slope(z, -x, y), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("error:An output with one or more elements was resized")
def test_binomial_numbers_of_one_count_are_drawn_at_many_points():
    def program(x, y=None):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Binomial(12, logits=slope * x), obs=y)

    x = torch.linspace(-2, 2, 60)
    y = torch.binomial(
        torch.full((60,), 12.0), torch.sigmoid(x), generator=torch.Generator().manual_seed(0)
    )
    posterior = pb.SVI(num_steps=300, lr=0.05, compile=False).fit(program, x, y, num_draws=200)
    replicates = posterior.to_datatree(x, y)["posterior_predictive"]["y"].values
    means = replicates.reshape(-1, 60).mean(0)
    expected = 12 * torch.sigmoid(posterior.draws["slope"][0, :, None] * x).mean(0)
    assert abs(means - expected.numpy()).max() < 0.6
