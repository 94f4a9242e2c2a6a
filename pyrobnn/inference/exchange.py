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
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pyrobnn.core.seeding import generator

#: positions (row, dim) and β (row,) to the gradient (row, dim), log base density and log likelihood (row,)
Evaluate = Callable[..., tuple[Tensor, Tensor, Tensor]]
#: rejection rate between neighbours that the temperatures are spaced for, and the fewest intervals
_REJECTED = 0.3
_FEWEST_INTERVALS = 8
_FEWEST_LADDERS = 4  # of an island: their spread gives the error
_TARGET_ACCEPT = 0.8
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


@dataclass(eq=False)
class Ladders:
    """Independent ladders of states, in islands.

    ``levels`` are those of a climb, from the lowest; ``prior`` gives fresh draws (row, dim) by their number and a seed.
    """

    evaluate: Evaluate
    prior: Callable[[int, int], Tensor]
    levels: list[Level]
    num_islands: int
    num_states: int
    seed: int
    max_leapfrogs: int = 64

    def __post_init__(self) -> None:
        self.num_gradients = 0
        self.num_steps = 0
        self._random = generator(self.seed)
        self._fresh: list[Tensor] = []
        self._device = self.levels[0].z.device
        betas = torch.tensor([0.0, *(level.beta for level in self.levels)], dtype=torch.float64)
        self._barrier = torch.linspace(0.0, 1.0, len(betas), dtype=torch.float64)
        self._place(betas)

    def _place(self, betas: Tensor) -> None:
        """States at these temperatures: those of the nearest level of the climb."""
        self.betas = betas
        ladders_per_island = max(
            _FEWEST_LADDERS, self.num_states // (len(betas) * self.num_islands)
        )
        self.num_ladders = ladders_per_island * self.num_islands
        nearest = [
            min(self.levels, key=lambda level: abs(level.beta - float(beta))) for beta in betas
        ]
        self._scale = torch.stack([level.scale for level in nearest])
        self._step = torch.tensor([level.step for level in nearest], dtype=torch.float64)
        states = []
        for level in nearest:
            uniform = torch.rand(ladders_per_island, generator=self._random)
            index = uniform.mul(level.z.shape[1]).long().to(self._device)
            states.append(level.z[:, index].flatten(0, 1))
        self._set(torch.stack(states))

    def halve(self) -> None:
        """Go on with half of the ladders of every island, each of which can take twice as many steps for its cost."""
        each = self.num_ladders // self.num_islands
        kept = max(_FEWEST_LADDERS, each // 2)
        island = torch.arange(self.num_islands)[:, None] * each
        index = (island + torch.arange(min(kept, each))).flatten().to(self._device)
        self.num_ladders = len(index)
        self.z = self.z[:, index]
        self.base = self.base[:, index]
        self.log_likelihood = self.log_likelihood[:, index]
        self._fresh = []

    def _set(self, z: Tensor) -> None:
        """Let the states be ``z`` (temperature, ladder, dim)."""
        self.z = z
        _, base, log_likelihood = self._values(z.flatten(0, 1), self._row_betas(slice(None)))
        self.base = base.reshape(z.shape[:2])
        self.log_likelihood = log_likelihood.reshape(z.shape[:2])

    def _row_betas(self, levels: slice | Tensor) -> Tensor:
        return self.betas[levels].repeat_interleave(self.num_ladders).to(self._device)

    def _values(self, z: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gradient, base, log_likelihood = self.evaluate(z, beta)
        self.num_gradients += len(z)
        impossible = -math.inf
        log_likelihood = log_likelihood.nan_to_num(impossible, impossible, impossible)
        return gradient, base, log_likelihood

    def adapt(self, num: int) -> None:
        """Run ``num`` steps, and place the temperatures where neighbours reject exchanges equally often."""
        rejected = torch.zeros(len(self.betas) - 1, dtype=torch.float64)
        for _ in range(num):
            rejected += self.step(tune=True) / num
        barrier = torch.cat([torch.zeros(1, dtype=torch.float64), (rejected + 1e-3).cumsum(0)])
        intervals = max(_FEWEST_INTERVALS, math.ceil(float(barrier[-1]) / _REJECTED))
        places = torch.linspace(0.0, float(barrier[-1]), intervals + 1, dtype=torch.float64)
        betas = _interpolated(places, barrier, self.betas)
        betas[0] = 0.0
        betas[-1] = 1.0
        self.levels = [
            Level(
                float(beta),
                self.z[k].unflatten(0, (self.num_islands, -1)),
                self._scale[k],
                float(self._step[k]),
            )
            for k, beta in enumerate(self.betas)
        ]
        self._place(betas)

    def step(self, tune: bool = False) -> Tensor:
        """One path of every state, then exchanges; the rates at which neighbours reject them (interval,)."""
        self.num_steps += 1
        self._renew()
        rates = self._move()
        if tune:
            self._step[1:] *= (2.0 * (rates - _TARGET_ACCEPT)).clamp(-1.0, 0.5).exp()
        return self._exchange()

    def _renew(self) -> None:
        """Fresh draws from the prior at the lowest temperature."""
        if not self._fresh or len(self._fresh[0]) != self.num_ladders:
            seed = int(torch.randint(2**31 - 1, (), generator=self._random))
            self._fresh = list(
                self.prior(_AT_ONCE * self.num_ladders, seed).split(self.num_ladders)
            )
        fresh = self._fresh.pop()
        _, base, log_likelihood = self._values(fresh, self._row_betas(slice(0, 1)))
        self.z = torch.cat([fresh[None], self.z[1:]])
        self.base = torch.cat([base[None], self.base[1:]])
        self.log_likelihood = torch.cat([log_likelihood[None], self.log_likelihood[1:]])

    def _move(self) -> Tensor:
        """One path of every state above the lowest; the mean acceptance rate of each temperature."""
        lengths, size = self._path_lengths_and_steps()
        momentum = torch.randn(self.z[1:].shape, generator=self._random).to(self.z)
        beta = self.betas[1:, None].to(self._device)
        start_kinetic = 0.5 * momentum.square().sum(-1, dtype=torch.float64)
        start_energy = start_kinetic - (self.base[1:] + beta * self.log_likelihood[1:])
        z, base, log_likelihood, momentum = self._leapfrogs(momentum, size, lengths)
        end_kinetic = 0.5 * momentum.square().sum(-1, dtype=torch.float64)
        error = end_kinetic - (base + beta * log_likelihood) - start_energy
        chance = torch.where(error.isfinite(), (-error).clamp(max=0.0).exp(), 0.0)
        self._accept(chance, z, base, log_likelihood)
        return chance.mean(1).cpu()

    def _accept(self, chance: Tensor, z: Tensor, base: Tensor, log_likelihood: Tensor) -> None:
        """Let the states above the lowest take their new places, each with its chance (temperature, ladder)."""
        uniform = torch.rand(chance.shape, generator=self._random, dtype=torch.float64)
        accepted = uniform.to(chance) < chance
        moved_z = torch.where(accepted.unsqueeze(-1), z, self.z[1:])
        moved_base = torch.where(accepted, base, self.base[1:])
        moved_likelihood = torch.where(accepted, log_likelihood, self.log_likelihood[1:])
        self.z = torch.cat([self.z[:1], moved_z])
        self.base = torch.cat([self.base[:1], moved_base])
        self.log_likelihood = torch.cat([self.log_likelihood[:1], moved_likelihood])

    def _path_lengths_and_steps(self) -> tuple[Tensor, Tensor]:
        """Leapfrog steps of a path (temperature,), and their random sizes (temperature, ladder, dim)."""
        upper, ladders, _ = self.z[1:].shape
        longest = math.pi / 2 / self._step[1:] * (0.5 + torch.rand(upper, generator=self._random))
        lengths = longest.round().clamp(1, self.max_leapfrogs).long()
        uniform = torch.rand(upper, ladders, generator=self._random, dtype=torch.float64)
        factor = torch.exp2(_FINEST * uniform.square())
        step = (self._step[1:, None] * factor).to(self.z).unsqueeze(-1)
        return lengths, step * self._scale[1:, None].to(self.z)

    def _leapfrogs(
        self, momentum: Tensor, size: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Position, log base density, log likelihood and momentum at the ends of the paths; ``momentum`` is changed."""
        _, ladders, dim = momentum.shape
        z = self.z[1:].clone()
        gradient, _, _ = self._values(z.flatten(0, 1), self._row_betas(slice(1, None)))
        gradient = gradient.reshape(z.shape)
        base = self.base[1:].clone()
        log_likelihood = self.log_likelihood[1:].clone()
        for leap in range(int(lengths.max())):
            active = (lengths > leap).nonzero()[:, 0].to(self._device)
            momentum[active] = momentum[active] + 0.5 * size[active] * gradient[active]
            z[active] = z[active] + size[active] * momentum[active]
            values = self._values(z[active].flatten(0, 1), self._row_betas(active.cpu() + 1))
            gradient[active] = values[0].reshape(len(active), ladders, dim)
            base[active] = values[1].reshape(len(active), ladders)
            log_likelihood[active] = values[2].reshape(len(active), ladders)
            momentum[active] = momentum[active] + 0.5 * size[active] * gradient[active]
        return z, base, log_likelihood, momentum

    def _exchange(self) -> Tensor:
        """Exchange the states of even pairs of neighbours and odd ones in turn; how often each pair would reject."""
        gap = self.betas.diff()[:, None].to(self._device)
        gain = gap * (self.log_likelihood[:-1] - self.log_likelihood[1:])
        chance = gain.nan_to_num(nan=-math.inf).clamp(max=0.0).exp()
        pairs = torch.arange(len(gap)) % 2 == self.num_steps % 2
        uniform = torch.rand(chance.shape, generator=self._random, dtype=torch.float64)
        accepted = (uniform.to(chance) < chance) & pairs.to(self._device)[:, None]
        temperature = torch.arange(len(self.betas), device=self._device)
        source = temperature[:, None].repeat(1, self.num_ladders)
        source[:-1] += accepted.long()
        source[1:] -= accepted.long()
        ladder = torch.arange(self.num_ladders, device=self._device)
        self.z = self.z[source, ladder]
        self.base = self.base[source, ladder]
        self.log_likelihood = self.log_likelihood[source, ladder]
        return 1.0 - chance.mean(1).cpu()

    def run(self, num: int, keep: int) -> Passage:
        """``num`` steps, and what was passed; of the states of the posterior about ``keep``."""
        stride = max(1, num * self.num_ladders // keep)
        tops = []
        joints = []
        likelihoods = []
        for step in range(num):
            self.step()
            likelihoods.append(self.log_likelihood)
            if step % stride == 0:
                tops.append(self.z[-1])
                joints.append(self.base[-1] + self.log_likelihood[-1])
        return Passage(self.betas, torch.stack(tops), torch.stack(joints), torch.stack(likelihoods))


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
    finite = torch.cat([lower.flatten(1), upper.flatten(1)], 1).nan_to_num(
        neginf=math.inf, posinf=math.inf
    )
    low = finite.amin(1) - 50.0  # below all that is finite, as states of density zero count, too
    finite = finite.masked_fill(finite.isinf(), -math.inf)
    high = finite.amax(1) + 1.0
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
