r"""The way down from a saddle, which looks like a mode to what follows gradients.

A point without a gradient is a mode where the curvature is positive in every direction. Gauss-Newton's matrix always
is, and L-BFGS keeps only what is: both stand still at a saddle, and in the bend of a narrow valley, where the curvature
is negative along it. There the size of the exact curvature is what a step should be measured by,

.. math:: z = z_0 + |H|^{-1/2} u, \qquad H = B \,\mathrm{diag}(c)\, B^\top, \quad |H| = B \,\mathrm{diag}(|c|)\, B^\top

So a few steps of L-BFGS are made in these units, the curvature is taken anew where they end, and so on.

Reference: Identifying and attacking the saddle point problem in high-dimensional non-convex optimization (Dauphin et
al., 2014) https://arxiv.org/abs/1406.2572
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pyrobnn.inference.optim.descent import descend
from pyrobnn.inference.optim.path_ends import Slope
from pyrobnn.model.compile import compiled

#: coordinates up to which the exact curvature costs little beside a search
MAX_COORDINATES = 500
#: nats that leaving a saddle gains, or it was none to speak of
_LEAST_GAIN = 0.1
#: curvature, in units of a Gaussian's, below which a point is no mode: nearer to zero it may be rounding
_NEGATIVE = -0.05
#: curvature in these units that counts for smaller ones
_SMALLEST = 0.3
#: nats that Newton's step may gain at a mode, and that a round must gain
_AT_MODE = 0.003
_AT_REST = 0.001
#: steps of L-BFGS in a round, and evaluations for each
_STEPS_IN_ROUND = 40
_PER_STEP = 1.2
#: share of a gradient that a column of the curvature costs, which is taken with others at once
_PER_COLUMN = 0.3
#: gradients at one point that take no longer than a step of a search, with its update and its other paths
_PER_SEARCH_STEP = 2
#: of a search, what leaving a saddle may take
_SHARE = 0.25
#: length of the first step away from a saddle, and the shortest
_FIRST_STEP = 0.5
_SHORTEST_STEP = 0.005
#: rows times coordinates times columns of a curvature that are computed at once
_AT_ONCE = 4_000_000


class Saddle(NamedTuple):
    """What a look for a saddle has found.

    ``lowest_curvature`` where the search has ended, in units of a Gaussian's, negative at a saddle; ``gain``, the nats
    by which the way down from there leads, zero where it is not taken, as one of less than .1 nats is not; ``at_mode``,
    whether there was no such way, or it came to a mode.
    """

    lowest_curvature: float
    gain: float = 0.0
    at_mode: bool = True


def below_saddle(
    loss: Callable[[Tensor], Tensor],
    start: Tensor,
    search: int,
    num_rows: int,
) -> tuple[Tensor, Saddle]:
    """The point (dim,) to which the way down leads from ``start``: that itself where it is no saddle to speak of.

    Args:
        loss: of coordinates (dim,) in which a Gaussian's curvature is one, in nats.
        start: where a search has ended, (dim,), float64.
        search: the steps that it has taken; the way takes about a quarter of their time at most.
        num_rows: of the data.
    """
    curvature_at = partial(_Bend.of, loss, max(1, _AT_ONCE // (num_rows * len(start))))
    bend = curvature_at(start)
    lowest = float(bend.values[0])
    cost = _PER_COLUMN * len(start) + _PER_STEP * _STEPS_IN_ROUND
    num_rounds = int(_SHARE * _PER_SEARCH_STEP * search / cost)
    if not lowest < _NEGATIVE:
        return start, Saddle(lowest)
    if not num_rounds:
        return start, Saddle(lowest, at_mode=False)
    slope = compiled(
        torch.func.grad_and_value(loss),
        start,
        enabled=False,
        calls=num_rounds * _STEPS_IN_ROUND,
    )
    bend, at_mode = _descended(slope, curvature_at, bend, num_rounds)
    gain = float(slope(start)[1] - slope(bend.point)[1])
    if not gain > _LEAST_GAIN:
        return start, Saddle(lowest, at_mode=at_mode)
    return bend.point, Saddle(lowest, gain, at_mode)


def _descended(
    slope: Slope,
    curvature_at: Callable[[Tensor], _Bend],
    bend: _Bend,
    num_rounds: int,
) -> tuple[_Bend, bool]:
    """Where so many rounds lead from a saddle, and whether that is a mode: to both sides first, on from the lower.

    A round may lead to another saddle, which is left to both sides too.
    """
    steps = bend.sides(slope)
    before = float(slope(bend.point)[1])
    for _ in range(num_rounds):
        ends = [bend.after_round(slope, begin) for begin in steps]
        bend = curvature_at(min(ends, key=lambda end: float(slope(end)[1])))
        gradient, value = slope(bend.point)
        decrement = 0.5 * float(bend.whitened(gradient).square().sum())
        is_at_rest = decrement <= _AT_MODE
        if is_at_rest and float(bend.values[0]) >= _NEGATIVE:
            return bend, True
        if not before - float(value) > _AT_REST:
            break
        before = float(value)
        steps = bend.sides(slope) if is_at_rest else [torch.zeros_like(bend.point)]
    return bend, False


@dataclass(frozen=True, eq=False)
class _Bend:
    """The exact curvature at a ``point`` (dim,): its ``values`` (dim,), ascending, and their ``basis`` (dim, dim)."""

    point: Tensor
    values: Tensor
    basis: Tensor

    @classmethod
    def of(
        cls,
        loss: Callable[[Tensor], Tensor],
        num_columns: int,
        point: Tensor,
    ) -> _Bend:
        """That of a loss at a point (dim,), so many columns at once."""
        slope = torch.func.grad(loss)

        def product(direction: Tensor) -> Tensor:
            # WORKAROUND(torch<=2.13): reverse over reverse, for forward mode mixes up dtypes where a float32 model is
            # summed in float64
            return torch.func.grad(lambda z: slope(z) @ direction)(point)

        identity = torch.eye(len(point)).to(point)
        matrix = torch.func.vmap(product, chunk_size=num_columns)(identity).detach()
        values, basis = torch.linalg.eigh(0.5 * (matrix + matrix.mT))
        return cls(point, values, basis)

    @property
    def _spreads(self) -> Tensor:
        """Standard deviations along the basis, (dim,), where the sizes of the values count."""
        return self.values.abs().clamp_min(_SMALLEST).rsqrt()

    def position(self, steps: Tensor) -> Tensor:
        """The point (dim,) that lies so many of these standard deviations (dim,) from this one."""
        return self.point + self.basis @ (steps * self._spreads)

    def whitened(self, gradient: Tensor) -> Tensor:
        """A gradient (dim,) in these standard deviations."""
        return (self.basis.mT @ gradient) * self._spreads

    def sides(self, slope: Slope) -> list[Tensor]:
        """Steps (dim,) along the lowest curvature, one to each side, as short as it takes to lead down."""
        here = float(slope(self.point)[1])
        sides = []
        for sign in (1.0, -1.0):
            steps = torch.zeros_like(self.point)
            steps[0] = sign * _FIRST_STEP
            while abs(float(steps[0])) > _SHORTEST_STEP and not (
                float(slope(self.position(steps))[1]) < here
            ):
                steps = 0.5 * steps
            sides.append(steps)
        return sides

    def after_round(self, slope: Slope, steps: Tensor) -> Tensor:
        """The point (dim,) to which a round of L-BFGS leads from these steps (dim,)."""

        def whitened_slope(position: Tensor) -> tuple[Tensor, Tensor]:
            gradient, value = slope(self.position(position))
            return self.whitened(gradient), value

        return self.position(descend(whitened_slope, steps, _STEPS_IN_ROUND)[0])
