"""Small models and data that several tests share."""

from __future__ import annotations

import functools

import pyro.distributions as dist
import torch
from helpers import seeded
from sklearn.datasets import load_diabetes

import pyrobnn as pb

NOISE = 0.7


def normal_prior(scale: float = 1.0) -> pb.priors.IIDPrior:
    return pb.priors.IIDPrior(dist.Normal(0.0, scale))


def toy(num_data: int = 40, out: int = 1, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(-2, 2, num_data, dtype=dtype)[:, None]
    y = torch.cat([torch.sin((k + 1) * x) for k in range(out)], 1)
    return x, y + 0.1 * torch.randn(y.shape, generator=generator, dtype=dtype)


def toy_net(num_inputs: int = 1, hidden: int = 8, out: int = 1) -> torch.nn.Module:
    with seeded(0):
        return pb.networks.mlp(num_inputs, (hidden,), out)


def toy_model(likelihood=None, out: int = 1) -> pb.BNN:
    return pb.BNN(
        toy_net(out=out), normal_prior(), likelihood or pb.likelihoods.HomoskedasticGaussian(0.2)
    )


@functools.cache
def diabetes_linear() -> dict[str, torch.Tensor]:
    """Linear regression on diabetes in closed form: N(0, 1) on all 11 parameters, noise sd 0.7, float64.

    Parameters are in the order weight (10), bias (1); x and y are standardised with ddof 0.
    """
    x, y = load_diabetes(return_X_y=True, scaled=False)
    x = (x - x.mean(0)) / x.std(0)
    y = (y - y.mean()) / y.std()
    x = torch.tensor(x)
    y = torch.tensor(y)[:, None]
    design = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    precision = design.T @ design / NOISE**2 + torch.eye(11, dtype=x.dtype)
    mean = torch.linalg.solve(precision, design.T @ y / NOISE**2)[:, 0]
    marginal = torch.distributions.MultivariateNormal(
        torch.zeros(len(x), dtype=x.dtype),
        design @ design.T + NOISE**2 * torch.eye(len(x), dtype=x.dtype),
    )
    return {
        "x": x,
        "y": y,
        "design": design,
        "mean": mean,
        "precision": precision,
        "cov": torch.linalg.inv(precision),
        "log_evidence": marginal.log_prob(y[:, 0]),
    }


def diabetes_model(dtype=torch.float64) -> pb.BNN:
    with seeded(0):
        net = torch.nn.Linear(10, 1).to(dtype)
    return pb.BNN(net, normal_prior(), pb.likelihoods.HomoskedasticGaussian(NOISE))


def joined(draws: dict[str, torch.Tensor]) -> torch.Tensor:
    """Draws of the linear model as (chain, draw, 11), in the order of :func:`diabetes_linear`."""
    return torch.cat([draws["net.weight"].flatten(2), draws["net.bias"].flatten(2)], -1)


def joint_covariance(network, x: torch.Tensor) -> torch.Tensor:
    """Covariance of a linearised network's f over all inputs and outputs, (point, width, point, width)."""
    f, rows = network.jacobian.rows(network.features(x))
    rows = rows.flatten(0, 1)
    root = torch.cat([block.whitened(network._columns(rows, block)) for block in network.blocks], 1)
    return (root @ root.T).reshape(*f.shape, *f.shape).to(f)
