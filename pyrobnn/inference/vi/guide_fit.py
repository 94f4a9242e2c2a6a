"""One fit of a guide: its objective, its batches, and the posterior of any parameters on the way."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyrobnn.core.checks import Refused
from pyrobnn.core.findings import Finding
from pyrobnn.core.seeding import seeded
from pyrobnn.inference.fitting.batches import Batches, PermutedRows, same
from pyrobnn.inference.fitting.checkpoints import Stages
from pyrobnn.inference.fitting.floats import full_float32
from pyrobnn.inference.fitting.problem import Callback, Problem, make_posterior
from pyrobnn.inference.fitting.program import rows_together, why_impossible
from pyrobnn.inference.fitting.rng import Noise
from pyrobnn.inference.fitting.watch import after, end_of
from pyrobnn.inference.optim.free_noise import HELD_SHARE, LEVELS, FreeNoise, held_first
from pyrobnn.inference.optim.minimize import Result, minimize
from pyrobnn.inference.optim.paths import SECOND_SHARE
from pyrobnn.inference.vi.elbo import TRACKED, Elbo
from pyrobnn.inference.vi.elbo_value import (
    Work,
    elbo_findings,
    evaluate_elbo,
    importance_stats,
)
from pyrobnn.inference.vi.families import CouplingFlow, Family, FullRank, LowRank, MeanField
from pyrobnn.inference.vi.kl_schedules import Constant, KLSchedule
from pyrobnn.inference.vi.local_noise import Estimator, WeightUses
from pyrobnn.inference.vi.pyro_guides import GuideFamily
from pyrobnn.inference.vi.row_batches import RowBatches
from pyrobnn.inference.vi.start import Start, start_of, starts_of
from pyrobnn.model import Density
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.approximation import Approximation

if TYPE_CHECKING:
    from pyrobnn.inference.method import FitRun
    from pyrobnn.inference.svi import SVI


def build_elbo(
    config: SVI,
    problem: Problem,
    start: Tensor,
    seed: int,
) -> _Objective:
    """The objective of a configuration, and where its search begins: around the point ``start`` (dim,)."""
    density = problem.density
    options = config.options
    num_latent = sum(site.size for site in density.sites if site.kind == "latent")
    loc = start[:num_latent].detach()
    points = start[num_latent:].detach()
    family: Family
    if callable(options.family):
        family = GuideFamily(options.family, density, loc, config.init_scale, seed)
    elif options.family == "full_rank":
        family = FullRank(loc, config.init_scale)
    elif options.family == "low_rank":
        family = LowRank(loc, config.init_scale, options.rank, seed)
    elif options.family == "flow":
        family = CouplingFlow(loc, config.init_scale, seed)
    else:
        family = MeanField(loc, config.init_scale, options.max_scale)
    estimator = _estimator(config, problem, start)
    rows = None if problem.is_bnn else RowBatches.of(problem, config.batch_size)
    of_rows = _of_rows(family, rows)
    elbo = Elbo(
        density,
        family,
        kl=config.kl,
        estimator=estimator,
        num_particles=config.num_particles,
        kl_direction=config.kl_direction,
        noise_rows=(0, 1) if problem.shares is None else problem.shares.rows_of_batch,
    )
    if rows is not None:
        _check_rows(rows, elbo)
    if of_rows is not None:
        of_rows = pad(of_rows, (0, len(points)))
    return _Objective(elbo, torch.cat([family.initial(), points]), rows, of_rows)


class _Objective(NamedTuple):
    """The ELBO, the parameters a search starts from (the guide's, then free points), and the rows of each step.

    ``of_rows``: which of the parameters belong to a row that not every batch has; None where none does.
    """

    elbo: Elbo
    start: Tensor
    rows: RowBatches | None
    of_rows: Tensor | None


def _of_rows(family: Family, rows: RowBatches | None) -> Tensor | None:
    """Which parameters (size,) of a guide belong to a row that not every batch has; None where none does."""
    if rows is None or rows.some.rows is None:
        return None
    return family.of_rows(rows.whole, rows.some.rows)


def _check_rows(rows: RowBatches, elbo: Elbo) -> None:
    """Refuse a guide, or a direction of the KL, that mini-batches of rows do not estimate."""
    elbo.at_rows(rows.some)
    if elbo.from_prior is not None:
        raise Refused("kl_direction='forward' sees all rows: leave the mini-batches out")
    if isinstance(elbo.family, GuideFamily):
        elbo.family.check_at_rows(rows.some)


def _estimator(config: SVI, problem: Problem, start: Tensor) -> Estimator | None:
    """How the noise of the weights is drawn; by itself, local reparameterization where it leaves the ELBO unbiased."""
    if config.estimator != "auto":
        return None if config.estimator == "weights" else config.estimator
    if not problem.is_bnn or config.options.family != "mean_field":
        return None
    density = problem.density
    values = density.constrain(start)
    latent = [values[site.name] for site in density.sites if site.kind == "latent"]
    with torch.no_grad(), WeightUses(latent) as uses:
        density.trace(values)
    x = density.args[0]
    exact = uses.once_per_row(len(x)) and not rows_together(problem.bnn, x)
    return "local_reparameterization" if exact else None


def fit_guide(config: SVI, problem: Problem, run: FitRun) -> Posterior:
    """Fit the guide of an :class:`pyrobnn.SVI`; one that contains mean-field begins where a fit of mean-field ended.

    Where the noise is free and no search has looked for the start, a second and shorter course holds it small first, as
    the paths of :mod:`pyrobnn.inference.optim.paths` do; the higher ELBO is kept. A forward KL has no bound to compare
    them by.
    """
    start = start_of(config, problem, run)
    guide_fit, result = _course(
        config,
        problem,
        run,
        start,
        owner=config,
        hold_noise=False,
    )
    if start.kind == "mode":
        result = replace(result, path=dict(start.path))
    elif _has_second_course(guide_fit) and result.stopped == "num_steps":
        guide_fit, result = _better_course(config, problem, run, start, guide_fit, result)
    return guide_fit.posterior(result.params, run.num_draws, result)


def _has_second_course(guide_fit: GuideFit) -> bool:
    """Whether the noise can be held in a second course, and its end be compared with that of the first."""
    return guide_fit.free_noise is not None and guide_fit.config.kl_direction == "reverse"


def _better_course(
    config: SVI,
    problem: Problem,
    run: FitRun,
    start: Start,
    free_fit: GuideFit,
    result: Result,
) -> tuple[GuideFit, Result]:
    """The course with the noise free throughout, or one that held the noise first, whichever has the higher ELBO."""
    short_config = replace(config, num_steps=max(1, round(SECOND_SHARE * config.num_steps)))
    try:
        held_fit, end = _course(
            short_config,
            problem,
            replace(run, callbacks=()),
            start,
            owner=config,
            hold_noise=True,
        )
    except FloatingPointError:
        return free_fit, result
    except KeyboardInterrupt:
        return free_fit, replace(result, stopped="interrupt")
    if end.interrupted:
        return free_fit, replace(result, stopped="interrupt")
    gain = held_fit.elbo_at(end.params)[0] - free_fit.elbo_at(result.params)[0]
    if not gain > 0:  # which a value that is not a number isn't either
        return free_fit, replace(result, path={"noise_held": 0.0, "path_gain": 0.0})
    return held_fit, replace(end, path={"noise_held": LEVELS[0], "path_gain": gain})


def _course(
    config: SVI,
    problem: Problem,
    run: FitRun,
    start: Start,
    *,
    owner: SVI,
    hold_noise: bool,
) -> tuple[GuideFit, Result]:
    """One fit, after mean-field's where the guide contains it.

    ``owner`` is the user's configuration, of which ``config`` is a part; ``hold_noise``: hold the noise small first.
    """
    callbacks = run.callbacks
    options = config.options
    title = "SVI, noise held first" if hold_noise else "SVI"
    guide_fit = GuideFit(config, problem, start, run.seed, owner, run.stages)
    # of our own guides the first parameters are means and scales
    contains = isinstance(options.family, str) and options.family != "mean_field"
    num_steps = round(options.mean_field_start * config.num_steps) if contains else 0
    if hold_noise:
        guide_fit.hold_noise(HELD_SHARE)
    if not num_steps:
        return guide_fit, guide_fit.train(callbacks, run.progress, title)
    mean_field_config = replace(
        config,
        guide=replace(options, family="mean_field"),
        num_steps=num_steps,
    )
    mean_field = GuideFit(mean_field_config, problem, start, run.seed, owner, run.stages)
    if hold_noise:
        mean_field.hold_noise(1.0)
    try:
        return _two_stages(mean_field, guide_fit, run, title)
    finally:
        for callback in callbacks:
            end_of(callback)()


def _two_stages(
    mean_field: GuideFit,
    guide_fit: GuideFit,
    run: FitRun,
    title: str,
) -> tuple[GuideFit, Result]:
    """A fit of mean-field, then the fit of the guide that begins where it ended, unless it was stopped."""
    callbacks = [after(0, callback) for callback in run.callbacks]
    result = mean_field.train(callbacks, run.progress, f"{title}, mean-field first")
    result = replace(result, asked=mean_field.config.num_steps + guide_fit.config.num_steps)
    if result.stopped in ("callback", "interrupt"):
        return mean_field, result
    guide_fit.begin_at(mean_field, result)
    callbacks = [after(result.num_steps, callback) for callback in run.callbacks]
    return guide_fit, guide_fit.train(callbacks, run.progress, title)


def fit_guides(
    config: SVI,
    problem: Problem,
    ys: Tensor,
    run: FitRun,
) -> list[Posterior]:
    """Fit a guide to each of several targets (set, N, …) in the place of the problem's, all in one search."""
    points = starts_of(config, problem, ys, run)
    guide_fit = GuideFit(config, problem, Start(points[0], "mode"), run.seed)

    def objective(
        thetas: Tensor,
        weight: Tensor,
        key: Tensor,
        x: Tensor,
        ys: Tensor,
    ) -> tuple[Tensor, Tensor]:
        elbos = torch.func.vmap(
            guide_fit.elbo,
            (0, None, 0, None, 0),
            (0, 1),
            randomness="different",
        )
        return elbos(thetas, weight, Noise(key).split(len(ys)), x, ys)

    guide_fit.level = None  # along the plain course
    x = guide_fit.elbo.density.args[0]
    thetas = minimize(
        objective,
        torch.stack([guide_fit.start_at(point) for point in points]),
        same((x, ys)),
        config.training,
        leading=guide_fit.keyed(),
        tracked=TRACKED,
        name="SVI",
    ).params
    return [guide_fit.cheap_posterior(theta, run.num_draws) for theta in thetas]


class FittedGuide(NamedTuple):
    """A fitted guide: the density with its point parameters held, those parameters, and the approximation."""

    held_density: Density
    points: dict[str, Tensor]
    approximation: Approximation

    def sample(self, num_draws: int) -> dict[str, Tensor]:
        """Draws by site, (1, num_draws, \\*shape): one chain."""
        return {name: value[None] for name, value in self.approximation.sample(num_draws).items()}


class Evidence(NamedTuple):
    """The ELBO of a fitted guide, None where it was not computed, its standard error, and findings about it."""

    elbo: float | None
    error: float
    findings: list[Finding]


class GuideFit:
    """One fit of a guide, in the next of the ``stages`` of a fit.

    ``owner`` is the user's configuration that ``config`` is a part of, if it is one.
    """

    def __init__(
        self,
        config: SVI,
        problem: Problem,
        start: Start,
        seed: int,
        owner: SVI | None = None,
        stages: Stages | None = None,
    ):
        self.config = config
        self.stages = stages or Stages()
        self.problem = problem
        # what the guide draws are weights, the same on all ranks; dropout is noise of the rows
        is_random = problem.density.stochastic is not None
        self.share = problem.of_share(seed, own_noise=is_random)
        self.seed = seed
        self.owner = owner or config
        self.began = start
        objective = build_elbo(config, self.share, start.point, seed)
        self.elbo, self.start, self.rows, self.of_rows = objective
        self.free_noise = FreeNoise.of(self.share)
        # at which the noise is held in the first ``num_held`` steps
        self.level: Tensor | None = None
        self.num_held = 0
        if self.free_noise is not None:
            self.elbo.density = self.free_noise.density
            self.level = torch.zeros_like(self.free_noise.spread)
        # of the training, and so of what follows it
        self.progress = False
        # the mean-field fit that this one began at, and where that ended
        self.mean_field: tuple[GuideFit, Result] | None = None
        if problem.stream:
            self.num_batches = problem.stream.num_batches
        elif self.rows is not None:
            self.num_batches = self.rows.num_batches
        else:
            self.num_batches = max(1, problem.num_rows // (config.batch_size or problem.num_rows))
        weight = config.kl_weight
        schedule = weight if isinstance(weight, KLSchedule) else Constant(weight)
        num_weights = sum(site.size for site in self.elbo.latent)
        kl_weights = schedule.factors(config.num_steps, self.num_batches, num_weights)
        self.kl_weights = kl_weights.to(problem.device)

    def start_at(self, point: Tensor) -> Tensor:
        """The start of the search with the means and the point parameters of another ``point`` (dim,)."""
        num_latent = sum(site.size for site in self.elbo.latent)
        scales = self.start[num_latent : self.elbo.family.size]
        return torch.cat([point[:num_latent], scales, point[num_latent:]])

    def begin_at(self, mean_field: GuideFit, result: Result) -> None:
        """Start at the means, scales and point parameters of a fit of mean-field."""
        num_mean_field = mean_field.elbo.family.size
        num_guide = self.elbo.family.size
        self.start = torch.cat(
            [
                result.params[:num_mean_field],
                self.start[num_mean_field:num_guide],
                result.params[num_mean_field:],
            ]
        )
        self.mean_field = mean_field, result

    def hold_noise(self, share: float) -> None:
        """Hold the noise small for the first ``share`` of the steps."""
        if self.free_noise is not None:
            self.level = LEVELS[0] * self.free_noise.spread
            self.num_held = round(share * self.config.num_steps)

    def train(
        self,
        callbacks: Sequence[Callback],
        progress: bool,
        name: str = "SVI",
    ) -> Result:
        """Fit the parameters: the guide's, then free points."""
        self.progress = progress
        batches = self.batches()
        return minimize(
            self._objective,
            self.start,
            batches,
            self.config.training,
            leading=self.keyed(),
            stage=self.stages.begin(batches),
            tracked=TRACKED,
            callbacks=callbacks,
            snapshot=self._snapshot,
            progress=progress,
            name=name,
            explain=self._explain,
            of_rows=self.of_rows,
        )

    def _explain(self, theta: Tensor) -> str:
        """Which parameter is impossible at draws of the guide; empty where none is, as of any net."""
        if self.problem.is_bnn or not bool(theta.isfinite().all()):
            return ""
        guide = self._guide_at(theta)
        with seeded(self.seed, self.problem.device):
            draws = guide.approximation.sample(100)
            return why_impossible(guide.held_density, guide.held_density.unconstrain(draws))

    def _objective(
        self,
        theta: Tensor,
        weight: Tensor,
        key: Tensor,
        *batch: Tensor,
    ) -> tuple[Tensor, Tensor]:
        if self.free_noise is None:
            return self._loss_of_batch(theta, weight, key, *batch)
        level, *data = batch
        with self.free_noise.at(level):
            return self._loss_of_batch(theta, weight, key, *data)

    def _loss_of_batch(
        self,
        theta: Tensor,
        weight: Tensor,
        key: Tensor,
        *batch: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Loss and tracked scalars on a batch: the data themselves, or row numbers and all data.

        Of a program whose latent sites belong to rows, the numbers of these.
        """
        if self.rows is not None:
            return self.elbo.at_rows(self.rows.at(batch))(theta, weight, key)
        if len(batch) == 3:  # gathered inside the graph
            rows, x, y = batch
            batch = x[rows], y[rows]
        return self.elbo(theta, weight, key, *batch)

    def batches(self) -> Batches[tuple[Tensor, ...]]:
        """The data of every step: row numbers and all data where batches are drawn."""
        problem = self.share
        if problem.loader is not None:
            return problem.batches()
        if self.rows is not None:
            return self.rows.batches(problem.device)
        if not problem.is_bnn:
            return same(())
        if self.num_batches == 1:
            return same(self.elbo.density.args)
        size = self.config.batch_size or problem.num_rows
        rows = PermutedRows(problem.num_rows, size, problem.device)
        return rows.mapped(lambda of_batch: (of_batch, problem.x, problem.y))

    def keyed(self) -> Callable[[int], tuple[Tensor, ...]]:
        """KL weight and key of the random numbers of every step, and the scale at which the noise is held."""
        weights = self.kl_weights.unbind()
        keys = torch.randint(
            -(2**63),
            2**63 - 1,
            self.kl_weights.shape,
            device=self.problem.device,
        ).unbind()
        if self.level is None:
            return lambda step: (weights[step], keys[step])
        level = held_first(self.level, self.num_held)
        return lambda step: (weights[step], keys[step], *level(step))

    def elbo_at(self, theta: Tensor) -> tuple[float, float]:
        """The ELBO of weight one at parameters ``theta``, and its standard error, in nats."""
        guide = self._guide_at(theta)
        with full_float32(self.problem.device):
            return self._evaluated(guide, theta)

    def _evaluated(self, guide: FittedGuide, theta: Tensor) -> tuple[float, float]:
        """The ELBO of weight one of a guide at ``theta``, and its standard error, in nats."""
        return evaluate_elbo(
            self.problem,
            guide.held_density,
            guide.approximation,
            self.elbo,
            theta,
            self._work,
        )

    @property
    def _work(self) -> Work:
        """What a whole training sends through the net."""
        batch_size = max(1, self.problem.num_rows // self.num_batches)
        num_draws = len(self.kl_weights) * self.config.num_particles
        return Work(num_draws * batch_size, batch_size, self.progress)

    def _snapshot(self, theta: Tensor) -> Posterior:
        with seeded(self.seed, self.problem.device):
            return self.cheap_posterior(theta, 100)

    def cheap_posterior(self, theta: Tensor, num_draws: int) -> Posterior:
        """The posterior of guide and point parameters ``theta``, without ELBO, history and importance weights."""
        guide = self._guide_at(theta)
        return make_posterior(
            self.problem,
            self.owner,
            guide.sample(num_draws),
            seed=self.seed,
            approximation=guide.approximation,
            point_values=guide.points,
            timings={},
            meta={"temperature": self._temperature(None)},
            importance=False,
        )

    def posterior(
        self,
        theta: Tensor,
        num_draws: int,
        result: Result,
    ) -> Posterior:
        """The posterior of guide and point parameters ``theta``, where the search ``result`` ended."""
        problem = self.problem
        guide = self._guide_at(theta)
        draws = guide.sample(num_draws)
        # both of this stage alone, before `result` becomes both stages
        temperature = self._temperature(result.num_steps)
        mean_field_steps = self._mean_field_steps(result)
        started = time.perf_counter()
        if self.mean_field is not None:
            result = _joined(self.mean_field[1], result)
        evidence = Evidence(None, math.nan, [])
        try:
            # a forward KL makes no bound
            if not result.interrupted and self.config.kl_direction == "reverse":
                with full_float32(problem.device):
                    track = result.tracked["elbo"] if temperature == 1.0 else None
                    evidence = self._evidence(guide, theta, track)
                    better = self._better_start(evidence) if temperature == 1.0 else None
                    if better is not None:
                        guide, evidence = better
                        draws = guide.sample(num_draws)
        except KeyboardInterrupt:
            result = replace(result, stopped="interrupt")
        timings = result.timings | {"evaluate": time.perf_counter() - started}
        if self.began.kind == "mode":
            timings["mode"] = self.began.seconds
        return make_posterior(
            problem,
            self.owner,
            draws,
            seed=self.seed,
            approximation=guide.approximation,
            point_values=guide.points,
            log_evidence=evidence.elbo,
            timings=timings,
            history=_history(result),
            meta=self._meta(result, evidence, temperature, mean_field_steps),
            interrupted=result.interrupted,
            notes=[*result.notes(self.config), *evidence.findings],
            importance=partial(
                importance_stats, problem, guide.held_density, guide.approximation, draws
            ),
            rows_seen=self._work.num_rows,
        )

    def _evidence(
        self,
        guide: FittedGuide,
        theta: Tensor,
        track: Tensor | None,
    ) -> Evidence:
        """The ELBO at the end of the search; ``track`` is its noisy value at every step, None of a tempered fit."""
        elbo, error = self._evaluated(guide, theta)
        return Evidence(elbo, error, elbo_findings(elbo, error, track))

    def _better_start(self, evidence: Evidence) -> tuple[FittedGuide, Evidence] | None:
        """The fit of mean-field where this one began, if its ELBO is surely higher."""
        if self.mean_field is None or evidence.elbo is None:
            return None
        mean_field, result = self.mean_field
        guide = mean_field._guide_at(result.params)
        elbo, error = mean_field._evaluated(guide, result.params)
        if not elbo - evidence.elbo > 3 * math.hypot(evidence.error, error):
            return None
        values = {
            "elbo": evidence.elbo,
            "error": evidence.error,
            "best": elbo,
        }
        return guide, Evidence(elbo, error, [Finding("elbo_below_best", values)])

    def _mean_field_steps(self, result: Result) -> int:
        """Steps of a fit of mean-field that was, or was to be, followed by one of the user's guide."""
        if self.mean_field is not None:
            return self.mean_field[1].num_steps
        is_first = self.owner.options.family != self.config.options.family
        return result.num_steps if is_first else 0

    def _meta(
        self,
        result: Result,
        evidence: Evidence,
        temperature: float,
        mean_field_steps: int,
    ) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "num_steps": result.num_steps,
            "stopped": result.stopped,
            "estimator": self.elbo.estimator or "weights",
            "start": self.began.kind,
            "kl_direction": self.config.kl_direction,
            "grad_norm": float(result.grad_norm),
            "temperature": temperature,
            "mean_field_steps": mean_field_steps,
            **result.path,
        }
        if self.config.kl_direction == "reverse":
            meta["log_evidence_kind"] = "elbo"
        if temperature == 1.0:
            losses = -result.tracked["elbo"]
            meta |= result.unfinished(losses, 1.0, self.problem.density.dim)
        meta["elbo_error"] = None
        if evidence.elbo is not None:
            # of the estimate, and of a search that has not ended
            meta["elbo_error"] = math.hypot(evidence.error, meta.get("fall_left", 0.0))
        return meta

    def _guide_at(self, theta: Tensor) -> FittedGuide:
        """The guide and the point parameters that ``theta`` holds."""
        density = self.problem.density
        size = self.elbo.family.size
        free = theta[size:]
        values = density.constrain(torch.cat([free.new_zeros(density.dim - len(free)), free]))
        points = dict(density.initial_points)
        for site in density.sites:
            if site.kind == "point":
                points[site.name] = values[site.name]
        held_density = density.holding(points)
        approximation = self.elbo.family.approximation(theta[:size], held_density)
        return FittedGuide(held_density, points, approximation)

    def _temperature(self, num_steps: int | None) -> float:
        """The temperature of the posterior that the first ``num_steps`` weights of the KL lead to."""
        return round(float(self.kl_weights[:num_steps][-self.num_batches :].mean()), 12)


def _joined(mean_field: Result, result: Result) -> Result:
    """The two stages as one run."""
    return replace(
        result,
        losses=torch.cat([mean_field.losses, result.losses]),
        num_steps=mean_field.num_steps + result.num_steps,
        timings={name: value + mean_field.timings[name] for name, value in result.timings.items()},
        asked=mean_field.asked,
        tracked={
            name: torch.cat([mean_field.tracked[name], value])
            for name, value in result.tracked.items()
        },
        factors=torch.cat([mean_field.factors[: mean_field.num_steps], result.factors]),
    )


def _history(result: Result) -> dict[str, Tensor]:
    """Loss and its parts, averaged over blocks of steps so that at most a thousand points remain."""
    width = max(1, result.num_steps // 1000)
    used = result.num_steps - result.num_steps % width
    series = {"loss": result.losses, **result.tracked}
    return {name: value[:used].reshape(-1, width).mean(1) for name, value in series.items()}
