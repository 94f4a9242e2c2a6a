"""L-BFGS to the bottom of the valley in which it starts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: L-BFGS steps whose gain says how far from the mode a search ended
_FURTHER = 10


class _Outside(Exception):
    """A step of L-BFGS ended where there is no finite density."""


def descend(
    slope: Callable[[Tensor], tuple[Tensor, Tensor]], theta: Tensor, num_steps: int
) -> tuple[Tensor, float]:
    """Minimise by L-BFGS what has the gradient (dim,) and the value ``slope(theta)``, in the precision of ``theta``.

    A step across the edge of a bounded prior's support, where there is no finite density, ends it at the best point
    inside.

    Returns:
        The better of start and end, and the norm of the gradient there.
    """
    point = theta.detach().clone()
    optimizer = torch.optim.LBFGS(
        [point], max_iter=num_steps, tolerance_grad=1e-9, tolerance_change=0.0, line_search_fn="strong_wolfe"
    )

    before = slope(theta)
    inside = [(before[1], point.clone())]

    def closure() -> Tensor:
        point.grad, value = slope(point)
        # the line search would interpolate between numbers that are none
        if not bool(value.isfinite() & point.grad.isfinite().all()):
            raise _Outside
        if value < inside[0][0]:
            inside[0] = value, point.clone()
        return value

    try:
        if num_steps:
            optimizer.step(closure)
    except _Outside:
        point = inside[0][1]
    after = slope(point)
    best, (gradient, _) = (point, after) if float(after[1]) <= float(before[1]) else (theta, before)
    return best.detach(), float(gradient.norm())


def polish(
    log_joint: Callable[..., Tensor], theta: Tensor, num_steps: int, jacobian: bool = False
) -> tuple[Tensor, float]:
    """Bring ``theta`` (dim,) to the very mode of ``log_joint(z, jacobian=…)``, by :func:`descend`."""
    return descend(torch.func.grad_and_value(lambda z: -log_joint(z, jacobian=jacobian)), theta, num_steps)


def gain_left(log_joint: Callable[..., Tensor], theta: Tensor) -> float:
    """Nats that ten L-BFGS steps on all of the data gain from ``theta`` (dim,)."""
    better, _ = polish(log_joint, theta, _FURTHER)
    return max(0.0, float(log_joint(better, jacobian=False) - log_joint(theta, jacobian=False)))
