"""Quantiles of mixtures, one mixture per row: of Gaussians, and of whatever has a distribution function."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

#: scalars that one pass works on: what fits in the cache of a core
_CHUNK_SCALARS = 2**17
#: error allowed, in standard deviations of the mixture
_TOLERANCE = 1e-7
_NUM_STARTS = 128
#: of a probability
_EXACT = 1e-12
_MAX_STEPS = 200


def mixture_quantile(level: float, loc: Tensor, scale: Tensor) -> Tensor:
    r"""The quantile of each mixture, :math:`t` with :math:`\frac1S \sum_s \Phi((t - m_s) / \sigma_s) = q`.

    Halley's method on :math:`\Phi^{-1}(F(t)) = \Phi^{-1}(q)`, which is a straight line for one Gaussian and nearly one
    for mixtures like it, from quantiles of a sample. The quantiles of the components hold the root between them; a step
    that leaves what is known of it, or does not shorten it, is a bisection.

    Args:
        level: q in (0, 1).
        loc, scale: components (row, component), of any floating type.

    Returns:
        (row,) in float64, to 1e-6 standard deviations of the mixture and better; where F is q on a whole interval (two
        groups of components with nothing between them), a point of it.
    """
    at_once = max(1, _CHUNK_SCALARS // loc.shape[1])
    # upper tails are turned over: 1 − F loses its digits where F is near 1
    sign = 1.0 if level <= 0.5 else -1.0
    parts = zip(loc.split(at_once), scale.split(at_once))
    return sign * torch.cat(
        [_lower_quantile(min(level, 1 - level), sign * m.double(), s.double()) for m, s in parts]
    )


def cdf_quantile(
    level: float, below: Callable[[Tensor], Tensor], start: Tensor, *, discrete: bool = False
) -> Tensor:
    """The quantile of each distribution by its distribution function.

    A bracket around ``start`` grows until it holds the quantile; then the Illinois form of regula falsi, with every
    third step a bisection; of whole numbers bisection alone.

    Args:
        level: q in (0, 1).
        below: y → P(Y ≤ y), both of the shape of ``start``.
        start: somewhere near, float64.
        discrete: whole numbers from 0; the least y with P(Y ≤ y) ≥ q is found.

    Returns:
        Of the shape of ``start``, to 1e-6 of the width of the bracket and better.
    """
    low, high = _bracket(level, below, start, discrete)
    if discrete:
        while bool((high - low > 1).any()):
            t = ((low + high) / 2).floor()
            under = below(t) < level
            low, high = torch.where(under, t, low), torch.where(under, high, t)
        return high
    f_low, f_high = below(low) - level, below(high) - level
    width = high - low
    for step in range(_MAX_STEPS):
        middle = (low + high) / 2
        t = middle if step % 3 == 2 else high - f_high * (high - low) / (f_high - f_low)
        t = torch.where((t > low) & (t < high), t, middle)
        value = below(t) - level
        under, exact = value < 0, value.abs() < _EXACT
        # the end that stays counts for half, so that it moves next
        f_low, f_high = torch.where(under, value, f_low / 2), torch.where(under, f_high / 2, value)
        low, high = torch.where(under | exact, t, low), torch.where(under & ~exact, high, t)
        if bool((high - low <= _TOLERANCE * width).all()):
            break
    return (low + high) / 2


def _bracket(
    level: float, below: Callable[[Tensor], Tensor], start: Tensor, discrete: bool
) -> tuple[Tensor, Tensor]:
    """Ends with P(Y ≤ low) < q ≤ P(Y ≤ high); they move away from the start by steps that double."""
    start = torch.where(torch.isfinite(start), start, 0.0)
    start = start.floor().clamp_min(0.0) if discrete else start
    low, high, reach = start - 1, start.clone(), 1.0
    for _ in range(_MAX_STEPS):
        short = below(high) < level
        if not bool(short.any()):
            break
        low = torch.where(short, high, low)
        high = torch.where(short, high + reach, high)
        reach *= 2
    reach = 1.0
    for _ in range(_MAX_STEPS):
        over = (below(low) >= level) & (low > -1 if discrete else torch.ones_like(low, dtype=torch.bool))
        if not bool(over.any()):
            break
        high = torch.where(over, low, high)
        low = torch.where(over, low - reach, low)
        low = low.clamp_min(-1.0) if discrete else low
        reach *= 2
    return low, high


def _lower_quantile(level: float, loc: Tensor, scale: Tensor) -> Tensor:
    z = torch.special.ndtri(torch.tensor(level, dtype=torch.float64)).item()
    ends = loc + z * scale
    low, high = ends.amin(1), ends.amax(1)
    sd = (scale.square().mean(1) + loc.var(1, correction=0)).sqrt()
    t = _sample_quantile(level, loc, scale).clamp(low, high)
    finest = scale.amin(1)
    inverse = 1 / scale
    found = t.clone()
    rows = torch.arange(len(loc), device=loc.device)
    last = high - low
    for _ in range(_MAX_STEPS):
        below, density, slope = _distribution(t, loc, inverse)
        under = below < level
        low, high = torch.where(under, t, low), torch.where(under, high, t)
        newton, bend = _newton(below, density, slope, z)
        step = newton / (1 + 0.5 * bend * newton).clamp(0.5, 2.0)
        # not where the step leaves the bracket, is no half of the one before, or is NaN where nothing is near t
        bisect = ~((t + step > low) & (t + step < high) & (step.abs() < 0.5 * last))
        step = torch.where(bisect, (low + high) / 2 - t, step)
        last = step.abs()
        exact = below == level
        t = torch.where(exact, t, t + step)
        # Halley's error is of third order in the step against the length on which F changes its shape
        error = newton.abs() * (newton * torch.maximum(1 / finest, bend.abs())).square()
        done = exact | (high - low < _TOLERANCE * sd) | (~bisect & (error < _TOLERANCE * sd))
        found[rows] = t
        if bool(done.all()):
            break
        keep = ~done
        rows, t, low, high, last, sd, finest = (v[keep] for v in (rows, t, low, high, last, sd, finest))
        loc, inverse = loc[keep], inverse[keep]
    return found


def _distribution(t: Tensor, loc: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """F, F' and F'' of each row at its t."""
    z = (t[:, None] - loc) * inverse
    below = torch.special.erfc(z * -math.sqrt(0.5)).mean(1) / 2
    density = (z.square() * -0.5).exp_().mul_(inverse / math.sqrt(2 * math.pi))
    slope = -(density * z).mul_(inverse).mean(1)
    return below, density.mean(1), slope


def _newton(below: Tensor, density: Tensor, slope: Tensor, z: float) -> tuple[Tensor, Tensor]:
    """Newton's step for g(t) = Φ⁻¹(F(t)) = z, and g''/g'."""
    g = torch.special.ndtri(below)
    first = density / ((g.square() * -0.5).exp() / math.sqrt(2 * math.pi))
    return (z - g) / first, slope / density + g * first


def _sample_quantile(level: float, loc: Tensor, scale: Tensor) -> Tensor:
    """The quantile of a few components with one stratified draw of noise each."""
    num = min(_NUM_STARTS, loc.shape[1])
    pick = torch.linspace(0, loc.shape[1] - 1, num, device=loc.device).round().long()
    ranks = torch.arange(num, dtype=torch.float64, device=loc.device)
    # multiples of the golden ratio spread evenly whatever the order of the components is
    noise = torch.special.ndtri(((ranks * 0.6180339887498949) % 1).clamp(0.5 / num, 1 - 0.5 / num))
    drawn = (loc[:, pick] + noise * scale[:, pick]).sort(1).values
    return drawn[:, min(num - 1, int(level * num))]
