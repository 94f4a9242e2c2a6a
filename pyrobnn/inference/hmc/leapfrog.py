"""One leapfrog of Hamiltonian dynamics, in whitened coordinates: of the machine, the first step size and the retrace.

*A Conceptual Introduction to Hamiltonian Monte Carlo* (Betancourt, 2017), https://arxiv.org/abs/1701.02434
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyrobnn.inference.hmc.metric import pulled, unwhiten
from pyrobnn.model.compile import materialize
from pyrobnn.model.gradient import Gradient


class Place(NamedTuple):
    """Where every chain is: whitened position and gradient (chain, dim), log density (chain,) in float64."""

    q: Tensor
    g: Tensor
    lp: Tensor


def whitened_gradient(gradient: Gradient, scale: Tensor) -> Gradient:
    """The gradient (chain, dim) and value (chain,) at whitened positions of a log density that is given at others."""

    def of_whitened(q: Tensor) -> tuple[Tensor, Tensor]:
        g, lp = gradient(materialize(unwhiten(q, scale)))
        return pulled(materialize(g), scale), lp

    return of_whitened


def leapfrog(
    gradient: Gradient,
    q: Tensor,
    r: Tensor,
    g: Tensor,
    move: Tensor,
) -> tuple[Place, Tensor]:
    """The place and the momenta (chain, dim) after one leapfrog.

    Args:
        gradient: whitened.
        q, r, g: whitened positions, momenta and gradients (chain, dim) before it.
        move: step size times direction (chain, 1).
    """
    q, half = drifted(q, r, g, move)
    g, lp = gradient(q)
    return Place(q, g, lp), materialize(half + 0.5 * move * g)


def drifted(
    q: Tensor,
    r: Tensor,
    g: Tensor,
    move: Tensor,
) -> tuple[Tensor, Tensor]:
    """The positions (chain, dim) after a leapfrog, and the momenta half-way; arguments as of :func:`leapfrog`."""
    half = r + 0.5 * move * g
    return materialize(q + move * half), half


def kinetic_energy(r: Tensor) -> Tensor:
    """The energy (chain,) of whitened momenta (chain, dim), in float64."""
    return 0.5 * (r * r).sum(-1, dtype=torch.float64)
