"""Quantiles of mixtures, one mixture per row: of Gaussians, and of whatever has a distribution function."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: P(Y ≤ y) of the mixtures ``rows`` (k,) at y (k,), from every ``every``-th component of each
Below = Callable[[Tensor, Tensor, int], Tensor]


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
    z, precision = (loc - mean) / sd, math.sqrt(0.5) * sd / scale

    def below(y: Tensor, rows: Tensor, every: int) -> Tensor:
        at_once = max(1, 2**17 * every // z.shape[1])  # scalars that fit in the cache of a core
        parts = [
            torch.special.erfc((z[part, ::every] - t[:, None]) * precision[part, ::every]).mean(1) / 2
            for t, part in zip(y.split(at_once), rows.split(at_once))
        ]
        return torch.cat(parts)

    found = cdf_quantile(tail, below, torch.zeros_like(mean[:, 0]), num=loc.shape[1])
    return sign * (mean + sd * found[:, None])[:, 0]


def cdf_quantile(level: float, below: Below, start: Tensor, *, num: int, discrete: bool = False) -> Tensor:
    """The quantile of each mixture by its distribution function, which costs what it has components.

    Some 128 components say where to look; a bracket around there grows until it holds the quantile.

    Args:
        level: q in (0, 1).
        below: P(Y ≤ y) of mixtures.
        start: somewhere near, float64, (row,).
        num: components.
        discrete: whole numbers from 0; the least y with P(Y ≤ y) ≥ q is found.

    Returns:
        (row,) in float64: where F is q to a billionth of the nearer of q and 1 − q, or y cannot tell.
    """
    from scipy.optimize import elementwise  # imported late: a fit needs none of it

    y, reach, rows = torch.where(torch.isfinite(start), start, 0.0), 1.0, np.arange(len(start))
    for every in (num // 128, 1) if num >= 256 else (1,):

        def gap(at: np.ndarray, rows: np.ndarray, every: int = every) -> np.ndarray:
            here, which = (torch.from_numpy(v).to(start.device) for v in (at, rows))
            return (below(here.floor() if discrete else here, which, every) - level).cpu().numpy()

        sides = ((y + side * reach).cpu().numpy() for side in (-1, 1))
        bracket = elementwise.bracket_root(gap, *sides, args=(rows,)).bracket
        tolerance = (1e-9 if every == 1 else 1e-3) * min(level, 1 - level)
        # steps of a count are told apart, and stepped over where F is q exactly
        within: dict[str, Any] = {"xatol": 0.1} if discrete else {"fatol": tolerance}
        y = torch.from_numpy(
            np.asarray(elementwise.find_root(gap, bracket, args=(rows,), tolerances=within).x)
        )
        y, reach = y.to(start), 1.0 if discrete else 0.1
    if discrete:
        y = y.round().clamp_min(0.0)
        least, here = (torch.from_numpy(gap((y - step).cpu().numpy(), rows)).to(start) for step in (1, 0))
        y = torch.where(least >= 0, y - 1, torch.where(here < 0, y + 1, y))
    return y
