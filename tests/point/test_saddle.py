"""The way down from a saddle, on functions whose saddles and modes are known by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pyrobnn.inference.optim.saddle import Saddle, below_saddle

#: steps of the searches before
SEARCH = 2000
NUM_ROWS = 50


def rotation(dim: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(dim, dim, dtype=torch.float64, generator=generator)
    return torch.linalg.qr(normal)[0]


def double_well(dim: int, depth: float, condition: float):
    """Two wells of this depth along the first axis, at -2 and 2; widths up to the root of ``condition`` elsewhere."""
    basis = rotation(dim)
    widths = torch.logspace(0.0, math.log10(condition), dim, dtype=torch.float64)[1:]

    def loss(z: Tensor) -> Tensor:
        u = basis @ z
        well = depth * (u[0].square() / 4.0 - 1.0).square()
        return well + 0.5 * (u[1:].square() / widths).sum()

    return loss


def bent_valley(z: Tensor) -> Tensor:
    """A valley along a parabola with a ridge at its bend, and modes at (-2, 4) and (2, 4)."""
    return 20.0 * (z[1] - z[0].square()).square() + 3.0 * (z[0].square() / 4.0 - 1.0).square()


def matrix_of_rank_two() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    left = torch.randn(4, 2, dtype=torch.float64, generator=generator)
    return 3.0 * left @ torch.randn(2, 4, dtype=torch.float64, generator=generator)


MATRIX = matrix_of_rank_two()


def factorised(z: Tensor) -> Tensor:
    """Two factors of a matrix of rank two: zero is a saddle, and every mode is a right product."""
    left, right = z[:8].reshape(4, 2), z[8:].reshape(2, 4)
    return (left @ right - MATRIX).square().sum()


def monkey(z: Tensor) -> Tensor:
    """A saddle of a third order: its curvature is zero, and three ways lead down."""
    x, y = z[0], z[1]
    return x.pow(3) - 3.0 * x * y.square() + z.square().sum().square()


@pytest.mark.parametrize("dim", [2, 10, 60])
@pytest.mark.parametrize("depth", [1.0, 30.0])
@pytest.mark.parametrize("condition", [1.0, 1e3])
def test_the_way_leads_into_a_well(dim, depth, condition):
    loss = double_well(dim, depth, condition)
    start = torch.zeros(dim, dtype=torch.float64)
    end, saddle = below_saddle(loss, start, SEARCH, NUM_ROWS)
    assert saddle.at_mode and float(loss(end)) < 0.01
    assert saddle.gain == pytest.approx(depth, abs=0.02)
    assert saddle.lowest_curvature == pytest.approx(-depth, rel=1e-6)


def test_the_way_leads_along_a_bent_valley():
    end, saddle = below_saddle(bent_valley, torch.zeros(2).double(), SEARCH, NUM_ROWS)
    assert saddle.at_mode and float(bent_valley(end)) < 0.01
    torch.testing.assert_close(end.abs(), torch.tensor([2.0, 4.0]).double(), atol=0.1, rtol=0)


def test_the_way_leads_from_no_factors_to_all():
    start = torch.zeros(16, dtype=torch.float64)
    end, saddle = below_saddle(factorised, start, SEARCH, NUM_ROWS)
    # on the way there is another saddle, of one factor
    assert saddle.at_mode and float(factorised(end)) < 0.01 and saddle.gain > 10.0


@pytest.mark.parametrize("shift", [0.05, -0.05])
def test_beside_a_saddle_of_the_third_order_the_way_is_found_where_it_bends_down(shift):
    start = torch.tensor([shift, 0.0], dtype=torch.float64)
    end, saddle = below_saddle(monkey, start, SEARCH, NUM_ROWS)
    assert saddle.lowest_curvature < 0
    assert float(monkey(end)) < float(monkey(start)) - 0.1


def test_a_mode_stays_as_it_is():
    loss = double_well(10, 1.0, 10.0)
    mode = rotation(10)[0] * 2.0
    end, saddle = below_saddle(loss, mode, SEARCH, NUM_ROWS)
    assert end is mode and saddle == Saddle(saddle.lowest_curvature) and saddle.lowest_curvature > 0


def test_a_search_too_short_to_pay_for_a_round_says_that_there_is_no_mode():
    loss = double_well(10, 1.0, 10.0)
    start = torch.zeros(10, dtype=torch.float64)
    end, saddle = below_saddle(loss, start, 20, NUM_ROWS)
    assert end is start and not saddle.at_mode and saddle.gain == 0.0


def test_a_ridge_as_flat_as_rounding_is_no_saddle():
    def loss(z: Tensor) -> Tensor:
        return 0.5 * z[1:].square().sum() - 0.005 * z[0].square() + 0.001 * z[0].pow(4)

    start = torch.zeros(3, dtype=torch.float64)
    end, saddle = below_saddle(loss, start, SEARCH, NUM_ROWS)
    assert end is start and saddle.lowest_curvature == pytest.approx(-0.01)
