"""Where the chains of a run start, the gradient that moves them, and how many of them one call of it takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pyrobnn.core.checks import Refused
from pyrobnn.core.seeding import seeded
from pyrobnn.inference.fitting.initial import start_chains
from pyrobnn.inference.fitting.problem import Problem
from pyrobnn.inference.hmc.machine import MAX_ENERGY_ERROR
from pyrobnn.model import Density
from pyrobnn.model.handlers import RADIUS
from pyrobnn.posterior import Posterior


def starts(problem: Problem, init: Any, seed: int, num_chains: int) -> tuple[Tensor, Tensor | None]:
    """Positions (chain, dim) with finite density and gradient; the first whitening scale if ``init`` has one.

    Chains of one draw each are starts as they are: they say nothing of the scale.
    """
    density, uniform = problem.density, not problem.is_bnn
    with seeded(seed, problem.device):
        scale = None
        z = (
            _drawn(density, num_chains, uniform)
            if init is None
            else start_chains(problem.model, density, init, num_chains)
        )
        exact = isinstance(init, Posterior) and init.num_draws == 1 and init.meta.get("kind") == "chains"
        if isinstance(init, Posterior) and init.num_chains * init.num_draws > 1 and not exact:
            flat = density.unconstrain({site.name: init.stacked()[site.name] for site in density.sites})
            scale = flat.std(0).clamp(min=1e-6)
        elif init is not None and not exact:  # around one point: apart, so that R-hat has something to judge
            z = z + 0.1 * torch.randn_like(z)
        # the box shrinks, for a density that is finite near zero alone; every second try is from the prior
        tries = (_drawn(density, num_chains, uniform != bool(i % 2), 0.9**i) for i in range(100))
        z = finite_starts(problem, z, tries)
    return z.detach().contiguous(), scale


def _drawn(density: Density, num: int, uniform: bool, shrink: float = 1.0) -> Tensor:
    """Starts (num, dim) from the box or from the prior, by torch's present random state."""
    seed = int(torch.randint(2**31, ()))
    return density.sample_box(num, seed, shrink * RADIUS) if uniform else density.sample_prior(num, seed)


def finite_starts(problem: Problem, z: Tensor, tries: Iterable[Tensor]) -> Tensor:
    """The starts ``z`` (chain, dim), those from which a chain cannot move replaced by others of ``tries``.

    A start has a finite density and a finite gradient, not zero everywhere, as on a plateau.
    A log density so low that its rounding exceeds the energy error that ends a trajectory lets it go nowhere: of such
    starts the best is kept. Refused where no start of a chain is finite.
    """
    single = torch.func.grad_and_value(problem.density.log_joint)
    lowest = -MAX_ENERGY_ERROR / torch.finfo(z.dtype).eps
    todo, best = list(range(len(z))), torch.full((len(z),), -torch.inf)
    found = z.clone()
    for draws in itertools.chain([z], tries):
        for chain in list(todo):
            gradient, value = single(draws[chain])
            if not (bool(torch.isfinite(value)) and bool(torch.isfinite(gradient).all())):
                continue
            if float(value) > best[chain]:
                best[chain], found[chain] = float(value), draws[chain]
            if float(value) >= lowest and bool((gradient != 0).any()):
                found[chain] = draws[chain]
                todo.remove(chain)
        if not todo:
            return found
    if bool((best == -torch.inf).any()):
        worst = z[int(best.argmin())]
        raise Refused(_why_no_start(problem, worst, *single(worst)))
    return found  # a plateau everywhere has no better start, nor has a density that is low everywhere


def _why_no_start(problem: Problem, z: Tensor, gradient: Tensor, value: Tensor) -> str:
    """Which site is to blame that no start has a finite density."""
    density, bad = problem.density, (~torch.isfinite(gradient)).nonzero()
    names = [*density.observed]
    if bool(torch.isfinite(density.log_parts(z)[1])):
        names = [density.site_of(int(bad[0]))] if len(bad) else [site.name for site in density.sites]
    where = f"the site {', '.join(map(repr, names))}"
    return (
        f"no start with a finite density in 100 draws: the log density is {float(value):g}, because of "
        f"{where}. Check its support and scale, or pass fit(init=...) with a posterior that has a finite density"
    )
