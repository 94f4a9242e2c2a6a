"""The law of the dtype: float32 and float64 agree where there are more weights than data, and may be mixed."""

from __future__ import annotations

import copy
import functools

import pyro.distributions as dist
import pytest
import torch
from helpers import seeded
from models import normal_prior, toy_net
from test_contract import METHODS, X, Y, num_draws

import pyrobnn as pb
from pyrobnn.likelihoods import HomoskedasticGaussian

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(of the draws|transitions diverged)|the centre is not a mode"
)
DTYPES = (torch.float32, torch.float64)
OTHER = {torch.float32: torch.float64, torch.float64: torch.float32}


# -- float64 data in a float32 net, and the other way round ------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("name", METHODS)
def test_data_of_the_other_dtype(name, dtype):
    model = pb.BNN(toy_net().to(dtype), normal_prior(), HomoskedasticGaussian(dist.HalfNormal(1.0)))
    x, y = X.to(OTHER[dtype]), Y.to(OTHER[dtype])
    posterior = METHODS[name].fit(model, x, y, seed=3, **num_draws(name))
    assert {value.dtype for value in posterior.draws.values()} == {dtype}
    prediction = posterior.predict(x[:7])
    assert prediction.f.dtype == prediction.mean.dtype == dtype
    assert prediction.log_prob(y[:7]).shape == (7,)


# -- Laplace: curvature that spans more than float32 resolves ----------------------------------------------------

NUM_DATA = 100  # for a net of 141 weights


@functools.cache
def precise_data() -> tuple[torch.Tensor, torch.Tensor, torch.nn.Module]:
    """Inputs, targets and a trained net, float64."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_DATA, 5, generator=generator, dtype=torch.float64)
    y = torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3]
    with seeded(0):
        net = pb.networks.mlp(5, (20,)).double()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for _ in range(300):
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()
    return x, y, net


def narrow(dtype: torch.dtype, **options) -> tuple[pb.Posterior, torch.Tensor]:
    """Laplace at the trained net, and the inputs."""
    x, y, net = precise_data()
    net = copy.deepcopy(net).to(dtype)
    model = pb.BNN(net, normal_prior(), HomoskedasticGaussian(0.03))
    return pb.Laplace(**options).fit(model, x.to(dtype), y.to(dtype), init=net, num_draws=20), x.to(dtype)


@pytest.mark.parametrize("tune", [None, "marginal_likelihood", "per layer"])
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_curvature_agrees(structure, tune):
    options = {"structure": structure, "tune": tune}
    if tune == "per layer":
        options = {"structure": structure, "tune": "marginal_likelihood", "tune_per_layer": True}
    (single, x), (double, x64) = (narrow(dtype, **options) for dtype in DTYPES)
    assert abs(single.log_evidence - double.log_evidence) < 0.02
    torch.testing.assert_close(single.moments(x)[1].double(), double.moments(x64)[1], rtol=1e-2, atol=1e-6)
    if structure == "full" and tune is None:
        # variances of the data's f in units of the noise add up to the effective parameters
        effective = float(single.moments(x)[1].double().sum()) / 0.03**2
        assert 0 < effective < NUM_DATA
        assert effective == pytest.approx(float(double.moments(x64)[1].sum()) / 0.03**2, abs=0.01)
