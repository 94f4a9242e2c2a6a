"""The law of evidence: ``log_evidence`` is the exact one, for every method that returns one."""

from __future__ import annotations

import math

import pyro.distributions as dist
import pytest
import torch
from helpers import seeded

import pyrobnn as pb
from pyrobnn.inference.curvature.images import log_images

X = torch.linspace(-2, 2, 100, dtype=torch.float64)[:, None]
NOISE, PRIOR = 0.03, 1.0


def tanh_net(units: int) -> tuple[pb.BNN, torch.Tensor]:
    """A net without biases: given its first weights, its output is linear in the others."""
    with seeded(0):
        net = torch.nn.Sequential(
            torch.nn.Linear(1, units, bias=False), torch.nn.Tanh(), torch.nn.Linear(units, 1, bias=False)
        ).double()
    y = 1.5 * torch.tanh(0.7 * X) - (0.8 * torch.tanh(3 * X) if units == 2 else 0.0)
    y = y + NOISE * torch.randn(X.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model = pb.BNN(
        net, pb.priors.IIDPrior(dist.Normal(0.0, PRIOR)), pb.likelihoods.HomoskedasticGaussian(NOISE)
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
            torch.zeros(len(X), dtype=torch.float64), PRIOR * h, torch.full((len(X),), NOISE**2).double()
        )
        total.append(density.log_prob(y[:, 0]) + dist.Normal(0.0, PRIOR).log_prob(part).sum(1))
    return float(torch.cat(total).logsumexp(0) + units * (axis[1] - axis[0]).log())


@pytest.mark.filterwarnings("ignore:the search was stopped")
@pytest.mark.parametrize("units", [1, 2])
def test_a_mixture_counts_the_images_of_its_modes(units):
    model, y = tanh_net(units)
    method = pb.LaplaceMixture(num_modes=2, num_steps=300, compile=False)
    posterior = method.fit(model, X, y, num_draws=50)
    assert posterior.log_evidence == pytest.approx(exact(units, y), abs=0.1)  # the images are log 2 and log 8


def test_laplace_has_the_evidence_of_one_mode_and_smc_that_of_all():
    model, y = tanh_net(1)
    one = pb.Laplace(num_steps=300, compile=False).fit(model, X, y, num_draws=50)
    assert one.log_evidence + math.log(2) == pytest.approx(exact(1, y), abs=0.1)
    whole = pb.SMC(num_particles=128, num_islands=4, compile=False).fit(model, X, y)
    error = max(whole.meta["log_evidence_error"], 0.05)
    assert whole.log_evidence == pytest.approx(exact(1, y), abs=4 * error)


@pytest.mark.filterwarnings("ignore:the centre is not a mode")
@pytest.mark.parametrize(
    ("activation", "loc", "weights", "images"),
    [
        (torch.nn.Tanh(), 0.0, [1.0, 2.0, 3.0], math.log(6 * 8)),
        (torch.nn.Tanh(), 0.0, [1.0, -1.0, 3.0], math.log(3 * 8)),  # two are one another's image
        (torch.nn.Tanh(), 0.0, [0.0, 0.0, 3.0], math.log(3 * 2)),  # two are off
        (torch.nn.ReLU(), 0.0, [1.0, 2.0, 3.0], math.log(6)),
        (torch.nn.Tanh(), 0.5, [1.0, 2.0, 3.0], math.log(6)),  # a prior that has a sign
        (torch.nn.LayerNorm(3, elementwise_affine=False), 0.0, [1.0, 2.0, 3.0], math.log(6)),
        (torch.nn.Softplus(), [0.1, 0.2, 0.3], [1.0, 2.0, 3.0], 0.0),  # a prior that knows the units apart
    ],
    ids=str,
)
def test_only_what_net_and_prior_share_and_the_posterior_tells_apart_is_an_image(
    activation, loc, weights, images
):
    with seeded(0):
        net = torch.nn.Sequential(torch.nn.Linear(1, 3), activation, torch.nn.Linear(3, 1)).double()
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor(weights)[:, None])
        net[2].weight.copy_(torch.tensor(weights))
        net[0].bias.zero_()
    first = torch.as_tensor(loc, dtype=torch.float64).expand(3)
    priors = {
        "0.weight": dist.Normal(first[:, None], 1.0).to_event(2),
        "0.bias": dist.Normal(torch.zeros(3).double(), 1.0).to_event(1),
        "2.weight": dist.Normal(torch.zeros(1, 3).double(), 1.0).to_event(2),
        "2.bias": dist.Normal(torch.zeros(1).double(), 1.0).to_event(1),
    }
    model = pb.BNN(net, pb.priors.DictPrior(priors), pb.likelihoods.HomoskedasticGaussian(0.01))
    mode = pb.Laplace(structure="diag", compile=False).fit(model, X, net(X).detach(), init=net, num_draws=1)
    assert log_images(model, mode.approximation, X[:4]) == pytest.approx(images)
