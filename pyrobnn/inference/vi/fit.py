"""One fit of a guide: its objective, its batches, and the posterior of any parameters on the way."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pyrobnn.density import Density
from pyrobnn.inference.fitting.batches import permuted_rows
from pyrobnn.inference.fitting.float32 import full_float32
from pyrobnn.inference.fitting.noise_check import noise_notes
from pyrobnn.inference.fitting.problem import Callback, Problem, make_posterior
from pyrobnn.inference.optim.learning_rate import Schedule, learning_rate_factors
from pyrobnn.inference.optim.minimize import Result, minimize
from pyrobnn.inference.optim.point import start_values
from pyrobnn.inference.optim.unfinished import falling
from pyrobnn.inference.vi.elbo import TRACKED, Elbo
from pyrobnn.inference.vi.elbo_notes import elbo_notes
from pyrobnn.inference.vi.evidence import evaluate_elbo, importance_stats
from pyrobnn.inference.vi.families import Family, FullRank, LowRank, MeanField
from pyrobnn.inference.vi.flow import CouplingFlow
from pyrobnn.inference.vi.local_noise import Estimator
from pyrobnn.inference.vi.pyro_guides import GuideFamily
from pyrobnn.kl_schedules import Constant, KLSchedule, effective_temperature
from pyrobnn.likelihoods import SCALE
from pyrobnn.posterior import Posterior
from pyrobnn.seeding import seeded

if TYPE_CHECKING:
    from pyrobnn.inference.svi import SVI

_HISTORY_POINTS, _SNAPSHOT_DRAWS = 1000, 100


def build_elbo(
    config: SVI, problem: Problem, init: Posterior | nn.Module | None, seed: int
) -> tuple[Elbo, Tensor]:
    """The objective of a configuration and the parameters it starts from: guide's first, then free points."""
    density = problem.density
    if config.init_loc == "prior" and init is None:
        start = density.sample_prior(1, seed)[0]
    else:
        start = density.initial(start_values(problem.model, init), seed)
    num_latent = sum(site.size for site in density.sites if site.kind == "latent")
    loc, points = start[:num_latent].detach(), start[num_latent:].detach()
    family: Family
    if callable(config.guide):
        family = GuideFamily(config.guide, density, loc, config.init_scale, seed)
    elif config.guide == "full_rank":
        family = FullRank(loc, config.init_scale)
    elif config.guide == "low_rank":
        family = LowRank(loc, config.init_scale, config.rank, seed)
    elif config.guide == "flow":
        family = CouplingFlow(loc, config.init_scale, seed)
    else:
        family = MeanField(loc, config.init_scale, config.max_scale)
    estimator: Estimator | None = "flipout" if config.flipout else None
    estimator = "local_reparameterization" if config.local_reparameterization else estimator
    elbo = Elbo(density, family, kl=config.kl, estimator=estimator, num_particles=config.num_particles)
    return elbo, torch.cat([family.initial(), points])


class GuideFit:
    """One fit of the guide of an :class:`pyrobnn.SVI`."""

    def __init__(self, config: SVI, problem: Problem, init: Posterior | nn.Module | None, seed: int):
        self.config, self.problem, self.seed = config, problem, seed
        self.elbo, self.start = build_elbo(config, problem, init, seed)
        #: first steps, in which a richer family is held at its mean-field member, and steps begun
        self.held = round(config.mean_field_start * config.num_steps) if config.has_mean_field else 0
        self.begun = 0
        self.num_batches = _num_batches(problem, config.batch_size)
        schedule = (
            config.kl_weight if isinstance(config.kl_weight, KLSchedule) else Constant(config.kl_weight)
        )
        num_weights = sum(site.size for site in self.elbo.latent)
        self.kl_weights = schedule.factors(config.num_steps, self.num_batches, num_weights).to(problem.device)

    def train(self, callbacks: Sequence[Callback], progress: bool) -> Result:
        """Fit the parameters: the guide's, then free points."""
        config = self.config
        return minimize(
            self._objective,
            self.start,
            self._batches(),
            num_steps=config.num_steps,
            lr=config.lr,
            optimizer=config.optimizer,
            lr_schedule=self._schedule(),
            clip_norm=config.clip_norm,
            average=config.averaged,
            tracked=TRACKED,
            patience=config.patience,
            min_delta=config.min_delta,
            held=self.held,
            log_every=config.log_every,
            callbacks=callbacks,
            snapshot=self._snapshot,
            progress=progress,
            name="SVI",
            compile=config.compile,
        )

    def _schedule(self) -> Schedule:
        """The configuration's; the default of a guide that is held at first is counted from the step that opens it."""
        if not self.held or self.config.lr_schedule != "auto":
            return self.config.schedule
        factors = learning_rate_factors(self.config.num_steps - self.held, self.config.schedule).tolist()
        return ([1.0] * self.held + factors).__getitem__

    def _objective(self, theta: Tensor, kl_weight: Tensor, *batch: Tensor) -> tuple[Tensor, Tensor]:
        opened: Tensor | None = None
        if self.held:
            opened, batch = batch[0], batch[1:]
        if len(batch) == 3:  # gathered inside the graph
            rows, x, y = batch
            batch = x[rows], y[rows]
        return self.elbo(theta, kl_weight, *batch, opened=opened)

    def _batches(self) -> Iterator[tuple[Tensor, ...]]:
        problem, size = self.problem, self.config.batch_size
        if problem.loader is not None:
            yield from ((*said, *batch) for said, batch in zip(self._said(), problem.batches(), strict=False))
        elif not problem.is_bnn:
            yield from self._said()
        elif self.num_batches == 1:
            yield from ((*said, problem.x, problem.y) for said in self._said())
        elif size is not None:
            walk = permuted_rows(problem.num_rows, size, problem.device)
            for rows, said in zip(walk, self._said(), strict=False):
                yield *said, rows, problem.x, problem.y

    def _said(self) -> Iterator[tuple[Tensor, ...]]:
        """What every step is told beside its data: the KL's weight, and whether a richer family is open."""
        closed, opened = self.start.new_tensor([0.0, 1.0]).unbind()
        for weight in self.kl_weights.unbind():
            self.begun += 1
            yield (weight, closed if self.begun <= self.held else opened) if self.held else (weight,)

    def _snapshot(self, theta: Tensor) -> Posterior:
        with seeded(self.seed, self.problem.device):
            return self.posterior(theta, _SNAPSHOT_DRAWS, None)

    def posterior(self, theta: Tensor, num_draws: int, result: Result | None) -> Posterior:
        """The posterior of guide and point parameters ``theta``; without ``result`` its cheap form."""
        problem, family = self.problem, self.elbo.family
        if (self.begun if result is None else result.num_steps) <= self.held:  # it was not opened yet
            theta = self.elbo.opened(theta, 0.0)
        values = self._point_values(theta[family.size :])
        layout = Density(problem.density.program, problem.density.args, points="held", values=values)
        approximation = family.approximation(theta[: family.size], layout)
        draws = {name: value[None] for name, value in approximation.sample(num_draws).items()}
        if result is None:
            return make_posterior(
                problem, self.config, draws, seed=self.seed, timings={}, approximation=approximation,
                point_values=values, meta={"temperature": self._temperature(None)}, importance=False,
            )  # fmt: skip
        begun = time.perf_counter()
        stats: dict[str, Tensor] = {}
        value, error = None, math.nan
        try:
            if not result.interrupted:
                with full_float32(problem.device):
                    stats = importance_stats(problem, layout, approximation, draws)
                    value, error = evaluate_elbo(problem, layout, approximation, self.elbo, theta)
        except KeyboardInterrupt:
            result = replace(result, stopped="interrupt")
        notes = self._notes(result, values, draws, stats, value, error)
        meta = {
            "num_steps": result.num_steps, "stopped": result.stopped, "elbo_error": None if value is None else error,
            "log_evidence_kind": "elbo", "grad_norm": float(result.grad_norm), "mean_field_steps": self.held,
            "temperature": self._temperature(result.num_steps),
        }  # fmt: skip
        # the ELBO is what a tempered fit gives up
        if meta["temperature"] == 1.0:
            meta |= falling(result, -result.tracked["elbo"], 1.0, problem.density.dim)
        timings = result.timings | {"evaluate": time.perf_counter() - begun}
        return make_posterior(
            problem, self.config, draws, seed=self.seed, timings=timings, approximation=approximation,
            point_values=values, sample_stats=stats, log_evidence=value, history=_history(result), meta=meta,
            importance=False, notes=notes, interrupted=result.interrupted,
        )  # fmt: skip

    def _point_values(self, points: Tensor) -> dict[str, Tensor]:
        """Point parameters by site, from their flat unconstrained vector."""
        density = self.problem.density
        offset = density.dim - len(points)
        return {
            site.name: site.transform(
                points[site.start - offset : site.stop - offset].reshape(site.unconstrained_shape)
            )
            for site in density.sites
            if site.kind == "point"
        }

    def _temperature(self, num_steps: int | None) -> float:
        """Of the posterior that the first ``num_steps`` weights of the KL lead to."""
        return effective_temperature(self.kl_weights[:num_steps], self.num_batches)

    def _notes(
        self, result: Result, values: dict[str, Tensor], draws: dict[str, Tensor], stats: dict[str, Tensor],
        value: float | None, error: float,
    ) -> list[str]:  # fmt: skip
        """What the user has to know: ``value`` ± ``error`` is the ELBO, ``stats`` what is known of the draws."""
        notes = result.notes(self.config)
        if value is None:
            missing = "" if stats else " and no log p of its draws (k-hat, LOO)"
            notes.append(f"its ELBO was not evaluated: there is no log evidence{missing}")
        means = {name: value[0].mean(0) for name, value in draws.items() if name != SCALE}
        notes += noise_notes(self.problem, values | means)
        if value is not None:
            # the ELBO is what a tempered fit gives up: its end is not its best
            tempered = self._temperature(result.num_steps) != 1.0
            notes += elbo_notes(result.tracked["elbo"][: 0 if tempered else None], value, error, draws)
        return notes


def _num_batches(problem: Problem, batch_size: int | None) -> int:
    if (stream := problem.stream) is not None:
        return stream.num_batches
    if not problem.is_bnn or batch_size is None or batch_size >= problem.num_rows:
        return 1
    return problem.num_rows // batch_size


def _history(result: Result) -> dict[str, Tensor]:
    """Loss and its parts, averaged over blocks of steps so that at most a thousand points remain."""
    width = max(1, result.num_steps // _HISTORY_POINTS)
    used = result.num_steps - result.num_steps % width
    series = {"loss": result.losses, **result.tracked}
    return {name: value[:used].reshape(-1, width).mean(1) for name, value in series.items()}
