"""The law of the dtype: float32 and float64 agree where there are more weights than data, and may be mixed."""

from __future__ import annotations

import copy
import dataclasses
import functools

import pyro.distributions as dist
import pytest
import torch
from helpers import assert_mean_within, seeded
from models import diabetes_linear, diabetes_model, normal_prior, toy_net
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


# -- six data, eleven weights: every method's answer ---------------------------------------------------------------

#: long enough to have an answer
SETTINGS = {
    "SVI": {"num_steps": 2500},
    "SVI-low-rank": {"num_steps": 2500},
}
MARKOV = {"NUTS", "NUTS-pyro", "SGLD", "SGHMC"}
DETERMINISTIC = {"MLE", "MAP", "SWA"}
EVIDENCE = [name for name in METHODS if name.startswith(("Laplace", "SVI"))]


@functools.cache
def few_data(name: str, dtype: torch.dtype) -> tuple[pb.Posterior, torch.Tensor]:
    """Posterior of a linear model on six rows, and its f at another, (chain, draw, 1, 1)."""
    truth = diabetes_linear()
    x, y = truth["x"].to(dtype), truth["y"].to(dtype)
    method = dataclasses.replace(METHODS[name], **SETTINGS.get(name, {}))
    draws = {"num_draws": 1000} if num_draws(name) else {}
    posterior = method.fit(diabetes_model(dtype), x[:6], y[:6], seed=3, **draws)
    return posterior, posterior.predict(x[6:7]).f.double()


def _slow(names, quick) -> list:
    return [pytest.param(name, marks=[] if name.startswith(quick) else [pytest.mark.slow]) for name in names]


@pytest.mark.parametrize("name", _slow(METHODS, ("MAP", "Laplace", "SWAG")))
def test_predictive_agrees(name):
    if name == "MCDropout" or name.startswith("SVI"):
        pytest.skip("trained by random gradients: two fits differ by more than the error of their draws")
    if name in MARKOV:
        pytest.skip("chains long enough to be compared take minutes without a compiler")
    if name == "DeepEnsemble":
        pytest.skip("its members start from random weights, other ones in another dtype")
    (_, single), (_, double) = (few_data(name, dtype) for dtype in DTYPES)
    if name in DETERMINISTIC:
        torch.testing.assert_close(single, double, rtol=1e-3, atol=1e-3)
        return
    if torch.allclose(single, double, rtol=1e-3, atol=1e-3):
        return  # even the draws are the same
    assert_mean_within(single - double, 0.0, min_ess=100, name="mean of f")
    centre = (single.mean((0, 1)) + double.mean((0, 1))) / 2
    squares = (single - centre) ** 2 - (double - centre) ** 2
    assert_mean_within(squares, 0.0, min_ess=100, name="variance of f")


@pytest.mark.parametrize("name", _slow(EVIDENCE, ("Laplace",)))
def test_evidence_agrees(name):
    single, double = (few_data(name, dtype)[0].log_evidence for dtype in DTYPES)
    assert abs(single - double) < 0.5
