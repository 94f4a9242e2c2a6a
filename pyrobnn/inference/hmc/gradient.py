"""How many chains one call of the gradient should take."""

from __future__ import annotations

from torch import Tensor

from pyrobnn.compile import library_elements
from pyrobnn.gradient import Gradient

_FEW, _CACHED = 8, 2**19  # chains never split; elements of one tensor that stay in the cache


def chains_per_call(gradient: Gradient, z: Tensor) -> int:
    """How many of the chains at ``z`` one call should take: as many as leave their activations in the CPU's cache.

    Matrix products read and write memory; past the cache a gradient costs up to three times as much per chain.
    """
    chains = len(z)
    if z.device.type != "cpu" or chains <= _FEW:
        return chains
    per_chain = library_elements(gradient, z[:2]) / 2
    divisors = [size for size in range(_FEW, chains + 1) if chains % size == 0]
    return max((size for size in divisors if size * per_chain <= _CACHED), default=divisors[0])
