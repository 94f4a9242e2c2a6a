"""Functions of probability that torch does not have, or has without a batching rule."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def by_scipy(function: str, *values: Tensor) -> Tensor:
    """An elementwise function of ``scipy.special`` that torch does not have, in float64 and without gradient."""
    from scipy import special  # imported late: a fit needs none of it

    arrays = [value.detach().double().cpu().numpy() for value in values]
    with np.errstate(all="ignore"):
        result = getattr(special, function)(*arrays)
    return torch.from_numpy(np.asarray(result)).to(values[0].device)


def log_normal_density(z: Tensor) -> Tensor:
    """Log density of the standard normal distribution."""
    return -0.5 * z.square() - 0.5 * math.log(2 * math.pi)


def log_ndtr(z: Tensor) -> Tensor:
    """Log of the normal distribution function; torch's own has no batching rule."""
    low = z.clamp_max(-1.0)
    high = z.clamp_min(-1.0)
    lower = (torch.special.erfcx(-low * math.sqrt(0.5)) / 2).log() - 0.5 * low.square()
    return torch.where(z < -1.0, lower, (torch.special.erfc(-high * math.sqrt(0.5)) / 2).log())
