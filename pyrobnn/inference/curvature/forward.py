"""Forward-mode differentiation without torch's own deprecation warning on first use."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor


def jvp(fn: Callable[[Tensor], Tensor], point: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """``fn(point)`` and its derivative along ``direction``, see :func:`torch.func.jvp`."""
    with warnings.catch_warnings():
        # the first call in a process compiles torch's decompositions with the deprecated torch.jit.script
        warnings.filterwarnings("ignore", message=".*torch.jit.script", category=DeprecationWarning)
        value, slope, *_ = torch.func.jvp(fn, (point,), (direction,))
        return value, slope
