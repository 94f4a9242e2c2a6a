r"""The path from prior to posterior, :math:`\pi_\beta(z) \propto p(z)\, L(z)^\beta`, and the particles of SMC on it.

They are resampled along the path, and moved by Hamiltonian paths, all in one batch.

*Sequential Monte Carlo samplers* (Del Moral, Doucet & Jasra, 2006), https://doi.org/10.1111/j.1467-9868.2006.00553.x
*Adaptive tuning of Hamiltonian Monte Carlo within sequential Monte Carlo* (Buchholz, Chopin & Jacob, 2021),
https://doi.org/10.1214/20-BA1222
*Waste-free sequential Monte Carlo* (Dau & Chopin, 2022), https://doi.org/10.1111/rssb.12475
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyrobnn.core.checks import Refused
from pyrobnn.core.seeding import seeded
from pyrobnn.inference.exchange import Level
from pyrobnn.inference.fitting import rng
from pyrobnn.inference.fitting.program import check_batched, check_proper, refuse_subsampling
from pyrobnn.inference.hmc.metric import pulled, unwhiten, whitening
from pyrobnn.model import NET, Density
from pyrobnn.model.compile import compiled, library_elements
from pyrobnn.model.compile.forecast import Compile
from pyrobnn.model.distribution_kinds import is_improper
from pyrobnn.model.gradient import Gradient
from pyrobnn.model.log_terms import log_prob_sum
from pyrobnn.model.nodes import is_observed, is_subsample

#: positions (particle, dim) and β to the gradient (particle, dim), log base density and log likelihood (particle,)
Evaluate = Callable[..., tuple[Tensor, Tensor, Tensor]]
_TARGET_ACCEPT = 0.8  # that the step size is tuned to
# particles that are never split, and of a call of compiled code at most, of one shape
_FEW = 8
_MANY = 256
_CACHED = 2**19  # elements of one tensor that stay in the cache


def refuse_without_prior(density: Density) -> None:
    """Refuse a program without a proper prior of every value: the path begins at draws from it."""
    check_proper(density)
    refuse_subsampling(density, "SMC")
    # what a prior hides of a net is held; of anything else there is no value to hold
    free = [
        name for name in density.initial_points if density.owner is None or not name.startswith(NET)
    ]
    if free:
        names = ", ".join(map(repr, free[:3]))
        raise Refused(
            f"{names}: a point parameter has no prior to begin from, and no evidence: give it one (a learned noise: "
            "HomoskedasticGaussian(dist.HalfNormal(1.0))), a fixed value, or use Laplace or SVI, which fit it"
        )
    with seeded(0, density.device):
        nodes = density.run({})
    improper = [site.name for site in density.sites if is_improper(nodes[site.name]["fn"])]
    if improper or density.masked:
        name = (improper or list(density.masked))[0]
        raise Refused(
            f"the prior of {name!r} is improper (or masked out), so there is nothing to begin from and no evidence: "
            "give it a wide proper prior (of pb.sample: a distribution as its support), or use NUTS"
        )
    check_batched(density, "SMC")


def parts(density: Density, z: Tensor) -> tuple[Tensor, Tensor]:
    """Log density of what the prior's draws ``z`` (dim,) come from, and all else of the log joint; float64 scalars.

    The first has no masks and no scales (``poutine.scale`` around a latent site is part of the second).
    """
    base = density.log_jacobian(z).double()
    remainder = torch.zeros_like(base)
    for node in density.trace(density.constrain(z)).values():
        if node["type"] != "sample" or is_subsample(node):
            continue
        log_prob = log_prob_sum(node)
        if is_observed(node):
            remainder = remainder + log_prob
            continue
        plain = log_prob
        if isinstance(node["scale"], Tensor) or node["scale"] != 1.0:
            plain = log_prob_sum({**node, "scale": 1.0})
            remainder = remainder + (log_prob - plain)
        base = base + plain
    return base, remainder


def parts_of_own_data(
    density: Density, points: Tensor
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """:func:`parts` of the program's own data at points like these (point, dim), in fewer operations where it has."""
    if not density.is_merged:
        return partial(parts, density)
    together = density.merged(lambda z: torch.stack(parts(density, z)), points)

    def both(z: Tensor) -> tuple[Tensor, Tensor]:
        base, remainder = together(z).unbind()
        return base, remainder

    return both


def evaluator(parts: Callable[..., tuple[Tensor, Tensor]]) -> Evaluate:
    """The tempered density's gradient and the two parts of its value, for all particles at once, each at its own β.

    ``parts`` gives base and remainder at a point (dim,); what it takes beside the point comes after β.
    """

    def tempered(z: Tensor, beta: Tensor, *data: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        base, remainder = parts(z, *data)
        return base + beta * remainder, (base, remainder)

    slope = torch.func.grad(tempered, has_aux=True)

    def evaluate(z: Tensor, beta: Tensor, *data: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shared = [None] * len(data)
        slope_of_each = torch.func.vmap(slope, in_dims=(0, 0, *shared))
        gradient, (base, remainder) = slope_of_each(z, beta, *data)
        return gradient, base, remainder

    return evaluate


class Batched(NamedTuple):
    """The gradient of all particles, how it was compiled, and in how many seconds."""

    evaluate: Evaluate
    mode: str
    seconds: float


def batched(
    evaluate: Evaluate,
    z: Tensor,
    compile: Compile,
    *data: Tensor,
    calls: int | None = None,
    say: Callable[[str], None] | None = None,
) -> Batched:
    """The gradient of all particles, compiled for as many as a call should take; of about so many ``calls``."""
    beta = torch.ones(
        len(z),
        dtype=torch.float64,
        device=z.device,
    )
    size = len(z)
    if compile or data:
        size = at_once(lambda points: evaluate(points, beta[: len(points)], *data)[:2], z)
    step = compiled(
        evaluate,
        z[:size].contiguous(),
        beta[:size],
        *data,
        enabled=compile,
        # of compiled code, which takes so many of the particles at once
        calls=None if calls is None else calls * math.ceil(len(z) / size),
        name="the model",
        say=say,
    )

    def in_parts(z: Tensor, beta: Tensor, *data: Tensor) -> Any:
        missing = -len(z) % size if step.mode != "eager" else 0  # compiled code has one shape
        filled = torch.cat([z, z[-1:].expand(missing, -1)])
        betas = beta.expand(len(z))
        betas = torch.cat([betas, betas[-1:].expand(missing)])
        pieces = zip(
            filled.split(size),
            betas.split(size),
            strict=True,
        )
        results = [step(points, point_betas, *data) for points, point_betas in pieces]
        return [torch.cat(pieces_of_one)[: len(z)] for pieces_of_one in zip(*results)]

    return Batched(in_parts, step.mode, step.seconds)


def at_once(gradient: Gradient, z: Tensor) -> int:
    """As many of the particles ``z`` as leave their activations in the CPU's cache: past it each is slower."""
    if z.device.type != "cpu" or len(z) <= _FEW:
        return len(z)
    elements = library_elements(gradient, z[:2]) / 2  # of one particle
    divisors = [size for size in range(_FEW, len(z) + 1) if len(z) % size == 0]
    cached = [size for size in divisors if size <= _MANY and size * elements <= _CACHED]
    return max(cached, default=divisors[0])


def next_beta(log_likelihood: Tensor, beta: float, ess: float) -> float:
    """The β at which the weights of a step are worth the share ``ess`` of the particles, by bisection; at most one."""
    possible = log_likelihood.isfinite().double().mean()

    def worth(step: float) -> float:
        return float(share(log_likelihood, step).mean() / possible)

    high = 1.0 - beta
    if worth(high) >= ess:
        return 1.0
    low = high * 1e-30
    for _ in range(80):  # to the last place
        middle = math.sqrt(low * high)
        if worth(middle) >= ess:
            low = middle
        else:
            high = middle
    return beta + low


def share(log_likelihood: Tensor, step: float) -> Tensor:
    """Effective sample size of the weights of a step in β, as a share of all particles, (island,)."""
    return 1.0 / (step * log_likelihood).softmax(1).square().sum(1) / log_likelihood.shape[1]


def systematic(weights: Tensor, num: int, chance: Tensor) -> Tensor:
    """Indices (island, num) of a systematic resampling by weights (island, position) that sum to one.

    ``chance`` (island,) is uniform on [0, 1): a position of weight w gets ⌊num · w⌋ or ⌈num · w⌉ copies, which are
    neighbours.
    """
    total = weights.cumsum(1)
    places = (torch.arange(num, device=weights.device) + chance.unsqueeze(1)) / num
    return torch.searchsorted(total / total[:, -1:], places).clamp(max=weights.shape[1] - 1)


class Rung(NamedTuple):
    """What happened at one temperature."""

    beta: float
    ess: float  # of the weights that led here, share of the particles
    acceptance_rate: float
    step_size: float
    moves: int
    rise: float  # of the mean log likelihood by the moves: none, where the particles keep up
    left: float  # correlation of the log likelihood with where the particles were resampled


def lag(rungs: list[Rung]) -> float:
    """What the evidence would gain with the likelihoods after the moves, nats; about zero where they keep up."""
    return sum((after.beta - rung.beta) * rung.rise for rung, after in pairwise(rungs))


@dataclass(frozen=True, eq=False)
class Population:
    """Particles in islands that never mix, each of which estimates the evidence for itself, at one temperature.

    Positions ``z`` (island × particle, dim), island by island, with the gradient (island × particle, dim) of the
    tempered density, log base density and log likelihood (island × particle,) there; which of its island's first
    particles each descends from; the log evidence (island,) of the way up to here; ``keys``, the random key of each
    (island × particle,); ``states``, the positions and log likelihoods that were passed at this temperature.
    """

    z: Tensor
    gradient: Tensor
    base: Tensor
    log_likelihood: Tensor
    ancestor: Tensor
    log_evidence: Tensor
    keys: Tensor
    step_size: float
    states: tuple[tuple[Tensor, Tensor], ...]
    beta: float = 0.0
    num_moves: int = 0
    num_gradients: int = 0

    @property
    def num_islands(self) -> int:
        """Groups of particles that never mix."""
        return len(self.log_evidence)

    @property
    def num_each(self) -> int:
        """Particles of an island."""
        return len(self.z) // self.num_islands

    def possible(self) -> bool:
        """Whether every island has a particle at which the data are possible."""
        return bool(self.passed().isfinite().any(1).all())

    def passed(self) -> Tensor:
        """Log likelihood of all positions at this temperature (island, particle · position), those of one together."""
        log_likelihoods = [log_likelihood for _, log_likelihood in self.states]
        return torch.stack(log_likelihoods, -1).reshape(self.num_islands, -1)

    def spread(self) -> Tensor:
        """The particles' sd (dim,), from their central 68 %: it is finite for any tails."""
        ordered = self.z.sort(0).values
        low, high = (ordered[round(q * (len(ordered) - 1))] for q in (0.16, 0.84))
        spread = 0.5 * (high - low)
        return torch.where(spread > 0, spread, self.z.std(0) + torch.finfo(self.z.dtype).eps)

    def level(self, num: int) -> Level:
        """Positions of every island at this temperature, at most ``num``, with their scale and the step of a path."""
        count = min(num, self.num_each)
        places = torch.linspace(
            0,
            self.num_each - 1,
            count,
            device=self.z.device,
        )
        islands = self.z.unflatten(0, (self.num_islands, -1))
        return Level(self.beta, islands[:, places.round().long()], self.spread(), self.step_size)

    def log_joint(self) -> Tensor:
        """Log joint density in unconstrained space (island × particle,)."""
        return self.base + self.log_likelihood

    def chances(self) -> tuple[Tensor, Tensor, Tensor]:
        """Two uniform numbers and a sign of this move for each island (island,), by its first particle's key."""
        # the stream of a move's particles counts up from one, this one down: they never meet
        return rng.chances(rng.stream(self.keys[:: self.num_each], ~(self.num_moves + 1)))

    def values(self, rows: Tensor) -> _Values:
        """Positions of the particles ``rows``, and what belongs to them."""
        return _Values(self.z, self.gradient, self.base, self.log_likelihood).at(rows)

    def changed(self, rows: Tensor, values: _Values) -> Population:
        """The particles, ``rows`` of which have these values."""
        target = (rows,)
        return replace(
            self,
            z=self.z.index_put(target, values.z),
            gradient=self.gradient.index_put(target, values.gradient),
            base=self.base.index_put(target, values.base),
            log_likelihood=self.log_likelihood.index_put(target, values.log_likelihood),
        )


class _Values(NamedTuple):
    """Positions (particle, dim), with the gradient, log base density and log likelihood there."""

    z: Tensor
    gradient: Tensor
    base: Tensor
    log_likelihood: Tensor

    def at(self, rows: Tensor) -> _Values:
        """Those of some particles."""
        return _Values(*(values[rows] for values in self))

    def energy(self, r: Tensor, beta: float) -> Tensor:
        """Kinetic energy of the momentum ``r`` (particle, dim) and the tempered potential, float64 (particle,)."""
        log_density = self.base + beta * self.log_likelihood
        return 0.5 * r.square().sum(1, dtype=torch.float64) - log_density


@dataclass(frozen=True, eq=False)
class Tempering:
    """What leads particles from one temperature to the next.

    All positions that the particles pass at a temperature are draws from its density: all are weighed, and those of the
    next are resampled from them. The temperatures, metric, step size and number of moves are adapted to all islands
    together.

    ``moved_below`` is the correlation below which particles count as moved; ``dense`` says whether the metric is dense;
    ``partly`` whether only a random share of the particles is moved, twice the weights' coefficient of variation: 1,000
    draws are worth about 900 after 100 updates so, 950 where all are moved.
    """

    evaluate: Evaluate
    max_leapfrogs: int = 64
    max_moves: int = 10
    moved_below: float = 0.1
    dense: bool = False
    partly: bool = False

    def start(
        self,
        z: Tensor,
        num_islands: int,
        seed: int,
        step_size: float | None = None,
    ) -> Population:
        """Particles at draws ``z`` (island × particle, dim) from the base density, island by island.

        It is the prior, or any other, and the remainder is what β adds to it. ``step_size`` is the first one.
        """
        particles = torch.arange(len(z), device=z.device)
        gradient, base, log_likelihood = self._values(z, 0.0)
        # what the base density does not hold for possible cannot be moved
        log_likelihood = torch.where(base.isfinite(), log_likelihood, -math.inf)
        return Population(
            z=z,
            gradient=gradient,
            base=base,
            log_likelihood=log_likelihood,
            ancestor=particles[: len(z) // num_islands].repeat(num_islands),
            log_evidence=torch.zeros(
                num_islands,
                dtype=torch.float64,
                device=z.device,
            ),
            keys=rng.key(torch.tensor(seed, device=z.device), particles),
            step_size=step_size or 0.5 * z.shape[1] ** -0.25,
            states=((z, log_likelihood),),
            num_gradients=len(z),
        )

    def _values(self, z: Tensor, beta: float) -> tuple[Tensor, Tensor, Tensor]:
        """Gradient, log base density and log likelihood: minus infinity where it is not finite."""
        tempered = torch.tensor(
            beta,
            dtype=torch.float64,
            device=z.device,
        )
        gradient, base, log_likelihood = self.evaluate(z, tempered)
        impossible = -math.inf
        log_likelihood = log_likelihood.nan_to_num(impossible, impossible, impossible)
        return gradient, base, log_likelihood

    def climb(self, particles: Population, ess: float) -> tuple[Population, Rung]:
        """One temperature more: weights worth the share ``ess``, evidence, resampling, moves."""
        passed = particles.passed()
        beta = next_beta(passed, particles.beta, ess)
        step = beta - particles.beta
        worth = float(share(passed, step).mean())
        log_sum = (step * passed).logsumexp(1)
        size = particles.num_each
        index = systematic((step * passed).softmax(1), size, particles.chances()[0])
        # passed() lists the states of one particle together: index = particle · states + state
        island = torch.arange(particles.num_islands, device=index.device).unsqueeze(1)
        particle = (index // len(particles.states) + size * island).flatten()
        state = (index % len(particles.states)).flatten()
        z = torch.stack([z for z, _ in particles.states])[state, particle]
        gradient, base, log_likelihood = self._values(z, beta)
        resampled = replace(
            particles,
            z=z,
            gradient=gradient,
            base=base,
            log_likelihood=log_likelihood,
            ancestor=particles.ancestor[particle],
            log_evidence=particles.log_evidence + log_sum - math.log(passed.shape[1]),
            beta=beta,
            num_gradients=particles.num_gradients + len(z),
        )
        return self.moved(resampled, worth)

    def moved(self, particles: Population, worth: float = 1.0) -> tuple[Population, Rung]:
        """Move every particle until it has forgotten where it was, or goes no farther."""
        scale = particles.spread()
        metric = self._metric(particles, scale)
        rows = self._picked(particles, worth)
        start = particles.values(rows)
        changes = (0.0, 0.0)
        rate = 0.0
        states = [(particles.z, particles.log_likelihood)]
        for _ in range(self.max_moves):
            particles, rate = self._move(particles, metric, rows)
            states.append((particles.z, particles.log_likelihood))
            earlier = changes
            changes = _changes(start, particles.values(rows), scale)
            still = _no_farther(changes, earlier) and rate >= 0.5 * _TARGET_ACCEPT
            if still or self._forgotten(changes):
                break
        rung = Rung(
            beta=particles.beta,
            ess=worth,
            acceptance_rate=rate,
            step_size=particles.step_size,
            moves=len(states) - 1,
            rise=float((particles.log_likelihood[rows] - start.log_likelihood).mean()),
            left=1.0 - changes[1] / 2.0,
        )
        return replace(particles, states=tuple(states)), rung

    def _forgotten(self, changes: tuple[float, float]) -> bool:
        """Whether the particles have little correlation with where they began."""
        return all(1.0 - change / 2.0 <= self.moved_below for change in changes)

    def _picked(self, particles: Population, worth: float) -> Tensor:
        """Which particles (index,) are moved: evenly spaced, as copies are neighbours, from a random start."""
        moved_share = 1.0
        if self.partly:
            variation = math.sqrt(max(1.0 / worth - 1.0, 0.0))
            moved_share = min(1.0, max(0.1, 2.0 * variation))
        particle = torch.arange(particles.num_each + 1, device=particles.z.device)
        places = (particle + particles.chances()[1].unsqueeze(1)) * moved_share
        return places.floor().diff(dim=1).flatten().nonzero()[:, 0]

    def _move(
        self,
        particles: Population,
        metric: Tensor,
        rows: Tensor,
    ) -> tuple[Population, float]:
        """One trajectory of the particles ``rows``, accepted or not; the mean acceptance rate, which tunes the step."""
        keys = rng.stream(particles.keys, particles.num_moves + 1)[rows]
        particles = replace(particles, num_moves=particles.num_moves + 1)
        uniform, jitter = rng.chances(keys)[:2]
        size = particles.step_size * (1.0 + 0.2 * (2.0 * jitter - 1.0))  # no path is periodic
        size = size.to(particles.z.dtype).unsqueeze(1)
        r = rng.normal(keys, particles.z.shape[1], particles.z.dtype)
        start = particles.values(rows)
        start_energy = start.energy(r, particles.beta)
        length = self._path_length(particles)
        end, r = self._leapfrogs(start, r, particles.beta, (length, size, metric))
        error = end.energy(r, particles.beta) - start_energy
        chance = torch.where(error.isfinite(), (-error).clamp(max=0.0).exp(), 0.0)
        accepted = uniform < chance
        rate = float(chance.mean())
        factor = math.exp(max(-1.0, min(0.5, 2.0 * (rate - _TARGET_ACCEPT))))
        moved = replace(
            particles.changed(rows[accepted], end.at(accepted)),
            step_size=particles.step_size * factor,
            num_gradients=particles.num_gradients + length * len(rows),
        )
        return moved, rate

    def _path_length(self, particles: Population) -> int:
        """Leapfrog steps of a path: half to one and a half of a quarter period, in units of the particles' sd."""
        chance = rng.chances(particles.keys[:1] + particles.num_moves)[0]
        quarter_periods = 0.5 + float(chance)
        longest = math.pi / 2 / particles.step_size * quarter_periods
        return max(1, min(self.max_leapfrogs, round(longest)))

    def _leapfrogs(
        self,
        start: _Values,
        r: Tensor,
        beta: float,
        path: tuple[int, Tensor, Tensor],
    ) -> tuple[_Values, Tensor]:
        """The values and the momentum at the end of paths of this length, step size and metric."""
        length, size, metric = path
        z, gradient, base, log_likelihood = start
        tempered = torch.tensor(
            beta,
            dtype=torch.float64,
            device=z.device,
        )
        for _ in range(length):
            r = r + 0.5 * size * pulled(gradient, metric)
            z = z + size * unwhiten(r, metric)
            # not cleaned: a path that ends at no finite energy is rejected
            gradient, base, log_likelihood = self.evaluate(z, tempered)
            r = r + 0.5 * size * pulled(gradient, metric)
        return _Values(z, gradient, base, log_likelihood), r

    def _metric(self, particles: Population, scale: Tensor) -> Tensor:
        """What whitens the particles: their spread, or the islands' pooled covariance."""
        if not self.dense:
            return scale
        islands = particles.num_islands
        counts = torch.full(
            (islands,),
            particles.num_each,
            device=particles.z.device,
        )
        return whitening(particles.z.unflatten(0, (islands, -1)), counts, scale.diag())


def _changes(start: _Values, end: _Values, scale: Tensor) -> tuple[float, float]:
    """Mean squared changes of position and log likelihood, in units of their variances."""
    before = start.log_likelihood
    variance = (before - before.mean()).square().mean().clamp(min=1e-300)
    distance = ((end.z - start.z) / scale).double().square().mean()
    change = (end.log_likelihood - before).square().mean() / variance
    return float(distance), float(change)


def _no_farther(changes: tuple[float, float], earlier: tuple[float, float]) -> bool:
    """Whether a move changed little: of a net, particles never leave their modes."""
    pairs = zip(changes, earlier, strict=True)
    return all(change - before <= 0.03 * change for change, before in pairs)
