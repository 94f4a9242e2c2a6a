"""Sequential Monte Carlo from the prior to the posterior: draws of all modes, and the evidence with its error."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor

from pyrobnn.core.chains import RHAT_LIMIT, ess_of_families, rhat
from pyrobnn.core.checks import Refused, check_count, check_number, check_optional
from pyrobnn.core.findings import Finding
from pyrobnn.core.memory import require
from pyrobnn.core.positions import evenly_spaced
from pyrobnn.core.seeding import generator
from pyrobnn.core.threads import threads_by_need
from pyrobnn.inference.exchange import Estimate, Exchange, Ladders, Level, Passage, States
from pyrobnn.inference.fitting.checkpoints import Fields, Stage, fields_of
from pyrobnn.inference.fitting.floats import full_float32
from pyrobnn.inference.fitting.problem import (
    Problem,
    interruption,
    launches,
    make_posterior,
    snapshot,
)
from pyrobnn.inference.fitting.watch import TRACING, Watch
from pyrobnn.inference.method import Claim, FitRun, Kind, Method, register
from pyrobnn.inference.tempering import (
    Batched,
    Population,
    Rung,
    Tempering,
    batched,
    evaluator,
    lag,
    parts_of_own_data,
    refuse_without_prior,
)
from pyrobnn.model.compile.forecast import Compile
from pyrobnn.model.derived import prior_runs
from pyrobnn.model.gradient import at_each
from pyrobnn.model.padding import padded
from pyrobnn.posterior import Posterior

_BAR_STEPS = 100  # of a bar, whose end nobody knows: along the fourth root of β
#: about how often the gradient of all particles is computed, for the forecast of what it costs
_CALLS = 2000
_MAX_TEMPERATURES = 500
_STATES_PER_LEVEL = 64  # of an island, that are kept of a temperature for the ladders
_NUM_ADAPTATIONS = 4  # of the ladders, before their first weighed run
#: of each adaptation; the first weighed run has twice as many, each later run up to twice those of the one before
_ADAPTATION_STEPS = 32
_BUDGET = 30  # gradients that the ladders may take, in units of those of the climb

# beyond these limits modes have parted, see Signs; what one mode shows
_MAX_HEAT = 1.6  # heat capacity, in units of a Gaussian's: up to 1.3
_MIN_WORTH = 0.5  # share of the particles that they are worth as families: from 0.8
_MAX_RISE = 4.0  # standard errors by which further moves raise the log likelihood: up to 2
_MAX_FAMILY_ERROR = 2.5  # error that families show, in units of that of resampling: up to 1.5

# within these limits runs of the ladders are at rest, see Weighing
_MAX_DRIFT = 2.5  # of the log evidence, in its standard errors
_MAX_ERROR = 0.1  # of the log evidence, nats
_MIN_EFFECTIVE_DRAWS = 400  # of the log likelihood at the posterior


@register("smc", quick={"num_particles": 400, "num_draws": 100})
@dataclass(frozen=True)
class SMC(Method):
    r"""Sequential Monte Carlo: particles from the prior, led to the posterior through
    :math:`\pi_\beta \propto p(\theta)\, p(y \mid \theta)^\beta`.

    The next β is where the particles' weights are still worth the share ``ess`` of them; they are resampled, and every
    one is moved by Hamiltonian paths, all in one batch, until they have forgotten where they were. The mean weights
    of all positions that they pass multiply to the marginal likelihood:

    .. math:: \log \hat Z = \sum_t \log \frac1K \sum_k p(y \mid \theta_k^{(t)})^{\beta_{t+1} - \beta_t}

    Where the particles part into modes on the way, their weights rest on the few that were in each at the time, and a
    mode that is found late has no weight at all. It shows in a heat capacity at the last temperature beyond that of one
    mode, in few families among the particles, and in further moves that raise the log likelihood. Then parallel
    tempering between the temperatures of the climb makes the draws and the evidence anew: a late mode climbs down to
    where modes communicate, and is weighed from there. It takes as long as draws and evidence still change, with fewer
    ladders and more steps where they drift, at most about thirty times as long as the climb.

    Args:
        num_particles: in all islands together.
        num_islands: groups of particles that never mix. Each is a chain of the posterior and estimates the evidence for
            itself: their spread is an estimate of its error, and R-hat between them says whether there were particles
            enough.
        ess: effective sample size of the weights between two temperatures, as a share of the particles.
        max_leapfrogs: of a path.
        max_moves: paths of a particle at a temperature.
        compile: ``"auto"`` compiles the gradient where the forecast in ``meta["tier"]`` says that it costs less, as of
            short fits it does not; True and False are obeyed.
        capacity: rows that the gradient has room for, as of NUTS: tables of 1 to ``capacity`` rows share one compile.

    Raises:
        TypeError, ValueError: naming the option.

    Returns, by ``fit``: draws (num_islands, num_draws, …), siblings beside each other: the particles, which move on
    where more are asked for, or states of the ladders of parallel tempering; ``sample_stats`` lp and ancestor (which of
    its island's draws from the prior, or of its ladders, a draw descends from), and ``log_evidence``. In ``meta``:
    ``log_evidence_error``, the standard error (None of one island): the larger one of what islands and families show,
    or that of the ladders with what their evidence still changes by, ``log_evidence_interval``, 95 %,
    ``log_evidence_by_island``, ``num_temperatures``, ``num_gradients``, ``signs_of_modes`` (heat, worth, rise,
    families, the error of the heat), and ``exchange`` where there was parallel tempering (its error, its drift in the
    last run and change from the run before, effective draws, temperatures, ladders, steps, gradients, and their
    budget).

    Refused: a program that subsamples or cannot be batched; point parameters other than a net's,
    which are held; an improper prior; data that are impossible at all draws from the prior; too many temperatures.

    Caveat: a mode that no particle has ever been in, of the draws from the prior or of any move, is not there for this
    method, and nothing can show it: neither the stated error nor a verdict. The narrower the mode and the more
    parameters, the more particles that takes.

    References:
        *Sequential Monte Carlo samplers* (Del Moral, Doucet & Jasra, 2006)
        https://doi.org/10.1111/j.1467-9868.2006.00553.x
        *Adaptive tuning of Hamiltonian Monte Carlo within sequential Monte Carlo* (Buchholz, Chopin & Jacob, 2021)
        https://doi.org/10.1214/20-BA1222
        *Waste-free sequential Monte Carlo* (Dau & Chopin, 2022) https://doi.org/10.1111/rssb.12475
        *Non-reversible parallel tempering* (Syed et al., 2022) https://doi.org/10.1111/rssb.12464

    Example:
        >>> import pyro, pyro.distributions as dist, pyrobnn as pb, torch
        >>> def program(x, y):
        ...     mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        ...     pyro.sample("y", dist.Normal(mean, 1.0).expand([len(y)]).to_event(1), obs=y)
        >>> posterior = pb.SMC(num_particles=80, compile=False).fit(program, None, torch.ones(3))
        >>> posterior.draws["mean"].shape
        torch.Size([4, 20])
        >>> exact = dist.MultivariateNormal(torch.zeros(3), torch.eye(3) + 1.0).log_prob(torch.ones(3))
        >>> abs(posterior.log_evidence - float(exact)) < 5 * posterior.meta["log_evidence_error"]
        True
    """

    num_particles: int = 2000
    num_islands: int = 4
    ess: float = 0.8
    max_leapfrogs: int = 64
    max_moves: int = 10
    compile: Compile = "auto"
    capacity: int | None = None

    kind: ClassVar[Kind] = "chains"
    claim: ClassVar[Claim] = "exact"
    gathers: ClassVar[bool] = True
    points: ClassVar[Literal["free", "held"]] = "held"
    uses: ClassVar[tuple[str, ...]] = ("checkpoint",)
    default_draws: ClassVar[int] = 500
    remedy: ClassVar[str] = "Use more particles."

    def __post_init__(self) -> None:
        check_count("num_islands", self.num_islands)
        check_count(
            "num_particles",
            self.num_particles,
            minimum=2 * self.num_islands,
        )
        if self.num_particles % self.num_islands:
            raise ValueError(
                f"'num_particles' must be a multiple of num_islands={self.num_islands}, got {self.num_particles}"
            )
        check_number(
            "ess",
            self.ess,
            above=0.0,
            below=1.0,
        )
        check_count("max_leapfrogs", self.max_leapfrogs)
        check_count("max_moves", self.max_moves)
        check_optional(check_count, "capacity", self.capacity)
        # who does not ask for a number of draws gets the particles
        object.__setattr__(self, "default_draws", self.num_particles // self.num_islands)

    def _fit(self, problem: Problem, run: FitRun) -> Posterior:
        refuse_without_prior(problem.density)
        density = problem.density
        # a move holds 16 copies beside the positions of a temperature
        copies = 16 + 2 * self.max_moves
        require(
            copies * self.num_particles * density.dim * density.dtype.itemsize,
            problem.device,
            f"a population of {self.num_particles} particles × {density.dim} parameters",
            "lower num_particles",
        )
        started = time.perf_counter()
        with full_float32(problem.device), torch.no_grad():
            stage = run.stages.begin()
            course = _Course(self, problem, run, stage)
            with course.watch, threads_by_need(), stage:
                course.run()
            z, log_joint, ancestor = course.draws()
            draws = density.constrain(z)
        stopped = course.watch.stopped
        notes = course.findings()
        if stopped == "interrupt":
            notes.append(
                interruption(
                    self, course.num_done, run.num_draws, "draws of each island", run.checkpoint
                )
            )
        if self.compile is True and course.compiled.mode != "inductor":
            notes += launches(problem.device, "the gradient could not be compiled")
        return make_posterior(
            problem,
            self,
            draws,
            seed=run.seed,
            timings={
                "compile": course.compiled.seconds,
                "fit": time.perf_counter() - started - course.compiled.seconds,
            },
            sample_stats={"lp": log_joint, "ancestor": ancestor},
            log_evidence=course.total,
            history=rung_history(course.reached.rungs),
            meta={
                **course.facts(),
                "stopped": stopped,
                "common_start": False,
            },
            notes=notes,
            interrupted=stopped == "interrupt",
        )

    @property
    def _num_parallel(self) -> int:
        return self.num_islands


class _Course:
    """The course of a fit: the climb through the temperatures, the signs of modes at its end, and the draws.

    The draws are those of the particles, or of ladders where modes parted. An interruption leaves the state of the last
    step; one before the signs are known leaves nothing, as nobody can say then what the draws are worth.

    Attributes:
        compiled: the tempered gradient.
        reached: how far the fit has come.
    """

    compiled: Batched
    reached: _Reached

    def __init__(self, config: SMC, problem: Problem, run: FitRun, stage: Stage) -> None:
        self._config = config
        self._problem = problem
        self._run = run
        self.watch = Watch(
            _BAR_STEPS,
            "SMC",
            run.callbacks,
            run.progress,
            finished="num_draws",
            starting=TRACING,
            metrics=("beta", "acceptance_rate", "moves"),
            worth_keeping=lambda: bool(self._rounds),
        )
        # of the ladders, where there are any
        self._exchange: Exchange | None = None
        # positions, log joints and ancestors of all islands, (island, draw, …), in the order they were drawn
        self._rounds: list[list[Tensor]] = []
        self._progress = _Progress(self.watch)
        self._stage = stage

    def run(self) -> None:
        """All temperatures, and the draws at the last; Refused where data are impossible or temperatures spent."""
        config = self._config
        z = self._prior(config.num_particles, self._run.seed)
        self.compiled = self._gradient(z, _CALLS)
        tempering = Tempering(self.compiled.evaluate, config.max_leapfrogs, config.max_moves)
        self.reached = _Reached(tempering.start(z, config.num_islands, self._run.seed))
        self._stage.resume(self)
        particles = self.reached.particles
        if not particles.possible():
            raise Refused(
                f"in none of an island's {particles.num_each} draws from the prior do the data have a finite "
                "likelihood: check the supports and scales of prior and likelihood, or use more num_particles"
            )
        self._climb(tempering)
        signs = self.reached.signs or self._look_for_modes(tempering)
        if signs.parted:
            self._weigh_modes(tempering)
        else:
            self._sample(tempering)

    def _gradient(self, z: Tensor, calls: int) -> Batched:
        """The tempered gradient of particles like ``z`` (particle, dim), for about so many calls."""
        config = self._config
        density = self._problem.density
        if config.capacity is not None:
            density = padded(density, config.capacity, z)
        return batched(
            evaluator(parts_of_own_data(density, z[:2])),
            z,
            config.compile,
            calls=calls,
            say=self.watch.say,
        )

    def _prior(self, num: int, seed: int) -> Tensor:
        """Draws from the prior in unconstrained space (draw, dim)."""
        density = self._problem.density
        values = prior_runs(density, num, seed, [site.name for site in density.sites])
        return at_each(density.unconstrain, values).detach().contiguous()

    def _climb(self, tempering: Tempering) -> None:
        """All temperatures, one after the other."""
        while self.reached.particles.beta < 1.0:
            reached = self.reached
            if len(reached.rungs) == _MAX_TEMPERATURES:
                raise Refused(
                    f"{_MAX_TEMPERATURES} temperatures led to beta = {reached.particles.beta:.3g} only, of 1: the "
                    "prior is too far from the posterior. Give it the scale of what you believe, lower ess, or use NUTS"
                )
            with self._stage.changing():
                particles, rung = tempering.climb(reached.particles, self._config.ess)
                self.reached = replace(
                    reached,
                    particles=particles,
                    rungs=[*reached.rungs, rung],
                    levels=[*reached.levels, particles.level(_STATES_PER_LEVEL)],
                )
            if self._report("tempering", 0.97 * particles.beta**0.25):
                raise ValueError(
                    f"a callback stopped the run at step {self._progress.steps}, before there was a draw"
                )
            self._stage.keep()

    def _look_for_modes(self, tempering: Tempering) -> Signs:
        """Move the particles on from the last temperature for the signs; where they were are the first draws."""
        with self._stage.changing():
            reached = self.reached
            before = reached.particles
            particles, _ = tempering.moved(before)
            signs = Signs.of(before, particles, reached.rungs)
            self.reached = replace(
                reached,
                particles=particles,
                levels=[*reached.levels, particles.level(_STATES_PER_LEVEL)],
                signs=signs,
            )
            # draws that an interruption leaves have their signs
            self._rounds.append(self._draws_of(before))
        return signs

    def _sample(self, tempering: Tempering) -> None:
        """Draws at the last temperature: the particles, which have moved on, and do so where more are asked for."""
        while not self._enough():
            with self._stage.changing():
                self._rounds.append(self._draws_of(self.reached.particles))
                particles, _ = tempering.moved(self.reached.particles)
                self.reached = replace(self.reached, particles=particles)
            self._stage.keep()

    @staticmethod
    def _draws_of(particles: Population) -> list[Tensor]:
        """Positions (island, draw, dim), log joints and ancestors (island, draw) of the particles."""
        values = particles.z, particles.log_joint(), particles.ancestor
        return [value.unflatten(0, (particles.num_islands, -1)) for value in values]

    def _enough(self) -> bool:
        """Reports, and says whether there are all draws, or a callback wants no more."""
        num_done = min(self._run.num_draws, self.num_done)
        finished = num_done == self._run.num_draws
        stop = self._report("sampling", 1.0 if finished else 0.99, num_done)
        if stop and not finished:
            self.watch.stopped = "callback"
        return stop or finished

    def _weigh_modes(self, tempering: Tempering) -> None:
        """Draws and evidence of ladders between all temperatures; of the climb alone where they cost too much."""
        exchange = self._exchange or self._new_exchange()
        ladders = self.reached.ladders or _Ladders(exchange.start(self.reached.levels))
        while ladders.num_adapted < _NUM_ADAPTATIONS:
            # those of the adaptations that are left, and of the first weighed run
            num_steps = (_NUM_ADAPTATIONS - ladders.num_adapted + 2) * _ADAPTATION_STEPS
            if not self._affords(ladders.now, num_steps):
                self._sample(tempering)
                return
            with self._stage.changing():
                adapted = exchange.adapted(ladders.now, _ADAPTATION_STEPS)
                ladders = _Ladders.adapted(adapted, ladders.num_adapted + 1)
                self.reached = replace(self.reached, ladders=ladders)
            if self._stopped_exchanging():
                return
            self._stage.keep()
        ladders = self._weigh(exchange, ladders)
        # further draws, which are not weighed
        while self.watch.stopped != "callback" and not self._enough():
            with self._stage.changing():
                moved, passage = exchange.run(ladders.now, _ADAPTATION_STEPS, self._num_kept)
                self._rounds.append(passage.draws(self._config.num_islands))
                ladders = replace(ladders, now=moved)
                self.reached = replace(self.reached, ladders=ladders)
            self._stage.keep()

    def _new_exchange(self) -> Exchange:
        config = self._config
        if config.compile == "auto" and self.compiled.mode == "graph":
            # the climb alone may have been too short to repay a compile
            z = self._prior(config.num_particles, self._run.seed)
            gradient = self._gradient(z, self._budget // config.num_particles)
            self.compiled = gradient._replace(seconds=self.compiled.seconds + gradient.seconds)
        self._exchange = Exchange(
            self.compiled.evaluate,
            self._prior,
            config.num_islands,
            config.num_particles,
            generator(self._run.seed),
            config.max_leapfrogs,
        )
        return self._exchange

    @property
    def _budget(self) -> int:
        """Gradients that the ladders may take."""
        return _BUDGET * self.reached.particles.num_gradients

    def _affords(self, ladders: Ladders, num_steps: int) -> bool:
        """Whether the budget allows so many steps more. The first is taken for a gradient of every state, the least."""
        gradients_per_step = ladders.num_gradients / max(1, ladders.num_steps)
        return ladders.num_gradients + gradients_per_step * num_steps <= self._budget

    def _weigh(self, exchange: Exchange, ladders: _Ladders) -> _Ladders:
        """Runs of ladders, each twice as long as the one before, until they are at rest or the budget is spent."""
        while not ladders.weighed:
            cost = ladders.gradients_per_step * ladders.num_steps
            if ladders.now.num_gradients + cost > self._budget:
                break
            with self._stage.changing():
                ladders = self._weighed(exchange, ladders)
                self.reached = replace(self.reached, ladders=ladders)
            if not ladders.weighed and self._stopped_exchanging():
                break
            self._stage.keep()
        return ladders

    def _weighed(self, exchange: Exchange, before: _Ladders) -> _Ladders:
        """One run of the ladders, and how long the next one is."""
        num_islands = self._config.num_islands
        ladders, passage = exchange.run(before.now, before.num_steps, self._num_kept)
        gradients_per_step = (ladders.num_gradients - before.now.num_gradients) / before.num_steps
        weighing = Weighing.of(
            passage,
            num_islands,
            ladders,
            self.reached.weighing,
            self._budget,
        )
        self.reached = replace(self.reached, weighing=weighing)
        # these replace the draws of the run before
        self._rounds[:] = [passage.draws(num_islands)]
        if weighing.at_rest:
            return replace(before, now=ladders, weighed=True)
        if weighing.drifts(_MAX_DRIFT):
            # half of the ladders cost as much less a step
            gradients_per_step /= ladders.num_ladders
            ladders = exchange.halved(ladders)
            gradients_per_step *= ladders.num_ladders
        affordable = int((self._budget - ladders.num_gradients) / gradients_per_step)
        num_steps = max(before.num_steps, min(2 * before.num_steps, affordable))
        return replace(
            before,
            now=ladders,
            num_steps=num_steps,
            gradients_per_step=gradients_per_step,
        )

    def _stopped_exchanging(self) -> bool:
        """Reports, and says whether a callback wants no more of the ladders."""
        stop = self._report("exchanging", 0.98)
        if stop:
            self.watch.stopped = "callback"
        return stop

    def state(self) -> _CourseState:
        """Particles, temperatures, draws and ladders, as they are between two steps."""
        random = None if self._exchange is None else self._exchange.random.get_state()
        return {
            "reached": self.reached.state(),
            "rounds": self._rounds,
            "steps": self._progress.steps,
            "random": random,
        }

    def restore(self, state: _CourseState) -> None:
        """Go on from what :meth:`state` gave."""
        self.reached = _Reached.restored(state["reached"])
        self._rounds[:] = state["rounds"]
        self._progress.steps = state["steps"]
        if state["random"] is not None:
            self._new_exchange().random.set_state(state["random"].cpu())

    @property
    def _num_kept(self) -> int:
        """About how many states of the posterior a run of ladders keeps."""
        config = self._config
        return max(2 * config.num_particles, config.num_islands * self._run.num_draws)

    @property
    def log_evidence(self) -> Tensor:
        """Log evidence of each island."""
        if self.reached.weighing is None:
            return self.reached.particles.log_evidence
        return self.reached.weighing.estimate.islands

    @property
    def total(self) -> float:
        """Log evidence of all islands."""
        if self.reached.weighing is None:
            return log_mean(self.log_evidence)
        return self.reached.weighing.estimate.log_evidence

    @property
    def interval(self) -> list[float] | None:
        """Where the log evidence is, nats; None of one island."""
        error = self.error
        if error is None:
            return None
        if self.reached.weighing is None:
            half = student_width(error, self._config.num_islands)
        else:
            half = 1.96 * error
        return [self.total - half, self.total + half]

    @property
    def error(self) -> float | None:
        """Standard error of the log evidence."""
        if self.reached.weighing is not None:
            return self.reached.weighing.estimate.whole_error
        spread = standard_error(self.log_evidence)
        if spread is None:
            return None
        ancestor = self.reached.particles.ancestor.unflatten(0, (self._config.num_islands, -1))
        return max(spread, error_of_families(ancestor))

    @property
    def num_done(self) -> int:
        """Draws of each island that there are."""
        return sum(z.shape[1] for z, _, _ in self._rounds)

    def _report(self, phase: str, bar_share: float, draws: int = 0) -> bool:
        """Tell bar and callbacks where the course is; True if a callback asks to stop."""
        rung = self.reached.rungs[-1]
        metrics = {
            "phase": phase,
            "beta": rung.beta,
            "log_evidence": self.total,
            "acceptance_rate": rung.acceptance_rate,
            "step_size": rung.step_size,
            "moves": rung.moves,
            "draws": draws,
            "snapshot": partial(self._snapshot, self.reached.particles.z),
        }
        return self._progress.report(metrics, bar_share)

    def _snapshot(self, z: Tensor) -> Posterior:
        """The posterior whose draws are the particles ``z`` (island × particle, dim)."""
        draws = self._problem.density.constrain(z.reshape(self._config.num_islands, -1, z.shape[1]))
        return snapshot(
            self._problem,
            self._config,
            draws,
            seed=self._run.seed,
        )

    def draws(self) -> list[Tensor]:
        """Positions (island, draw, dim), log joints and ancestors (island, draw), evenly spread over siblings."""
        num = min(self._run.num_draws, self.num_done)
        picked = torch.arange(num)
        if len(self._rounds) == 1:
            picked = evenly_spaced(self.num_done, num)
        # positions, log joints and ancestors
        joined = [torch.cat(rounds, 1) for rounds in zip(*self._rounds, strict=True)]
        return [values[:, picked.to(values.device)] for values in joined]

    def findings(self) -> list[Finding]:
        """What the user has to know."""
        error = self.error
        interval = self.interval
        findings = [Finding("one_island")] if interval is None else []
        if interval is not None and error is not None and error > 0.5:  # nats
            low, high = interval
            findings.append(Finding("evidence_uncertain", {"low": low, "high": high}))
        if self.reached.weighing is None:
            return findings + self._findings_of_climb(error)
        if not self.reached.weighing.known:
            findings.append(Finding("modes_unsettled", self.reached.weighing.numbers))
        return findings

    def _findings_of_climb(self, error: float | None) -> list[Finding]:
        """What the user has to know of particles that no ladders weigh."""
        findings = []
        if self.reached.signs is not None and self.reached.signs.parted:
            worth = self.reached.signs.worth * self._config.num_particles
            numbers = {"error": error, "drift": None, "worth": worth}
            findings.append(Finding("modes_unsettled", numbers))
        nats = lag(self.reached.rungs)
        if nats > 0.5 + 2.0 * (error or 0.0):
            findings.append(Finding("particles_lag", {"lag": nats}))
        return findings

    @property
    def num_gradients(self) -> int:
        """Gradients of the particles and of the ladders that were weighed."""
        of_ladders = 0 if self.reached.weighing is None else self.reached.weighing.num_gradients
        return self.reached.particles.num_gradients + of_ladders

    def facts(self) -> dict[str, Any]:
        """What ``meta`` holds of the evidence and of its cost."""
        facts: dict[str, Any] = {
            "log_evidence_kind": "smc",
            "log_evidence_error": self.error,
            "log_evidence_interval": self.interval,
            "log_evidence_by_island": self.log_evidence.tolist(),
            "num_temperatures": len(self.reached.rungs),
            "num_gradients": self.num_gradients,
            "signs_of_modes": None if self.reached.signs is None else self.reached.signs._asdict(),
        }
        if self.reached.weighing is not None:
            facts["exchange"] = self.reached.weighing.numbers
        return facts


class _ReachedState(TypedDict):
    """What a checkpoint has of :class:`_Reached`."""

    particles: Fields
    rungs: list[list[Any]]
    levels: list[list[Any]]
    signs: list[float] | None
    ladders: Fields | None
    weighing: Fields | None


class _CourseState(TypedDict):
    """What a checkpoint has of a fit: the draws of each round, the steps that were reported, the ladders' generator."""

    reached: _ReachedState
    rounds: list[list[Tensor]]
    steps: int
    random: Tensor | None


@dataclass(frozen=True, eq=False)
class _Reached:
    """How far a fit has come.

    Attributes: ``particles``, as they are now; ``rungs``, what happened at each temperature; ``levels``, states of
        each, from which ladders begin; ``signs``, what the particles showed at the last temperature; ``ladders``, where
        there are any; ``weighing``, their last run.
    """

    particles: Population
    rungs: list[Rung] = field(default_factory=list)
    levels: list[Level] = field(default_factory=list)
    signs: Signs | None = None
    ladders: _Ladders | None = None
    weighing: Weighing | None = None

    def state(self) -> _ReachedState:
        """Tensors and plain values, nested."""
        return {
            "particles": fields_of(self.particles),
            "rungs": [list(rung) for rung in self.rungs],
            "levels": [list(level) for level in self.levels],
            "signs": None if self.signs is None else list(self.signs),
            "ladders": None if self.ladders is None else self.ladders.state(),
            "weighing": None if self.weighing is None else self.weighing.state(),
        }

    @classmethod
    def restored(cls, state: _ReachedState) -> _Reached:
        """What :meth:`state` gave."""
        states = tuple((z, log_likelihood) for z, log_likelihood in state["particles"]["states"])
        return cls(
            particles=Population(**{**state["particles"], "states": states}),
            rungs=[Rung(*rung) for rung in state["rungs"]],
            levels=[Level(*level) for level in state["levels"]],
            signs=None if state["signs"] is None else Signs(*state["signs"]),
            ladders=None if state["ladders"] is None else _Ladders.restored(state["ladders"]),
            weighing=None if state["weighing"] is None else Weighing.restored(state["weighing"]),
        )


@dataclass(frozen=True, eq=False)
class _Ladders:
    """Ladders on their way to weights of the modes.

    Attributes: ``now``, as they are; ``num_adapted``, adaptations that they have had; ``num_steps`` of the next weighed
        run, with ``gradients_per_step``; ``weighed``: they are at rest.
    """

    now: Ladders
    num_adapted: int = 0
    num_steps: int = 2 * _ADAPTATION_STEPS
    gradients_per_step: float = 0.0
    weighed: bool = False

    @classmethod
    def adapted(cls, ladders: Ladders, num_adapted: int) -> _Ladders:
        """Ladders after so many adaptations, whose steps say what further ones cost."""
        cost = ladders.num_gradients / ladders.num_steps
        return cls(ladders, num_adapted, gradients_per_step=cost)

    def state(self) -> Fields:
        """Tensors and plain values, nested."""
        now = fields_of(self.now) | {"states": list(self.now.states)}
        return fields_of(self) | {"now": now}

    @classmethod
    def restored(cls, state: Fields) -> _Ladders:
        """What :meth:`state` gave."""
        now = state["now"]
        restored = {
            "states": States(*now["states"]),
            "fresh": tuple(now["fresh"]),
            # these are the host's
            "betas": now["betas"].cpu(),
            "step_size": now["step_size"].cpu(),
        }
        return cls(**{**state, "now": Ladders(**{**now, **restored})})


class _Progress:
    """Where the bar of a fit is, and the number of its reports."""

    def __init__(self, watch: Watch) -> None:
        self.steps = 0
        self._watch = watch
        self._place = 0

    def report(self, metrics: dict[str, Any], bar_share: float) -> bool:
        """Move the bar to this share of its length, and call every callback; True if one asks to stop."""
        self.steps += 1
        place = int(bar_share * _BAR_STEPS)
        if place > self._place:
            self._watch.show(place, metrics)
            self._place = place
        return self._watch.ask(self.steps, metrics)


class Signs(NamedTuple):
    """What shows that modes parted on the way up.

    ``heat``, the heat capacity, is the variance of the log likelihood at the last temperature in units of a Gaussian
    posterior's, half the number of parameters: modes of different likelihood have more. ``worth`` is the effective
    share of the particles, counted by families: particles that pass between modes forget which of the prior's draws
    they descend from. ``rise`` is what further moves add to the mean log likelihood, in standard errors. ``families``
    is the error of the log evidence that families show, in units of what the weights of all temperatures explain: it is
    larger where few particles passed a bottleneck and the others descend from them. ``heat_error`` is the standard
    error that the heat of so many independent draws of a Gaussian posterior has.
    """

    heat: float
    worth: float
    rise: float
    families: float
    heat_error: float = 0.0

    @classmethod
    def of(
        cls,
        before: Population,
        after: Population,
        rungs: list[Rung],
    ) -> Signs:
        """What particles at the last temperature show ``before`` and ``after`` they were moved once more."""
        count, dim = after.z.shape
        passed = before.passed()
        heat = float(passed[passed.isfinite()].var()) / (0.5 * dim)
        change = after.log_likelihood - before.log_likelihood
        rise = float(change.mean()) / max(float(change.std()) / math.sqrt(count), 1e-300)
        shape = after.num_islands, -1
        ancestor = after.ancestor.reshape(shape)
        likelihoods = after.log_likelihood.reshape(1, *shape).cpu().numpy()
        worth = float(ess_of_families(likelihoods, ancestor.cpu().numpy())[0])
        explained = math.sqrt(sum(1.0 / rung.ess - 1.0 for rung in rungs) / count)
        families = error_of_families(ancestor) / max(explained, math.sqrt(0.1 / count))
        heat_error = math.sqrt((2.0 + 12.0 / dim) / count)
        return cls(heat, worth / count, rise, families, heat_error)

    @property
    def parted(self) -> bool:
        """Whether modes are to be weighed by ladders."""
        hot = self.heat > _MAX_HEAT + 2.0 * self.heat_error
        late = hot or self.rise > _MAX_RISE
        return late or self.worth < _MIN_WORTH or self.families > _MAX_FAMILY_ERROR


@dataclass(frozen=True)
class Weighing:
    """What a run of ladders says: its evidence, and the number of independent draws of the log likelihood.

    Attributes:
        estimate: of the log evidence, by this run.
        before: the estimate of the run before; None of the first.
        num_effective: effective draws of the log likelihood at β = 1.
        rhat: of the log likelihood at β = 1 between islands; one of a single island.
        num_temperatures: with the prior, β = 0.
        num_ladders: of all islands, in this run.
        num_steps: of the ladders, up to the end of this run.
        num_gradients: that the ladders have spent by then.
        budget: gradients that the ladders may spend in all.
    """

    estimate: Estimate
    before: Estimate | None
    num_effective: float
    rhat: float
    num_temperatures: int
    num_ladders: int
    num_steps: int
    num_gradients: int
    budget: int

    @classmethod
    def of(
        cls,
        passage: Passage,
        num_islands: int,
        ladders: Ladders,
        before: Weighing | None,
        budget: int,
    ) -> Weighing:
        """That of one run, at whose end the ladders are ``ladders``, after the run ``before``."""
        values = passage.log_likelihood[:, -1]
        likelihoods = passage.draws_of(values, num_islands).cpu().numpy()
        ladder = torch.arange(values.shape[1]).expand(len(values), -1)
        families = passage.draws_of(ladder, num_islands).numpy()
        num_effective = float(ess_of_families(likelihoods[None], families)[0])
        return cls(
            estimate=passage.estimate(num_islands),
            before=None if before is None else before.estimate,
            num_effective=num_effective,
            rhat=float(rhat(likelihoods)) if num_islands > 1 else 1.0,
            num_temperatures=len(passage.betas),
            num_ladders=values.shape[1],
            num_steps=ladders.num_steps,
            num_gradients=ladders.num_gradients,
            budget=budget,
        )

    def state(self) -> dict[str, Any]:
        """Its fields, as a checkpoint has them."""
        before = None if self.before is None else list(self.before)
        return fields_of(self) | {"estimate": list(self.estimate), "before": before}

    @classmethod
    def restored(cls, state: Fields) -> Weighing:
        """What :meth:`state` gave."""
        before = None if state["before"] is None else Estimate(*state["before"])
        return cls(**{**state, "estimate": Estimate(*state["estimate"]), "before": before})

    @property
    def change(self) -> float | None:
        """By how much the log evidence differs from that of the run before."""
        if self.before is None:
            return None
        return self.estimate.log_evidence - self.before.log_evidence

    def drifts(self, errors: float) -> bool:
        """Whether the log evidence changes in the run, or from the run before, by more than so many standard errors."""
        if abs(self.estimate.drift) > errors * self.estimate.drift_error:
            return True
        if self.before is None or self.change is None:
            return False
        return abs(self.change) > errors * math.hypot(self.estimate.error, self.before.error)

    @property
    def at_rest(self) -> bool:
        """Whether a longer run would say the same: no first run can know."""
        steady = self.before is not None and not self.drifts(_MAX_DRIFT)
        exact = self.estimate.error <= _MAX_ERROR and self.num_effective >= _MIN_EFFECTIVE_DRAWS
        return steady and exact and self.rhat <= RHAT_LIMIT

    @property
    def known(self) -> bool:
        """Whether draws and evidence are the posterior's as far as the ladders show."""
        steady = self.before is not None and not self.drifts(3.0)
        return (
            steady
            and self.estimate.error <= 0.5
            and self.num_effective >= 0.25 * _MIN_EFFECTIVE_DRAWS
        )

    @property
    def numbers(self) -> dict[str, float | None]:
        """What ``meta`` and the findings say of it."""
        return {
            "error": self.estimate.error,
            "drift": self.estimate.drift,
            "drift_error": self.estimate.drift_error,
            "change": self.change,
            "worth": self.num_effective,
            "rhat": self.rhat,
            "num_temperatures": self.num_temperatures,
            "num_ladders": self.num_ladders,
            "num_steps": self.num_steps,
            "num_gradients": self.num_gradients,
            "budget": self.budget,
        }


def rung_history(rungs: list[Rung]) -> dict[str, Tensor]:
    """What happened at each temperature, (temperature,)."""
    return dict(
        zip(
            Rung._fields,
            torch.tensor(rungs, dtype=torch.float64).unbind(1),
            strict=True,
        )
    )


def log_mean(islands: Tensor) -> float:
    """Log of the mean evidence of the islands, which is unbiased."""
    return float(islands.logsumexp(0)) - math.log(len(islands))


def standard_error(islands: Tensor) -> float | None:
    """Standard error of the mean of the islands' log evidence, nats; None of one."""
    return None if len(islands) < 2 else float(islands.std()) / math.sqrt(len(islands))


def error_of_families(ancestor: Tensor) -> float:
    r"""Standard error of the log evidence, nats, by how unequal the families of particles (island, particle) are.

    .. math:: \operatorname{var} \log \hat Z \approx \sum_a (n_a / N)^2 - 1 / N

    for n of N particles of an island that descend from the ancestor a: what came of few ancestors is known as well as
    few draws know it, also where islands agree by chance.

    References:
        Variance estimation in the particle filter (Lee & Whiteley, 2018) https://doi.org/10.1093/biomet/asy028
    """
    islands, count = ancestor.shape
    variances = [
        float((family.bincount().double() / count).square().sum()) - 1.0 / count
        for family in ancestor
    ]
    return math.sqrt(max(sum(variances), 0.0)) / islands


def student_width(error: float, islands: int, level: float = 0.95) -> float:
    """Half of the width of an interval, by Student's t with a degree of freedom less than islands."""
    from scipy import stats

    return float(stats.t.ppf(0.5 + level / 2, islands - 1)) * error


def student_interval(islands: Tensor, level: float = 0.95) -> list[float] | None:
    """Where the log evidence is, nats; None of one island."""
    error = standard_error(islands)
    if error is None:
        return None
    centre = log_mean(islands)
    width = student_width(error, len(islands), level)
    return [centre - width, centre + width]
