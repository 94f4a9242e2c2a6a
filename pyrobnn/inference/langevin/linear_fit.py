"""A linear fit beside a net: where chains start and where they end they should come as close to the data."""

from __future__ import annotations

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

    Its residuals are leave-one-out (by the hat matrix): on few rows it follows its own data.

    Attributes: ``x``; ``y`` (row, out), float64; ``squares`` (out,), the mean squared leave-one-out residual.
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
        one_minus_leverage = (1 - hat.diagonal()).clamp_min(1e-3)
        return cls(x, y, ((hat @ y - y) / one_minus_leverage[:, None]).square().mean(0))

    @torch.no_grad()
    def nets(self, problem: Problem, z: Tensor) -> Tensor:
        """Outputs (point, row, out) of the nets at z (point, dim)."""
        constrain, forward = problem.density.constrain, problem.bnn.forward
        return torch.stack([forward(constrain(one), self.x)[:, : self.y.shape[1]] for one in z]).double()

    def at_least_as_good(self, outputs: Tensor, tolerance: float = 0.0) -> Tensor:
        """Whether mean squared residuals of outputs (…, row, out) are no larger than the linear fit's (…).

        Args:
            outputs: of nets.
            tolerance: nats per datum by which they may be worse.
        """
        squares = (outputs - self.y).square().mean(-2)
        # float32 nets cannot come closer to a line without noise
        rounding = torch.finfo(torch.float32).eps * self.y.var(0)
        return (squares <= (1.0 + 2.0 * tolerance) * self.squares + rounding).all(-1)


def some_rows(problem: Problem) -> tuple[Tensor, Tensor]:
    """Some training data: evenly spaced rows in memory, or the first batches of a pass."""
    if problem.loader is None:
        index = torch.linspace(0, problem.num_rows - 1, min(NUM_ROWS, problem.num_rows)).long()
        index = index.to(problem.device)
        return problem.x[index], problem.y[index]
    pairs, seen = [], 0
    for x, y in problem.one_pass():
        pairs.append((x, y))
        seen += len(x)
        if seen >= NUM_ROWS:
            break
    return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
