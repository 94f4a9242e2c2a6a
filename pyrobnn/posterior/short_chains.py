"""Hundreds of short Hamiltonian chains that run side by side.

*MCMC using Hamiltonian dynamics* (Neal, 2011), https://arxiv.org/abs/1206.1901
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pyrobnn.core.positions import evenly_spaced
from pyrobnn.core.seeding import seeded
from pyrobnn.model import BNN, Density
from pyrobnn.model.compile import compiled
from pyrobnn.model.gradient import Gradient, at_each, batched_gradient, runs_at_once
from pyrobnn.posterior.marginal_last_layer import LastLayer
from pyrobnn.posterior.prediction import widest_layer

#: acceptance rate that the step size is tuned to
_TARGET_ACCEPT = 0.85
#: transitions at the beginning, of short paths: from where the density is low most of the way is downhill
_NUM_SHORT_PATHS = 6
_SHORT_LENGTH = 8
#: leapfrogs of the longest path afterwards; the shortest is a quarter
LONGEST = 48
#: share of paths with a finer step, and the least power of two that it is multiplied by: for steep places
_SHARE_FINER = 0.25
_LEAST_POWER = -4.0
#: transitions after which the scale of every coordinate is set anew, up to this number of them
_ADAPT_EVERY = 4
_ADAPT_UP_TO = 40
#: energy error that counts as a divergence, as everywhere
_DIVERGENT = 1000.0
#: distance, to either side, of the finite differences that give the curvature
_CURVATURE_STEP = 1e-2
#: draws from the prior, the likeliest of which is a start elsewhere
_NUM_TRIED = 64
#: seconds below which a leapfrog step of all chains is cheap
_CHEAP_SECONDS = 0.005


class Visit(NamedTuple):
    """Where the chains are after a transition, (chain, dim), and what it was like, (chain,) each.

    A path is ``diverging`` where a finer step has not helped: a long one may be unstable anywhere, and is rejected.
    """

    z: Tensor
    log_density: Tensor
    energy: Tensor
    acceptance: Tensor
    diverging: Tensor
    num_steps: int
    step_size: float


class HamiltonianPath(NamedTuple):
    """The end of a Hamiltonian path of every chain; position, momentum and gradient (chain, dim), density (chain,)."""

    z: Tensor
    momentum: Tensor
    slope: Tensor
    log_density: Tensor

    @property
    def energy(self) -> Tensor:
        """Kinetic energy less the log density, (chain,)."""
        return 0.5 * self.momentum.square().sum(-1) - self.log_density

    def after(
        self,
        gradient: Gradient,
        step: Tensor,
        num_steps: int,
    ) -> HamiltonianPath:
        """The path so many leapfrog steps further; steps (chain, dim) or (dim,)."""
        z = self.z
        momentum = self.momentum
        slope = self.slope
        log_density = self.log_density
        for _ in range(num_steps):
            momentum = momentum + 0.5 * step * slope
            z = z + step * momentum
            slope, log_density = gradient(z)
            momentum = momentum + 0.5 * step * slope
        return HamiltonianPath(z, momentum, slope, log_density)


@dataclass(frozen=True, eq=False)
class ShortChains:
    """Chains after a number of transitions; positions and gradients (chain, dim), log densities (chain,).

    ``scale`` (dim,) are the units of the steps, ``anchor`` the positions where these were set; ``visits`` are the
    transitions so far, of at most ``longest`` leapfrogs.
    """

    z: Tensor
    slope: Tensor
    log_density: Tensor
    scale: Tensor
    step: float
    anchor: Tensor
    visits: tuple[Visit, ...] = ()
    longest: int = LONGEST

    @property
    def num_leapfrogs(self) -> int:
        """Leapfrog steps of a chain so far."""
        return sum(visit.num_steps for visit in self.visits)

    @classmethod
    def begin(
        cls,
        gradient: Gradient,
        z: Tensor,
        random: torch.Generator,
        longest: int = LONGEST,
    ) -> ShortChains:
        """Chains at positions ``z`` (chain, dim)."""
        slope, log_density = gradient(z)
        scale = _curvature(gradient, z, random).rsqrt()
        step = 0.5 * z.shape[1] ** -0.25
        return cls(
            z,
            slope,
            log_density,
            scale,
            step,
            z,
            longest=longest,
        )

    def transition(self, gradient: Gradient, random: torch.Generator) -> ShortChains:
        """One Hamiltonian path of every chain, accepted or not by itself."""
        length = self._length(random)
        factor, is_finer = self._step_factors(random)
        step = (self.step * factor).to(self.z) * self.scale
        momentum = torch.randn(self.z.shape, generator=random).to(self.z)
        begin = HamiltonianPath(self.z, momentum, self.slope, self.log_density)
        energy = begin.energy
        end = begin.after(gradient, step, length)
        error = end.energy - energy
        rate = (-error).clamp(max=0.0).exp().nan_to_num(0.0)
        accepted = torch.rand(len(self.z), generator=random).to(rate) < rate
        visit = Visit(
            torch.where(accepted[:, None], end.z, self.z),
            torch.where(accepted, end.log_density, self.log_density),
            torch.where(accepted, energy + error, energy),
            rate,
            ~(error <= _DIVERGENT) & is_finer.to(error.device),
            length,
            self.step,
        )
        slope = torch.where(accepted[:, None], end.slope, self.slope)
        # the acceptance of finer steps says nothing of the step size
        mean_rate = float(rate[~is_finer.to(rate.device)].mean().nan_to_num(0.0))
        return self._moved_to(visit, slope, mean_rate)

    def _length(self, random: torch.Generator) -> int:
        """Leapfrogs of the next path."""
        chance = float(torch.rand((), generator=random))
        if len(self.visits) < _NUM_SHORT_PATHS:
            return _SHORT_LENGTH
        return max(1, round(self.longest * (0.25 + 0.75 * chance)))

    def _step_factors(self, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """What the step of each chain is multiplied by (chain, 1), and which chains take finer steps (chain,)."""
        jitter = torch.rand(len(self.z), 1, generator=random)
        is_finer = torch.rand(len(self.z), 1, generator=random) < _SHARE_FINER
        factor = torch.where(is_finer, 2.0 ** (_LEAST_POWER * jitter), 0.8 + 0.4 * jitter)
        return factor, is_finer[:, 0]

    def _moved_to(
        self,
        visit: Visit,
        slope: Tensor,
        mean_rate: float,
    ) -> ShortChains:
        """The chains after a visit, their step size nearer to the rate at which paths should be accepted."""
        log_growth = max(-1.0, min(0.5, 2.0 * (mean_rate - _TARGET_ACCEPT)))
        moved = replace(
            self,
            z=visit.z,
            slope=slope,
            log_density=visit.log_density,
            step=self.step * math.exp(log_growth),
            visits=(*self.visits, visit),
        )
        num_visits = len(moved.visits)
        adapts = num_visits % _ADAPT_EVERY == 0 and num_visits <= _ADAPT_UP_TO
        return moved._in_new_units() if adapts else moved

    def _in_new_units(self) -> ShortChains:
        """The chains with the unit of each coordinate set to how far they have moved along it since it was last set."""
        distance = (self.z - self.anchor).double().square().mean(0).div(2.0).sqrt()
        floor = 1e-3 * float(distance.median())
        if floor == 0.0 or not math.isfinite(floor):
            return self
        scale = distance.clamp(min=floor).to(self.scale)
        growth = float((scale.log().mean() - self.scale.log().mean()).exp())
        return replace(
            self,
            scale=scale,
            step=self.step / growth,
            anchor=self.z,
        )


def _curvature(
    gradient: Gradient,
    z: Tensor,
    random: torch.Generator,
) -> Tensor:
    """Minus the second derivative along each coordinate (dim,), in the median over positions (chain, dim).

    Hutchinson's estimate, from two gradients at each position.
    """
    signs = (torch.randint(0, 2, z.shape, generator=random) * 2.0 - 1.0).to(z)
    above, _ = gradient(z + _CURVATURE_STEP * signs)
    below, _ = gradient(z - _CURVATURE_STEP * signs)
    curvature = (signs * (below - above) / (2.0 * _CURVATURE_STEP)).nan_to_num().median(0).values
    # a low curvature, or one that is not positive, is raised: the units are adapted from there
    positive = curvature[curvature > 0.0]
    if not len(positive):
        return torch.ones_like(curvature)
    # of bfloat16 torch has no quantiles
    positive = positive.to(torch.promote_types(positive.dtype, torch.float32))
    return curvature.clamp(min=float(positive.quantile(0.1)))


class TracedGradient(NamedTuple):
    """Gradient and value of a log density, whose Python has run once.

    ``seconds`` are those of a call on one core, forecast from its operations: infinite where these are not known.
    """

    gradient: Gradient
    seconds: float


def traced_gradient(log_density: Callable[[Tensor], Tensor], z: Tensor) -> TracedGradient:
    """Gradient and value of a log density at positions like ``z`` (chain, dim)."""
    gradient, why_not_batched = batched_gradient(log_density, z[:2])
    if why_not_batched:
        return TracedGradient(gradient, math.inf)
    step = compiled(
        gradient,
        z,
        enabled="trace",
        name="the model",
    )

    def traced(points: Tensor) -> tuple[Tensor, Tensor]:
        slope, log_density = step(points)
        return slope, log_density.double()

    forecast = step.forecast
    if forecast is None or forecast.looped:
        return TracedGradient(traced, math.inf)
    return TracedGradient(traced, forecast.seconds_of_call("trace"))


def starts_elsewhere(
    density: Density,
    count: int,
    seed: int,
) -> Tensor:
    """Positions (count, dim) that no fit has chosen: each the likeliest of some draws from a net's prior."""
    model = density.owner
    if model is None:
        raise TypeError("the prior of a plain program may be vague: its draws are no starts")
    with seeded(seed, density.device):
        draws = {name: site.sample((count * _NUM_TRIED,)) for name, site in model.priors.items()}
    z = density.unconstrain({site.name: draws[site.name] for site in density.sites})
    with torch.no_grad():
        values = at_each(density.log_joint, z, at_once=256)
    values = values.nan_to_num(-torch.inf, -torch.inf, -torch.inf).reshape(count, _NUM_TRIED)
    best = values.argmax(1) + torch.arange(count, device=z.device) * _NUM_TRIED
    return z[best]


def evenly(z: Tensor, count: int) -> Tensor:
    """``count`` of the positions (draw, dim), evenly spread over them; all, repeated, where there are fewer."""
    return z[evenly_spaced(len(z), count).to(z.device)]


def seconds_per_leapfrog(density: Density, rows: int, num_chains: int) -> float:
    """Seconds that a leapfrog step of all chains takes on one core, by a rule of thumb: the same on every machine."""
    widest = 1
    if density.owner is not None:
        widest = widest_layer(density.owner, density.args[0][:2])
    seconds = 2.5e-3 + num_chains * rows * (1e-8 * widest + 1e-9 * density.dim)
    last_layer = LastLayer.of(density)
    if last_layer is not None:
        seconds += 8e-11 * num_chains * last_layer.num_operations(rows)
    # one chain after another runs the Python of the model for each
    return seconds if _runs_at_several_points(density) else num_chains * seconds


def _runs_at_several_points(density: Density) -> bool:
    """Whether the model runs for several points at once: not where its Python depends on values."""
    if density.owner is None:
        return runs_at_once(density.log_joint, density.sample_prior(2, seed=0))
    weights = density.owner.initial_values()
    pairs = {name: torch.stack([value, value]) for name, value in weights.items()}
    # two rows tell as much as all
    return runs_at_once(partial(_output, density.owner, density.args[0][:2]), pairs)


def _output(model: BNN, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    return model.forward(weights, x)


def chains_per_group(density: Density, rows: int, num_groups: int) -> int:
    """Chains of a group: sixteen where a leapfrog of all of them is cheap, down to four."""
    num_chains = 16
    while (
        num_chains > 4
        and seconds_per_leapfrog(density, rows, num_groups * num_chains) > _CHEAP_SECONDS
    ):
        num_chains //= 2
    return num_chains
