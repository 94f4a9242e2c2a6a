"""Quantiles of mixtures, one mixture per row: of Gaussians, and of whatever has a distribution function."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

#: components from which a first quantile is found
_NUM_STARTS = 128


class Below(Protocol):
    """P(Y ≤ y) of the mixtures ``rows`` (k,) at y (k,), from every ``every``-th component of each."""

    def __call__(self, y: Tensor, rows: Tensor, every: int) -> Tensor: ...


def mixture_quantile(level: float, loc: Tensor, scale: Tensor) -> Tensor:
    r"""The quantile of each mixture of normals, :math:`t` with :math:`\frac1S \sum_s \Phi((t - m_s) / \sigma_s) = q`.

    Args:
        level: q in (0, 1).
        loc, scale: components (row, component), of any floating type.

    Returns:
        (row,) in float64, to 1e-6 standard deviations of the mixture and better; where F is q on a whole interval (two
        groups of components with nothing between them), a point of it.
    """
    # upper tails are turned over: 1 − F loses its digits where F is near 1
    sign, tail = (1.0, level) if level <= 0.5 else (-1.0, 1 - level)
    loc, scale = sign * loc.double(), scale.double()
    mean = loc.mean(1, keepdim=True)
    sd = (scale.square().mean(1, keepdim=True) + loc.var(1, correction=0, keepdim=True)).sqrt()
    # in units of each mixture's own mean and standard deviation, in which brackets of width one are near
    z, precision = (loc - mean) / sd, math.sqrt(0.5) * sd / scale

    def below(y: Tensor, rows: Tensor, every: int) -> Tensor:
        at_once = max(1, 2**17 * every // z.shape[1])  # scalars that fit in the cache of a core
        return torch.cat(
            [
                torch.special.erfc((z[part, ::every] - t[:, None]) * precision[part, ::every]).mean(1) / 2
                for t, part in zip(y.split(at_once), rows.split(at_once))
            ]
        )

    found = cdf_quantile(tail, below, torch.zeros_like(mean[:, 0]), num=loc.shape[1])
    return sign * (mean + sd * found[:, None])[:, 0]


def cdf_quantile(level: float, below: Below, start: Tensor, *, num: int, discrete: bool = False) -> Tensor:
    """The quantile of each mixture by its distribution function, which costs what it has components.

    Every k-th component says where to look; a bracket around there grows until it holds the quantile, which
    Chandrupatla's method then finds.

    Args:
        level: q in (0, 1).
        below: (y (k,), rows (k,), every) → P(Y ≤ y) of the mixture of every so-manieth component, (k,).
        start: somewhere near, float64, (row,).
        num: components.
        discrete: whole numbers from 0; the least y with P(Y ≤ y) ≥ q is found.

    Returns:
        (row,) in float64: where F is q to a billionth of the nearer of q and 1 − q, or y cannot tell.
    """
    every, nearer = num // _NUM_STARTS, min(level, 1 - level)
    centre = torch.where(torch.isfinite(start), start, 0.0)
    reach = torch.ones_like(centre)
    if every > 1:
        coarse = _Search(level, below, every, discrete)
        centre, width = coarse.root(centre, reach, 1e-3 * nearer)
        # what the components that were left out may change of F, over its slope
        slope = (coarse.gap(centre + 1e-3 * width) - coarse.gap(centre - 1e-3 * width)) / (2e-3 * width)
        wrong = math.sqrt(level * (1 - level) / _NUM_STARTS) / 2
        reach = reach if discrete else torch.minimum(wrong / slope.clamp_min(1e-300), width)
    return _Search(level, below, 1, discrete).root(centre, reach, 1e-9 * nearer)[0]


class _Search:
    """F − q of each mixture, by every so-manieth component, and its root."""

    def __init__(self, level: float, below: Below, every: int, discrete: bool):
        self.level, self.below, self.every, self.discrete = level, below, every, discrete

    def gap(self, y: Tensor, rows: Tensor | None = None) -> Tensor:
        rows = torch.arange(len(y), device=y.device) if rows is None else rows
        return self.below(y.floor() if self.discrete else y, rows, self.every) - self.level

    def root(self, centre: Tensor, reach: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
        """The root, and the width of the bracket in which it was looked for, both (row,)."""
        from scipy.optimize import elementwise  # imported late: a fit needs none of it

        def gap(y: np.ndarray, rows: np.ndarray) -> np.ndarray:
            found = self.gap(torch.from_numpy(y).to(centre.device), torch.from_numpy(rows).to(centre.device))
            return found.cpu().numpy()

        rows = np.arange(len(centre))
        low, high = ((centre + side * reach).cpu().numpy() for side in (-1, 1))
        bracket = elementwise.bracket_root(gap, low, high, args=(rows,)).bracket
        # steps of a count are told apart, and stepped over where F is q exactly
        within: dict[str, Any] = {"xatol": 0.1} if self.discrete else {"fatol": tolerance}
        found = elementwise.find_root(gap, bracket, args=(rows,), tolerances=within).x
        y, width = (torch.from_numpy(np.asarray(v)).to(centre) for v in (found, bracket[1] - bracket[0]))
        if self.discrete:
            y = y.round().clamp_min(0.0)
            y = torch.where(self.gap(y - 1) >= 0, y - 1, torch.where(self.gap(y) < 0, y + 1, y))
        return y, width
