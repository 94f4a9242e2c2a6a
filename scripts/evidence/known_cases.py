"""Models whose log evidence is known, and nets of 1-10-1 on curves, where it is not."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pyro.distributions as dist
import torch
from torch import Tensor, nn

import pyrobnn as pb

NOISE = 0.3
#: the data on which tanh is ranked against ReLU
DATA = ("gap", "step", "kink", "line", "wave", "bump")


@dataclass(frozen=True)
class Case:
    """A model, its data, and its log evidence, None where that is not known."""

    model: pb.BNN
    x: Tensor
    y: Tensor
    exact: float | None


def data_of(name: str) -> tuple[Tensor, Tensor]:
    """Forty points of a curve with noise of sd 0.3."""
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(-2, 2, 40, dtype=torch.float64)[:, None]
    if name == "gap":
        x = torch.cat([x[:20] - 0.5, x[20:] + 0.5])
    f = {
        "gap": torch.sin(2 * x),
        "step": 1.5 * torch.tanh(4 * x),
        "kink": 1.5 * x.abs() - 1.5,
        "line": x,
        "wave": torch.sin(3 * x),
        "bump": 2 * torch.exp(-2 * x**2) - 0.5,
    }[name]
    return x, f + NOISE * torch.randn(
        x.shape,
        generator=generator,
        dtype=torch.float64,
    )


def linear() -> Case:
    """Five inputs and a bias with N(0, 1) priors: y is jointly normal."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(
        60,
        5,
        generator=generator,
        dtype=torch.float64,
    )
    y = x.sum(1, keepdim=True) / 2 + NOISE * torch.randn(
        60,
        1,
        generator=generator,
        dtype=torch.float64,
    )
    design = torch.cat([x, torch.ones(60, 1, dtype=torch.float64)], 1)
    cov = design @ design.T + NOISE**2 * torch.eye(60, dtype=torch.float64)
    exact = dist.MultivariateNormal(torch.zeros(60, dtype=torch.float64), cov).log_prob(y[:, 0])
    return Case(bnn(nn.Linear(5, 1), 1.0), x, y, float(exact))


def one_unit() -> Case:
    """y = v tanh(w x), with two modes that mirror each other: summed over a grid."""
    x, y = data_of("step")
    grid = torch.linspace(
        -14,
        14,
        1401,
        dtype=torch.float64,
    )
    w, v = torch.meshgrid(grid, grid, indexing="ij")
    prior = dist.Normal(0.0, 2.0)
    log_joint = prior.log_prob(w) + prior.log_prob(v)
    for point, target in zip(x[:, 0], y[:, 0], strict=True):
        log_joint = log_joint + dist.Normal(v * torch.tanh(w * point), NOISE).log_prob(target)
    exact = float(log_joint.logsumexp((0, 1))) + 2 * math.log(float(grid[1] - grid[0]))
    layers = (nn.Linear(1, 1, bias=False), nn.Tanh(), nn.Linear(1, 1, bias=False))
    return Case(bnn(nn.Sequential(*layers), 2.0), x, y, exact)


def bnn(net: nn.Module, scale: float) -> pb.BNN:
    """A net with N(0, scale²) weights and known noise, in float64."""
    prior = pb.priors.IIDPrior(dist.Normal(0.0, scale))
    return pb.BNN(net.double(), prior, pb.likelihoods.HomoskedasticGaussian(NOISE))


def case(name: str) -> Case:
    """The case of a name in :data:`CASES`."""
    torch.manual_seed(0)
    if name == "linear":
        return linear()
    if name == "one tanh unit":
        return one_unit()
    activation, _, data = name.partition(" on ")
    net = pb.networks.mlp(
        1,
        (10,),
        activation=activation,
        seed=0,
    )
    return Case(bnn(net, 1.0), *data_of(data), None)


CASES = ["linear", "one tanh unit"]
for _data in DATA:
    CASES += [f"tanh on {_data}", f"relu on {_data}"]
