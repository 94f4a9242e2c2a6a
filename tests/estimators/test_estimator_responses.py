"""The estimators with responses other than Gaussian noise and plain classes."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.base import clone

import pyrobnn as pb
from pyrobnn import likelihoods as lk

OPTIONS = {"hidden": (), "compile": False, "random_state": 0}
RNG = np.random.default_rng(0)
X = np.linspace(-1, 1, 120)[:, None]


def regressor(likelihood):
    return pb.BNNRegressor(
        pb.Laplace(num_steps=150, compile=False), likelihood=likelihood, **OPTIONS
    )


@pytest.mark.slow
def test_outliers_under_student_t():
    y = 3 * X[:, 0] + 0.05 * RNG.normal(size=120)
    y[::12] += 20.0
    model = clone(regressor(lk.StudentT(3.0, "learned"))).fit(X, y)
    assert abs(model.predict(X) - 3 * X[:, 0]).max() < 0.3
    low, high = model.predict_interval(X, 0.5).T
    assert ((low < y) & (y < high)).mean() > 0.3


def test_counts_with_an_exposure_column():
    exposure = np.exp(3 * RNG.random(120))
    y = RNG.poisson(exposure * np.exp(1 + X[:, 0]))
    x = np.column_stack([X, exposure])
    model = regressor(lk.Poisson(exposure=-1)).fit(x, y)
    once = np.column_stack([X, np.ones(120)])
    np.testing.assert_allclose(model.predict(once), np.exp(1 + X[:, 0]), rtol=0.15)
    quantiles = model.predict_quantiles(x, (0.05, 0.95))
    assert quantiles.shape == (120, 2) and (quantiles == quantiles.round()).all()
    assert ((quantiles[:, 0] <= y) & (y <= quantiles[:, 1])).mean() > 0.85


def test_survival_times_as_scikit_survival_has_them():
    time = np.exp(1 + X[:, 0]) * RNG.weibull(2.0, 120)
    event = time < 4.0
    y = np.array(list(zip(event, time.clip(max=4.0))), dtype=[("event", "?"), ("time", "<f8")])
    model = regressor(lk.Weibull("learned")).fit(X, y)
    assert model.n_outputs_ == 1 and model.predict(X).shape == (120,)
    median = model.predict_quantiles(X, (0.5,))[:, 0]
    np.testing.assert_allclose(median, np.exp(1 + X[:, 0]) * np.log(2) ** 0.5, rtol=0.25)


def test_ordered_classes():
    y = np.digitize(2 * X[:, 0] + RNG.logistic(size=120), [-1.0, 1.0])
    model = pb.BNNClassifier(
        pb.Laplace(num_steps=150, compile=False), likelihood=lk.Ordinal(3), **OPTIONS
    ).fit(X, y)
    probs = model.predict_proba(X)
    assert probs.shape == (120, 3)
    np.testing.assert_allclose(probs.sum(1), 1, rtol=1e-6)
    assert (np.diff(probs @ np.arange(3)) > 0).all()


@pytest.mark.parametrize("likelihood", [lk.Categorical(), lk.Ordinal(3), lk.Poisson])
def test_what_is_no_response_of_numbers_is_refused(likelihood):
    with pytest.raises(TypeError, match="for regression, got"):
        regressor(likelihood).fit(X, X[:, 0])
