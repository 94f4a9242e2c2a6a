"""The last steps to the mode, in units of the posterior's standard deviations.

The valleys of a net's density are narrow and curved: L-BFGS in the coordinates of the weights stands nearly still in
them, nats below the mode. In the units of the Gaussian around a point the valley is as wide as it is long. So the
centre moves by a few steps of L-BFGS in these units, a Gaussian is taken anew where they end, and so on, until Newton's
step from there would gain next to nothing.

That is so at a saddle too, of whose negative curvature Gauss-Newton's matrix knows nothing: where the exact curvature
is negative the centre moves on in units of that.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyrobnn.inference.curvature.gaussian import Block
from pyrobnn.inference.curvature.mode import MANY, Centre
from pyrobnn.inference.curvature.precision import (
    Precision,
    WeightCurvature,
    ggn_precision,
    hessian_block,
    hessian_precision,
)
from pyrobnn.inference.fitting.problem import Problem
from pyrobnn.inference.optim.descent import descend
from pyrobnn.inference.optim.path_ends import Slope
from pyrobnn.inference.optim.saddle import MAX_COORDINATES, Saddle, below_saddle
from pyrobnn.model import NET
from pyrobnn.model.compile import compiled

#: nats by which Newton's step from a mode may raise the log joint
AT_MODE = 0.01
#: nats that it, or the last round, may gain where the rounds ran out
NEAR_MODE = 0.5
#: of the nats that Newton's step promises, those without which further rounds lead nowhere
_SMALLEST_SHARE = 0.1
#: rounds at most; steps of L-BFGS in each, and at most where a curvature costs as much as many of them
_MOST_ROUNDS = 32
_FEWEST_STEPS = 12
_MOST_STEPS = 100
#: evaluations of a line search for a step of L-BFGS
_PER_STEP = 1.5
#: of the evaluations of the search, those that the rounds may take
_SHARE = 0.25
#: floating-point operations of a gradient, of a weight and a row; and those that take as long as its calls themselves
_OPERATIONS_PER_WEIGHT = 6.0
_OPERATIONS_PER_CALL = 25e6


@dataclass(frozen=True, eq=False)
class Expansion:
    """The curvature of the model as it is declared at a centre.

    Attributes: ``centre``; ``weights``, what these know of themselves, None where the curvature is the exact Hessian;
        ``structure`` of that; ``short``: the rounds towards the mode ran out before it; ``saddle``: what a look for one
        has found, None where nobody looked.
    """

    centre: Centre
    weights: WeightCurvature | None
    structure: str
    short: bool = False
    saddle: Saddle | None = None

    @classmethod
    def by_hessian(cls, structure: str, centre: Centre) -> Expansion:
        """By the exact Hessian."""
        return cls(centre, None, structure)

    @classmethod
    def by_ggn(cls, structure: str, centre: Centre) -> Expansion:
        """By Gauss-Newton's matrix."""
        return cls(centre, WeightCurvature.at(centre, structure), structure)

    @functools.cached_property
    def precision(self) -> Precision:
        """Of the Gaussian around the centre."""
        if self.weights is None:
            return hessian_precision(self.centre, self.structure)
        return ggn_precision(self.centre, self.weights, None)

    @property
    def blocks(self) -> list[Block]:
        """Those of the precision; and of learned noise, a point that moves with the mode, the exact Hessian."""
        density = self.centre.problem.density
        points = [site.name for site in density.sites if site.kind == "point"]
        noise = [name for name in points if not name.startswith(NET)]
        if not noise:
            return self.precision.blocks
        free = replace(
            self.centre,
            density=density,
            mode=self.theta,
        )
        return [*self.precision.blocks, hessian_block(free, noise, "full")[0]]

    @property
    def theta(self) -> Tensor:
        """The centre among the coordinates of latent sites and point parameters (dim,)."""
        return self.centre.problem.density.unconstrain(self.centre.values)

    @property
    def evaluations(self) -> float:
        """Gradients that cost as much as the curvature does, roughly."""
        if self.weights is None:
            sizes = {site.name: site.size for site in self.centre.density.sites}
            return float(sum(sizes[name] for name in self.centre.names))
        rows = len(self.centre.problem.x)
        gradient = _OPERATIONS_PER_WEIGHT * rows * len(self.centre.mode)
        return self.weights.chosen.operations / max(_OPERATIONS_PER_CALL, gradient)


@dataclass(frozen=True)
class Rounds:
    """How many rounds towards the mode are made at most, and the steps of L-BFGS in each."""

    number: int
    num_steps: int

    @classmethod
    def affordable(cls, curvature: float, search: int) -> Rounds:
        """As many as a share of the ``search`` pays for where a ``curvature`` is taken in each; both in gradients."""
        num_steps = int(min(_MOST_STEPS, max(_FEWEST_STEPS, curvature / _PER_STEP)))
        number = int(_SHARE * search / (curvature + _PER_STEP * num_steps))
        return cls(min(_MOST_ROUNDS, number), num_steps)


def approached(
    expansion: Expansion,
    expand: Callable[[Centre], Expansion],
    search: int,
) -> Expansion:
    r"""The expansion at the mode, or as near to it as rounds of L-BFGS lead that the search pays for.

    .. math:: z = z_0 + \Lambda_0^{-1/2} u, \qquad \tfrac12 g(z)^\top \Lambda^{-1} g(z) \le 0.01

    with the gradient g of the log joint. The second, Newton's decrement, is the gain in nats of Newton's step from z.
    An expansion that is at the mode stays where it is. At a saddle the decrement is as small: of few parameters the
    exact curvature shows it, and :func:`pyrobnn.inference.optim.saddle.below_saddle` leads on from there.

    Args:
        expansion: where the search has ended.
        expand: a centre → the expansion there.
        search: gradients that the search has taken.
    """
    nearest = _at_mode(expansion, expand, search)
    num_coordinates = sum(len(block.index) for block in nearest.blocks)
    num_rows = nearest.centre.problem.num_rows
    if num_coordinates > MAX_COORDINATES or num_rows > MANY:
        return nearest
    # a network may have no second derivative
    with contextlib.suppress(RuntimeError):
        return _below_saddle(nearest, expand, search)
    return nearest


def _below_saddle(
    expansion: Expansion,
    expand: Callable[[Centre], Expansion],
    search: int,
) -> Expansion:
    """The expansion at the end of the way down from a saddle; the given one, marked as seen, where it is none."""
    problem = expansion.centre.problem
    density = problem.in_double().density
    theta = expansion.theta
    blocks = expansion.blocks
    index = torch.cat([block.index for block in blocks])
    # rows of standard deviations, of each block by itself
    root = torch.block_diag(
        *[block.sample(torch.eye(len(block.index)).to(theta)) for block in blocks]
    ).double()
    centre = theta.double()

    def at(steps: Tensor) -> Tensor:
        return centre.index_add(0, index, steps @ root)

    start = torch.zeros(
        len(index),
        dtype=torch.float64,
        device=theta.device,
    )
    end, saddle = below_saddle(
        lambda steps: -density.log_joint(at(steps)),
        start,
        search,
        problem.num_rows,
    )
    if not saddle.gain:
        return replace(expansion, saddle=saddle)
    moved = at(end).to(theta)
    gradient, _ = problem.whole_slope(problem.density)(moved)
    return replace(
        expand(expansion.centre.moved(moved, -gradient)),
        short=not saddle.at_mode,
        saddle=saddle,
    )


def _at_mode(
    expansion: Expansion,
    expand: Callable[[Centre], Expansion],
    search: int,
) -> Expansion:
    """The expansion where as many rounds lead as the search pays for; one whose decrement is small as it is."""
    rounds = Rounds.affordable(expansion.evaluations, search)
    if not rounds.number:
        return expansion
    problem = expansion.centre.problem
    theta = expansion.theta
    blocks = expansion.blocks
    gradient, value = problem.whole_slope(problem.density)(theta)
    decrement = _decrement(blocks, gradient)
    if decrement <= AT_MODE:
        return expansion
    slope = _slope(problem, theta, rounds)
    for _ in range(rounds.number):
        theta = _moved(slope, theta, blocks, rounds.num_steps)
        gradient, lower_value = slope(theta)
        gain = float(value - lower_value)
        expansion = expand(expansion.centre.moved(theta, -gradient))
        # where the density has a kink, or its rounding shows, the gradient promises what no step gains
        if gain < _SMALLEST_SHARE * decrement:
            return expansion
        value = lower_value
        blocks = expansion.blocks
        decrement = _decrement(blocks, gradient)
        if decrement <= AT_MODE:
            return expansion
    return replace(expansion, short=max(decrement, gain) > NEAR_MODE)


def _slope(problem: Problem, theta: Tensor, rounds: Rounds) -> Slope:
    """From points (dim,) to gradients (dim,) and values () of minus the log joint in unconstrained coordinates."""
    density = problem.density
    if problem.is_bnn and problem.num_rows > MANY:
        return problem.whole_slope(density)

    def loss(z: Tensor) -> Tensor:
        return -density.log_joint(z)

    return compiled(
        torch.func.grad_and_value(loss),
        theta,
        enabled=False,
        calls=rounds.number * rounds.num_steps,
    )


def _whitened(blocks: Sequence[Block], gradient: Tensor) -> Tensor:
    """The gradient in the units of the Gaussian of these blocks, (their coordinates,), float64."""
    roots = [block.root(gradient[block.index].unsqueeze(0))[0].double() for block in blocks]
    return torch.cat(roots)


def _decrement(blocks: Sequence[Block], gradient: Tensor) -> float:
    """By how many nats Newton's step would raise the log joint."""
    return 0.5 * float(_whitened(blocks, gradient).square().sum())


def _moved(
    slope: Slope,
    theta: Tensor,
    blocks: Sequence[Block],
    num_steps: int,
) -> Tensor:
    """The point (dim,) to which so many steps of L-BFGS lead in the units of the Gaussian of these blocks."""
    sizes = [len(block.index) for block in blocks]

    def at(steps: Tensor) -> Tensor:
        point = theta.clone()
        for block, step in zip(blocks, steps.split(sizes), strict=True):
            point[block.index] += block.sample(step.unsqueeze(0))[0].to(theta)
        return point

    def whitened_slope(steps: Tensor) -> tuple[Tensor, Tensor]:
        gradient, value = slope(at(steps))
        return _whitened(blocks, gradient), value

    start = torch.zeros(
        sum(sizes),
        dtype=torch.float64,
        device=theta.device,
    )
    return at(descend(whitened_slope, start, num_steps)[0])
