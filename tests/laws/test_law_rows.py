"""The law of rows: a verdict does not change when exchangeable rows are written down in another order."""

from __future__ import annotations

import warnings

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from helpers import seeded
from known_posteriors import linear_tree
from test_law_likelihood import CASES, data, linear

import pyrobnn as pb
from pyrobnn.diagnostics import diagnose
from pyrobnn.diagnostics.patterns import merged

NOISE = 0.5
NUM = 240
#: name → what is added to a line with normal noise, of x and noise
TRUTHS = {
    "healthy": lambda x, noise: noise,
    "by region": lambda x, noise: 2.0 * np.exp(2.5 * x) * noise,
    "bent": lambda x, noise: 1.5 * x**2 + noise,
    "narrow": lambda x, noise: 4.0 * noise,
}
#: how the rows come: as drawn, backwards, shuffled, sorted by their input, and by their outcomes within its ties
ORDERS = {
    "backwards": lambda x, y: np.arange(len(y))[::-1],
    "shuffled": lambda x, y: np.random.default_rng(5).permutation(len(y)),
    "by outcome": lambda x, y: np.argsort(y),
    "by outcome in ties": lambda x, y: np.lexsort((y, x)),
}


def rows(truth, levels, seed):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1.0, 1.0, NUM)
    x = x if levels is None else np.round((levels - 1) * (x + 1.0) / 2.0) * 2.0 / (levels - 1) - 1.0
    return x, 0.5 + x + TRUTHS[truth](x, NOISE * rng.normal(size=NUM))


def judged(x, y, test, order):
    """The tree of the exact posterior of a line, its rows in an order."""
    design = np.stack([x, np.ones(len(x))], 1)
    covariance = np.linalg.inv(design.T @ design / NOISE**2 + np.eye(2))
    exact = np.random.default_rng(2).multivariate_normal(
        covariance @ design.T @ y / NOISE**2, covariance, (4, 250)
    )
    with seeded(0):
        net = torch.nn.Linear(1, 1)
    model = pb.BNN(
        net, pb.priors.IIDPrior(dist.Normal(0.0, 1.0)), pb.likelihoods.HomoskedasticGaussian(NOISE)
    )
    parts = [
        (part[0][where], part[1][where])
        for part, where in (((x, y), order(x, y)), (test, order(*test)))
    ]
    data = [torch.tensor(each[:, None], dtype=torch.float32) for part in parts for each in part]
    return linear_tree(model, data, exact)


def statuses(verdict):
    """What each check says that says anything; of rows sorted by outcome there is no order to be judged."""
    found = {check.name: check.status for check in verdict.checks if check.status != "info"}
    return {
        name: status for name, status in found.items() if (name, status) != ("row_order", "pass")
    }


#: continuous inputs and inputs of three values
FAST = {("healthy", 3), ("bent", None)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("truth", "levels"),
    [
        pytest.param(truth, levels, marks=[] if (truth, levels) in FAST else [pytest.mark.slow])
        for truth in TRUTHS
        for levels in (None, 3)
    ],
)
def test_a_verdict_is_that_of_the_rows_in_any_order(truth, levels):
    data = rows(truth, levels, 0)
    test = rows(truth, levels, 1)
    before = diagnose(judged(*data, test, lambda x, y: np.arange(len(y))))
    assert (before.status == "pass") == (truth == "healthy"), statuses(before)
    for name, order in ORDERS.items():
        after = diagnose(judged(*data, test, order))
        assert [each.name for each in after.failed[:1]] == [
            each.name for each in before.failed[:1]
        ], name
        assert statuses(after) == statuses(before), (
            name,
            [str(c) for c in after.checks if c.status != "pass"],
        )


def test_values_that_differ_by_rounding_alone_are_the_same():
    """The mean of an input of three values was sorted by how its sum had been rounded: by the places of the rows."""
    levels = np.repeat([-1.0, 1e-3, 2.0, 1e9], 50)
    noisy = levels * (1.0 + 1e-8 * np.random.default_rng(0).normal(size=200))
    assert len(np.unique(merged(noisy)[:150])) == 3 and np.all(
        np.abs(merged(noisy) - levels) <= 1e-6 * np.abs(levels)
    )
    apart = np.random.default_rng(1).normal(size=200)
    np.testing.assert_array_equal(merged(apart), apart)


#: of full batches, which see the same data whatever their order
METHODS = {
    "laplace": pb.Laplace(num_steps=300, compile=False),
    "map": pb.MAP(num_steps=300, compile=False),
    "svi": pb.SVI(num_steps=1500, compile=False),
    "nuts": pb.NUTS(num_chains=4, num_warmup=200, compile=False),
}
FITS = [("laplace", name) for name in CASES] + [
    (method, "gaussian") for method in METHODS if method != "laplace"
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "name"), FITS)
def test_a_fit_to_rows_in_another_order_has_the_same_verdict(method, name):
    x, y = data(name, num=80)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    found = []
    for rows_of in (torch.arange(len(x)), order):
        model = linear(name, CASES[name].inferred())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            posterior = METHODS[method].fit(model, x[rows_of], y[rows_of], seed=0)
            found.append(diagnose(posterior.to_datatree(x[rows_of], y[rows_of])))
    before, after = found
    assert after.status == before.status, (statuses(before), statuses(after))
    assert after.lines == before.lines, (statuses(before), statuses(after))
