"""Quantiles by their distribution functions: where these are flat, steep, heavy-tailed or no numbers."""

from __future__ import annotations

import math

import pytest
import torch

from pyrobnn.posterior.mixture_quantiles import where_reached

LEVELS = (1e-6, 0.05, 0.5, 0.93)


def normal(y: torch.Tensor) -> torch.Tensor:
    return torch.special.ndtr(y)


def cauchy(y: torch.Tensor) -> torch.Tensor:
    return 0.5 + torch.atan(y) / math.pi


def far_apart(y: torch.Tensor) -> torch.Tensor:
    """Two narrow normals, between which the function is flat at one half."""
    return 0.5 * (torch.special.ndtr((y + 100) / 0.01) + torch.special.ndtr((y - 100) / 0.01))


def bounded(y: torch.Tensor) -> torch.Tensor:
    return y.clamp(0, 1).square()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("below", [normal, cauchy, far_apart, bounded])
def test_the_level_is_reached_wherever_the_search_begins(below, level):
    begin = torch.tensor([-3.0, 0.0, 0.5, 40.0], dtype=torch.float64)
    tolerance = 1e-9 * min(level, 1 - level)
    points, slopes = where_reached(below, level, begin, torch.full_like(begin, 0.4), tolerance)
    # to the tolerance, or to neighbouring numbers where the function jumps over it
    torch.testing.assert_close(below(points), torch.full_like(begin, level), rtol=1e-6, atol=1e-12)
    assert bool((slopes > 0).all())


def test_points_without_numbers_are_nan_and_keep_nobody_waiting():
    begin = torch.tensor([0.0, math.nan], dtype=torch.float64)
    points, _ = where_reached(normal, 0.5, begin + 1, torch.ones_like(begin), 1e-9)
    assert abs(float(points[0])) < 1e-8 and math.isnan(float(points[1]))
