"""Divergent transitions followed once more, to see whether they ended where a parameter is impossible."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from pyrobnn.inference.hmc.leapfrog import Place, kinetic_energy, leapfrog, whitened_gradient
from pyrobnn.inference.hmc.machine import MAX_ENERGY_ERROR
from pyrobnn.inference.hmc.metric import pulled, unwhiten, whiten
from pyrobnn.inference.hmc.windows import STATS
from pyrobnn.model import Density
from pyrobnn.model.gradient import batched_gradient

#: transitions that are followed, leapfrogs of each, and parameters that are named
_MOST_FOLLOWED = 24
_MOST_LEAPFROGS = 32
_MOST_NAMED = 3


@torch.no_grad()
def impossible_ends(
    density: Density,
    z: Tensor,
    stats: Tensor,
    scale: Tensor,
) -> dict[str, Any]:
    """How many of the divergent transitions that were followed end at impossible values, and the parameters.

    The momenta of a run are not kept: each transition gets a new one, and goes both ways from the draw before it.

    Args:
        z, stats: unconstrained draws (chain, draw, dim) and their statistics (chain, draw, 7).
        scale: the metric of the run.
    Returns:
        ``followed``, ``impossible`` and ``places``; empty where none ends so.
    """
    chains, draws = stats[..., STATS.index("diverging")].nonzero(as_tuple=True)
    spread = torch.linspace(
        0,
        len(chains) - 1,
        min(len(chains), _MOST_FOLLOWED),
        device=chains.device,
    )
    picked = spread.round().long()
    chains = chains[picked]
    draws = draws[picked]
    start = z[chains, (draws - 1).clamp(min=0)]
    step_size = stats[chains, draws, STATS.index("step_size")]
    ends = _impossible_positions(
        density, torch.cat([start, start]), torch.cat([step_size, -step_size]), scale
    )
    names: Counter[str] = Counter()
    count = 0
    for forwards, backwards in zip(
        ends[: len(start)],
        ends[len(start) :],
        strict=True,
    ):
        places: list[str] = []
        for end in (forwards, backwards):
            if end is not None:
                places += map(str, density.impossible(end.to(density.dtype)))
        names.update(set(places))
        count += bool(places)
    if not count:
        return {}
    return {
        "followed": len(start),
        "impossible": count,
        "places": [name for name, _ in names.most_common(_MOST_NAMED)],
    }


def _impossible_positions(
    density: Density,
    z: Tensor,
    step_size: Tensor,
    scale: Tensor,
) -> list[Tensor | None]:
    """Where the density of a trajectory from each of ``z`` (point, dim) becomes zero; None where it does not."""
    gradient, _ = batched_gradient(density.log_joint, z)
    noise = torch.randn(
        z.shape,
        generator=torch.Generator().manual_seed(0),
        dtype=z.dtype,
    )
    momentum = noise.to(z.device)
    move = step_size.to(z.dtype).unsqueeze(-1)
    whitened = whitened_gradient(gradient, scale)
    slope, value = gradient(z)
    place = Place(whiten(z, scale), pulled(slope, scale), value)
    energy_at_start = kinetic_energy(momentum) - value
    running = torch.ones(
        len(z),
        dtype=torch.bool,
        device=z.device,
    )
    ends: list[Tensor | None] = [None] * len(z)
    for _ in range(_MOST_LEAPFROGS):
        place, momentum = leapfrog(whitened, place.q, momentum, place.g, move)
        positions = unwhiten(place.q, scale)
        for index in (running & (place.lp == -torch.inf)).nonzero()[:, 0].tolist():
            ends[index] = positions[index]
        error = kinetic_energy(momentum) - place.lp - energy_at_start
        running = running & (error <= MAX_ENERGY_ERROR)  # false of NaN
        if not bool(running.any()):
            break
    return ends
