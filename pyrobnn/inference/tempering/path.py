r"""The path from prior to posterior, :math:`\pi_\beta(z) \propto p(z)\, L(z)^\beta`, and the ladder of its β.

*Sequential Monte Carlo samplers* (Del Moral, Doucet & Jasra, 2006), https://doi.org/10.1111/j.1467-9868.2006.00553.x
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from pyrobnn.checks import Refused
from pyrobnn.density import Density
from pyrobnn.inference.fitting.program import check_batched, check_proper, refuse_subsampling
from pyrobnn.seeding import seeded
from pyrobnn.sites.nodes import is_observed, is_subsample, log_prob_sum
from pyrobnn.sites.supply import is_improper

#: positions (particle, dim) and β to the gradient (particle, dim), log base density and log likelihood (particle,)
Evaluate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
_BISECTIONS = 80


def refuse_without_prior(density: Density) -> None:
    """Refuse a program without a proper prior of every value: the path begins at draws from it."""
    check_proper(density)
    refuse_subsampling(density, "SMC")
    if density.initial_points:
        names = ", ".join(map(repr, list(density.initial_points)[:3]))
        raise Refused(
            f"{names}: a point parameter has no prior to begin from, and no evidence: give it one (a learned noise: "
            "HomoskedasticGaussian(dist.HalfNormal(1.0))), a fixed value, or use Laplace or SVI, which fit it"
        )
    with seeded(0, density.device):
        nodes = density.trace({})
    improper = [site.name for site in density.sites if is_improper(nodes[site.name]["fn"])]
    if improper or density.masked:
        name = (improper or list(density.masked))[0]
        raise Refused(
            f"the prior of {name!r} is improper (or masked out), so there is nothing to begin from and no evidence: "
            "give it a wide proper prior, or use NUTS"
        )
    check_batched(density, "SMC")


def prior_draws(density: Density, num: int, seed: int) -> Tensor:
    """Draws (num, dim) from the prior in unconstrained space; those of a BNN all at once where its priors allow."""
    if density.owner is None:
        return density.sample_prior(num, seed)
    try:
        with seeded(seed, density.device):
            draws = {name: site.sample((num,)) for name, site in density.owner.priors.items()}
    except RuntimeError:  # Pyro's mixtures of vectors draw one at a time
        return density.sample_prior(num, seed)
    return density.unconstrain(draws)


def parts(density: Density, z: Tensor) -> tuple[Tensor, Tensor]:
    """Log density of what the prior's draws ``z`` (dim,) come from, and all else of the log joint; float64 scalars.

    The first has no masks and no scales (``poutine.scale`` around a latent site is part of the second).
    """
    return density.pure(functools.partial(_parts, density))(z)


def _parts(density: Density, z: Tensor) -> tuple[Tensor, Tensor]:
    base = density.log_jacobian(z).double()
    rest = torch.zeros_like(base)
    for node in density.trace(density.constrain(z)).values():
        if node["type"] != "sample" or is_subsample(node):
            continue
        log_prob = log_prob_sum(node)
        if is_observed(node):
            rest = rest + log_prob
            continue
        plain = log_prob
        if isinstance(node["scale"], Tensor) or node["scale"] != 1.0:
            plain = log_prob_sum({**node, "scale": 1.0})
            rest = rest + (log_prob - plain)
        base = base + plain
    return base, rest


def evaluator(density: Density) -> Evaluate:
    """The tempered density's gradient and the two parts of its value, for all particles at once."""

    def tempered(z: Tensor, beta: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        base, rest = parts(density, z)
        return base + beta * rest, (base, rest)

    slope = torch.func.vmap(torch.func.grad(tempered, has_aux=True), in_dims=(0, None))

    def evaluate(z: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gradient, (base, rest) = slope(z, beta)
        return gradient, base, rest

    return evaluate


def next_beta(log_likelihood: Tensor, beta: float, ess: float) -> float:
    """The β at which the weights of a step are worth the share ``ess`` of the particles, by bisection; at most one."""
    finite = log_likelihood.isfinite().double().mean()

    def worth(step: float) -> float:
        return float((share(log_likelihood, step)).mean() / finite)

    high = 1.0 - beta
    if worth(high) >= ess:
        return 1.0
    low = high * 1e-30
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if worth(middle) >= ess else (low, middle)
    return beta + low


def share(log_likelihood: Tensor, step: float) -> Tensor:
    """Effective sample size of the weights of a step in β, as a share of all particles, (island,)."""
    weights = (step * log_likelihood).softmax(1)
    return 1.0 / weights.square().sum(1) / log_likelihood.shape[1]


def systematic(weights: Tensor, num: int, chance: Tensor) -> Tensor:
    """Indices (island, num) of a systematic resampling by weights (island, position) that sum to one.

    ``chance`` (island,) is uniform on [0, 1): a position of weight w gets ⌊num · w⌋ or ⌈num · w⌉ copies, which are
    neighbours.
    """
    total = weights.cumsum(1)
    places = (torch.arange(num, device=weights.device) + chance.unsqueeze(1)) / num
    return torch.searchsorted(total / total[:, -1:], places).clamp(max=weights.shape[1] - 1)
