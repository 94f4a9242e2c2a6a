"""Functions of a point, and the gradient of a log density, at many points at once."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyrobnn.compile.trees import leaves_of, mapped

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


def at_each(function: Callable[..., Any], *points: Any) -> Any:
    """``function`` of the first element of every argument, of the second and so on, stacked.

    Args:
        function: returns a tensor, or tensors by name.
        *points: tensors, or tensors by name, with a leading axis (point, …).
    Returns:
        As of ``torch.func.vmap``; point by point where the function cannot be batched.
    """
    try:
        with warnings.catch_warnings():
            # an operation without a batching rule is only slower
            warnings.simplefilter("ignore", UserWarning)
            return torch.func.vmap(function, randomness="different")(*points)
    except RuntimeError:
        count = len(leaves_of(points)[0])
        each = [function(*mapped(operator.itemgetter(index), points)) for index in range(count)]
        columns = zip(*map(leaves_of, each), strict=True)
        return mapped(lambda _: torch.stack(next(columns)), each[0])
