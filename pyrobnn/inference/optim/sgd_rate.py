"""The constant learning rate at which SGD wanders about as widely as the posterior."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

#: of SGD (Maddox et al., 2019)
MOMENTUM = 0.9
#: nats per datum by which SGD may leave a mode beyond what is expected of it
TOLERATED_RISE = 0.1


def constant_rate(
    loss: Callable[..., Tensor], theta: Tensor, batches: Iterator[Sequence], *, num_data: int, momentum: float = 0.0
) -> float:
    r"""Learning rate of SGD whose stationary distribution comes closest to the posterior around a mode.

    .. math:: \frac{\eta}{1 - \mu} = \min\Big( \frac{2 D}{N \operatorname{tr} \operatorname{Var}[\nabla L_b]},
        \ \frac{1}{\lambda_{\max}(\nabla^2 L)} \Big)

    The first is the minimiser of KL(q‖p) for a quadratic loss; the second keeps SGD stable where the noise is so small
    that the first would not. Both are local: at a mode that interpolates the data, gradients and curvature all but
    vanish. So the rate is tried, and halved until the loss rises by no more than twice what it should,
    :math:`\tfrac{\eta}{4 (1 - \mu)} \operatorname{tr} \operatorname{Var}[\nabla L_b]`; and once more, because a
    trial is short.

    Args:
        loss: (theta, \*batch) → loss per datum ().
        theta: near the mode (D,).
        batches: endless mini-batches.
        num_data: N.
        momentum: μ of SGD.

    Raises:
        FloatingPointError: the gradients at ``theta`` are not finite, or SGD leaves it at every rate.

    Caveat: with fewer data than weights most of the D directions have no gradient noise, and the bound decides.

    Reference: `Stochastic Gradient Descent as Approximate Bayesian Inference (Mandt, Hoffman & Blei, 2017)
    <https://arxiv.org/abs/1704.04289>`_, Theorem 1.

    Example:
        >>> def loss(theta, y):
        ...     return 0.5 * (theta - y).square().mean()
        >>> batches = iter(lambda: (torch.zeros(4),), None)  # no gradient noise: the bound, 1 / curvature
        >>> round(constant_rate(loss, torch.zeros(1), batches, num_data=100), 3)
        1.0
    """
    slope = torch.func.grad(loss)
    drawn = list(itertools.islice(batches, 64))
    gradients = torch.stack([slope(theta, *batch).double() for batch in drawn])
    if not bool(torch.isfinite(gradients).all()):
        raise FloatingPointError("the gradients at the start of SGD are not finite: start from another init")
    noise = float(gradients.var(0).sum())
    bound = 1.0 / max(_largest_curvature(slope, theta, drawn), 1e-12)
    best = 2.0 * len(theta) / (num_data * noise) if noise > 0 else bound
    first = rate = min(best, bound)
    while not _rise(loss, theta, drawn, (1.0 - momentum) * rate, momentum) <= rate * noise / 2 + TOLERATED_RISE:
        rate /= 2
        if rate < 1e-6 * first:
            raise FloatingPointError("SGD leaves the start at every learning rate: start from a mode")
    return (1.0 - momentum) * (rate if rate == first else rate / 2)


def _rise(
    loss: Callable[..., Tensor], theta: Tensor, batches: Sequence[Sequence[Tensor]], lr: float, momentum: float
) -> float:
    """Mean rise of the loss over the second half of a trial of 128 steps; inf or NaN if it diverges."""
    slope, moved, velocity = torch.func.grad_and_value(loss), theta, torch.zeros_like(theta)
    rises = []
    for batch in itertools.islice(itertools.cycle(batches), 128):
        gradient, value = slope(moved, *batch)
        velocity = momentum * velocity + gradient
        moved = moved - lr * velocity
        rises.append(float(value) - float(loss(theta, *batch)))
    return sum(rises[64:]) / 64


def _largest_curvature(slope: Callable[..., Tensor], theta: Tensor, batches: Sequence[Sequence[Tensor]]) -> float:
    """Largest eigenvalue of the Hessian by 20 steps of the power iteration, a batch for each."""
    vector = torch.randn_like(theta)
    vector = vector / vector.norm()
    values = []
    for batch in itertools.islice(itertools.cycle(batches), 20):
        # reverse over reverse: forward mode does not follow the float64 sums of the density
        along = torch.func.grad(lambda z, batch=batch, vector=vector: (slope(z, *batch) * vector).sum())
        product = along(theta)
        values.append(float(product.norm()))
        vector = product / product.norm().clamp_min(1e-30)
    return sum(values[10:]) / 10
