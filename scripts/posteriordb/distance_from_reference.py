"""Draws beside a reference: R-hat, ESS, and distances in Monte-Carlo errors; and what a run is called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import hypot, sqrt

import numpy as np
from torch import Tensor

#: mean, sd, their Monte-Carlo errors and the ESS of a scalar
Moments = Mapping[str, float]


@dataclass(frozen=True)
class Distance:
    """The worst R-hat, the least bulk ESS, and the largest distance in Monte-Carlo errors with its scalar."""

    rhat: float
    ess: float
    errors: float
    where: str


def scalars(draws: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Reference names to draws (chain, draw): vectors are numbered from 1."""
    draws = dict(draws)
    if "theta_trans" in draws:
        draws["theta"] = draws["mu"][..., None] + draws["tau"][..., None] * draws.pop("theta_trans")
    draws_of_scalars = {}
    for name, value in draws.items():
        values = value.double().numpy().reshape(*value.shape[:2], -1)
        for i in range(values.shape[-1]):
            scalar = f"{name}[{i + 1}]" if value.ndim > 2 else name
            draws_of_scalars[scalar] = values[..., i]
    return draws_of_scalars


def distance(draws: Mapping[str, np.ndarray], reference: Mapping[str, Moments]) -> Distance:
    """How far draws (chain, draw) of scalars are from the reference's moments, which have errors of their own."""
    from arviz_stats.base import array_stats

    rhat = 0.0
    bulk = float("inf")
    worst = (0.0, "")
    for name, moments in reference.items():
        x = draws[name]
        if not x.std() > 0:
            return Distance(float("inf"), 0.0, float("inf"), name)
        rhat = max(rhat, float(array_stats.rhat(x, chain_axis=0, draw_axis=1)))
        bulk = min(bulk, float(array_stats.ess(x, method="bulk", chain_axis=0, draw_axis=1)))
        z = _errors_of_mean(x, moments)
        z_sd = _errors_of_sd(x, moments)
        worst = max(worst, (z, name), (z_sd, f"sd of {name}"))
    return Distance(rhat, bulk, *worst)


def _errors_of_mean(x: np.ndarray, moments: Moments) -> float:
    """The mean's distance in Monte-Carlo errors; those of the draws are at least what the reference's sd gives."""
    from arviz_stats.base import array_stats

    axes = {"chain_axis": 0, "draw_axis": 1}
    ess = array_stats.ess(x, method="mean", **axes)
    mcse = max(array_stats.mcse(x, method="mean", **axes), moments["sd"] / sqrt(ess))
    return float(abs(x.mean() - moments["mean"]) / hypot(mcse, moments["mcse_mean"]))


def _errors_of_sd(x: np.ndarray, moments: Moments) -> float:
    """The sd's distance in Monte-Carlo errors; those of the draws are at least the reference's, by the ESS of both."""
    from arviz_stats.base import array_stats

    axes = {"chain_axis": 0, "draw_axis": 1}
    ess = array_stats.ess(
        (x - x.mean()) ** 2,
        method="mean",
        **axes,
    )
    least = moments["mcse_sd"] * sqrt(moments["ess"] / ess)
    mcse = max(array_stats.mcse(x, method="sd", **axes), least)
    return float(abs(x.std(ddof=1) - moments["sd"]) / hypot(mcse, moments["mcse_sd"]))


def outcome_of(right: bool, warned: bool, name_of_warned: str) -> str:
    """What becomes of a run: wrong ones are told apart by whether the fit warned."""
    if right:
        return "right"
    return name_of_warned if warned else "WRONG"
