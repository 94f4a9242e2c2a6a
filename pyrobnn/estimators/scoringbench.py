"""The regressor for ScoringBench, which scores predictive distributions of tables; runs inside a checkout of it.

Its board takes a model as one module in ``scoringbench/univariate/wrappers/``, here of one line, ``from
pyrobnn.estimators.scoringbench import PyrobnnWrapper``, and one entry in ``models.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.base import clone

from pyrobnn.estimators.regressor import BNNRegressor

try:
    from scoringbench.univariate.wrappers.base import DistributionPrediction, ProbabilisticWrapper
except ImportError as error:
    raise ImportError(
        "pyrobnn.estimators.scoringbench runs inside a checkout of ScoringBench (no package index has it): "
        "put the checkout on PYTHONPATH"
    ) from error

__all__ = ["PyrobnnWrapper"]

_TAIL = np.array([1e-4, 3e-4, 1e-3, 2e-3, 3.5e-3])
#: probabilities whose quantiles are handed over; the board joins them by straight lines of the distribution function,
#: which costs a normal's CRPS at most a thousandth of its sd, and keeps what lies beyond the last two as atoms there
LEVELS = np.concatenate([_TAIL, np.arange(1, 200) / 200, 1 - _TAIL[::-1]])


class PyrobnnWrapper(ProbabilisticWrapper):  # type: ignore[misc, unused-ignore]
    """A Bayesian neural network as a model of ScoringBench: quantiles of the mixture of the posterior's draws.

    Args:
        estimator: a :class:`pyrobnn.BNNRegressor`, which is left as it is; default one with ``method="auto"`` that
            imputes missing inputs, with ``random_state=0``.

    Attributes: ``estimator_``, the fitted one, with ``posterior_``, ``verdict_`` and ``method_reason_``.

    Papers: ScoringBench (Landsgesell and Knoll, 2026), https://arxiv.org/abs/2603.29928.
    """

    def __init__(self, estimator: Any = None):
        self.estimator = estimator

    def fit(self, X: Any, y: Any) -> PyrobnnWrapper:
        """Fit to a table (row, feature) of numbers and outcomes (row,), in their units.

        Rows whose outcome is not finite are left out; infinite inputs count as missing.

        Raises:
            ValueError: no outcome is finite.
        """
        outcome = np.asarray(y, dtype=float).reshape(-1)
        known = np.isfinite(outcome)
        if not known.any():
            raise ValueError("'y' has no finite value: nothing can be fitted")
        self._set_train_range(outcome[known])
        net = (
            BNNRegressor(missing="impute", random_state=0)
            if self.estimator is None
            else clone(self.estimator)
        )
        self.estimator_ = net.fit(_table(X)[known], outcome[known])
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The predictive mean (row,)."""
        return np.asarray(self.estimator_.predict(_table(X)), dtype=float).reshape(-1)

    def predict_distribution(self, X: Any) -> DistributionPrediction:
        """Quantiles of every row, and its mean, in the board's container."""
        mean, quantiles = self.estimator_._predict(
            _table(X), lambda p: p.mean[:, 0], lambda p: p.quantile(torch.from_numpy(LEVELS))[..., 0].T
        )
        return DistributionPrediction.from_multi_quantile(
            np.maximum.accumulate(quantiles, axis=1), LEVELS, mean=mean, train_range=self._y_train_range
        )


def _table(X: Any) -> np.ndarray:
    table = np.asarray(X, dtype=float)
    return np.where(np.isfinite(table), table, np.nan)
