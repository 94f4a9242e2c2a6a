"""The gradient of many chains at once, and how many of them one call should take."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyrobnn.compile import library_elements
from pyrobnn.inference.hmc.machine import Gradient

_FEW, _CACHED = 8, 2**19  # chains never split; elements of one tensor that stay in the cache


def chains_together(gradient: Gradient, z: Tensor) -> int:
    """How many of the chains at ``z`` one call should take: as many as leave their activations in the CPU's cache.

    Matrix products read and write memory; past the cache a gradient costs up to three times as much per chain.
    """
    chains = len(z)
    if z.device.type != "cpu" or chains <= _FEW:
        return chains
    per_chain = library_elements(gradient, z[:2]) / 2
    divisors = [size for size in range(_FEW, chains + 1) if chains % size == 0]
    return max((size for size in divisors if size * per_chain <= _CACHED), default=divisors[0])


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
