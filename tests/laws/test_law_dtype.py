"""The law of the dtype: float32 and float64 agree where there are more weights than data, and may be mixed."""

from __future__ import annotations

import copy
import dataclasses
import functools

import pyro.distributions as dist
import pytest
import torch
from helpers import assert_mean_within, seeded
from models import NOISE, diabetes_linear, diabetes_model, normal_prior, toy_net
from test_contract import METHODS, X, Y, num_draws, one_of_each_kind

import pyrobnn as pb
from pyrobnn.likelihoods import HomoskedasticGaussian

pytestmark = pytest.mark.filterwarnings("ignore:.*(of the draws|transitions diverged)|the centre is not a mode")
DTYPES = (torch.float32, torch.float64)
OTHER = {torch.float32: torch.float64, torch.float64: torch.float32}


# -- float64 data in a float32 net, and the other way round ------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", one_of_each_kind())
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
        options = {"structure": structure, "tune": "per_layer"}
    (single, x), (double, x64) = (narrow(dtype, **options) for dtype in DTYPES)
    assert abs(single.log_evidence - double.log_evidence) < 0.02
    torch.testing.assert_close(single.moments(x)[1].double(), double.moments(x64)[1], rtol=1e-2, atol=1e-6)
    if structure == "full" and tune is None:
        # variances of the data's f in units of the noise add up to the effective parameters
        effective = float(single.moments(x)[1].double().sum()) / 0.03**2
        assert 0 < effective < NUM_DATA
        assert effective == pytest.approx(float(double.moments(x64)[1].sum()) / 0.03**2, abs=0.01)


# -- six data, eleven weights: every method's answer ---------------------------------------------------------------

#: long enough to have an answer; fewer than 16 numbers of torch's generator are the same in both dtypes, so that one
#: chain of eleven weights is too, up to rounding
SETTINGS = {
    "MAP": {"polish_steps": 100},
    "SVI": {"num_steps": 600, "lr": 0.03},
    "SVI-low-rank": {"num_steps": 600, "lr": 0.03},
    "DeepEnsemble": {"num_steps": 600, "lr": 0.05},
    "NUTS": {"num_chains": 1, "num_warmup": 20, "max_tree_depth": 4},
    "NUTS-pyro": {"num_warmup": 20, "max_tree_depth": 4},
    "SGLD": {"num_chains": 1, "num_warmup": 50, "thinning": 5},
    "SGHMC": {"num_chains": 1, "num_warmup": 50, "thinning": 5},
    "SMC": {"num_particles": 1200, "max_leapfrogs": 4, "max_moves": 6, "ess": 0.7},
    "MCDropout": {"num_steps": 0},
}
MARKOV = {"NUTS", "NUTS-pyro", "SGLD", "SGHMC"}
#: initialised anew, nets of two dtypes begin with other weights: they start from the model's own
FROM_NET = {"SGLD", "SGHMC", "MCDropout"}
EVIDENCE = [name for name in METHODS if name.startswith(("Laplace", "SVI"))]
EXACT = [name for name in METHODS if name in ("MAP", "DeepEnsemble", "SVI", "Laplace", "Laplace-draws")]


@functools.cache
def few_data(name: str, dtype: torch.dtype) -> tuple[pb.Posterior, torch.Tensor]:
    """Posterior of a linear model on six rows, and its f at another, (chain, draw, 1, 1)."""
    truth = diabetes_linear()
    x, y = truth["x"].to(dtype), truth["y"].to(dtype)
    method = dataclasses.replace(METHODS[name], **SETTINGS.get(name, {}))
    draws = {"num_draws": 20 if name in MARKOV else 1000} if num_draws(name) else {}
    start = {}
    if name in FROM_NET:
        with seeded(1):
            start = {"init": torch.nn.Linear(10, 1, dtype=torch.float64).to(dtype)}
    posterior = method.fit(diabetes_model(dtype), x[:6], y[:6], seed=3, **draws, **start)
    return posterior, posterior.predict(x[6:7]).f.double()


def _slow(names, quick) -> list:
    return [pytest.param(name, marks=[] if name.startswith(quick) else [pytest.mark.slow]) for name in names]


@pytest.mark.parametrize("name", _slow(METHODS, ("MAP", "Laplace", "SWAG", "SGLD", "MCDropout")))
def test_predictive_agrees(name):
    (one, single), (two, double) = (few_data(name, dtype) for dtype in DTYPES)
    assert single.shape == double.shape and bool(single.isfinite().all())
    if single.shape[1] < 100:  # a point, members, or a chain worth no more than its own numbers
        tolerance = 1e-2 if name in MARKOV else 1e-3
        torch.testing.assert_close(single, double, rtol=tolerance, atol=tolerance)
        return
    if one.moments is not None:
        probe = diabetes_linear()["x"][6:7]
        pairs = zip(one.moments(probe.float()), two.moments(probe), strict=True)
        for ours, theirs in pairs:
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-3)
    if torch.allclose(single, double, rtol=1e-3, atol=1e-3):
        return  # even the draws are the same
    assert_mean_within(single - double, 0.0, min_ess=100, name="mean of f")
    centre = (single.mean((0, 1)) + double.mean((0, 1))) / 2
    squares = (single - centre) ** 2 - (double - centre) ** 2
    assert_mean_within(squares, 0.0, min_ess=100, name="variance of f")


@pytest.mark.slow
def test_training_with_dropout_agrees():
    """torch draws the masks of training anew in every dtype: what agrees is the mean over seeds."""
    method = dataclasses.replace(METHODS["MCDropout"], num_steps=60, lr=0.05)
    truth, trained = diabetes_linear(), []
    for dtype in DTYPES:
        x, y = truth["x"][:6].to(dtype), truth["y"][:6].to(dtype)
        with seeded(1):
            net = torch.nn.Linear(10, 1, dtype=torch.float64).to(dtype)
        fits = [method.fit(diabetes_model(dtype), x, y, seed=seed, init=net, num_draws=50) for seed in range(40)]
        # a mask has nothing of the bias, and keeps or drops a weight as it was trained
        weights = torch.stack([fit.draws["net.weight"].abs().amax((0, 1)).flatten() for fit in fits])
        trained.append(torch.cat([weights, torch.stack([fit.draws["net.bias"][0, 0] for fit in fits])], 1))
    assert_mean_within((trained[0].double() - trained[1])[None], 0.0, min_ess=10, name="trained weights")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_predictive_is_exact(name, dtype):
    """More weights than data, and a posterior in closed form."""
    truth = diabetes_linear()
    design = truth["design"][:6]
    precision = design.T @ design / NOISE**2 + torch.eye(11, dtype=torch.float64)
    mode = torch.linalg.solve(precision, design.T @ truth["y"][:6, 0]) / NOISE**2
    posterior, f = few_data(name, dtype)
    probe = truth["design"][6]
    if f.shape[1] < 100:  # the prior and data make one mode, of every member
        torch.testing.assert_close(f, (probe @ mode).expand_as(f), rtol=1e-3, atol=1e-3)
        return
    assert_mean_within(f, probe @ mode, name="mean of f")
    if name != "SVI":
        assert_mean_within((f - probe @ mode) ** 2, probe @ torch.linalg.solve(precision, probe))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MARKOV | {"SVI", "SVI-low-rank"}))
def test_the_numbers_are_the_same(name):
    """The same random numbers, so the same course: float32 adds its rounding and nothing else."""
    (single, _), (double, _) = (few_data(name, dtype) for dtype in DTYPES)
    if name in MARKOV:
        pairs = [(single.draws[site], double.draws[site]) for site in double.draws]
    else:
        state = double.approximation.state()[1]
        pairs = [(single.approximation.state()[1][key], state[key]) for key in state]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", _slow(EVIDENCE, ("Laplace",)))
def test_evidence_agrees(name):
    single, double = (few_data(name, dtype)[0].log_evidence for dtype in DTYPES)
    assert abs(single - double) < 0.5
