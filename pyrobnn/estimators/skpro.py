"""The regressor for skpro, whose probabilistic regressors give a distribution; needs the extra ``skpro``."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pandas as pd
from scipy.special import ndtr
from sklearn.base import clone

from pyrobnn.checks import Refused
from pyrobnn.estimators.regressor import BNNRegressor
from pyrobnn.inference import MAP, Laplace

try:
    from skpro.distributions.normal_mixture import NormalMixture
    from skpro.regression.base import BaseProbaRegressor
except ImportError as error:
    raise ImportError("pyrobnn.estimators.skpro needs skpro: pip install 'pyrobnn[skpro]'") from error

__all__ = ["BNNProbaRegressor"]


class BNNProbaRegressor(BaseProbaRegressor):  # type: ignore[misc, unused-ignore]
    """A Bayesian neural network as a probabilistic regressor of skpro.

    ``predict_proba`` gives a mixture with one normal per draw of the posterior, ``predict`` the mean that
    :class:`pyrobnn.BNNRegressor` gives: where the method knows it exactly, the mixture's differs by Monte-Carlo error.

    Args:
        estimator: a :class:`pyrobnn.BNNRegressor`, which is left as it is; default one with ``method="auto"``.

    Attributes: ``estimator_``, the fitted one, with ``posterior_`` and ``verdict_``.

    Raises:
        Refused: a likelihood under which an observation is not normal.

    Example:
        >>> import pandas as pd, pyrobnn as pb
        >>> from pyrobnn.estimators.skpro import BNNProbaRegressor
        >>> X = pd.DataFrame({"x": [-1.0, -0.5, 0.0, 0.5, 1.0]})
        >>> net = pb.BNNRegressor(pb.MAP(num_steps=500, compile=False), hidden=(), random_state=0)
        >>> model = BNNProbaRegressor(net).fit(X, 2 * X.rename(columns={"x": "y"}))
        >>> model.predict_proba(X).mean().shape
        (5, 1)
    """

    _tags = {"authors": ["pyrobnn"], "capability:multioutput": True, "capability:missing": False}

    def __init__(self, estimator: Any = None):
        self.estimator = estimator
        super().__init__()

    def _fit(self, X: pd.DataFrame, y: pd.DataFrame) -> BNNProbaRegressor:
        net = BNNRegressor() if self.estimator is None else clone(self.estimator)
        if net.likelihood is not None and not net.likelihood.normal:
            raise Refused(
                f"skpro gets a mixture of normals, which predictions of {net.likelihood} are not: use "
                "pyrobnn.BNNRegressor itself, whose posterior_.predict(x) has the density and quantiles of any response"
            )
        self.estimator_ = net.fit(_named(X), y.iloc[:, 0] if y.shape[1] == 1 else y)
        self._columns = y.columns
        return self

    def _predict(self, X: pd.DataFrame) -> pd.DataFrame:
        mean = self.estimator_.predict(_named(X)).reshape(len(X), -1)
        return pd.DataFrame(mean, index=X.index, columns=self._columns)

    def _predict_proba(self, X: pd.DataFrame) -> NormalMixture:
        mu, sigma = self.estimator_._predict(
            _named(X),
            lambda p: p.loc.flatten(0, 1).movedim(0, 1),
            lambda p: p.scale.expand_as(p.loc).flatten(0, 1).movedim(0, 1),
        )
        weights = np.full(mu.shape[:2], 1 / mu.shape[1])
        return _Mixture(weights, mu, sigma, index=X.index, columns=self._columns)

    @classmethod
    def get_test_params(cls, parameter_set: str = "default") -> list[dict[str, Any]]:
        """Settings that skpro's own tests run with."""
        methods = MAP(num_steps=50, compile=False), Laplace(num_steps=50, compile=False)
        return [{"estimator": BNNRegressor(each, hidden=(3,))} for each in methods]


def _named(X: pd.DataFrame) -> pd.DataFrame:
    """With names of columns that are text, as scikit-learn wants them."""
    return X.set_axis(X.columns.astype(str), axis=1)


class _Mixture(NormalMixture):  # type: ignore[misc, unused-ignore]
    """skpro's mixture of normals with E|Z − Z'|, which the CRPS needs, as it is.

    That of skpro 2.16 leaves out how far the means lie apart, and is √2 too large where they do not: 1.60 for N(0, 1).
    """

    def _energy_self(self) -> Any:
        parts = zip(self._mu, self._sigma, self._pi)
        found = [sum(map(_difference, mu.T, sigma.T, [pi] * mu.shape[1])) for mu, sigma, pi in parts]
        return float(found[0]) if self.ndim == 0 else np.array(found)[:, None]

    def _iloc(self, rowidx: Any = None, colidx: Any = None) -> _Mixture:
        return _Mixture(**super()._iloc(rowidx, colidx).get_params(deep=False))

    def _iat(self, rowidx: Any = None, colidx: Any = None) -> _Mixture:
        return _Mixture(**super()._iat(rowidx, colidx).get_params(deep=False))


def _difference(mu: np.ndarray, sigma: np.ndarray, weights: np.ndarray) -> float:
    """E|Z − Z'| of two draws of a mixture of normals (component,), by 2 ∫ F (1 − F)."""
    low, high = (mu - 8 * sigma).min(), (mu + 8 * sigma).max()
    # two points for the narrowest sd are exact to rounding; where it is far narrower than the rest it weighs little
    points = np.linspace(low, high, int(np.clip(2 * (high - low) / sigma.min(), 64, 1024)))
    below = ndtr((points[:, None] - mu) / sigma) @ weights
    return cast(float, 2 * np.trapezoid(below * (1 - below), points))
