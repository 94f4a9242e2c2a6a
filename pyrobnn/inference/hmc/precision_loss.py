"""Whether float32 holds the steps of a program's chains; where not, a run begins again in float64.

Positions in float64 from the start would make this file needless, at a price that was measured: with a float32 gradient
a leapfrog of four chains takes 1.3 times as long on nets of 151 and 751 weights and 1.45 times on eight schools; with
the gradient in float64 too, 1.5 times on eight schools and 2.4 times on a logistic regression of 5000 rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyrobnn.density import Density
from pyrobnn.inference.fitting.float64 import float64, log_joint_float64

_MAX_ROUNDING = 0.1  # nats, sd of the difference of densities of float32 and float64
_MIN_STEP = 8.0  # units of the last place in a step
_POINTS = 32


class PrecisionLoss(Exception):
    """Ends a run whose chains float32 cannot hold; ``z`` (chain, dim), where another run begins."""

    def __init__(self, reason: str, z: Tensor) -> None:
        super().__init__(reason)
        self.z = z


def inspector(density: Density) -> Callable[[Tensor, Tensor], str] | None:
    """What says why float32 cannot hold draws and steps of a program; None where it cannot be told."""
    if density.dtype != torch.float32:
        return None
    exact = log_joint_float64(density)
    try:
        exact(density.sample_box(1, seed=0)[0].double())
    except (RuntimeError, TypeError, ValueError):  # a program that cannot be run in float64
        return None
    return lambda z, steps: float64_reason(density.log_joint, exact, z, steps)


def float64_reason(
    log_joint: Callable[[Tensor], Tensor], exact: Callable[[Tensor], Tensor], z: Tensor, steps: Tensor
) -> str:
    """Why float32 cannot hold these draws, in words; empty if it can.

    Args:
        log_joint: log density of one float32 vector (dim,).
        exact: the same in float64.
        z: draws (point, dim) of one chain, in float32.
        steps: the sampler's step along each coordinate (dim,).
    """
    resolution = torch.finfo(z.dtype).eps * z.abs().mean(0)
    if bool((steps < _MIN_STEP * resolution).any()):
        worst = int((steps / resolution).argmin())
        return f"steps of {float(steps[worst]):.1g} at positions near {float(z[:, worst].mean()):.7g}"
    points = z[:: max(1, len(z) // _POINTS)][:_POINTS]
    noise = torch.stack([log_joint(point) - exact(point.double()) for point in points])
    noise = noise[noise.isfinite()]
    if len(noise) > 2 and float(noise.std()) > _MAX_ROUNDING:
        return f"the log density was rounded by {float(noise.std()):.2g} nats"
    return ""


def in_program_dtype(density: Density, z: Tensor) -> dict[str, Tensor]:
    """Constrained draws, site → (chain, draw, …), of unconstrained ones (chain, draw, dim).

    Of positions in float64 they have the program's dtype, but where that cannot tell them apart.
    """
    if z.dtype == density.dtype:
        return density.constrain(z)
    with float64():
        exact = density.constrain(z)
    return {name: _narrow(value, density.dtype) for name, value in exact.items()}


def _narrow(value: Tensor, dtype: torch.dtype) -> Tensor:
    rounded = value.to(dtype)
    error = (rounded.double() - value).abs().amax((0, 1))
    return value if bool((error > 0.02 * value.std((0, 1))).any()) else rounded
