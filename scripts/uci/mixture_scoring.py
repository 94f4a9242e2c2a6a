"""Exact scores of equal-weight mixtures of normals: RMSE, log density, CRPS and coverage."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyrobnn.data import Dataset
from pyrobnn.posterior.prediction import Prediction

#: components at most for the CRPS, whose cost is the square of their number
MAX_CRPS_COMPONENTS = 256


def mixture_scores(
    loc: Tensor,
    scale: Tensor,
    y: Tensor,
    *,
    mean: Tensor | None = None,
    level: float = 0.95,
) -> dict[str, float]:
    r"""RMSE, mean log density, mean CRPS and coverage of equal-weight mixtures of normals.

    Of components ``loc, scale`` (draw, point) at targets ``y`` (point,); ``mean`` (point,) where it is known better.

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
    loc = loc.double()
    scale = scale.double()
    y = y.double()
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

    Reference: Grimit et al. (2006).

    Example:
        >>> crps = mixture_crps(torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1))
        >>> round(crps.item(), 4)  # (sqrt(2) - 1) / sqrt(pi)
        0.2337
    """
    if len(loc) > MAX_CRPS_COMPONENTS:
        keep = torch.linspace(0, len(loc) - 1, MAX_CRPS_COMPONENTS).round().long()
        loc = loc[keep]
        scale = scale[keep]
    crps = _mean_abs(y - loc, scale.square()).mean(0)
    pairs = torch.zeros_like(crps)
    # row by row: S² pairs of N points would not fit
    for its_loc, its_scale in zip(loc, scale):
        pairs += _mean_abs(its_loc - loc, its_scale.square() + scale.square()).mean(0)
    return crps - pairs / (2 * len(loc))


def _mean_abs(m: Tensor, v: Tensor) -> Tensor:
    """E|N(m, v)|."""
    sd = v.sqrt()
    z = m / sd
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return m * (2 * torch.special.ndtr(z) - 1) + 2 * sd * density


def held_out_scores(prediction: Prediction, data: Dataset) -> dict[str, float]:
    """RMSE, log density, CRPS and coverage in original units."""
    loc = prediction.loc.flatten(0, 1)[..., 0]
    scale = prediction.scale.flatten(0, 1)[..., 0]
    return mixture_scores(
        loc,
        scale,
        data.y[:, 0],
        mean=prediction.mean[:, 0],
    )
