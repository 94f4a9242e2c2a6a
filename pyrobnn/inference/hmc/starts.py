"""Where the chains of a run start."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyrobnn.density import Density
from pyrobnn.inference.fitting.problem import Problem
from pyrobnn.inference.hmc.checks import movable
from pyrobnn.inference.langevin.plan import start_chains
from pyrobnn.posterior import Posterior
from pyrobnn.seeding import seeded
from pyrobnn.sites.supply import RADIUS

_TRIES = 100  # draws of a start, before there is none


def starts(
    problem: Problem, init: Any, seed: int, num_chains: int, uniform: bool
) -> tuple[Tensor, Tensor | None]:
    """Positions (chain, dim) with finite density and gradient; the first whitening scale if ``init`` has one.

    Args:
        problem: what is fitted.
        init: an earlier posterior, a net, or None for starts of the chains' own.
        seed: of the starts.
        num_chains: how many.
        uniform: own starts are uniform in a box rather than draws from the prior.
    """
    density = problem.density
    with seeded(seed, problem.device):
        scale = None
        own = init is None
        z = (
            _drawn(density, num_chains, uniform)
            if own
            else start_chains(problem.model, density, init, num_chains)
        )
        if isinstance(init, Posterior) and init.num_chains * init.num_draws > 1:
            flat = density.unconstrain({site.name: init.stacked()[site.name] for site in density.sites})
            scale = flat.std(0).clamp(min=1e-6)
        elif init is not None:  # around one point: apart, so that R-hat has something to judge
            z = z + 0.1 * torch.randn_like(z)
        # the box shrinks, for a density that is finite near zero alone; every second try is from the prior
        tries = (_drawn(density, num_chains, uniform != bool(i % 2), 0.9**i) for i in range(_TRIES))
        z = movable(problem, z, tries)
    return z.detach().contiguous(), scale


def _drawn(density: Density, num: int, uniform: bool, shrink: float = 1.0) -> Tensor:
    """Starts (num, dim) from the box or from the prior, by torch's present random state."""
    seed = int(torch.randint(2**31, ()))
    return density.sample_box(num, seed, shrink * RADIUS) if uniform else density.sample_prior(num, seed)
