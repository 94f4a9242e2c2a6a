"""Sequential Monte Carlo from the prior to the posterior: draws of all modes, and the evidence with its error."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pyrobnn.core.checks import Refused, check_count, check_number, require
from pyrobnn.core.findings import Finding
from pyrobnn.inference.fitting.floats import full_float32
from pyrobnn.inference.fitting.problem import Problem, interruption, launches, make_posterior, snapshot
from pyrobnn.inference.fitting.watch import COMPILING, Watch
from pyrobnn.inference.method import Claim, FitRun, Kind, Method, register
from pyrobnn.inference.tempering import Population, Rung, batched, evaluator, lag, parts, refuse_without_prior
from pyrobnn.model.derived import prior_runs
from pyrobnn.model.gradient import at_each
from pyrobnn.posterior import Posterior

_STEPS = 100  # of a bar, whose end nobody knows: along the fourth root of β
_MAX_TEMPERATURES = 500


@register("smc", quick={"num_particles": 400, "num_draws": 100})
@dataclass(frozen=True)
class SMC(Method):
    r"""Sequential Monte Carlo: particles from the prior, led to the posterior through
    :math:`\pi_\beta \propto p(\theta)\, p(y \mid \theta)^\beta`.

    The next β is where the particles' weights are still worth the share ``ess`` of them; they are resampled, and every
    one is moved by Hamiltonian paths, all in one batch, until they have forgotten where they were. The mean weights
    of all positions that they pass multiply to the marginal likelihood:

    .. math:: \log \hat Z = \sum_t \log \frac1K \sum_k p(y \mid \theta_k^{(t)})^{\beta_{t+1} - \beta_t}

    Args:
        num_particles: in all islands together.
        num_islands: groups of particles that never mix. Each is a chain of the posterior and estimates the evidence for
            itself: their spread is its error, and R-hat between them says whether there were particles enough.
        ess: effective sample size of the weights between two temperatures, as a share of the particles.
        max_leapfrogs: of a path.
        max_moves: paths of a particle at a temperature.
        compile: compile the gradient; False gives the same draws within float tolerance, slower.

    Raises:
        TypeError, ValueError: naming the option.

    Returns, by ``fit``: draws (num_islands, num_draws, …), siblings beside each other: the particles, which move on
    where more are asked for; ``sample_stats`` lp and ancestor (which of its island's draws from the prior a draw
    descends from), and ``log_evidence``. In ``meta``: ``log_evidence_error``, the standard error of the mean over
    islands (None of one island; of four it has three degrees of freedom), ``log_evidence_interval``, 95 % by Student's
    t, ``log_evidence_by_island``, ``num_temperatures`` and ``num_gradients``.

    Refused: a program that subsamples or cannot be batched; point parameters other than a net's,
    which are held; an improper prior; data that are impossible at all draws from the prior; too many temperatures.

    Caveat: where a mode is narrow and the particles are few, none may be in it when it parts from the rest, and nothing
    shows it. An island's particles descend from few: its draws are worth less than their number.

    References:
        *Sequential Monte Carlo samplers* (Del Moral, Doucet & Jasra, 2006)
        https://doi.org/10.1111/j.1467-9868.2006.00553.x
        *Adaptive tuning of Hamiltonian Monte Carlo within sequential Monte Carlo* (Buchholz, Chopin & Jacob, 2021)
        https://doi.org/10.1214/20-BA1222
        *Waste-free sequential Monte Carlo* (Dau & Chopin, 2022) https://doi.org/10.1111/rssb.12475

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
    compile: bool = True

    kind: ClassVar[Kind] = "chains"
    claim: ClassVar[Claim] = "exact"
    gathers: ClassVar[bool] = True
    points: ClassVar[Literal["free", "held"]] = "held"
    uses: ClassVar[tuple[str, ...]] = ()
    default_draws: ClassVar[int] = 500
    remedy: ClassVar[str] = "Use more particles."

    def __post_init__(self) -> None:
        check_count("num_islands", self.num_islands)
        check_count("num_particles", self.num_particles, minimum=2 * self.num_islands)
        if self.num_particles % self.num_islands:
            raise ValueError(
                f"'num_particles' must be a multiple of num_islands={self.num_islands}, got {self.num_particles}"
            )
        check_number("ess", self.ess, above=0.0, below=1.0)
        check_count("max_leapfrogs", self.max_leapfrogs)
        check_count("max_moves", self.max_moves)
        # who does not ask for a number of draws gets the particles
        object.__setattr__(self, "default_draws", self.num_particles // self.num_islands)

    def _fit(self, problem: Problem, run: FitRun) -> Posterior:
        refuse_without_prior(problem.density)
        require(
            # a move holds 16 copies beside the positions of a temperature
            (16 + 2 * self.max_moves) * self.num_particles * problem.density.dim * problem.density.dtype.itemsize,
            problem.device,
            f"a population of {self.num_particles} particles × {problem.density.dim} parameters",
            "lower num_particles",
        )
        started = time.perf_counter()
        with full_float32(problem.device), torch.no_grad():
            course = _Course(self, problem, run)
            with course.watch:
                course.run()
            z, log_joint, ancestor = course.draws()
            draws = problem.density.constrain(z)
        stopped, islands = course.watch.stopped, course.particles.log_evidence
        notes = course.findings()
        if stopped == "interrupt":
            notes.append(interruption(self, course.done, run.num_draws, "draws of each island"))
        if self.compile and course.mode != "inductor":
            notes += launches(problem.device, "the gradient could not be compiled")
        return make_posterior(
            problem,
            self,
            draws,
            seed=run.seed,
            timings={"compile": course.compile_seconds, "fit": time.perf_counter() - started - course.compile_seconds},
            sample_stats={"lp": log_joint, "ancestor": ancestor},
            log_evidence=log_mean(islands),
            history=rung_history(course.rungs),
            meta={
                "log_evidence_kind": "smc",
                "log_evidence_error": standard_error(islands),
                "log_evidence_interval": student_interval(islands),
                "log_evidence_by_island": islands.tolist(),
                "num_temperatures": len(course.rungs),
                "num_gradients": course.particles.num_gradients,
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
    """The course of a fit: temperatures, then draws."""

    particles: Population

    def __init__(self, config: SMC, problem: Problem, run: FitRun) -> None:
        self._config, self._problem, self._run = config, problem, run
        self.watch = Watch(
            _STEPS,
            "SMC",
            run.callbacks,
            run.progress,
            finished="num_draws",
            starting=COMPILING if config.compile else "",
            metrics=("beta", "acceptance_rate", "moves"),
            worth_keeping=lambda: bool(self._rounds),
        )
        self.rungs: list[Rung] = []
        self._rounds: list[list[Tensor]] = []
        self._steps = self._place = 0

    def run(self) -> None:
        """All temperatures, and the draws at the last; Refused where data are impossible or temperatures spent."""
        config, density = self._config, self._problem.density
        values = prior_runs(density, config.num_particles, self._run.seed, [site.name for site in density.sites])
        z = at_each(density.unconstrain, values).detach().contiguous()
        evaluate, self.mode, self.compile_seconds = batched(evaluator(partial(parts, density)), z, config.compile)
        self.particles = particles = Population(
            evaluate, z, config.num_islands, self._run.seed, config.max_leapfrogs, config.max_moves
        )
        if not particles.possible():
            raise Refused(
                f"in none of an island's {particles.num_each} draws from the prior do the data have a finite "
                "likelihood: check the supports and scales of prior and likelihood, or use more num_particles"
            )
        while particles.beta < 1.0:
            if len(self.rungs) == _MAX_TEMPERATURES:
                raise Refused(
                    f"{len(self.rungs)} temperatures led to beta = {particles.beta:.3g} only, of 1: the prior is too "
                    "far from the posterior. Give it the scale of what you believe, lower ess, or use NUTS"
                )
            self.rungs.append(particles.climb(config.ess))
            if self._report("tempering", self.rungs[-1], 0.98 * particles.beta**0.25):
                raise ValueError(f"a callback stopped the run at step {self._steps}, before there was a draw")
        rung = self.rungs[-1]
        while True:
            kept = particles.z, particles.log_joint(), particles.ancestor
            self._rounds.append([each.reshape(config.num_islands, -1, *each.shape[1:]) for each in kept])
            done = min(self._run.num_draws, self.done)
            finished = done == self._run.num_draws
            stop = self._report("sampling", rung, 1.0 if finished else 0.99, done)
            if stop and not finished:
                self.watch.stopped = "callback"
            if stop or finished:
                return
            rung = particles.moved()

    @property
    def done(self) -> int:
        """Draws of each island that there are."""
        return len(self._rounds) * self.particles.num_each

    def _report(self, phase: str, rung: Rung, done: float, draws: int = 0) -> bool:
        self._steps += 1
        metrics = {
            "phase": phase,
            "beta": rung.beta,
            "log_evidence": log_mean(self.particles.log_evidence),
            "acceptance_rate": rung.acceptance_rate,
            "step_size": rung.step_size,
            "moves": rung.moves,
            "draws": draws,
            "snapshot": partial(self._snapshot, self.particles.z),
        }
        if (place := int(done * _STEPS)) > self._place:
            self.watch.show(place, metrics)
            self._place = place
        return self.watch.ask(self._steps, metrics)

    def _snapshot(self, z: Tensor) -> Posterior:
        draws = self._problem.density.constrain(z.reshape(self._config.num_islands, -1, z.shape[1]))
        return snapshot(self._problem, self._config, draws, seed=self._run.seed)

    def draws(self) -> list[Tensor]:
        """Positions (island, draw, dim), log joints and ancestors (island, draw), evenly spread over siblings."""
        num = min(self._run.num_draws, self.done)
        picked = torch.arange(num)
        if len(self._rounds) == 1:
            picked = torch.linspace(0, self.done - 1, num).round().long()
        found = (torch.cat(each, 1) for each in zip(*self._rounds, strict=True))
        return [each[:, picked.to(each.device)] for each in found]

    def findings(self) -> list[Finding]:
        """What the user has to know."""
        islands = self.particles.log_evidence
        error, interval = standard_error(islands), student_interval(islands)
        found = [Finding("one_island")] if interval is None else []
        if interval is not None and error is not None and error > 0.5:  # nats
            found.append(Finding("evidence_uncertain", {"low": interval[0], "high": interval[1]}))
        if (low := lag(self.rungs)) > 0.5 + 2.0 * (error or 0.0):
            found.append(Finding("particles_lag", {"lag": low}))
        return found


def rung_history(rungs: list[Rung]) -> dict[str, Tensor]:
    """What happened at each temperature, (temperature,)."""
    return dict(zip(Rung._fields, torch.tensor(rungs, dtype=torch.float64).unbind(1), strict=True))


def log_mean(islands: Tensor) -> float:
    """Log of the mean evidence of the islands, which is unbiased."""
    return float(islands.logsumexp(0)) - math.log(len(islands))


def standard_error(islands: Tensor) -> float | None:
    """Standard error of the mean of the islands' log evidence, nats; None of one."""
    return None if len(islands) < 2 else float(islands.std()) / math.sqrt(len(islands))


def student_width(error: float, islands: int, level: float = 0.95) -> float:
    """Half of the width of an interval, by Student's t with a degree of freedom less than islands."""
    from scipy import stats

    return float(stats.t.ppf(0.5 + level / 2, islands - 1)) * error


def student_interval(islands: Tensor, level: float = 0.95) -> list[float] | None:
    """Where the log evidence is, nats; None of one island."""
    error, centre = standard_error(islands), log_mean(islands)
    return None if error is None else [centre + student_width(side * error, len(islands), level) for side in (-1, 1)]
