"""L-BFGS to the bottom of the valley in which it starts, and how far from there a search ended, in nats."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pyrobnn.core.findings import Finding
from pyrobnn.core.threads import threads_by_need
from pyrobnn.model.compile import compiled

#: of :func:`descend_each`: evaluations between two looks, nats that a look must have gained, and nats behind the best
#: that are given up
_LOOK_EVERY = 25
_STANDS_STILL = 0.3
_OUT_OF_REACH = 30.0
#: of :func:`descend_in_valleys`: evaluations in a round, and nats that a round must have gained
_STEPS_IN_ROUND = 14
_AT_REST = 0.02
#: of :func:`gain_left`: steps of L-BFGS, and gradients that these take at most, with the two values beside them
_LOOK_STEPS = 10
NUM_LOOKS = 15
#: steps below which the losses show nothing
_SHORT = 20


class _Outside(Exception):
    """A step of L-BFGS ended where there is no finite density, or steps have become noise."""


@threads_by_need()
def descend(
    slope: Callable[[Tensor], tuple[Tensor, Tensor]],
    theta: Tensor,
    num_steps: int,
    patience: float = math.inf,
) -> tuple[Tensor, float]:
    """Minimise by L-BFGS what has the gradient (dim,) and the value ``slope(theta)``, in the precision of ``theta``.

    A step across the edge of a bounded prior's support, where no density is finite, ends it at the best point inside;
    so do ``patience`` evaluations without a smaller value, which is rounding by then: a gradient may grow on the way.

    Returns:
        The better of start and end, and the norm of the gradient there.
    """
    point = theta.detach().clone()
    optimizer = torch.optim.LBFGS(
        [point],
        max_iter=num_steps,
        tolerance_grad=1e-9,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    gradient_before, value_before = slope(theta)
    # the smallest value at a point inside the support, and that point
    best_inside = [(value_before, point.clone())]
    history = list[float]()

    def closure() -> Tensor:
        point.grad, value = slope(point)
        history.append(float(value))
        finite = bool(value.isfinite() & point.grad.isfinite().all())
        if not finite:  # the line search would interpolate between numbers that are none
            raise _Outside
        # the smallest value is older than `patience` evaluations
        if history.index(min(history)) < len(history) - patience:
            raise _Outside
        if value < best_inside[0][0]:
            best_inside[0] = value, point.clone()
        return value

    try:
        if num_steps:
            optimizer.step(closure)
    except _Outside:
        point = best_inside[0][1]
    gradient_after, value_after = slope(point)
    if float(value_after) <= float(value_before):
        return point.detach(), float(gradient_after.norm())
    return theta.detach(), float(gradient_before.norm())


@threads_by_need()
@torch.no_grad()
def descend_each(
    slope: Callable[[Tensor], tuple[Tensor, Tensor]],
    thetas: Tensor,
    num_steps: int,
    memory: int = 10,
) -> Tensor:
    """As :func:`descend` from several points (point, dim) at once, each by itself, to where ``num_steps`` lead.

    A step that gains too little, or ends where there is no finite density, is halved. It ends early where no point that
    may still become the lowest moves.

    Args:
        slope: points (point, dim) → gradients (point, dim) and values (point,).
        thetas: where each begins.
        num_steps: evaluations of ``slope``.
        memory: pairs of moves and gradients that give a direction.
    """
    points = thetas.detach().clone()
    gradients, values = slope(points)
    moves = gradients.new_zeros(memory, *points.shape)
    turns = torch.zeros_like(moves)
    # the first step is of length one at most
    sizes = (1 / gradients.norm(dim=1).clamp_min(1.0)).unsqueeze(1)
    directions = -gradients * sizes
    scales = torch.ones_like(sizes)
    earlier = values
    for step in range(num_steps):
        if step % _LOOK_EVERY == 0 and step:
            near = values <= values.nan_to_num(nan=math.inf).min() + _OUT_OF_REACH
            if float((earlier - values)[near].max()) < _STANDS_STILL:
                break
            earlier = values
        trials = points + scales * directions
        trial_gradients, trial_values = slope(trials)
        expected = (scales * directions * gradients).sum(1)
        finite = trial_values.isfinite() & trial_gradients.isfinite().all(1)
        accepted = (finite & (trial_values <= values + 1e-4 * expected)).unsqueeze(1)
        move = torch.where(accepted, trials - points, 0.0)
        turn = torch.where(accepted, trial_gradients - gradients, 0.0)
        convex = (move * turn).sum(1, keepdim=True) > 1e-10 * turn.square().sum(1, keepdim=True)
        moves = torch.where(convex, torch.cat([moves[1:], move[None]]), moves)
        turns = torch.where(convex, torch.cat([turns[1:], turn[None]]), turns)
        points = torch.where(accepted, trials, points)
        gradients = torch.where(accepted, trial_gradients, gradients)
        values = torch.where(accepted.squeeze(1), trial_values, values)
        directions = torch.where(accepted, -_newton_like(gradients, moves, turns), directions)
        scales = torch.where(accepted, 1.0, 0.5 * scales)
    return points


@torch.no_grad()
def descend_in_valleys(
    slope: Callable[[Tensor], tuple[Tensor, Tensor]],
    thetas: Tensor,
    roots_at: Callable[[Tensor], Tensor],
    num_rounds: int,
) -> Tensor:
    """As :func:`descend_each`, by rounds of a few steps in the units of a Gaussian around each point.

    In these a narrow and curved valley is as wide as it is long.

    Args:
        slope: points (point, dim) → gradients (point, dim) and values (point,).
        thetas: where each begins.
        roots_at: points → roots (point, dim, dim) of their Gaussians' covariances.
        num_rounds: at most; fewer where no point that may still become the lowest moves.
    """
    points = thetas.detach().clone()
    values = slope(points)[1]
    for _ in range(num_rounds):
        points = _after_round(slope, points, roots_at(points).to(points))
        lower_values = slope(points)[1]
        near = lower_values <= lower_values.nan_to_num(nan=math.inf).min() + _OUT_OF_REACH
        if float((values - lower_values)[near].max()) < _AT_REST:
            break
        values = lower_values
    return points


def _after_round(
    slope: Callable[[Tensor], tuple[Tensor, Tensor]],
    points: Tensor,
    roots: Tensor,
) -> Tensor:
    """Where a few steps lead from points (point, dim) in units of these roots (point, dim, dim)."""

    def positions(steps: Tensor) -> Tensor:
        return points + torch.einsum("pi,pij->pj", steps, roots)

    def whitened(steps: Tensor) -> tuple[Tensor, Tensor]:
        gradients, values = slope(positions(steps))
        return torch.einsum("pj,pij->pi", gradients, roots), values

    return positions(descend_each(whitened, torch.zeros_like(points), _STEPS_IN_ROUND))


def _newton_like(gradients: Tensor, moves: Tensor, turns: Tensor) -> Tensor:
    """The gradients (point, dim) times the inverse curvature that moves and turns (pair, point, dim) show.

    The two-loop recursion of L-BFGS (Nocedal & Wright, algorithm 7.4), each loop as a triangular system in the products
    of moves, its s, and turns, its y.
    """
    moves_of_points = moves.transpose(0, 1).double()
    turns_of_points = turns.transpose(0, 1).double()
    columns = gradients.double().unsqueeze(2)
    products = moves_of_points @ turns_of_points.mT
    curvatures = products.diagonal(dim1=1, dim2=2)
    # a pair that is not there yet has products of zero
    triangles = products.triu() + torch.diag_embed((curvatures == 0).double())
    shares = torch.linalg.solve_triangular(triangles, moves_of_points @ columns, upper=True)
    steps = columns - turns_of_points.mT @ shares
    squares = turns_of_points[:, -1].square().sum(1)
    sizes = 1 / columns.norm(dim=1).squeeze(1).clamp_min(1.0)
    sizes = torch.where(curvatures[:, -1] > 0, curvatures[:, -1] / squares.clamp_min(1e-30), sizes)
    steps = steps * sizes.reshape(-1, 1, 1)
    corrections = torch.linalg.solve_triangular(
        triangles.mT,
        curvatures.unsqueeze(2) * shares - turns_of_points @ steps,
        upper=False,
    )
    return (steps + moves_of_points.mT @ corrections).squeeze(2).to(gradients)


def polish(
    log_joint: Callable[..., Tensor],
    theta: Tensor,
    num_steps: int,
    jacobian: bool = False,
) -> tuple[Tensor, float]:
    """Bring ``theta`` (dim,) to the very mode of ``log_joint(z, jacobian=…)`` by :func:`descend`."""
    slope = torch.func.grad_and_value(lambda z: -log_joint(z, jacobian=jacobian))
    step = compiled(
        slope,
        theta,
        enabled=False,
        calls=num_steps,
    )
    return descend(step, theta, num_steps)


def gain_left(log_joint: Callable[..., Tensor], theta: Tensor) -> float:
    """Nats that ten L-BFGS steps on all of the data gain from ``theta`` (dim,), by ``NUM_LOOKS`` gradients or fewer."""
    better, _ = polish(log_joint, theta, num_steps=_LOOK_STEPS)
    return max(0.0, float(log_joint(better, jacobian=False) - log_joint(theta, jacobian=False)))


def unfinished(nats: float, num_params: int, name: str = "gain_left") -> dict[str, float]:
    """What ``meta`` keeps of a search that ended so many nats above its mode.

    Every parameter may be .05 nats off, a third of its standard error.
    """
    return {name: nats, "gain_limit": max(1.0, 0.05 * num_params)}


def stopped_short(meta: Mapping[str, Any]) -> list[Finding]:
    """What the user has to know of a search that ran out of steps, from what ``meta`` keeps of it."""
    if meta.get("stopped") != "num_steps":
        return []
    gain = meta.get("gain_left")
    fall = meta.get("fall_left")
    limit = meta.get("gain_limit", math.inf)
    steps = meta.get("num_steps", _SHORT)
    if gain is not None:
        shortfall = {"gain": gain, "limit": limit} if gain > limit else {}
    elif fall is not None:  # the losses of a run tell less than further steps
        shortfall = {"fall": fall, "limit": limit} if fall > 10 * limit else {}
    else:
        shortfall = {"steps": steps} if steps < _SHORT else {}
    return [Finding("search_unfinished", shortfall)] if shortfall else []


def still_falling(losses: Tensor, factors: Tensor, scale: float) -> float | None:
    r"""The fall of a loss over the last fifth of a run, in nats; of several members the largest.

    The run is measured by the sum of its learning-rate factors, so that a rate that goes to zero does not look like an
    optimum. Three standard errors of the noise of mini-batches are taken off.

    Args:
        losses: (step,) or (step, members).
        factors: of the learning rate, (≥ step,).
        scale: nats of a unit of the loss.

    Returns:
        The fall; None of a run too short to show one.
    """
    num_steps = len(losses)
    if num_steps < _SHORT:
        return None
    losses = losses.double().reshape(num_steps, -1)
    time = factors[:num_steps].cumsum(0)
    late = time > 0.8 * time[-1]
    before = (time > 0.6 * time[-1]) & ~late
    if min(int(late.sum()), int(before.sum())) < 2:
        return None
    fall = losses[before].mean(0) - losses[late].mean(0)
    error = sum(losses[period].var(0) / int(period.sum()) for period in (before, late))
    return max(0.0, scale * float((fall - 3.0 * torch.as_tensor(error).sqrt()).max()))
