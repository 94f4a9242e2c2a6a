"""The floor: Bayesian linear regression in closed form. A network that does not beat it is broken."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyrobnn.data import Dataset, Standardizer


@dataclass(frozen=True, eq=False)
class LinearFloor:
    r"""Bayesian linear regression whose prior precision and noise maximise the evidence.

    .. math:: w \sim N(0, \alpha^{-1} I), \quad y \sim N(x^\top w, \beta^{-1}), \quad
        (\hat\alpha, \hat\beta) = \arg\max p(y \mid \alpha, \beta)

    on standardised data, so that the intercept is the mean of y. One output.

    Attributes: ``weights`` (feature,), ``covariance`` (feature, feature), ``noise`` (standard deviation), all in
    standard units; ``standardizer``; ``log_evidence`` of the standardised targets, in nats.

    Reference: Bayesian Interpolation (MacKay, 1992).

    Example:
        >>> from pyrobnn.data import diabetes
        >>> floor = LinearFloor.fit(diabetes())
        >>> mean, scale = floor.predict(diabetes().x)
        >>> bool((mean - diabetes().y[:, 0]).square().mean().sqrt() < 54)
        True
    """

    weights: Tensor
    covariance: Tensor
    noise: float
    standardizer: Standardizer
    log_evidence: float

    @classmethod
    def fit(cls, train: Dataset, *, num_iterations: int = 500) -> LinearFloor:
        """Maximise the evidence by MacKay's fixed point, on the eigenvalues of X'X."""
        standardizer = Standardizer.fit(train)
        x = standardizer.transform_x(train.x).double()
        y = standardizer.transform_y(train.y)[:, 0].double()
        num_data = len(x)
        values, vectors = torch.linalg.eigh(x.T @ x)
        values = values.clamp_min(0)
        projected = vectors.T @ (x.T @ y)
        alpha, beta = torch.ones((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
        for _ in range(num_iterations):
            mean = beta * projected / (beta * values + alpha)
            residual = y.square().sum() - 2 * mean @ projected + (values * mean.square()).sum()
            well_determined = (beta * values / (beta * values + alpha)).sum()
            alpha = well_determined / mean.square().sum().clamp_min(1e-12)
            beta = (num_data - well_determined) / residual.clamp_min(1e-12)
        precision = beta * values + alpha
        mean = beta * projected / precision
        residual = y.square().sum() - 2 * mean @ projected + (values * mean.square()).sum()
        log_evidence = 0.5 * (
            len(values) * alpha.log()
            + num_data * (beta / (2 * torch.pi)).log()
            - beta * residual
            - alpha * mean.square().sum()
            - precision.log().sum()
        )
        return cls(
            vectors @ mean,
            (vectors / precision) @ vectors.T,
            float(beta**-0.5),
            standardizer,
            float(log_evidence),
        )

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of y (point,) at inputs (point, feature), in original units."""
        x = self.standardizer.transform_x(x).double()
        var = ((x @ self.covariance) * x).sum(1) + self.noise**2
        units = self.standardizer
        return x @ self.weights * units.y_scale + units.y_mean, var.sqrt() * units.y_scale
