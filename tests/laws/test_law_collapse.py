"""A fit that has found no function says so."""

from __future__ import annotations

import math
import warnings

import pyro.distributions as dist
import pytest
import torch
from helpers import seeded
from torch import nn

import pyrobnn as pb
from pyrobnn.inference.fitting.batches import even_rows
from pyrobnn.inference.fitting.collapse import (
    _CONSTANT,
    _log_density_of_shares,
    _relative_spread,
    _spread_of_probs,
)
from pyrobnn.model.likelihoods.base import Likelihood

X = torch.randn(120, 4, generator=torch.Generator().manual_seed(0))
Y = 2 * X[:, :1] - X[:, 1:2]
LABELS = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()
FINISHED = {"num_steps": 150, "lr": 0.02, "compile": False}


def net(width: int) -> nn.Module:
    with seeded(0):
        return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, width))


def model(labels: bool, scale: float) -> pb.BNN:
    likelihood = pb.likelihoods.HomoskedasticGaussian(0.5)
    if labels:
        likelihood = pb.likelihoods.Categorical()
    return pb.BNN(net(3 if labels else 1), pb.priors.IIDPrior(dist.Normal(0.0, scale)), likelihood)


def codes(posterior: pb.Posterior) -> set[str]:
    return {finding["code"] for finding in posterior.meta["findings"]}


METHODS = {"map": pb.MAP(**FINISHED), "svi": pb.SVI(**FINISHED)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("name", METHODS)
def test_a_prior_that_makes_the_function_constant_is_told(name, labels):
    y = LABELS if labels else Y
    num_draws = None if name == "map" else 30
    narrow = METHODS[name].fit(model(labels, 1e-4), X, y, num_draws=num_draws)
    if "search_unfinished" not in codes(narrow):
        assert codes(narrow) & {"constant_function", "no_better_than_shares"}
        assert any("IIDPrior(Normal(0, 1))" in text for text in narrow.meta["warnings"])
    else:
        assert name == "svi"
    wide = METHODS[name].fit(model(labels, 1.0), X, y, num_draws=num_draws)
    assert not codes(wide) & {"constant_function", "no_better_than_shares"}


def test_the_warning_is_raised():
    with pytest.warns(UserWarning, match="the fitted function is constant.*pb.posthoc"):
        METHODS["map"].fit(model(True, 1e-4), X, LABELS)


def test_worse_than_the_shares_of_the_classes_is_told():
    # labels that the inputs do not tell, and weights that stay where they begin
    y = torch.randint(3, (120,), generator=torch.Generator().manual_seed(5))
    untold = model(True, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = pb.MLE(num_steps=150, lr=1e-9, compile=False).fit(untold, X, y)
    assert "no_better_than_shares" in codes(posterior)


def test_nothing_is_said_of_few_rows_or_of_equal_inputs():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        few = METHODS["map"].fit(model(True, 1e-4), X[:10], LABELS[:10])
        equal = METHODS["map"].fit(model(True, 1e-4), torch.ones_like(X), LABELS)
    for posterior in (few, equal):
        assert not codes(posterior) & {"constant_function", "no_better_than_shares"}


class WithoutMean(Likelihood):
    """A log-normal law that does not know its mean."""

    task = "skewed"

    def distribution(self, f, params):
        normal = dist.Normal(f, 0.5)
        return dist.TransformedDistribution(normal, [dist.transforms.ExpTransform()]).to_event(1)


def test_a_fit_whose_law_has_no_mean_is_kept():
    skewed = pb.BNN(net(1), pb.priors.IIDPrior(dist.Normal(0.0, 1.0)), WithoutMean())
    posterior = METHODS["map"].fit(skewed, X, Y.exp())
    with pytest.raises(NotImplementedError):
        _ = posterior.predict(X).mean


def test_an_outlier_does_not_make_a_function_constant():
    y = Y.clone()
    y[7] = 1e6
    assert _relative_spread(Y, y) == pytest.approx(_relative_spread(Y, Y), rel=0.5)
    assert _relative_spread(1e-4 * Y, y) < _CONSTANT


def test_rows_of_very_many_are_none_beyond_the_end():
    num_rows = 2**24 + 4
    rows = even_rows(num_rows, 200)
    assert rows[0] == 0 and rows[-1] == num_rows - 1 and len(rows) == 200
    assert even_rows(3, 200).tolist() == [0, 1, 2]


def test_many_classes_that_vary_by_a_half_are_not_constant():
    shares = torch.full((1000,), 1e-3)
    odd = 1e-3 * (1 + 0.5 * (-1.0) ** torch.arange(1000))
    varying = torch.stack([odd, 2 * shares - odd]).repeat(50, 1)
    assert float(varying.std(0).max()) < _CONSTANT < _spread_of_probs(varying)
    assert _spread_of_probs(shares.expand(100, -1)) < _CONSTANT


def test_counts_that_are_mostly_zero_have_the_spread_of_their_sd():
    counts = (X[:, :1] > 1.5).long()
    assert _relative_spread(counts, counts) == pytest.approx(1.0)


def test_the_density_of_shares_is_minus_their_entropy():
    labels = torch.tensor([0, 0, 0, 2])
    probs = torch.tensor([0.75, 0.75, 0.75, 0.25]).double()
    assert _log_density_of_shares(labels, labels) == pytest.approx(float(probs.log().mean()))


def test_the_shares_are_those_of_all_labels():
    # 200 of 20,000 rows hold a fifth of a thousand classes, whose shares among themselves are five times as large
    labels = torch.arange(20_000) % 1000
    rows = torch.linspace(0, 19_999, 200).round().long()
    assert _log_density_of_shares(labels, labels[rows]) == pytest.approx(-math.log(1000))
