r"""Parallel tempering between the temperatures of SMC: modes that parted on the way up are weighed against each other.

A ladder holds one state at every temperature, from the prior to the posterior. All states are moved by Hamiltonian
paths, and neighbours exchange their places by Metropolis' rule: a state climbs down to where modes communicate, and up
again in another. The lowest state is a fresh draw from the prior at every step, so what a ladder carries upwards never
runs out. Ladders are independent, which gives every estimate its error.

*Non-reversible parallel tempering: a scalable highly parallel MCMC scheme* (Syed, Bouchard-Côté, Deligiannidis &
Doucet, 2022), https://doi.org/10.1111/rssb.12464
*Efficient estimation of free energy differences from Monte Carlo data* (Bennett, 1976),
https://doi.org/10.1016/0021-9991(76)90078-4
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

#: positions (row, dim) and β (row,) to the gradient (row, dim), log base density and log likelihood (row,)
Evaluate = Callable[..., tuple[Tensor, Tensor, Tensor]]
_REJECTED = 0.3  # rate of rejected exchanges that the temperatures are spaced for
_FEWEST_INTERVALS = 8  # between temperatures
_FEWEST_LADDERS = 4  # of an island: their spread gives the error
_TARGET_ACCEPT = 0.8  # of the paths, that step sizes are tuned to
#: the smallest step of a path is this power of two below the largest: modes of several widths are entered and left
_FINEST = -4.0
_AT_ONCE = 32  # steps whose draws from the prior are made together


class Level(NamedTuple):
    """A temperature: states (island, state, dim) that were there, their scale (dim,), and the step size of a path."""

    beta: float
    z: Tensor
    scale: Tensor
    step: float


class Estimate(NamedTuple):
    """Log evidence of all ladders and of each island, its standard error, and its drift in time with the error."""

    log_evidence: float
    islands: Tensor
    error: float
    drift: float
    drift_error: float

    @property
    def whole_error(self) -> float:
        """The standard error, and beside it the drift, which a start far from rest leaves."""
        return math.hypot(self.error, self.drift)


class States(NamedTuple):
    """Positions (temperature, ladder, dim), log base densities and log likelihoods (temperature, ladder)."""

    z: Tensor
    base: Tensor
    log_likelihood: Tensor

    def below(self, upper: States) -> States:
        """The lowest states of these, and the ``upper`` ones above them."""
        return States(*(torch.cat([a[:1], b]) for a, b in zip(self, upper, strict=True)))

    def above(self) -> States:
        """All but the lowest."""
        return States(*(values[1:] for values in self))

    def at(self, temperature: Tensor | slice, ladder: Tensor) -> States:
        """Those of these places."""
        return States(*(values[temperature, ladder] for values in self))


@dataclass(frozen=True, eq=False)
class Ladders:
    """Independent ladders of states, island by island, as they are after a number of steps.

    Of each temperature β (temperature,), the scale of its states (temperature, dim) and the step size of their paths
    (temperature,); ``fresh`` are draws from the prior for the next steps, each (ladder, dim), the last one the first.
    """

    betas: Tensor
    scale: Tensor
    step_size: Tensor
    states: States
    fresh: tuple[Tensor, ...] = ()
    num_steps: int = 0
    num_gradients: int = 0

    @property
    def num_ladders(self) -> int:
        """Ladders of all islands."""
        return self.states.z.shape[1]

    def levels(self, num_islands: int) -> list[Level]:
        """The states of every temperature, to place ladders of other temperatures from."""
        return [
            Level(
                float(beta),
                self.states.z[k].unflatten(0, (num_islands, -1)),
                self.scale[k],
                float(self.step_size[k]),
            )
            for k, beta in enumerate(self.betas)
        ]

    def row_betas(self, levels: slice | Tensor) -> Tensor:
        """The β of every state of these temperatures (temperature × ladder,)."""
        return self.betas[levels].repeat_interleave(self.num_ladders).to(self.states.z.device)


@dataclass(frozen=True, eq=False)
class Exchange:
    """Parallel tempering: what leads ladders from one step to the next.

    ``prior`` gives fresh draws (row, dim) by their number and a seed; ``num_states`` is about how many states all
    temperatures of all islands have together; ``random`` is drawn from by every step.
    """

    evaluate: Evaluate
    prior: Callable[[int, int], Tensor]
    num_islands: int
    num_states: int
    random: torch.Generator
    max_leapfrogs: int = 64

    def start(self, levels: list[Level]) -> Ladders:
        """Ladders at the temperatures of a climb, from the lowest, and at the prior."""
        betas = torch.tensor([0.0, *(level.beta for level in levels)], dtype=torch.float64)
        return self._placed(levels, betas)

    def _placed(self, levels: list[Level], betas: Tensor) -> Ladders:
        """Ladders at these temperatures, their states those of the nearest level."""
        ladders_per_island = max(
            _FEWEST_LADDERS, self.num_states // (len(betas) * self.num_islands)
        )
        device = levels[0].z.device
        nearest = [min(levels, key=lambda level: abs(level.beta - float(beta))) for beta in betas]
        positions = []
        for level in nearest:
            uniform = torch.rand(ladders_per_island, generator=self.random)
            index = uniform.mul(level.z.shape[1]).long().to(device)
            positions.append(level.z[:, index].flatten(0, 1))
        z = torch.stack(positions)
        row_betas = betas.repeat_interleave(z.shape[1]).to(device)
        _, base, log_likelihood = self._values(z.flatten(0, 1), row_betas)
        shape = z.shape[:2]
        return Ladders(
            betas=betas,
            scale=torch.stack([level.scale for level in nearest]),
            step_size=torch.tensor([level.step for level in nearest], dtype=torch.float64),
            states=States(z, base.reshape(shape), log_likelihood.reshape(shape)),
            num_gradients=len(row_betas),
        )

    def _values(self, z: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradient, log base density and log likelihood: minus infinity where it is not finite."""
        gradient, base, log_likelihood = self.evaluate(z, beta)
        impossible = -math.inf
        log_likelihood = log_likelihood.nan_to_num(impossible, impossible, impossible)
        return gradient, base, log_likelihood

    def adapted(self, ladders: Ladders, num: int) -> Ladders:
        """Ladders after ``num`` steps, their temperatures placed where neighbours reject exchanges equally often."""
        rejected = torch.zeros(len(ladders.betas) - 1, dtype=torch.float64)
        for _ in range(num):
            ladders, rejection_rates = self.step(ladders, tune=True)
            rejected += rejection_rates / num
        barrier = torch.cat([torch.zeros(1, dtype=torch.float64), (rejected + 1e-3).cumsum(0)])
        intervals = max(_FEWEST_INTERVALS, math.ceil(float(barrier[-1]) / _REJECTED))
        places = torch.linspace(
            0.0,
            float(barrier[-1]),
            intervals + 1,
            dtype=torch.float64,
        )
        betas = _interpolated(places, barrier, ladders.betas)
        betas[0] = 0.0
        betas[-1] = 1.0
        placed = self._placed(ladders.levels(self.num_islands), betas)
        return replace(
            placed,
            fresh=ladders.fresh,
            num_steps=ladders.num_steps,
            num_gradients=ladders.num_gradients + placed.num_gradients,
        )

    def halved(self, ladders: Ladders) -> Ladders:
        """Half of the ladders of every island, each of which can take twice as many steps for their cost."""
        size = ladders.num_ladders // self.num_islands
        fewer = min(size, max(_FEWEST_LADDERS, size // 2))
        islands = torch.arange(self.num_islands)[:, None] * size
        index = (islands + torch.arange(fewer)).flatten().to(ladders.states.z.device)
        return replace(
            ladders,
            states=ladders.states.at(slice(None), index),
            fresh=(),
        )

    def step(self, ladders: Ladders, tune: bool = False) -> tuple[Ladders, Tensor]:
        """One path of every state, then exchanges; the rates at which neighbours reject them (interval,)."""
        ladders = self._renewed(ladders)
        upper, acceptance_rates, num_gradients = self._moved(ladders)
        step_size = ladders.step_size
        if tune:
            factor = (2.0 * (acceptance_rates - _TARGET_ACCEPT)).clamp(-1.0, 0.5).exp()
            step_size = torch.cat([step_size[:1], step_size[1:] * factor])
        num_steps = ladders.num_steps + 1
        states, rejected = self._exchanged(
            ladders.betas, ladders.states.below(upper), num_steps % 2
        )
        stepped = replace(
            ladders,
            step_size=step_size,
            states=states,
            num_steps=num_steps,
            num_gradients=ladders.num_gradients + num_gradients,
        )
        return stepped, rejected

    def _renewed(self, ladders: Ladders) -> Ladders:
        """Ladders with fresh draws from the prior at the lowest temperature."""
        count = ladders.num_ladders
        fresh = ladders.fresh
        if not fresh or len(fresh[0]) != count:
            seed = int(
                torch.randint(
                    2**31 - 1,
                    (),
                    generator=self.random,
                )
            )
            fresh = self.prior(_AT_ONCE * count, seed).split(count)
        _, base, log_likelihood = self._values(fresh[-1], ladders.row_betas(slice(0, 1)))
        lowest = States(fresh[-1][None], base[None], log_likelihood[None])
        return replace(
            ladders,
            states=lowest.below(ladders.states.above()),
            fresh=fresh[:-1],
            num_gradients=ladders.num_gradients + count,
        )

    def _moved(self, ladders: Ladders) -> tuple[States, Tensor, int]:
        """The states above the lowest after one path each, the mean acceptance rates (temperature,), and gradients."""
        lengths, size = self._path_lengths_and_steps(ladders)
        before = ladders.states.above()
        momentum = torch.randn(before.z.shape, generator=self.random).to(before.z)
        beta = ladders.betas[1:, None].to(before.z.device)
        start_kinetic = 0.5 * momentum.square().sum(-1, dtype=torch.float64)
        start_energy = start_kinetic - (before.base + beta * before.log_likelihood)
        after, momentum = self._leapfrogs(ladders, momentum, size, lengths)
        end_kinetic = 0.5 * momentum.square().sum(-1, dtype=torch.float64)
        error = end_kinetic - (after.base + beta * after.log_likelihood) - start_energy
        chance = torch.where(error.isfinite(), (-error).clamp(max=0.0).exp(), 0.0)
        uniform = torch.rand(
            chance.shape,
            generator=self.random,
            dtype=torch.float64,
        )
        accepted = uniform.to(chance) < chance
        states = States(
            torch.where(accepted.unsqueeze(-1), after.z, before.z),
            torch.where(accepted, after.base, before.base),
            torch.where(accepted, after.log_likelihood, before.log_likelihood),
        )
        num_gradients = (len(lengths) + int(lengths.sum())) * ladders.num_ladders
        return states, chance.mean(1).cpu(), num_gradients

    def _path_lengths_and_steps(self, ladders: Ladders) -> tuple[Tensor, Tensor]:
        """Leapfrog steps of a path (temperature,), and their random sizes (temperature, ladder, dim)."""
        z = ladders.states.z[1:]
        upper, count, _ = z.shape
        step_size = ladders.step_size[1:]
        longest = math.pi / 2 / step_size * (0.5 + torch.rand(upper, generator=self.random))
        lengths = longest.round().clamp(1, self.max_leapfrogs).long()
        uniform = torch.rand(
            upper,
            count,
            generator=self.random,
            dtype=torch.float64,
        )
        factor = torch.exp2(_FINEST * uniform.square())
        step = (step_size[:, None] * factor).to(z).unsqueeze(-1)
        return lengths, step * ladders.scale[1:, None].to(z)

    def _leapfrogs(
        self,
        ladders: Ladders,
        momentum: Tensor,
        size: Tensor,
        lengths: Tensor,
    ) -> tuple[States, Tensor]:
        """The states above the lowest, and their momentum, at the ends of the paths; ``momentum`` is changed."""
        count = ladders.num_ladders
        z, base, log_likelihood = (values.clone() for values in ladders.states.above())
        gradient, _, _ = self._values(z.flatten(0, 1), ladders.row_betas(slice(1, None)))
        gradient = gradient.reshape(z.shape)
        for leap in range(int(lengths.max())):
            active = (lengths > leap).nonzero()[:, 0].to(z.device)
            momentum[active] = momentum[active] + 0.5 * size[active] * gradient[active]
            z[active] = z[active] + size[active] * momentum[active]
            betas = ladders.row_betas(active.cpu() + 1)
            values = self._values(z[active].flatten(0, 1), betas)
            gradient[active] = values[0].unflatten(0, (-1, count))
            base[active] = values[1].unflatten(0, (-1, count))
            log_likelihood[active] = values[2].unflatten(0, (-1, count))
            momentum[active] = momentum[active] + 0.5 * size[active] * gradient[active]
        return States(z, base, log_likelihood), momentum

    def _exchanged(self, betas: Tensor, states: States, parity: int) -> tuple[States, Tensor]:
        """The states after exchanges of the pairs of neighbours of this parity; how often each pair would reject."""
        device = states.z.device
        likelihood = states.log_likelihood
        gain = betas.diff()[:, None].to(device) * (likelihood[:-1] - likelihood[1:])
        chance = gain.nan_to_num(nan=-math.inf).clamp(max=0.0).exp()
        pairs = torch.arange(len(gain)) % 2 == parity
        uniform = torch.rand(
            chance.shape,
            generator=self.random,
            dtype=torch.float64,
        )
        accepted = (uniform.to(chance) < chance) & pairs.to(device)[:, None]
        count = likelihood.shape[1]
        source = torch.arange(len(betas), device=device)[:, None].repeat(1, count)
        source[:-1] += accepted.long()
        source[1:] -= accepted.long()
        ladder = torch.arange(count, device=device)
        return states.at(source, ladder), 1.0 - chance.mean(1).cpu()

    def run(self, ladders: Ladders, num: int, keep: int) -> tuple[Ladders, Passage]:
        """``num`` steps, and what was passed; of the states of the posterior about ``keep``."""
        stride = max(1, num * ladders.num_ladders // keep)
        tops = []
        joints = []
        likelihoods = []
        for step in range(num):
            ladders, _ = self.step(ladders)
            z, base, log_likelihood = ladders.states
            likelihoods.append(log_likelihood)
            if step % stride == 0:
                tops.append(z[-1])
                joints.append(base[-1] + log_likelihood[-1])
        passage = Passage(
            ladders.betas, torch.stack(tops), torch.stack(joints), torch.stack(likelihoods)
        )
        return ladders, passage


class Passage(NamedTuple):
    """What ladders pass in a number of steps.

    The temperatures (temperature,); of some of the steps the states of the posterior (step, ladder, dim) and their log
    joints (step, ladder); the log likelihoods of all (step, temperature, ladder).
    """

    betas: Tensor
    z: Tensor
    log_joint: Tensor
    log_likelihood: Tensor

    def draws(self, num_islands: int) -> list[Tensor]:
        """Positions (island, draw, dim), log joints and ladders (island, draw), in the order of the steps."""
        ladder = torch.arange(self.z.shape[1], device=self.z.device).expand(len(self.z), -1)
        return [self.draws_of(values, num_islands) for values in (self.z, self.log_joint, ladder)]

    @staticmethod
    def draws_of(values: Tensor, num_islands: int) -> Tensor:
        """Values (step, ladder, …) by island (island, draw, …)."""
        return values.unflatten(1, (num_islands, -1)).swapaxes(0, 1).flatten(1, 2)

    def estimate(self, num_islands: int) -> Estimate:
        """The log evidence by Bennett's acceptance ratio between neighbours, with the error that ladders show."""
        work = self._work()
        total, influence = bennett(work)
        half = work[0].shape[1] // 2
        early, influence_early = bennett(tuple(side[:, :half] for side in work))
        late, influence_late = bennett(tuple(side[:, half:] for side in work))
        sides = [side.unflatten(2, (num_islands, -1)) for side in work]
        by_island = []
        for island in range(num_islands):
            ratio, _ = bennett(tuple(side[:, :, island] for side in sides))
            by_island.append(ratio)
        return Estimate(
            total,
            torch.tensor(by_island, dtype=torch.float64),
            _error_of_sum(influence),
            late - early,
            _error_of_sum(influence_late - influence_early),
        )

    def _work(self) -> tuple[Tensor, Tensor]:
        """Log of the ratio of the densities of neighbours, at the states of both (interval, step, ladder)."""
        values = self.log_likelihood.swapaxes(0, 1).double()
        gap = self.betas.diff()[:, None, None].to(values.device)
        return gap * values[:-1], gap * values[1:]


def bennett(work: tuple[Tensor, ...]) -> tuple[float, Tensor]:
    r"""Sum over intervals of the log ratio of two normalising constants, and the influence of each ladder on it.

    With as many states of the lower density as of the upper one, and the log ratio w of the densities, the root c of

    .. math:: \sum_{i\ \text{lower}} \sigma(w_i - c) = \sum_{j\ \text{upper}} \sigma(c - w_j)

    is the estimate of the smallest variance.
    """
    lower, upper = work
    # the root of a decreasing function by bisection; infinite ratios are left out of the bracket
    ratios = torch.cat([lower.flatten(1), upper.flatten(1)], 1).nan_to_num(
        neginf=math.inf, posinf=math.inf
    )
    low = ratios.amin(1) - 50.0  # below all that is finite, as states of density zero count, too
    ratios = ratios.masked_fill(ratios.isinf(), -math.inf)
    high = ratios.amax(1) + 1.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        centre = middle[:, None, None]
        excess = (lower - centre).sigmoid().sum((1, 2)) - (centre - upper).sigmoid().sum((1, 2))
        low = torch.where(excess > 0, middle, low)
        high = torch.where(excess > 0, high, middle)
    ratio = 0.5 * (low + high)
    below = (lower - ratio[:, None, None]).sigmoid()
    above = (ratio[:, None, None] - upper).sigmoid()
    slope = (below * (1.0 - below)).sum((1, 2)) + (above * (1.0 - above)).sum((1, 2))
    influence = (below.sum(1) - above.sum(1)) / slope.clamp(min=1e-300)[:, None]
    return float(ratio.sum()), influence.sum(0)


def _error_of_sum(influence: Tensor) -> float:
    """Standard error of a sum of independent influences (ladder,) that is zero."""
    count = len(influence)
    return float(influence.square().sum().mul(count / max(count - 1, 1)).sqrt())


def _interpolated(at: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """Piecewise linear interpolation, ``places`` increasing."""
    index = torch.searchsorted(places, at.contiguous()).clamp(1, len(places) - 1)
    lower = places[index - 1]
    upper = places[index]
    weight = ((at - lower) / (upper - lower)).clamp(0.0, 1.0)
    return values[index - 1] + weight * (values[index] - values[index - 1])
