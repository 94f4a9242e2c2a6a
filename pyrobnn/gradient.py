"""Functions of a point, and the gradient of a log density, at many points at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

Gradient = Callable[[Tensor], tuple[Tensor, Tensor]]


def batched_gradient(log_density: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Gradient, str]:
    """Gradient and value for all chains at once, or one after the other where the program cannot be batched.

    Returns:
        The function, and in words why it is not batched; empty if it is (then it can be compiled).
    """
    single = torch.func.grad_and_value(log_density)
    batched = torch.func.vmap(single)
    try:
        batched(z)
    except RuntimeError as error:  # what functorch raises, for control flow on values above all
        why = why_not_batched(error)

        def looped(z: Tensor) -> tuple[Tensor, Tensor]:
            pairs = [single(one) for one in z]
            return torch.stack([g for g, _ in pairs]), torch.stack([lp for _, lp in pairs])

        looped(z)  # an error of the program itself surfaces here
        return looped, why
    return batched, ""


def why_not_batched(error: RuntimeError) -> str:
    """What keeps a program from being run at many points at once, by the error of ``torch.func.vmap``."""
    said = str(error).strip().partition("\n")[0]
    if "data-dependent control flow" in said or ".item()" in said:
        return "the program's Python depends on the values of its sites (if, while, assert, float() or .item() of one)"
    if "in-place" in said or "inplace" in said:
        return f"the program writes into a tensor that all points share ({said})"
    return f"torch cannot run one of its operations at many points at once ({said or type(error).__name__})"


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
