"""Quantiles of mixtures, one mixture per row: of Gaussians, and of whatever has a distribution function."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

#: components from which a first quantile is found
_NUM_STARTS = 128
#: of a search, which needs about ten
_MAX_STEPS = 200


class Below(Protocol):
    """P(Y ≤ y) of some mixtures, from every k-th component of each."""

    def __call__(self, y: Tensor, rows: Tensor, k: int) -> Tensor: ...


def mixture_quantile(level: float, loc: Tensor, scale: Tensor) -> Tensor:
    r"""The quantile of each mixture of normals, :math:`t` with :math:`\frac1S \sum_s \Phi((t - m_s) / \sigma_s) = q`.

    Args:
        level: q in (0, 1).
        loc, scale: components (row, component), of any floating type.

    Returns:
        (row,) in float64, to 1e-6 standard deviations of the mixture and better; where F is q on a whole interval (two
        groups of components with nothing between them), a point of it.
    """
    at_once = max(1, 2**17 // loc.shape[1])  # scalars that fit in the cache of a core
    # upper tails are turned over: 1 − F loses its digits where F is near 1
    sign, tail = (1.0, level) if level <= 0.5 else (-1.0, 1 - level)
    parts = zip(loc.split(at_once), scale.split(at_once))
    return sign * torch.cat([_tail_quantile(tail, sign * m.double(), s.double()) for m, s in parts])


def _tail_quantile(level: float, loc: Tensor, scale: Tensor) -> Tensor:
    """In units of each mixture's own mean and standard deviation, in which brackets of width one are near."""
    mean = loc.mean(1, keepdim=True)
    sd = (scale.square().mean(1, keepdim=True) + loc.var(1, correction=0, keepdim=True)).sqrt()
    z, precision = (loc - mean) / sd, math.sqrt(0.5) * sd / scale

    def below(y: Tensor, rows: Tensor, k: int) -> Tensor:
        return torch.special.erfc((z[rows, ::k] - y) * precision[rows, ::k]).mean(1, keepdim=True) / 2

    found = cdf_quantile(level, below, torch.zeros_like(mean), num=loc.shape[1])
    return (mean + sd * found)[:, 0]


def cdf_quantile(level: float, below: Below, start: Tensor, *, num: int, discrete: bool = False) -> Tensor:
    """The quantile of each mixture by its distribution function, which costs what it has components.

    Every k-th component says where to look. A bracket around there grows until it holds the quantile; then
    Chandrupatla's method, of whole numbers bisection.

    Args:
        level: q in (0, 1).
        below: (y (row, …), rows (row,), k) → P(Y ≤ y) of the mixture of every k-th component, of the shape of y.
        start: somewhere near, float64, (row, …).
        num: components.
        discrete: whole numbers from 0; the least y with P(Y ≤ y) ≥ q is found.

    Returns:
        Of the shape of ``start``: where F is q to a billionth of the nearer of q and 1 − q, or to 1e-7 of the width of
        the bracket.
    """
    every = num // _NUM_STARTS
    start = torch.where(torch.isfinite(start), start, 0.0)
    start = start.floor().clamp_min(0.0) if discrete else start
    reach = torch.ones_like(start)
    rows = torch.arange(len(start), device=start.device)
    if every > 1:
        start, width = _search(level, partial(below, k=every), start, reach, discrete)
        if not discrete:
            # what the components that were left out may change of F, over its slope
            step = 1e-3 * width
            slope = (below(start + step, rows, every) - below(start - step, rows, every)) / (2 * step)
            wrong = math.sqrt(level * (1 - level) / _NUM_STARTS) / 2
            reach = torch.minimum(wrong / slope.clamp_min(1e-300), width)
    return _search(level, partial(below, k=1), start, reach, discrete)[0]


def _search(
    level: float, below: Callable[[Tensor, Tensor], Tensor], start: Tensor, reach: Tensor, discrete: bool
) -> tuple[Tensor, Tensor]:
    """The quantile, and the width of the bracket in which it was looked for."""
    low, high, f_low, f_high = _bracket(level, below, start, reach, discrete)
    width, found = high - low, high.clone()
    rows = torch.arange(len(start), device=start.device)
    while discrete:
        t = ((low + high) / 2).floor()
        under = below(t, rows) < level
        low, high = torch.where(under, t, low), torch.where(under, high, t)
        if not bool((high - low > 1).any()):
            return high, width
    share = f_high / (f_high - f_low)
    # the root lies between the first and the second; the third is the one that was left last
    y: tuple[Tensor, ...] = (high, low, low)
    f: tuple[Tensor, ...] = (f_high, f_low, f_low)
    for _ in range(_MAX_STEPS):
        t = y[0] + share * (y[1] - y[0])
        value = below(t, rows) - level
        same = (value < 0) == (f[0] < 0)
        y = (t, torch.where(same, y[1], y[0]), torch.where(same, y[0], y[1]))
        f = (value, torch.where(same, f[1], f[0]), torch.where(same, f[0], f[1]))
        nearer = f[0].abs() < f[1].abs()
        best, left = torch.where(nearer, y[0], y[1]), torch.where(nearer, f[0], f[1]).abs()
        least = (1e-7 * width[rows] / (y[1] - y[0]).abs()).clamp_max(1.0)
        found[rows] = best
        keep = ((left > 1e-9 * min(level, 1 - level)) & (least < 1)).flatten(1).any(1)
        if not bool(keep.any()):
            break
        rows, share = rows[keep], _chandrupatla(y, f).clamp(least / 2, 1 - least / 2)[keep]
        y, f = (tuple(v[keep] for v in each) for each in (y, f))
    return found, width


def _chandrupatla(y: tuple[Tensor, ...], f: tuple[Tensor, ...]) -> Tensor:
    """Where to look between the first two of three points: by inverse quadratic interpolation, or in the middle.

    Reference: A new hybrid quadratic/bisection algorithm for finding the zero of a nonlinear function without using
    derivatives (Chandrupatla, 1997).
    """
    (a, b, c), (fa, fb, fc) = y, f
    xi, phi = (a - b) / (c - b), (fa - fb) / (fc - fb)
    inverse = fa / (fa - fb) * fc / (fc - fb) - (c - a) / (b - a) * fa / (fc - fa) * fb / (fb - fc)
    straight = (1 - (1 - xi).sqrt() < phi) & (phi < xi.sqrt())
    return torch.where(straight, inverse, torch.full_like(inverse, 0.5))


def _bracket(
    level: float,
    below: Callable[[Tensor, Tensor], Tensor],
    start: Tensor,
    reach: Tensor,
    discrete: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ends with P(Y ≤ low) < q ≤ P(Y ≤ high), and F − q there; they move away by steps that double."""
    rows = torch.arange(len(start), device=start.device)
    low, high = start - reach, start + (0.0 if discrete else reach)
    f_low, f_high = below(low, rows) - level, below(high, rows) - level
    step = reach
    for _ in range(_MAX_STEPS):
        short = f_high < 0
        if not bool(short.any()):
            break
        low, f_low = torch.where(short, high, low), torch.where(short, f_high, f_low)
        high, step = torch.where(short, high + step, high), 2 * step
        f_high = torch.where(short, below(high, rows) - level, f_high)
    step = reach
    for _ in range(_MAX_STEPS):
        over = f_low >= 0
        if not bool(over.any()):
            break
        high, f_high = torch.where(over, low, high), torch.where(over, f_low, f_high)
        low, step = torch.where(over, low - step, low), 2 * step
        if discrete:
            low = low.clamp_min(-1.0)  # below every count
        f_low = torch.where(over, below(low, rows) - level, f_low)
    return low, high, f_low, f_high
