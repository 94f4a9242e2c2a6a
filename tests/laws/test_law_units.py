"""The law of units: measured in other units, the same data give the same answer in those units, for every method.

The data lie on a grid of 1/64 and there are 32 of them, the units change by powers of two and whole offsets: their
mean and variance are exact in float64, so the standardised data, and with them every draw, must agree to the last bit.
An offset of 2²⁷ ≈ 1e8 has no room for the data in float32.
"""

from __future__ import annotations

import functools
import math
import warnings

import pyro.distributions as dist
import pytest
import torch
from models import normal_prior, toy_net
from test_contract import FEW, METHODS, num_draws

import pyrobnn as pb
from pyrobnn.data import Dataset, Standardizer
from pyrobnn.diagnostics import score
from pyrobnn.posterior.datatree import to_datatree
from pyrobnn.report.results import compare_rows

# runs this short are told to be too short, and heads without a prior to follow 32 rows, as they should
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(of the draws|transitions diverged)|the centre is not a mode|the weights use up"
)

A = 8.0
B = 2.0**27
C = 0.25
D = -(2.0**27)
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randint(-128, 128, (32, 2), generator=GENERATOR).double() / 64
Y = torch.stack([X[:, 0].sin(), 100 * X[:, 1].cos()], 1).mul(64).round() / 64
CLASSES = (X[:, 0] > -0.5).long() + (X[:, 0] > 0.5).long()
LIKELIHOODS = {
    "inferred": lambda: pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0)),
    "heteroskedastic": lambda: pb.likelihoods.HeteroskedasticGaussian(),
    "classes": lambda: pb.likelihoods.Categorical(),
}


UNITS = {"here": (X, Y), "there": (C * X + D, A * Y + B)}
# fast: the ways to fit with a noise that is inferred, and one of each other likelihood
FAST = FEW - {"SGLD"}


def each(*kinds: str) -> list:
    def marks(kind: str, name: str) -> list:
        return [] if name == "MAP" or (kind == "inferred" and name in FAST) else [pytest.mark.slow]

    return [pytest.param(kind, name, marks=marks(kind, name)) for kind in kinds for name in METHODS]


@functools.cache
def fit(name: str, kind: str, units: str) -> pb.Posterior:
    x, y = UNITS[units]
    y = CLASSES if kind == "classes" else y
    data = Dataset(x, y, "d", "classification" if kind == "classes" else "regression")
    net = toy_net(num_inputs=2, out={"classes": 3, "heteroskedastic": 4}.get(kind, 2))
    model = pb.BNN(net, normal_prior(), LIKELIHOODS[kind](), standardizer=Standardizer.fit(data))
    with warnings.catch_warnings():
        if kind == "heteroskedastic":  # so few points are soon known by heart, which a fit says
            warnings.filterwarnings("ignore", ".*left out")
        return METHODS[name].fit(model, x, y, seed=3, **num_draws(name))


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to seven digits of the spread of y (float32 has no more), however far from zero it lies."""
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected.double(), rtol=0, atol=1e-6 * A * 100)


@pytest.mark.covering(2)
@pytest.mark.parametrize(("kind", "name"), each(*LIKELIHOODS))
def test_the_same_draws_and_the_prediction_in_the_units_of_the_data(kind, name):
    here, there = (fit(name, kind, units) for units in UNITS)
    for site, draws in here.draws.items():
        assert torch.equal(there.draws[site], draws), site
    assert there.log_evidence == here.log_evidence
    p, q = (fit(name, kind, units).predict(x) for units, (x, _) in UNITS.items())
    assert torch.equal(q.standard_f, p.standard_f)
    if kind == "classes":
        assert torch.equal(q.probs, p.probs) and torch.equal(q.f, p.f)
        return
    close(q.mean, A * p.mean + B)
    close(q.f, A * p.f + B)
    close(q.quantile(0.9), A * p.quantile(0.9) + B)
    close(q.sample(seed=1), A * p.sample(seed=1) + B)
    close(q.aleatoric_var.sqrt(), A * p.aleatoric_var.sqrt())
    close(q.epistemic_var.sqrt(), A * p.epistemic_var.sqrt())
    moved = p.log_prob(Y) - 2 * math.log(A)
    torch.testing.assert_close(q.log_prob(A * Y + B), moved, rtol=1e-5, atol=1e-3)
    # the functions are those whose mean is the mean, in the units of y and without the noise head
    assert p.f.shape == (*p.standard_f.shape[:3], 2)
    assert torch.equal(there.function(UNITS["there"][0]), q.f)
    if here.moments is None:
        close(p.f.mean((0, 1)), p.mean)
        close(p.f.var((0, 1), correction=0).sqrt(), p.epistemic_var.sqrt())


@functools.cache
def trees_of(name, kind):
    """In either units, with all that the tests of trees read."""
    return [
        to_datatree(fit(name, kind, units), x, y, probe_x=x[:4], num_prior_draws=5, test=(x, y))
        for units, (x, y) in UNITS.items()
    ]


@pytest.mark.usefixtures("few_moves")
@pytest.mark.covering(1)
@pytest.mark.parametrize(("kind", "name"), each("inferred", "heteroskedastic"))
def test_scores_are_in_the_units_of_one_output_or_in_none(kind, name):
    trees = trees_of(name, kind)
    p, q = (score(tree) for tree in trees)
    assert "rmse" not in p and "crps" not in p  # no number of two units
    assert all(
        name in p
        for name in ("rmse[0]", "rmse[1]", "rmse_standardized", "crps_standardized", "width_90[1]")
    )
    for there in q.values():
        here = p[there.name].value
        if there.name == "log_prob":
            here -= 2 * math.log(A)
        elif there.name.endswith("]") and "coverage" not in there.name:
            here *= A
        assert there.value == pytest.approx(here, rel=1e-4, abs=1e-4), there.name
    sd = Y.std(0, correction=0)
    expected = sum(p[f"rmse[{output}]"].value / sd[output].item() for output in range(2)) / 2
    assert p["rmse_standardized"].value == pytest.approx(expected)
    first, second = (compare_rows({"a": tree})[0].values for tree in trees)
    for column in ("aleatoric_standardized", "epistemic_standardized"):
        assert second[column] == pytest.approx(first[column], rel=1e-4, abs=1e-6)


@pytest.mark.usefixtures("few_moves", "few_rounds")
@pytest.mark.covering(1)
@pytest.mark.parametrize(("kind", "name"), each("inferred", "heteroskedastic"))
def test_trees_hold_functions_in_the_units_of_the_data(kind, name):
    trees = trees_of(name, kind)
    for group in ("function", "prior_predictive"):
        p, q = (torch.tensor(tree[group]["f"].values) for tree in trees)
        close(q, A * p + B)
