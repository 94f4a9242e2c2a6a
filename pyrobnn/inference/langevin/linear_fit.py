"""A linear fit as the floor of a regression: a net and its draws should come as close to the data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pyrobnn.inference.fitting.problem import Problem

#: nats per datum, at the linear fit's own noise, by which a net may be worse than it
TOLERATED_NATS = 0.1
#: rows that the linear fit sees
NUM_ROWS = 2000


@dataclass(frozen=True, eq=False)
class LinearFit:
    """A least squares fit, and the rows it was made of.

    Its residuals are those of points left out (by the hat matrix): on few rows it follows its own data.

    Attributes: ``x``; ``y`` (row, out), float64; ``squares`` (out,), the mean squared residual of points left out.
    """

    x: Tensor
    y: Tensor
    squares: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, problem: Problem) -> LinearFit | None:
        """None where there is nothing to compare: no regression with a BNN, or less than two rows an input."""
        if not problem.is_bnn or not problem.bnn.likelihood.normal:
            return None
        x, y = some_rows(problem)
        y = y.double()
        design = torch.cat([x.flatten(1).double(), y.new_ones(len(x), 1)], 1)
        if 2 * design.shape[1] > len(design):
            return None
        hat = design @ torch.linalg.pinv(design)
        left_out = (1 - hat.diagonal()).clamp_min(1e-3)
        return cls(x, y, ((hat @ y - y) / left_out[:, None]).square().mean(0))

    @torch.no_grad()
    def of_mean(self, problem: Problem, z: Tensor) -> Tensor:
        """Mean squared residual (out,) of the mean of the nets at z (point, dim)."""
        total = torch.zeros_like(self.y)
        for one in z:
            total += self._net(problem, one)
        return (total / len(z) - self.y).square().mean(0)

    @torch.no_grad()
    def of_each(self, problem: Problem, z: Tensor) -> Tensor:
        """Mean squared residual (point, out) of every net."""
        return torch.stack([(self._net(problem, one) - self.y).square().mean(0) for one in z])

    def behind(self, problem: Problem, z: Tensor) -> Tensor:
        """Which nets (point,) are further from the targets than the linear fit."""
        return ~self._closer(self.of_each(problem, z), 1.0)

    def beaten(self, squares: Tensor) -> bool:
        """Whether residuals (out,) are no larger than the linear fit's, but for the slack."""
        return bool(self._closer(squares, 1.0 + 2.0 * TOLERATED_NATS))

    def worst(self, squares: Tensor) -> tuple[float, float]:
        """Root mean square of ``squares`` (out,) and of the linear fit, for the output where they compare worst."""
        output = int((squares / self.squares.clamp_min(1e-30)).argmax())
        return float(squares[output].sqrt()), float(self.squares[output].sqrt())

    def _closer(self, squares: Tensor, factor: float) -> Tensor:
        # float32 nets cannot come closer to a line without noise
        rounding = torch.finfo(torch.float32).eps * self.y.var(0)
        return (squares <= factor * self.squares + rounding).all(-1)

    def _net(self, problem: Problem, one: Tensor) -> Tensor:
        return problem.bnn.forward(problem.density.constrain(one), self.x)[:, : self.y.shape[1]]


def some_rows(problem: Problem) -> tuple[Tensor, Tensor]:
    """Some training data: evenly spaced rows in memory, or the first batches of a pass."""
    if problem.loader is None:
        index = torch.linspace(0, problem.num_rows - 1, min(NUM_ROWS, problem.num_rows)).long()
        index = index.to(problem.device)
        return problem.x[index], problem.y[index]
    pairs = list(_first(problem.one_pass()))
    return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])


def _first(batches: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    seen = 0
    for x, y in batches:
        yield x, y
        seen += len(x)
        if seen >= NUM_ROWS:
            return
