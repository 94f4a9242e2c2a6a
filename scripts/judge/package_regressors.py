"""Predictions of regressors of other packages, each in the form that its package gives."""

from __future__ import annotations

from collections.abc import Callable

import mapie.regression
import numpy as np
import sklearn.gaussian_process as gp
from judge.planted_regression import LEVELS
from scipy import stats
from scipy.stats.distributions import rv_frozen
from sklearn import ensemble, linear_model

Predictions = rv_frozen | dict[float, np.ndarray] | np.ndarray


def boosting(x: np.ndarray, y: np.ndarray, new: np.ndarray) -> Predictions:
    """Quantiles, each by a model of its own, put into their order."""
    models = [
        ensemble.GradientBoostingRegressor(
            loss="quantile",
            alpha=level,
            random_state=0,
        )
        for level in LEVELS
    ]
    quantiles = np.sort([model.fit(x, y).predict(new) for model in models], axis=0)
    return dict(zip(LEVELS, quantiles, strict=True))


def process(x: np.ndarray, y: np.ndarray, new: np.ndarray) -> Predictions:
    """Normals of a Gaussian process with noise."""
    kernel = gp.kernels.ConstantKernel(1.0) * gp.kernels.RBF(2.0) + gp.kernels.WhiteKernel(0.1)
    model = gp.GaussianProcessRegressor(kernel, normalize_y=True)
    mean, sd = model.fit(x, y).predict(new, return_std=True)
    return stats.norm(mean, sd)


def line(x: np.ndarray, y: np.ndarray, new: np.ndarray) -> Predictions:
    """Normals of a Bayesian linear regression."""
    mean, sd = linear_model.BayesianRidge().fit(x, y).predict(new, return_std=True)
    return stats.norm(mean, sd)


def trees(x: np.ndarray, y: np.ndarray, new: np.ndarray) -> Predictions:
    """The trees of a random forest, as if they were draws."""
    forest = ensemble.RandomForestRegressor(200, random_state=0).fit(x, y)
    return np.stack([tree.predict(new) for tree in forest.estimators_])


def intervals(x: np.ndarray, y: np.ndarray, new: np.ndarray) -> Predictions:
    """MAPIE's 90 % intervals around a random forest, conformal by the last third of the rows."""
    forest = ensemble.RandomForestRegressor(100, random_state=0)
    split = mapie.regression.SplitConformalRegressor(
        forest,
        0.9,
        prefit=False,
    )
    cut = len(y) * 2 // 3
    fitted = split.fit(x[:cut], y[:cut]).conformalize(x[cut:], y[cut:])
    ends = fitted.predict_interval(new)[1]
    return {0.05: ends[:, 0, 0], 0.95: ends[:, 1, 0]}


#: the name in the records → predictions at new inputs (row, feature) by a fit to x (row, feature) and y (row,)
REGRESSORS: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], Predictions]] = {
    "gradient boosting, quantiles": boosting,
    "Gaussian process": process,
    "Bayesian ridge": line,
    "random forest, its trees as draws": trees,
    "random forest, MAPIE's intervals": intervals,
}
