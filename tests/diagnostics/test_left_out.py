"""The check of intervals by rows that are left out: exact where the model is linear, told where draws are narrow."""

from __future__ import annotations

import warnings

import pyro.distributions as dist
import pytest
import torch
from helpers import seeded

import pyrobnn as pb
from pyrobnn.inference.fitting import left_out
from pyrobnn.inference.fitting.noise_check import left_to_others
from pyrobnn.inference.fitting.problem import prepare

NUM, INPUTS, NOISE = 120, 90, 0.5


def linear(likelihood=None, num=NUM, inputs=INPUTS) -> tuple[pb.BNN, torch.Tensor, torch.Tensor]:
    """Rows of which a linear model uses up three quarters: it is off by √3 times the noise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num, inputs, generator=generator, dtype=torch.float64)
    y = x @ torch.randn(inputs, 1, generator=generator, dtype=torch.float64)
    y = y + NOISE * torch.randn(num, 1, generator=generator, dtype=torch.float64)
    with seeded(0):
        net = torch.nn.Linear(inputs, 1, bias=False).double()
    prior = pb.priors.IIDPrior(dist.Normal(0.0, 1.0))
    return pb.BNN(net, prior, likelihood or pb.likelihoods.HomoskedasticGaussian(NOISE)), x, y


def told(method, model, x, y, **options) -> tuple[pb.Posterior, list[str]]:
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        posterior = method.fit(model, x, y, **options)
    return posterior, [note for note in posterior.meta["warnings"] if note.startswith(left_out.SAID)]


SEARCH = {"num_steps": 150, "lr": 0.1, "compile": False}
SHORT = pb.Laplace(map=pb.MAP(**SEARCH), importance=False, compile=False)
NARROW = {
    "SWAG": pb.SWAG(scale=0.01, init_steps=150, init_lr=0.1, num_steps=100, lr=1e-3, compile=False),
    "members that agree": pb.DeepEnsemble(num_members=3, **SEARCH),
    "damped Laplace": pb.Laplace(damping=1e4, map=pb.MAP(**SEARCH), compile=False),
    "little dropout": pb.MCDropout(p=1e-4, **SEARCH),
}


@pytest.mark.parametrize("name", [pytest.param("SWAG", marks=pytest.mark.slow), *list(NARROW)[1:]])
def test_draws_that_are_too_narrow_are_told(name):
    posterior, notes = told(NARROW[name], *linear())
    assert len(notes) == 1 and notes[0].startswith(posterior.meta["left_out"])
    # of errors nearly twice as wide as the intervals are made for
    assert float(notes[0].split("hold ")[1].split("%")[0]) < 70


def test_the_posterior_itself_holds_what_is_left_out_as_a_refit_without_it_would():
    model, x, y = linear()
    posterior, notes = told(SHORT, model, x, y)
    draws = left_out._spread_of(prepare(model, x, y, points="held"), posterior)
    rows = left_out._rows(model, draws)
    rest = left_to_others(rows)[:, 0, 0]
    precision = torch.eye(INPUTS).double() + x.T @ x / NOISE**2
    without = precision - x[0, :, None] * x[0] / NOISE**2
    mean = torch.linalg.solve(without, (x.T @ y - x[0, :, None] * y[0]) / NOISE**2)
    seen = (y - x @ torch.linalg.solve(precision, x.T @ y / NOISE**2))[:, 0]
    torch.testing.assert_close(seen[0] / rest[0], (y[0] - x[0] @ mean)[0], rtol=1e-6, atol=0)
    held = ((seen / rest).abs() < 1.645 * NOISE / rest.sqrt()).double().mean()
    assert not notes and float(held) > 0.8
    assert abs(left_out._checked(prepare(model, x, y, points="held"), posterior)[0] - float(held)) < 0.03
    # a linear model answers to other targets as it says
    assert left_out._bend(model, draws, rows) == pytest.approx(1.0, abs=0.01)


def test_a_part_of_many_rows_stands_for_all():
    """Of 2,000 rows with 3 weights the leverage is that of 2,000, not of the 1,000 that are looked at."""
    model, x, y = linear(num=2000, inputs=3)
    posterior, notes = told(SHORT, model, x, y)
    draws = left_out._spread_of(prepare(model, x, y, points="held"), posterior)
    rest = left_to_others(left_out._rows(model, draws), draws.share)
    assert float((1 - rest).mean()) * 2000 == pytest.approx(3, rel=0.1)
    assert not notes and "of 1,000 of 2,000 training values" in posterior.meta["left_out"]


class Nameless(pb.likelihoods.Poisson):
    """A likelihood whose Fisher information nobody wrote down."""

    fisher_root = pb.likelihoods.Likelihood.fisher_root


class Spreading(pb.likelihoods.StudentT):
    """Another, whose spread is found with the weights."""

    fisher_root = pb.likelihoods.Likelihood.fisher_root


def test_what_cannot_be_checked_is_told():
    model, x, y = linear(Nameless(), num=60, inputs=2)
    method = pb.DeepEnsemble(num_members=2, num_steps=20, compile=False)
    posterior, notes = told(method, model, x, y.abs().round())
    assert notes == [
        "90 % intervals were not checked: Nameless has no fisher_root, which tells what each row says"
    ]
    posterior, notes = told(method, *linear(num=20, inputs=2))
    assert not notes and "20 rows are too few" in posterior.meta["left_out"]
    # a point: its intervals, and where nothing tells whether the spread follows the data, that
    model, x, y = linear(Spreading(scale="learned"), num=60, inputs=50)
    point = pb.MAP(num_steps=20, polish_steps=0, compile=False)
    posterior, notes = told(point, model, x, y)
    assert not notes and "not checked: a point has no draws" in posterior.meta["left_out"]
    found = [
        note for note in posterior.meta["warnings"] if "was not checked: Spreading has no fisher" in note
    ]
    assert len(found) == 1 and found[0].startswith("the noise is found with 50 weights from 60 values")
    posterior, _ = told(point, *linear(Spreading(scale="learned"), num=60, inputs=5))
    assert not any("not checked" in note for note in posterior.meta["warnings"])


@pytest.mark.slow
def test_healthy_posteriors_raise_no_alarm():
    """Laplace's approximation of nets with the noise that the data have, 60 to 200 rows each: one of 40 at most."""
    alarms = 0
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        num = 60 + 35 * (seed % 5)
        x = torch.randn(num, 6, generator=generator)
        y = x[:, :1] + torch.sin(2 * x[:, 1:2]) + NOISE * torch.randn(num, 1, generator=generator)
        net = pb.networks.mlp(6, (15,), seed=seed)
        model = pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(NOISE))
        method = pb.Laplace(map=pb.MAP(num_steps=500, compile=False), importance=False, compile=False)
        alarms += bool(told(method, model, x, y, num_draws=200)[1])
    assert alarms <= 1


@pytest.mark.parametrize("apart", [3.0, 0.3])
def test_probabilities_that_are_too_modest_are_told(apart):
    """60 rows of five classes that can be told apart, or can't: judged by 300 new ones."""
    generator = torch.Generator().manual_seed(1)
    centres, y = apart * torch.randn(5, 6, generator=generator), torch.arange(360) % 5
    x = centres[y] + torch.randn(360, 6, generator=generator)
    model = pb.BNN(pb.networks.mlp(6, (8,), 5, seed=0), pb.priors.FanInNormal(), pb.likelihoods.Categorical())
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        posterior = SHORT.fit(model, x[:60], y[:60], num_draws=100)
    probs = posterior.predict(x[60:]).probs
    modest = float((probs.argmax(-1) == y[60:]).double().mean() - probs.amax(-1).mean())
    notes = [note for note in posterior.meta["warnings"] if "too modest" in note]
    assert posterior.meta["left_out"].startswith("of 60 training labels that are left out")
    assert (modest > left_out.MODEST) == bool(notes) == (apart == 3.0), modest
