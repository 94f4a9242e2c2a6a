"""Functions of a point, and the gradient of a log density, at many points at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

Gradient = Callable[[Tensor], tuple[Tensor, Tensor]]


def batched_gradient(log_density: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Gradient, bool]:
    """Gradient and value for all chains at once, or one after the other where the program cannot be batched.

    Returns:
        The function, and whether it is batched (then it can be compiled).
    """
    single = torch.func.grad_and_value(log_density)
    batched = torch.func.vmap(single)
    try:
        batched(z)
    except RuntimeError:  # what functorch raises for control flow on values

        def looped(z: Tensor) -> tuple[Tensor, Tensor]:
            pairs = [single(one) for one in z]
            return torch.stack([g for g, _ in pairs]), torch.stack([lp for _, lp in pairs])

        looped(z)  # an error of the program itself surfaces here
        return looped, False
    return batched, True


def at_each(function: Callable[[Tensor], dict[str, Tensor]], z: Tensor) -> dict[str, Tensor]:
    """Tensors by name at each of the points (point, dim), or point by point where the function cannot be batched."""
    try:
        with warnings.catch_warnings():
            # an operation without a batching rule is only slower
            warnings.simplefilter("ignore", UserWarning)
            return torch.func.vmap(function)(z)
    except RuntimeError:
        each = [function(one) for one in z]
        return {name: torch.stack([values[name] for values in each]) for name in each[0]}
