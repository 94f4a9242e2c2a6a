"""The gradient that moves the chains, and how many of them one call of it should take."""

from __future__ import annotations

from torch import Tensor

from pyrobnn.compile import library_elements
from pyrobnn.gradient import Gradient, batched_gradient
from pyrobnn.inference.fitting.float64 import log_joint_float64
from pyrobnn.inference.fitting.padding import padded_log_joint
from pyrobnn.inference.fitting.problem import Problem

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


def gradient_of(problem: Problem, z: Tensor, in_float64: bool, compile: bool) -> tuple[Gradient, str]:
    """The gradient of a problem's log joint for the chains at ``z``, and why it is not batched (empty if it is).

    Args:
        problem: what is fitted.
        z: positions (chain, dim).
        in_float64: with every operation in float64.
        compile: it will be compiled, and is to be the same graph for the next number of rows.
    """
    if in_float64:
        return batched_gradient(log_joint_float64(problem.density), z)
    return batched_gradient(padded_log_joint(problem, z) if compile else problem.density.log_joint, z)
