r"""The two directions of the Kullback-Leibler divergence, on a mixture of normals in one dimension.

Variational inference minimises :math:`KL(q \| p)`, which lets q settle in one mode; the other direction spreads q over
all of them. In one dimension both are integrals on a grid, so that the lesson carries no Monte Carlo noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pyrobnn.checks import check_choice

DIRECTIONS = ("forward", "reverse")


@dataclass(frozen=True)
class Mixture1D:
    """A mixture of normals on the line.

    Args:
        weights: positive, adding up to one.
        locs: means.
        scales: standard deviations.

    Raises:
        ValueError: unequal lengths, weights that don't add up to one, or a scale that is not positive.

    Example:
        >>> Mixture1D((0.5, 0.5), (-2.0, 2.0), (0.5, 0.5)).mean_var
        (0.0, 4.25)
    """

    weights: Sequence[float]
    locs: Sequence[float]
    scales: Sequence[float]

    def __post_init__(self) -> None:
        if not len(self.weights) == len(self.locs) == len(self.scales) > 0:
            raise ValueError(
                f"'weights', 'locs' and 'scales' need one entry per component, got "
                f"{len(self.weights)}, {len(self.locs)} and {len(self.scales)}"
            )
        if min(self.weights) <= 0 or abs(sum(self.weights) - 1) > 1e-6:
            raise ValueError(f"'weights' must be positive and add up to 1, got {tuple(self.weights)}")
        if min(self.scales) <= 0:
            raise ValueError(f"'scales' must be positive, got {tuple(self.scales)}")

    def log_prob(self, x: Tensor) -> Tensor:
        """Log density, elementwise, float64."""
        x = x.double()[..., None]
        weights, locs, scales = (
            torch.tensor(v, dtype=torch.float64) for v in (self.weights, self.locs, self.scales)
        )
        return torch.logsumexp(weights.log() + _normal(x, locs, scales), -1)

    @property
    def mean_var(self) -> tuple[float, float]:
        """Mean and variance."""
        mean = sum(w * m for w, m in zip(self.weights, self.locs, strict=True))
        second = sum(w * (s**2 + m**2) for w, m, s in zip(self.weights, self.locs, self.scales, strict=True))
        return mean, second - mean**2


def kl_divergence(
    target: Mixture1D, loc: float | Tensor, scale: float | Tensor, direction: Literal["forward", "reverse"]
) -> Tensor:
    r"""KL between the target p and :math:`q = N(\mu, \sigma^2)` in nats, by quadrature; a differentiable scalar.

    Args:
        target: the mixture p.
        loc, scale: of q, numbers or scalar tensors.
        direction: ``"forward"`` is :math:`KL(p \| q)`, ``"reverse"`` is :math:`KL(q \| p)`.

    Raises:
        ValueError: an unknown direction.

    Example:
        >>> p = Mixture1D((1.0,), (0.0,), (1.0,))
        >>> round(kl_divergence(p, 1.0, 1.0, "reverse").item(), 6)
        0.5
    """
    check_choice("direction", direction, DIRECTIONS)
    loc, scale = (torch.as_tensor(value, dtype=torch.float64) for value in (loc, scale))
    if direction == "forward":
        mean, var = target.mean_var
        x = torch.linspace(mean - 12 * math.sqrt(var), mean + 12 * math.sqrt(var), 4001, dtype=torch.float64)
        log_p = target.log_prob(x)
        return torch.trapezoid(log_p.exp() * (log_p - _normal(x, loc, scale)), x)
    x = loc + scale * torch.linspace(-10.0, 10.0, 2001, dtype=torch.float64)
    log_q = _normal(x, loc, scale)
    return torch.trapezoid(log_q.exp() * (log_q - target.log_prob(x)), x)


def fit_normal(
    target: Mixture1D, direction: Literal["forward", "reverse"], *, start: tuple[float, float] = (0.0, 1.0)
) -> tuple[float, float, float]:
    """The normal closest to the target in one direction: mean, standard deviation and divergence.

    The forward direction has one optimum, the moments of the target. The reverse one has one near every mode, and the
    one that is found depends on ``start`` (mean, standard deviation).

    Raises:
        ValueError: an unknown direction, or a start scale that is not positive.

    Example:
        >>> p = Mixture1D((0.25, 0.75), (-3.0, 3.0), (0.5, 0.5))
        >>> [round(v, 3) for v in fit_normal(p, "forward")[:2]]
        [1.5, 2.646]
        >>> [round(v, 3) for v in fit_normal(p, "reverse", start=(1.0, 1.0))[:2]]
        [3.0, 0.5]
    """
    check_choice("direction", direction, DIRECTIONS)
    if start[1] <= 0:
        raise ValueError(f"'start' must be (mean, positive scale), got {start}")
    phi = torch.tensor([start[0], math.log(start[1])], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [phi], max_iter=300, tolerance_grad=1e-10, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = kl_divergence(target, phi[0], phi[1].exp(), direction)
        loss.backward()
        return loss

    optimizer.step(closure)
    loc, scale = phi[0].item(), phi[1].exp().item()
    return loc, scale, float(kl_divergence(target, loc, scale, direction))


def _normal(x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    return -0.5 * ((x - loc) / scale).square() - scale.log() - 0.5 * math.log(2 * math.pi)
