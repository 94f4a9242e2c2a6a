"""A Pyro program as an estimator: scikit-learn's own checks, exact predictions of a line, pipelines and folds."""

from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator

import pyrobnn as pb


def line(x, y=None):
    weight = pyro.sample("weight", dist.Normal(torch.zeros(x.shape[1]), 3.0).to_event(1))
    bias = pyro.sample("bias", dist.Normal(0.0, 3.0))
    with pyro.plate("rows", len(x)):
        return pyro.sample("y", dist.Normal(x @ weight + bias, 0.5), obs=y)


def softmax(x, y=None):
    weight = pyro.sample("weight", dist.Normal(torch.zeros(x.shape[1], 4), 3.0).to_event(2))
    bias = pyro.sample("bias", dist.Normal(torch.zeros(4), 3.0).to_event(1))
    with pyro.plate("rows", len(x)):
        return pyro.sample("y", dist.Categorical(logits=x @ weight + bias), obs=y)


def logistic(x, y=None):
    weight = pyro.sample("weight", dist.Normal(torch.zeros(x.shape[1]), 3.0).to_event(1))
    pyro.sample("y", dist.Bernoulli(logits=x @ weight).to_event(1), obs=y)


SHORT = pb.MAP(num_steps=30, lr=0.3, polish_steps=0, compile=False)
SEARCH = pb.MAP(num_steps=60, lr=0.3, compile=False)
EXACT = pb.Laplace(curvature="hessian", map=SEARCH, compile=False)


ESTIMATORS = [
    pb.PyroRegressor(line, SHORT, random_state=0),
    pb.PyroClassifier(softmax, SHORT, random_state=0),
]
# the identifiers of parametrize_with_checks hold a function's address, which differs between workers
CHECKS = [
    pytest.param(estimator, check, id=f"{type(estimator).__name__}-{index}", marks=marks)
    for estimator, marks in zip(ESTIMATORS, ((), pytest.mark.slow), strict=True)
    for index, (_, check) in enumerate(estimator_checks_generator(estimator))
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("estimator", "check"), CHECKS)
def test_scikit_learns_own_checks(estimator, check):
    state = (
        np.random.get_state()
    )  # some of the checks draw from NumPy's global generator themselves
    check(estimator)
    np.random.set_state(state)


def rows(num=60):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(num, 2))
    return X, X @ [1.0, -2.0] + 0.5 + 0.5 * rng.normal(size=num)


def test_predictions_are_those_of_the_conjugate_posterior():
    X, y = rows()
    model = pb.PyroRegressor(line, EXACT, random_state=0).fit(X, y)
    design = np.column_stack([X, np.ones(len(X))])
    cov = np.linalg.inv(design.T @ design / 0.25 + np.eye(3) / 9)
    at = np.column_stack([X[:5], np.ones(5)])
    exact = at @ cov @ design.T @ y / 0.25
    sd = np.sqrt(0.25 + ((at @ cov) * at).sum(1))
    mean, std = model.predict(X[:5], return_std=True)
    np.testing.assert_allclose(
        mean, exact, atol=0.02
    )  # 5 sd of the function's 0.13 over sqrt(1000) draws
    np.testing.assert_allclose(std, sd, rtol=0.02)
    interval = model.predict_interval(X[:5], level=0.9)
    np.testing.assert_allclose(interval[:, 1] - interval[:, 0], 2 * 1.645 * sd, rtol=0.1)
    assert model.verdict_.draws in ("pass", "warn") and model.score(X, y) > 0.9
    assert model.verdict_ is model.verdict_


def test_two_classes_by_a_bernoulli_and_labels_of_any_kind():
    X, _ = rows()
    labels = np.where(X[:, 0] > 0, "yes", "no")
    model = pb.PyroClassifier(logistic, SHORT, random_state=0).fit(X, labels)
    weight = model.posterior_.draws["weight"][0, 0].numpy()
    expected = 1 / (1 + np.exp(-X @ weight))
    np.testing.assert_allclose(model.predict_proba(X)[:, 1], expected, rtol=1e-4)
    assert model.score(X, labels) > 0.9 and set(model.predict(X)) == {"yes", "no"}


def test_pipelines_folds_and_clones():
    X, y = load_iris(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), pb.PyroClassifier(softmax, SHORT, random_state=0))
    assert cross_val_score(pipeline, X, y, cv=3).mean() > 0.9
    assert clone(pipeline[-1]).get_params()["program"] is softmax


def two(x, y=None):
    line(x, y)
    pyro.sample("other", dist.Normal(0.0, 1.0), obs=torch.tensor(1.0))


def by_y(x, y=None):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", 60):
        pyro.sample("y", dist.Normal(slope, 1.0), obs=y)


def test_what_to_predict_is_named_and_follows_x():
    X, y = rows()
    with pytest.raises(ValueError, match="'site' must name"):
        pb.PyroRegressor(two, SHORT, random_state=0).fit(X, y)
    assert pb.PyroRegressor(two, SHORT, site="y", random_state=0).fit(X, y).predict(X).shape == (
        60,
    )
    with pytest.raises(ValueError, match="take their number from x"):
        pb.PyroRegressor(by_y, SHORT, random_state=0).fit(X, y).predict(X[:7])


def test_what_is_no_program_method_or_class_is_an_error():
    X, y = rows()
    for estimator in (
        pb.PyroRegressor(None),
        pb.PyroRegressor(two, "nuts", site="y"),
        pb.PyroRegressor(two, pb.MAP),
    ):
        with pytest.raises(TypeError, match="a Pyro program fn|a method such as"):
            estimator.fit(X, y)
    with pytest.raises(TypeError, match="'y' is Normal, which has no classes"):
        pb.PyroClassifier(two, SHORT, site="y", random_state=0).fit(X, y > y.mean()).predict_proba(
            X
        )
