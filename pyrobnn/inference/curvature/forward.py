"""Forward-mode differentiation without torch's own deprecation warning on first use."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor


def jvp(fn: Callable[[Tensor], Tensor], point: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """``fn(point)`` and its derivative along ``direction``, see :func:`torch.func.jvp`.

    Where an operation has no forward derivative, it is the derivative of the reverse one, which is linear in what is
    pulled back: three passes in place of one.
    """
    with warnings.catch_warnings():
        # the first call in a process compiles torch's decompositions with the deprecated torch.jit.script
        warnings.filterwarnings("ignore", message=".*torch.jit.script", category=DeprecationWarning)
        try:
            value, slope, *_ = torch.func.jvp(fn, (point,), (direction,))
        except NotImplementedError:
            value, pull, *_ = torch.func.vjp(fn, point)
            push = torch.func.vjp(lambda out: pull(out)[0], torch.zeros_like(value))[1]
            (slope,) = push(direction)
        return value, slope
