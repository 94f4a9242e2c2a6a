"""Positive definite matrices as latent sites: the bijection, its Jacobian, and a posterior that is known."""

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyrobnn as pb
from pyrobnn.model import Density
from pyrobnn.model.positive_definite import FromCholesky


@pytest.mark.parametrize("size", [1, 2, 4])
def test_jacobian_is_that_of_automatic_differentiation(size):
    transform = FromCholesky()
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(
        size * (size + 1) // 2,
        generator=generator,
        dtype=torch.float64,
    )
    y = transform(x)
    assert y.shape == transform.forward_shape(x.shape)
    assert x.shape == transform.inverse_shape(y.shape)
    torch.testing.assert_close(transform.inv(y), x)
    rows, columns = torch.tril_indices(size, size)
    jacobian = torch.func.jacrev(lambda x: transform(x)[rows, columns])(x)
    expected = torch.linalg.slogdet(jacobian).logabsdet
    torch.testing.assert_close(transform.log_abs_det_jacobian(x, y), expected)


def test_matrices_of_a_batch_are_those_one_by_one():
    transform = FromCholesky()
    x = torch.randn(
        5,
        3,
        6,
        generator=torch.Generator().manual_seed(0),
    )
    y = transform(x)
    torch.testing.assert_close(y[2, 1], transform(x[2, 1]))
    assert transform.log_abs_det_jacobian(x, y).shape == (5, 3)


def program(x, y):
    precision = pyro.sample("precision", dist.Wishart(torch.tensor(4.0), torch.eye(2)))
    law = dist.MultivariateNormal(torch.zeros(2), precision_matrix=precision)
    with pyro.plate("rows", len(y)):
        pyro.sample("y", law, obs=y)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Singular sample:UserWarning")  # torch warns of all others
def test_a_wishart_prior_of_a_precision_has_its_conjugate_posterior():
    y = torch.randn(
        60,
        2,
        generator=torch.Generator().manual_seed(0),
    ) * torch.tensor([1.0, 2.0])
    assert Density(program, (None, y)).dim == 3
    method = pb.NUTS(
        num_chains=2,
        num_warmup=150,
        compile=False,
    )
    draws = method.fit(
        program,
        None,
        y,
        num_draws=300,
        seed=0,
    ).draws["precision"]
    posterior = dist.Wishart(torch.tensor(64.0), precision_matrix=torch.eye(2) + y.T @ y)
    sd = posterior.variance.sqrt()
    error = (draws.mean((0, 1)) - posterior.mean).abs() / sd
    assert bool((error < 5 / 100**0.5).all())
    assert bool(((draws.flatten(0, 1).std(0) / sd - 1).abs() < 0.3).all())
