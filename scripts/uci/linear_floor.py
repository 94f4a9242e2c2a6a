"""Bayesian linear regression, which every method should beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sklearn.linear_model import BayesianRidge
from torch import Tensor

from pyrobnn.data import Dataset, Standardizer


@dataclass(frozen=True, eq=False)
class LinearFloor:
    r"""Bayesian linear regression whose prior precision and noise maximise the evidence, on standardised data.

    .. math:: w \sim N(0, \lambda^{-1} I), \quad y \sim N(x^\top w, \alpha^{-1}), \quad
        (\hat\lambda, \hat\alpha) = \arg\max p(y \mid \lambda, \alpha)

    Reference: Bayesian Interpolation (MacKay, 1992).
    """

    ridge: BayesianRidge
    standardizer: Standardizer

    @classmethod
    def fit(cls, train: Dataset) -> LinearFloor:
        """Maximise the evidence on the standardised rows; one output."""
        units = Standardizer.fit(train)
        flat = {
            "alpha_1": 0.0,
            "alpha_2": 0.0,
            "lambda_1": 0.0,
            "lambda_2": 0.0,
        }
        ridge = BayesianRidge(
            max_iter=500,
            tol=1e-12,
            fit_intercept=False,
            **flat,
        )
        x = units.transform_x(train.x).double()
        y = units.transform_y(train.y)[:, 0].double()
        return cls(ridge.fit(x.numpy(), y.numpy()), units)

    @property
    def noise(self) -> float:
        """The standard deviation of the noise, in standard units."""
        return float(self.ridge.alpha_) ** -0.5

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of y (point,) at inputs (point, feature), in original units."""
        units = self.standardizer
        mean, sd = self.ridge.predict(units.transform_x(x).double().numpy(), return_std=True)
        mean = torch.as_tensor(mean) * units.y_scale + units.y_mean
        return mean, torch.as_tensor(sd) * units.y_scale
