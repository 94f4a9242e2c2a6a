"""Where chains begin: at draws of an earlier posterior, of the prior or of a box, with finite density and gradient."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pyrobnn.core.checks import Refused
from pyrobnn.core.seeding import seeded
from pyrobnn.inference.fitting.initial import start_chains
from pyrobnn.inference.hmc.machine import MAX_ENERGY_ERROR
from pyrobnn.model import BNN, Density
from pyrobnn.model.density import Program
from pyrobnn.model.gradient import batched_gradient
from pyrobnn.model.handlers import RADIUS
from pyrobnn.posterior import Posterior


class Starts(NamedTuple):
    """Positions (chain, dim) with finite density and gradient, and the first whitening scale (dim,) if one is known."""

    z: Tensor
    scale: Tensor | None = None


def chain_starts_of(
    model: BNN | Program,
    density: Density,
    init: Posterior | nn.Module | None,
    seed: int,
    num_chains: int,
) -> Starts:
    """Where the chains begin; ``init`` may know the scale.

    Chains of one draw each are starts as they are: they say nothing of the scale.
    """
    uniform = not isinstance(model, BNN)
    scale = None
    with seeded(seed, density.device):
        if init is None:
            z = _drawn(density, num_chains, uniform)
        else:
            z = start_chains(model, density, init, num_chains)
            if not _has_single_draws(init):
                scale = _spread(density, init)
                if scale is None:
                    # around one point: apart, so that R-hat has something to judge
                    z = z + 0.1 * torch.randn_like(z)
        # the box shrinks, for a density that is finite near zero alone; every second try is from the prior
        tries = (_drawn(density, num_chains, uniform != bool(i % 2), 0.9**i) for i in range(100))
        z = finite_starts(density, z, tries)
    return Starts(z.detach().contiguous(), scale)


def _has_single_draws(init: Posterior | nn.Module) -> bool:
    """Whether it holds chains of one draw each."""
    if not isinstance(init, Posterior):
        return False
    return init.num_draws == 1 and init.meta.get("kind") == "chains"


def _spread(density: Density, init: Posterior | nn.Module) -> Tensor | None:
    """The sd (dim,) of an earlier posterior's draws in unconstrained space; None where there is one point."""
    if not isinstance(init, Posterior) or init.num_chains * init.num_draws == 1:
        return None
    draws = {site.name: init.draws[site.name].flatten(0, 1) for site in density.sites}
    return density.unconstrain(draws).std(0).clamp(min=1e-6)


def _drawn(
    density: Density,
    num: int,
    uniform: bool,
    shrink: float = 1.0,
) -> Tensor:
    """Starts (num, dim) from the box or from the prior, by torch's present random state."""
    seed = int(torch.randint(2**31, ()))
    if uniform:
        return density.sample_box(num, seed, shrink * RADIUS)
    return density.sample_prior(num, seed)


@torch.no_grad()
def finite_starts(density: Density, z: Tensor, tries: Iterable[Tensor]) -> Tensor:
    """The starts ``z`` (chain, dim), those from which a chain cannot move replaced by others of ``tries``.

    A start has a finite density and a finite gradient, not zero everywhere, as on a plateau.
    A log density so low that its rounding exceeds the energy error that ends a trajectory lets it go nowhere: of such
    starts the best is kept. Refused where no start of a chain is finite.
    """
    gradients, _ = batched_gradient(density.log_joint, z)
    lowest = -MAX_ENERGY_ERROR / torch.finfo(z.dtype).eps
    todo = torch.arange(len(z), device=z.device)
    chosen = z.clone()
    best = torch.full(
        (len(z),),
        -torch.inf,
        dtype=torch.float64,
        device=z.device,
    )
    for draws in itertools.chain([z], tries):
        gradient, value = gradients(draws[todo])
        finite = value.isfinite() & gradient.isfinite().all(1)
        moves = finite & (value >= lowest) & (gradient != 0).any(1)
        better = moves | (finite & (value > best[todo]))
        best[todo[better]] = value[better]
        chosen[todo[better]] = draws[todo[better]]
        todo = todo[~moves]
        if not len(todo):
            return chosen
    if bool((best == -torch.inf).any()):
        worst = z[int(best.argmin())]
        gradient, value = torch.func.grad_and_value(density.log_joint)(worst)
        raise Refused(_why_no_start(density, worst, gradient, value))
    # a plateau everywhere has no better start, nor has a density that is low everywhere
    return chosen


def _why_no_start(
    density: Density,
    z: Tensor,
    gradient: Tensor,
    value: Tensor,
) -> str:
    """Which site is to blame that no start has a finite density."""
    bad = (~torch.isfinite(gradient)).nonzero()
    places = density.impossible(z)
    if places:
        return (
            f"no start with a finite density in 100 draws: {places[0]}. Check how the program computes it, or pass "
            "fit(init=...) with a posterior that has a finite density"
        )
    names = [*density.observed]
    if bool(torch.isfinite(density.log_parts(z)[1])):
        names = [site.name for site in density.sites]
        if len(bad):
            names = [density.site_of(int(bad[0]))]
    where = f"the site {', '.join(map(repr, names))}"
    return (
        f"no start with a finite density in 100 draws: the log density is {float(value):g}, because of "
        f"{where}. Check its support and scale, or pass fit(init=...) with a posterior that has a finite density"
    )
