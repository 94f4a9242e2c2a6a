"""The regressor for skpro: skpro's own checks, and its scores by what they should be."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

import pyrobnn as pb

pytest.importorskip("skpro")

from skpro.metrics import CRPS, LogLoss
from skpro.utils import check_estimator

from pyrobnn.estimators.skpro import BNNProbaRegressor
from pyrobnn.studies.uci.scores import mixture_crps

pytestmark = pytest.mark.filterwarnings("ignore")  # of skpro, and short fits say that they are short


def rows(outputs=1):
    rng = np.random.default_rng(0)
    X = pd.DataFrame(rng.normal(size=(40, 2)), columns=["a", "b"], index=range(7, 47))
    y = X["a"].to_numpy()[:, None] * np.arange(1, outputs + 1) + 0.3 * rng.normal(size=(40, outputs))
    return X, pd.DataFrame(y, columns=[f"y{each}" for each in range(outputs)], index=X.index)


def regressor(**options):
    method = pb.Laplace(num_steps=200, compile=False)
    return pb.BNNRegressor(method, hidden=(3,), num_draws=200, random_state=0, **options)


@pytest.mark.slow
def test_skpro_finds_nothing_wrong():
    state = np.random.get_state()  # skpro draws from it
    found = check_estimator(BNNProbaRegressor, verbose=False)
    np.random.set_state(state)
    assert len(found) > 20
    assert {name: result for name, result in found.items() if result != "PASSED"} == {}


def test_scores_are_those_of_the_mixture_of_draws():
    X, y = rows()
    model = BNNProbaRegressor(regressor()).fit(X, y)
    found, p = model.predict_proba(X), model.estimator_.posterior_.predict(torch.tensor(X.to_numpy()))
    target = torch.tensor(y.to_numpy())
    assert LogLoss()(y, found) == pytest.approx(-p.log_prob(target).mean().item(), abs=1e-9)
    loc, scale = (each.expand_as(p.loc).flatten(0, 1)[..., 0] for each in (p.loc, p.scale))
    assert CRPS()(y, found) == pytest.approx(mixture_crps(loc, scale, target[:, 0]).mean().item(), rel=1e-6)
    part = found.iloc[[3, 5]]
    assert CRPS()(y.iloc[[3, 5]], part) == pytest.approx(
        mixture_crps(loc[:, [3, 5]], scale[:, [3, 5]], target[[3, 5], 0]).mean().item(), rel=1e-6
    )
    lower = model.predict_quantiles(X, [0.05]).to_numpy()[:, 0]
    np.testing.assert_allclose(lower, p.quantile(0.05)[:, 0], atol=1e-5)


def test_several_outputs_keep_their_names_and_rows():
    X, y = rows(outputs=2)
    model = BNNProbaRegressor(regressor()).fit(X, y)
    found = model.predict_proba(X)
    assert (list(found.columns), list(found.index)) == (["y0", "y1"], list(X.index))
    np.testing.assert_allclose(found.mean(), model.predict(X), atol=0.1)
    assert (found.mean() - y).abs().mean().max() < 0.5


def test_a_response_that_is_not_normal_is_refused():
    X, y = rows()
    with pytest.raises(pb.Refused, match="mixture of normals.*use pyrobnn.BNNRegressor"):
        BNNProbaRegressor(regressor(likelihood=pb.likelihoods.StudentT(4.0, 0.3))).fit(X, y)
