r"""Hundreds of short Hamiltonian chains that run side by side, and whether they have reached their target.

Chains are in groups, and those of a group begin at one point: once the means of the groups differ by no more than
chance, the chains have forgotten where they began, however short they are.

*Nested R-hat: assessing the convergence of Markov chain Monte Carlo when running many short chains* (Margossian et al.,
2024), https://arxiv.org/abs/2110.13017
*MCMC using Hamiltonian dynamics* (Neal, 2011), https://arxiv.org/abs/1206.1901
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from pyrobnn.core.positions import evenly_spaced
from pyrobnn.core.seeding import generator, seeded
from pyrobnn.model import BNN, NET, Density
from pyrobnn.model.compile import compiled
from pyrobnn.model.gradient import Gradient, at_each, batched_gradient
from pyrobnn.model.likelihoods.base import identified
from pyrobnn.posterior.marginal_last_layer import LastLayer
from pyrobnn.posterior.prediction import widest_layer

#: acceptance rate that the step size is tuned to
_TARGET_ACCEPT = 0.85
#: transitions at the beginning, of short paths: from where the density is low most of the way is downhill
_NUM_SHORT_PATHS = 6
_SHORT_LENGTH = 8
#: leapfrogs of the longest path afterwards, and where a net's last layer is integrated out; the shortest is a quarter
LONGEST = 48
_LONGEST_OF_OTHERS = 24
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
#: largest change from one half of a window to the other that is no drift: of a mean (in sds), and of a log sd
_DRIFT = 0.25, 0.2
#: correlation of the end of a window with its beginning, up to which chains have forgotten where they were
_MEMORY = 0.5
#: transitions that a window of two halves has at least
_LEAST_TRANSITIONS = 4
#: B / W allowed at convergence beyond 1 / (chains of a group), which chance alone makes (Margossian et al., section 4)
_CHANCE = 0.04
#: transitions after which the chains are first judged, by the later half of their transitions
_FIRST_CHECK = 16
#: transitions until the next look, as a multiple of those until this one
_NEXT_CHECK = 1.125
#: effective sample size of the window that chains which have arrived need, by the smallest of its estimates: of twenty
#: quantities whose true size is 400 that has the median 280 where there are 64 chains
_MIN_ESS = 280.0
#: sds of the log density by which groups from elsewhere lie so far below the others that they are left out
_BELOW = 3.0


class Visit(NamedTuple):
    """Where the chains are after a transition, (chain, dim), and what it was like, (chain,) each."""

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
            ~(error <= _DIVERGENT),
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
    return curvature.clamp(min=float(positive.quantile(0.1)))


def traced_gradient(log_density: Callable[[Tensor], Tensor], z: Tensor) -> Gradient:
    """Gradient and value of a log density at positions like ``z`` (chain, dim): its Python has run once."""
    gradient, why_not_batched = batched_gradient(log_density, z[:2])
    if why_not_batched:
        return gradient
    step = compiled(
        gradient,
        z,
        enabled="trace",
        name="the model",
    )

    def traced(points: Tensor) -> tuple[Tensor, Tensor]:
        slope, log_density = step(points)
        return slope, log_density.double()

    return traced


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
    return seconds


def chains_per_group(density: Density, rows: int, num_groups: int) -> int:
    """Chains of a group: sixteen where a leapfrog of all of them is cheap, down to four."""
    num_chains = 16
    while (
        num_chains > 4
        and seconds_per_leapfrog(density, rows, num_groups * num_chains) > _CHEAP_SECONDS
    ):
        num_chains //= 2
    return num_chains


class Arrival(NamedTuple):
    """How near chains are to convergence, by the worst quantity.

    Args:
        nested_rhat: R-hat of the groups.
        shift: change of the mean from one half of the window to the other, in sds.
        log_ratio: change of the log sd.
        memory: correlation over chains of the end of the window with its beginning; one if chains hardly move.
        limit: what nested R-hat stays below at convergence.
    """

    nested_rhat: float
    shift: float
    log_ratio: float
    memory: float
    limit: float

    @property
    def is_converged(self) -> bool:
        """Whether the groups agree, and nothing drifts."""
        steady = self.shift <= _DRIFT[0] and self.log_ratio <= _DRIFT[1]
        return steady and self.memory <= _MEMORY and self.nested_rhat <= self.limit


#: the arrival of chains about which nothing is known
NOWHERE = Arrival(math.inf, math.inf, math.inf, 1.0, 1.0)


def arrival(values: np.ndarray, num_groups: int) -> Arrival:
    """How far quantities (quantity, transition, chain) of chains, group by group, have come.

    `NOWHERE` where one is not finite, or of fewer than four transitions.
    """
    if values.shape[1] < _LEAST_TRANSITIONS or not np.isfinite(values).all():
        return NOWHERE
    moving = values[np.ptp(values, axis=(1, 2)) > 0.0]
    if not len(moving):
        return NOWHERE
    shift, log_ratio = _drift(moving)
    return Arrival(
        float(nested_rhat(moving, num_groups).max()),
        float(shift.max()),
        float(log_ratio.max()),
        float(_memory(moving).max()),
        math.sqrt(1.0 + num_groups / moving.shape[2] + _CHANCE),
    )


def _drift(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How far the mean (sds) and the log sd of values (quantity, transition, chain) change from half to half."""
    half = values.shape[1] // 2
    early = values[:, :half].reshape(len(values), -1)
    late = values[:, -half:].reshape(len(values), -1)
    sd_early = np.maximum(early.std(axis=1), 1e-300)
    sd_late = np.maximum(late.std(axis=1), 1e-300)
    shift = np.abs(late.mean(axis=1) - early.mean(axis=1)) / sd_late
    return shift, np.abs(np.log(sd_late / sd_early))


def _memory(values: np.ndarray) -> np.ndarray:
    """The correlation over chains of values (quantity, transition, chain) at the begin with those at the end."""
    begin = values[:, 0] - values[:, 0].mean(axis=1, keepdims=True)
    end = values[:, -1] - values[:, -1].mean(axis=1, keepdims=True)
    scale = np.sqrt((begin**2).mean(axis=1) * (end**2).mean(axis=1))
    return (begin * end).mean(axis=1) / np.maximum(scale, 1e-300)


def effective_draws(values: np.ndarray) -> float:
    r"""Effective sample size of the worst of quantities (quantity, transition, chain), by the spread of chains' means.

    .. math:: C \, \sigma^2 / \operatorname{Var}(\text{mean of a chain})

    of C chains: they are too short for their autocorrelations, and many enough for this.
    """
    variance = values.var(axis=(1, 2))
    of_means = values.mean(axis=1).var(axis=1, ddof=1)
    moving = variance > 0.0
    if not moving.any() or not np.isfinite(values).all():
        return 0.0
    num_chains = values.shape[2]
    sizes = num_chains * variance[moving] / np.maximum(of_means[moving], 1e-300)
    return float(min(sizes.min(), values.shape[1] * num_chains))


def nested_rhat(values: np.ndarray, num_groups: int) -> np.ndarray:
    r"""Nested R-hat of quantities (quantity, transition, chain) of chains, group by group; (quantity,).

    .. math:: \sqrt{1 + B / W}

    B is the variance of the groups' means; W the mean over groups of the variance of their chains' means, and of the
    mean variance within their chains (Margossian et al., 2024, equations 8 to 10).
    """
    grouped = values.reshape(*values.shape[:2], num_groups, -1)
    chain_means = grouped.mean(axis=1)
    within_chains = grouped.var(axis=1, ddof=1).mean(axis=2) if values.shape[1] > 1 else 0.0
    between_chains = chain_means.var(axis=2, ddof=1) if grouped.shape[3] > 1 else 0.0
    within = np.mean(between_chains + within_chains, axis=1)
    between = chain_means.mean(axis=2).var(axis=1, ddof=1)
    return np.sqrt(1.0 + between / np.maximum(within, 1e-300))


#: identified quantities (quantity, chain) at a visit
Quantities = Callable[[Visit], np.ndarray]


class Groups:
    """Groups of chains, each begun at one point, on their way to a posterior, and how far they have come.

    Of a net whose last layer can be integrated out, the chains are of all else, and it is drawn at every visit
    (:class:`~pyrobnn.posterior.marginal_last_layer.LastLayer`).

    Args:
        density: of the posterior.
        starts: where the groups begin (group, dim), those from elsewhere last.
        num_elsewhere: groups that begin elsewhere.
        size: chains of a group.
        quantities: identified quantities of the chains at a visit.
        seed: of the moves.
    """

    def __init__(
        self,
        density: Density,
        starts: Tensor,
        num_elsewhere: int,
        size: int,
        quantities: Quantities,
        seed: int,
    ) -> None:
        self.size = size
        self.is_elsewhere = torch.arange(len(starts)) >= len(starts) - num_elsewhere
        self.kept = torch.ones(len(starts), dtype=torch.bool)
        self.last_layer = LastLayer.of(density)
        log_density: Callable[[Tensor], Tensor] = density.log_joint
        longest = LONGEST
        if self.last_layer is not None:
            longest = _LONGEST_OF_OTHERS
            starts = starts[:, self.last_layer.others]
            log_density = self.last_layer.log_density
        z = starts.repeat_interleave(size, 0).contiguous()
        self.random = generator(seed)
        self.gradient = traced_gradient(log_density, z)
        self.chains = ShortChains.begin(self.gradient, z, self.random, longest)
        self.visits: list[Visit] = []
        self.arrival = NOWHERE
        self.ess = 0.0
        self.arrived = False
        self._steady_since: int | None = None
        self._quantities = quantities
        self._values: list[np.ndarray] = []

    def run(self, spent: Callable[[ShortChains], float]) -> None:
        """Move the chains until they have arrived or all of a budget is spent; ``spent`` is its share so far."""
        next_check = _FIRST_CHECK
        share_spent = 0.0
        while not self.arrived and share_spent < 1.0:
            self.chains = self.chains.transition(self.gradient, self.random)
            self.visits.append(self._completed(self.chains.visits[-1]))
            share_spent = spent(self.chains)
            if len(self.chains.visits) >= next_check or share_spent >= 1.0:
                next_check = math.ceil(_NEXT_CHECK * len(self.chains.visits))
                self._check_progress(may_leave_out=share_spent >= 0.5)

    @property
    def window(self) -> tuple[Visit, ...]:
        """What is judged, and handed over: the later half of the transitions.

        Where too few draws are all that is lacking, the half that was judged and all that came since.
        """
        return tuple(self.visits[self._begin() :])

    def _begin(self) -> int:
        """The transitions before the window."""
        half = len(self.visits) // 2
        return half if self._steady_since is None else min(half, self._steady_since)

    def _completed(self, visit: Visit) -> Visit:
        """A visit of the chains with all sites, and their log joint density."""
        if self.last_layer is None:
            return visit
        completed = self.last_layer.complete(visit.z, self.random)
        return visit._replace(z=completed.z, log_density=completed.log_density)

    def window_values(self) -> np.ndarray:
        """Identified quantities (quantity, transition, chain) of the window."""
        while len(self._values) < len(self.visits):
            self._values.append(self._quantities(self.visits[len(self._values)]))
        return np.stack(self._values[self._begin() :], 1)

    def mask(self) -> Tensor:
        """Which chains (chain,) are of groups that are kept."""
        return self.kept.repeat_interleave(self.size)

    def _check_progress(self, may_leave_out: bool) -> None:
        """See how far the chains have come, if need be without the groups from elsewhere that lie below the others."""
        self.kept = torch.ones_like(self.kept)
        self._update_arrival()
        if not self.arrived and may_leave_out and bool(self.is_elsewhere.any()):
            self.kept = ~(self.is_elsewhere & self._groups_far_below())
            if not bool(self.kept.all()):
                self._update_arrival()

    def _update_arrival(self) -> None:
        """Judge the chains of the kept groups: arrived if they are converged and worth enough independent draws."""
        self._judge_window()
        if self._steady_since is not None and not self.arrival.is_converged:
            self._steady_since = None
            self._judge_window()
        if self.arrival.is_converged and self._steady_since is None:
            self._steady_since = len(self.visits) // 2
        self.arrived = self.arrival.is_converged and self.ess >= _MIN_ESS

    def _judge_window(self) -> None:
        """How near the chains of the kept groups are to convergence in the window, and their effective draws."""
        values = self.window_values()[:, :, self.mask().numpy()]
        self.arrival = arrival(values, int(self.kept.sum()))
        self.ess = effective_draws(values)

    def _groups_far_below(self) -> Tensor:
        """Which groups (group,) lie so far below the others in log density that chance does not explain it."""
        levels = torch.stack([visit.log_density for visit in self.window]).mean(0).cpu()
        levels = levels.reshape(len(self.kept), self.size)
        ours = levels[~self.is_elsewhere]
        return levels.mean(1) < ours.mean() - _BELOW * ours.std() / math.sqrt(self.size) - _BELOW


def net_quantities(density: Density, x: Tensor) -> Quantities:
    """The log density, a net's function at inputs ``x`` (point, …) and the sites but its weights."""
    model = cast(BNN, density.owner)

    def quantities(visit: Visit) -> np.ndarray:
        draws = density.constrain(visit.z)
        fixed = density.initial_points
        f = at_each(lambda draw: model.forward(fixed | draw, x), draws)
        columns = [visit.log_density[:, None], identified(model.likelihood, f[None])[0].flatten(1)]
        names = [name for name in draws if not name.startswith(NET)]
        return _joined([*columns, *(draws[name] for name in names)])

    return quantities


def site_quantities(density: Density) -> Quantities:
    """The log density and all latent sites of a program."""

    def quantities(visit: Visit) -> np.ndarray:
        return _joined([visit.log_density, *density.constrain(visit.z).values()])

    return quantities


def _joined(columns: Sequence[Tensor]) -> np.ndarray:
    """Quantities (chain, …) side by side, (quantity, chain)."""
    flat = [column.reshape(len(column), -1).double() for column in columns]
    return torch.cat(flat, 1).cpu().numpy().T
