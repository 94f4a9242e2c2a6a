"""Draws moved by Hamiltonian Monte Carlo: how their function changes on the way to the posterior."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import xarray as xr
from torch import Tensor

from pyrobnn.core.seeding import generator
from pyrobnn.density.gradient import Gradient, batched_gradient
from pyrobnn.model import BNN
from pyrobnn.posterior.stein import posterior_density

if TYPE_CHECKING:
    from pyrobnn.posterior import Posterior

#: draws that are moved, trajectories of each, and leapfrog steps of one
NUM_DRAWS, NUM_TRAJECTORIES, NUM_STEPS = 128, 10, 6
#: searches for a step size, the factor between them, and the acceptance rates that a step size is kept between
_SEARCHES, _FACTOR, _LOWEST, _HIGHEST = 10, 1.6, 0.6, 0.95
#: draws of which quantiles say anything; a quick look at a posterior has fewer
_FEWEST = 200
#: products of data, weights and gradients that the moves may take
_MAX_WORK = 2e10
#: likewise for chains, which much else judges
_MAX_WORK_OF_CHAINS = 4e9
#: below it twice as many draws are moved
_LITTLE_WORK = 2e8


def moved_functions(posterior: Posterior, x: Tensor, y: Tensor, probe_x: Tensor) -> xr.Dataset | None:
    r"""The function at the probes and the log density of 128 or 256 thinned draws, before and after they are moved.

    Each draw takes ten trajectories of six leapfrog steps, accepted or refused by Metropolis' rule, in units of the
    draws' own standard deviations. Such moves leave the model's posterior p as it is: draws of p stay draws of p, and
    those of another distribution come nearer to it with every move. What the function changes by is how far it was off,
    or less where the way is longer than the moves; in any number of weights.

    Args:
        posterior: of a BNN: chains, or draws of an approximation with its density.
        x, y: the data that it was fitted to.
        probe_x: inputs (probe, …).

    Returns:
        Dataset with ``before`` and ``after`` (chain, draw, probe, output), the log density of the draws and of where
        they end, ``density_before`` and ``density_after`` (chain, draw), and the mean ``acceptance`` (); None where the
        draws are not of this density (a linearised net, layers in training mode), too few, or the gradients too dear.

    References:
        MCMC using Hamiltonian dynamics (Neal, 2011) https://arxiv.org/abs/1206.1901
    """
    chains = posterior.meta.get("kind") == "chains"
    if not isinstance(posterior.model, BNN) or (posterior.approximation is None and not chains):
        return None
    if (
        posterior.num_chains * posterior.num_draws < _FEWEST
        or (density := posterior_density(posterior, x, y)) is None
    ):
        return None
    work = density.dim * len(y) * NUM_DRAWS * NUM_TRAJECTORIES * NUM_STEPS
    if work > (_MAX_WORK_OF_CHAINS if chains else _MAX_WORK):
        return None
    num_draws = 2 * NUM_DRAWS if work < _LITTLE_WORK else NUM_DRAWS
    few = posterior.thin(max(1, num_draws // posterior.num_chains))
    start = density.unconstrain(few.draws).detach()
    flat = start.reshape(-1, density.dim)
    gradient, _ = batched_gradient(density.log_joint, flat[:2])
    end, acceptance = _moved(gradient, flat, flat.std(0))
    densities = (gradient(z)[1].detach().double().cpu().numpy().reshape(start.shape[:2]) for z in (flat, end))
    moved = replace(few, draws=few.draws | density.constrain(end.reshape(start.shape)))
    dims = ("chain", "draw", "probe", "output")
    before, after = (each.function(probe_x).double().cpu().numpy() for each in (few, moved))
    of_density = dict(zip(("density_before", "density_after"), ((dims[:2], each) for each in densities)))
    return xr.Dataset(
        {"before": (dims, before), "after": (dims, after), **of_density, "acceptance": ((), acceptance)}
    )


def _moved(gradient: Gradient, z: Tensor, scale: Tensor) -> tuple[Tensor, float]:
    """Points (draw, dim) after all trajectories, and the share that was accepted."""
    random = generator(0)
    step, accepted = float(z.shape[1]) ** -0.25, []
    for _ in range(_SEARCHES):
        if _trajectory(gradient, z, scale * step, 2, random)[1] > _LOWEST:
            break
        step /= _FACTOR
    for _ in range(NUM_TRAJECTORIES):
        jitter = 0.8 + 0.4 * float(torch.rand((), generator=random))
        z, rate = _trajectory(gradient, z, scale * step * jitter, NUM_STEPS, random)
        accepted.append(rate)
        step *= 1.0 / _FACTOR if rate < _LOWEST else _FACTOR if rate > _HIGHEST else 1.0
    return z, sum(accepted) / len(accepted)


def _trajectory(
    gradient: Gradient, z: Tensor, step: Tensor, num_steps: int, random: torch.Generator
) -> tuple[Tensor, float]:
    """One Hamiltonian trajectory of every point, steps per weight (dim,), and the mean acceptance rate."""
    momentum = torch.randn(z.shape, generator=random).to(z)
    slope, begun = gradient(z)
    begun = begun - 0.5 * momentum.square().sum(-1)
    end = z
    for _ in range(num_steps):
        momentum = momentum + 0.5 * step * slope
        end = end + step * momentum
        slope, ended = gradient(end)
        momentum = momentum + 0.5 * step * slope
    rate = (ended - 0.5 * momentum.square().sum(-1) - begun).clamp(max=0.0).exp().nan_to_num(0.0)
    taken = torch.rand(len(z), generator=random).to(z) < rate
    return torch.where(taken[:, None], end, z), float(rate.mean())
