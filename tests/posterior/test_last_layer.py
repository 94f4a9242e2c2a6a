"""Nets whose last layer is integrated out."""

from __future__ import annotations

import math

import pyro.distributions as dist
import pytest
import torch

import pyrobnn as pb
from pyrobnn.core.seeding import generator, seeded
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.posterior.marginal_last_layer import LastLayer

NOISES = {
    "known": (1, 0.3),
    "of each output": (2, torch.tensor([0.3, 0.5])),
    "inferred": (1, dist.HalfNormal(1.0)),
    "inferred of each output": (2, dist.HalfNormal(torch.ones(2))),
}
PRIORS = {
    "fan-in": pb.priors.FanInNormal(1.0),
    "away from zero": pb.priors.IIDPrior(dist.Normal(0.3, 2.0)),
}


def layer_of(noise, prior, hidden, bias=True):
    """The last layer of a small net with so many hidden units and nine rows."""
    num_outputs, scale = NOISES[noise]
    with seeded(0):
        net = torch.nn.Sequential(
            torch.nn.Linear(2, 5),
            torch.nn.Tanh(),
            torch.nn.Linear(5, hidden),
            torch.nn.ReLU(),
            torch.nn.Linear(hidden, num_outputs, bias=bias),
        )
        x = torch.randn(9, 2, dtype=torch.float64)
        y = torch.randn(9, num_outputs, dtype=torch.float64)
    likelihood = pb.likelihoods.HomoskedasticGaussian(scale)
    model = pb.BNN(net.double(), PRIORS[prior], likelihood)
    layer = LastLayer.of(prepare(model, x, y, points="held").density)
    assert layer is not None
    return layer


def positions(layer, num):
    return torch.randn(
        num,
        len(layer.others),
        generator=generator(1),
        dtype=torch.float64,
    )


@pytest.mark.parametrize("hidden", [4, 12])
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("noise", NOISES)
def test_what_is_drawn_has_the_joint_density_of_the_whole_net(noise, prior, hidden):
    layer = layer_of(noise, prior, hidden)
    completed = layer.complete(positions(layer, 5), generator(2))
    expected = torch.stack([layer.density.log_joint(z) for z in completed.z])
    torch.testing.assert_close(completed.log_density, expected)


@pytest.mark.parametrize("hidden", [4, 12])  # fewer units than rows, and more
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("noise", NOISES)
def test_its_derivatives_are_those_of_finite_differences(noise, bias, hidden):
    layer = layer_of(noise, "away from zero", hidden, bias)
    z = positions(layer, 1)[0]
    slope = torch.func.grad(layer.log_density)(z)
    step = 1e-5
    for index in range(len(z)):
        moved = torch.zeros_like(z)
        moved[index] = step
        difference = layer.log_density(z + moved) - layer.log_density(z - moved)
        assert float(slope[index]) == pytest.approx(
            float(difference) / (2 * step),
            rel=1e-4,
            abs=1e-5,
        )


def test_the_last_layer_given_all_else_has_the_entropy_of_its_draws():
    layer = layer_of("known", "fan-in", 4)
    z = positions(layer, 1)
    draws = layer.complete(z.expand(4000, -1), generator(3))
    log_given = draws.log_density - layer.log_density(z[0])
    size = layer.loc.numel()
    # the last layer's sites are the last of the vector
    cov = torch.cov(draws.z[:, -size:].T)
    entropy = 0.5 * (size * (1 + math.log(2 * math.pi)) + float(torch.logdet(cov)))
    # of 4,000 draws: sd 0.025 of the mean, and 0.035 of half the log determinant
    assert float(-log_given.mean()) == pytest.approx(entropy, abs=0.2)


def test_what_is_not_normal_given_all_else_stays():
    x = torch.randn(9, 1, generator=generator(0))
    student = pb.likelihoods.StudentT(5.0, 0.3)
    heavy = pb.priors.IIDPrior(dist.StudentT(3.0, 0.0, 1.0))
    normal = pb.priors.FanInNormal()
    known = pb.likelihoods.HomoskedasticGaussian(0.3)
    net = pb.networks.mlp(1, (4,), 1, seed=0)
    linear = pb.networks.mlp(1, (), 1, seed=0)
    for module, prior, likelihood in (
        (net, normal, student),
        (net, heavy, known),
        (linear, normal, known),  # nothing else is left
    ):
        model = pb.BNN(module, prior, likelihood)
        assert LastLayer.of(prepare(model, x, x, points="held").density) is None


def test_a_wide_net_under_a_wide_prior_arrives():
    data = pb.data.gap(num_data=40)
    noise = pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0))
    units = pb.data.Standardizer.fit(data)
    model = pb.BNN(
        pb.networks.mlp(1, (30,), 1, seed=0),
        pb.priors.FanInNormal(4.0),
        noise,
        standardizer=units,
    )
    rough = pb.MAP(num_steps=100, compile=False).fit(model, data.x, data.y)
    facts = rough.refine(120.0).meta["refine"]
    assert facts["arrived"] and facts["gradients"] < 200_000
