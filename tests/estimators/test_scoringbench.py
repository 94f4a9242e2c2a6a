"""The regressor as a model of ScoringBench: what it hands over, and the protocol that the script repeats."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

import pyrobnn as pb

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import benchmark_scoringbench as board  # noqa: E402

NAMES = [
    "scoringbench" + part for part in ("", ".univariate", ".univariate.wrappers", ".univariate.wrappers.base")
]
OURS = "pyrobnn.estimators.scoringbench"


@pytest.fixture
def wrapper(monkeypatch):
    """The module with the board's two classes stood in for; gone afterwards."""
    for name in [*NAMES, OURS]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    board.stand_in()
    yield importlib.import_module(OURS)
    for name in [*NAMES, OURS]:
        sys.modules.pop(name, None)


def test_outside_of_a_checkout_it_says_what_is_missing(monkeypatch):
    monkeypatch.delitem(sys.modules, OURS, raising=False)
    monkeypatch.setitem(sys.modules, "scoringbench", None)
    with pytest.raises(ImportError, match="checkout of ScoringBench .* PYTHONPATH"):
        importlib.import_module(OURS)


@pytest.mark.filterwarnings("ignore::UserWarning")  # short fits say that they are short
def test_it_hands_over_the_quantiles_of_the_mixture(wrapper):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 2))
    y = 100 + 5 * X[:, 0] + rng.normal(size=40)
    X[3, 1], y[5] = np.inf, np.nan
    net = pb.BNNRegressor(
        pb.MAP(num_steps=300, compile=False), hidden=(), missing="impute", random_state=0, likelihood=None
    )
    model = wrapper.PyrobnnWrapper(net).fit(X, y)
    found = model.predict_distribution(X)
    assert found.q.shape == (40, len(wrapper.LEVELS)) and (np.diff(found.q, axis=1) >= 0).all()
    assert model._y_train_range == (np.nanmin(y), np.nanmax(y))
    assert np.allclose(found.mean, model.predict(X), rtol=1e-5)
    half = found.q[:, list(wrapper.LEVELS).index(0.5)]
    assert np.allclose(half, found.mean, atol=1e-3)  # one normal
    assert abs(np.delete(found.mean - y, 5)).mean() < 1.5
    with pytest.raises(ValueError, match="no finite value"):
        model.fit(X, np.full(40, np.nan))


def test_the_scores_are_those_of_a_normal(wrapper):
    rng, levels = np.random.default_rng(0), wrapper.LEVELS
    mean, y = rng.normal(size=50), 1.5 * rng.normal(size=50)
    q = norm.ppf(levels, mean[:, None], 0.7)
    z = (y - mean) / 0.7
    exact = 0.7 * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - np.pi**-0.5)  # Gneiting and Raftery (2007)
    assert np.allclose(board.crps(q, levels, y), exact, atol=1e-3 * 0.7)
    found = board.score(board.Quantiles(q, levels, mean), y)
    assert found["coverage_90"] == pytest.approx(np.mean(abs(z) < norm.ppf(0.95)))
    assert found["rmse"] == pytest.approx(np.mean((y - mean) ** 2) ** 0.5)


def test_the_folds_are_capped_as_the_boards():
    x = np.zeros((5000, 1))
    parts = list(board.folds(x, x[:, 0]))
    assert [(len(train), len(test)) for train, test in parts] == [(2400, 600)] * 5
    assert all(not set(train) & set(test) for train, test in parts)
