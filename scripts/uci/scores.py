"""Exact scores of a mixture of normals, and the floor: Bayesian linear regression in closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyrobnn.data import Dataset, Standardizer

#: components at most for the CRPS, whose cost is the square of their number
MAX_CRPS_COMPONENTS = 256


def mixture_scores(
    loc: Tensor, scale: Tensor, y: Tensor, *, mean: Tensor | None = None, level: float = 0.95
) -> dict[str, float]:
    r"""RMSE, mean log density, mean CRPS and coverage of equal-weight mixtures of normals.

    .. math:: p(y_n) = \frac1S \sum_s N(y_n; \mu_{sn}, \sigma_{sn}^2)

    Args:
        loc, scale: mean and standard deviation of every component, (draw, point), in the units of y.
        y: targets (point,).
        mean: the predictive mean (point,) where it is known better than as the mean of ``loc``.
        level: of the central interval whose coverage is counted.

    Returns:
        ``rmse``, ``log_density`` (nats a point), ``crps`` (units of y), ``coverage`` (share of points inside).

    Raises:
        ValueError: shapes that disagree, or a level outside (0, 1).

    Example:
        >>> scores = mixture_scores(torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([0.0, 3.0]))
        >>> round(scores["log_density"], 4), scores["coverage"]  # -log(2 pi) / 2 - 9 / 4
        (-3.1689, 0.5)
    """
    if loc.shape != scale.shape or loc.dim() != 2 or y.shape != loc.shape[1:]:
        raise ValueError(
            f"'loc' {tuple(loc.shape)} and 'scale' {tuple(scale.shape)} must be (draw, point) and "
            f"'y' {tuple(y.shape)} (point,)"
        )
    if not 0 < level < 1:
        raise ValueError(f"'level' must lie in (0, 1), got {level}")
    loc, scale, y = loc.double(), scale.double(), y.double()
    centre = loc.mean(0) if mean is None else mean.double()
    standard = (y - loc) / scale
    per_draw = -0.5 * standard.square() - scale.log() - 0.5 * math.log(2 * math.pi)
    below = torch.special.ndtr(standard).mean(0)
    tail = (1 - level) / 2
    return {
        "rmse": float((y - centre).square().mean().sqrt()),
        "log_density": float((torch.logsumexp(per_draw, 0) - math.log(len(loc))).mean()),
        "crps": float(mixture_crps(loc, scale, y).mean()),
        "coverage": float(((below > tail) & (below < 1 - tail)).double().mean()),
    }


def mixture_crps(loc: Tensor, scale: Tensor, y: Tensor) -> Tensor:
    r"""Continuous ranked probability score of equal-weight mixtures of normals, in closed form; (point,).

    .. math:: \frac1S\sum_s A(y - \mu_s, \sigma_s^2) - \frac1{2S^2}\sum_{st} A(\mu_s - \mu_t, \sigma_s^2 + \sigma_t^2),
        \quad A(m, v) = E|N(m, v)|

    More than 256 components are thinned evenly.

    Args:
        loc, scale: (draw, point). y: (point,).

    Reference: Calibrated Probabilistic Forecasting Using Ensemble Model Output Statistics (Gneiting et al., 2005);
    Grimit et al. (2006) for mixtures.

    Example:
        >>> crps = mixture_crps(torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1))
        >>> round(crps.item(), 4)  # (sqrt(2) - 1) / sqrt(pi)
        0.2337
    """
    if len(loc) > MAX_CRPS_COMPONENTS:
        keep = torch.linspace(0, len(loc) - 1, MAX_CRPS_COMPONENTS).round().long()
        loc, scale = loc[keep], scale[keep]
    first = _mean_abs(y - loc, scale.square()).mean(0)
    pairs = torch.zeros_like(first)
    for one, its_scale in zip(loc, scale):  # row by row: S² pairs of N points would not fit
        pairs += _mean_abs(one - loc, its_scale.square() + scale.square()).mean(0)
    return first - pairs / (2 * len(loc))


def _mean_abs(m: Tensor, v: Tensor) -> Tensor:
    """E|N(m, v)|."""
    sd = v.sqrt()
    z = m / sd
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return m * (2 * torch.special.ndtr(z) - 1) + 2 * sd * density


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
