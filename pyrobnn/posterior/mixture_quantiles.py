"""Where distribution functions reach a level: quantiles of mixtures, which have no formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

#: secant steps; what has not converged by then is halved, which always ends
_NUM_SECANT = 12
#: halvings of an interval until no float64 lies between its ends, after doublings of a step to find it
_MOST_STEPS = 400


def where_reached(
    below: Callable[[Tensor], Tensor],
    level: float,
    begin: Tensor,
    slope: Tensor,
    tolerance: float,
) -> tuple[Tensor, Tensor]:
    r"""The points at which increasing functions reach a level, each by itself, and the slopes there.

    .. math:: y_{t+1} = y_t - \frac{F(y_t) - q}{s_t}, \quad s_t = \frac{F(y_t) - F(y_{t-1})}{y_t - y_{t-1}}

    The point stays between those at which F was below and above the level, of which it is the middle where the secant
    leaves them.

    Args:
        below: points → F there, of the shape of ``begin``; float64.
        level: q in (0, 1).
        begin: where to begin.
        slope: of F there, about; positive.
        tolerance: of F.

    Returns:
        Points and slopes; NaN where F is NaN.
    """
    point = begin
    slope = slope.clamp_min(torch.finfo(slope.dtype).tiny)
    bracket = _Bracket(torch.full_like(point, -math.inf), torch.full_like(point, math.inf))
    # a step that finds no upper or no lower end may be twice as long the next time
    reach = 1.0 / slope
    before = excess_before = torch.full_like(point, math.nan)
    for step in range(_MOST_STEPS):
        excess = below(point) - level
        bracket = bracket.with_point(point, excess < 0)
        secant = (excess - excess_before) / (point - before)
        slope = torch.where((secant > 0) & secant.isfinite(), secant, slope)
        is_done = (excess.abs() <= tolerance) | excess.isnan() | bracket.is_exhausted
        if bool(is_done.all()):
            break
        move = (excess / slope).clamp(-reach, reach)
        if step >= _NUM_SECANT:
            # where F is flat a secant gets nowhere: as far as it may
            move = torch.copysign(reach, excess)
        ahead = bracket.kept_inside(point - move, halves=step >= _NUM_SECANT)
        reach = 2.0 * reach
        before, excess_before = point, excess
        point = torch.where(is_done, point, ahead)
    return torch.where(excess.isnan(), excess, point), slope


class _Bracket(NamedTuple):
    """The largest points at which F was found below the level, and the smallest at which it was not."""

    lower: Tensor
    upper: Tensor

    def with_point(self, point: Tensor, is_below: Tensor) -> _Bracket:
        """The bracket after F has been found below the level at a point, or not."""
        lower = torch.where(is_below, point, self.lower)
        return _Bracket(lower, torch.where(is_below, self.upper, point))

    @property
    def middle(self) -> Tensor:
        """Infinite or NaN where an end is not known."""
        return 0.5 * (self.lower + self.upper)

    @property
    def is_exhausted(self) -> Tensor:
        """Where no number lies between the ends."""
        middle = self.middle
        return middle.isfinite() & ((middle <= self.lower) | (middle >= self.upper))

    def kept_inside(self, ahead: Tensor, halves: bool) -> Tensor:
        """The point, or the middle where it lies outside; where it ``halves``, the middle wherever there is one."""
        middle = self.middle
        stays = (ahead > self.lower) & (ahead < self.upper)
        if halves:
            stays = stays & ~middle.isfinite()
        return torch.where(stays, ahead, middle)
