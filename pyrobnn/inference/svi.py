"""Stochastic variational inference: a guide fitted by gradient ascent on the evidence lower bound."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from pyrobnn.checks import check_choice, check_count, check_number
from pyrobnn.density import Density
from pyrobnn.inference.fitting.batches import check_batch_size, permuted_rows
from pyrobnn.inference.fitting.float32 import full_float32
from pyrobnn.inference.fitting.noise_check import noise_notes
from pyrobnn.inference.fitting.problem import Callback, Problem, make_posterior, prepare
from pyrobnn.inference.fitting.program import check_batched, check_proper, refuse_dependent
from pyrobnn.inference.fitting.sizes import Need, Sizes
from pyrobnn.inference.method import Claim, Kind, Method, check_call, register
from pyrobnn.inference.optim.learning_rate import Schedule
from pyrobnn.inference.optim.minimize import OptimizerFactory, Result, check_optimizer, minimize
from pyrobnn.inference.optim.point import start_values
from pyrobnn.inference.vi.elbo import TRACKED, Elbo
from pyrobnn.inference.vi.elbo_notes import elbo_notes
from pyrobnn.inference.vi.evidence import draws_per_block, evaluate_elbo, importance_stats
from pyrobnn.inference.vi.families import Family, FullRank, LowRank, MeanField
from pyrobnn.inference.vi.flow import CouplingFlow
from pyrobnn.inference.vi.local_noise import Estimator
from pyrobnn.inference.vi.pyro_guides import GuideFamily
from pyrobnn.kl_schedules import Constant, KLSchedule, effective_temperature
from pyrobnn.model import BNN
from pyrobnn.posterior import Posterior
from pyrobnn.seeding import seeded

GUIDES = ("mean_field", "low_rank", "full_rank", "flow")
_HISTORY_POINTS, _SNAPSHOT_DRAWS = 1000, 100


@register("svi", standard=True, quick={"num_steps": 2000, "num_draws": 500})
@dataclass(frozen=True)
class SVI(Method):
    r"""Variational inference: the member q of a guide family that maximises the ELBO.

    .. math:: \mathrm{ELBO}(q) = E_{q}[\log p(y \mid \theta)] - w \, KL(q(\theta) \,\|\, p(\theta))

    The whole update (draw, ELBO, gradient, Adam) is one compiled graph. Point parameters (hidden weights, learned
    noise) are optimised alongside. Mini-batches are scaled to the whole data set.

    Args:
        guide: ``"mean_field"``, ``"low_rank"``, ``"full_rank"`` (normals in unconstrained space), ``"flow"`` (affine
            couplings), or any Pyro AutoGuide class or function of the program that returns one.
        num_steps: gradient steps (at most, with ``patience``).
        lr: peak learning rate of Adam.
        optimizer: ``"adam"`` or a factory ``[tensor] -> torch.optim.Optimizer``.
        lr_schedule: None (constant), ``"cosine"``, ``"hold_cosine"`` (constant for half of the steps, then a cosine),
            ``"one_cycle"``, a function step → factor, or a torch ``LRScheduler`` class; ``"auto"`` is constant for
            mean-field, whose iterates are averaged, and ``"hold_cosine"`` for the others.
        clip_norm: bound on the gradient norm.
        batch_size: mini-batch size; None takes all data in every step.
        num_particles: draws per step.
        local_reparameterization: draw the outputs of linear and convolution layers instead of their weights
            (mean-field only; lower gradient variance).
        flipout: random signs per datum (mean-field only); excludes ``local_reparameterization``.
        kl: ``"closed_form"`` wherever there is one, ``"monte_carlo"`` throughout (with the path gradient of Roeder et
            al., 2017), or ``"auto"``: closed form for independent weights, Monte Carlo for correlated guides, where its
            gradient noise vanishes as q approaches the posterior.
        kl_weight: a number or a schedule of :mod:`pyrobnn.kl_schedules`. It scales the KL only; a final weight other
            than one is a tempered posterior and is recorded as ``meta["temperature"]``.
        init_loc: start at the ``"net"``'s own weights, or at a draw from the ``"prior"``; ``fit(init=)`` overrides it.
        init_scale: initial standard deviations in unconstrained space.
        max_scale: cap on the standard deviations (mean-field only).
        rank: columns of the low-rank factor.
        average: share of the last steps whose iterates are averaged into the result, which removes gradient noise;
            None takes half where the learning rate is constant and none where it decays.
        patience, min_delta: stop when the loss of the last ``patience`` steps is not lower by ``min_delta`` than that
            of as many steps before.
        log_every: steps between callbacks.
        compile: trace and compile the step.

    Raises:
        TypeError, ValueError: naming the option.

    Caveat: KL(q‖p) makes q sit inside one mode and, for mean-field, underestimates every variance where weights
    correlate: between clusters of data the uncertainty is too small. k-hat of ``log_q`` says how bad it is.
    ``"low_rank"`` needs many steps: after 1500 on a 2-50-1 ReLU net its ELBO is below mean-field's (-357 against -330
    nats), where ``"full_rank"`` and ``"flow"`` are above. Compare ``log_evidence``.

    Reference: `Weight Uncertainty in Neural Networks (Blundell et al., 2015) <https://arxiv.org/abs/1505.05424>`_;
    `Automatic Differentiation Variational Inference (Kucukelbir et al., 2017) <https://arxiv.org/abs/1603.00788>`_.

    Example:
        >>> import pyro.distributions as dist, pyrobnn as pb
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> model = pb.BNN(nn.Linear(1, 1), pb.priors.IIDPrior(dist.Normal(0.0, 1.0)),
        ...                pb.likelihoods.HomoskedasticGaussian(0.1))
        >>> posterior = SVI(num_steps=2000, compile=False).fit(model, x, 2 * x, num_draws=100)
        >>> posterior.draws["net.weight"].shape, round(posterior.predict(x[-1:]).mean.item())
        (torch.Size([1, 100, 1, 1]), 2)
    """

    guide: str | Callable[..., Any] = "mean_field"
    num_steps: int = 10_000
    lr: float = 0.01
    optimizer: str | OptimizerFactory = "adam"
    lr_schedule: Schedule = "auto"
    clip_norm: float | None = None
    batch_size: int | None = None
    num_particles: int = 1
    local_reparameterization: bool = False
    flipout: bool = False
    kl: Literal["auto", "closed_form", "monte_carlo"] = "auto"
    kl_weight: float | KLSchedule = 1.0
    init_loc: str = "net"
    init_scale: float = 0.05
    max_scale: float | None = None
    rank: int = 10
    average: float | None = None
    patience: int | None = None
    min_delta: float = 0.0
    log_every: int = 100
    compile: bool = True

    kind: ClassVar[Kind] = "independent"
    claim: ClassVar[Claim] = "approximate"
    has_density: ClassVar[bool] = True
    remedy: ClassVar[str] = (
        "The approximation misses the posterior: use a richer guide (low_rank, full_rank), or run NUTS and compare."
    )

    def __post_init__(self) -> None:
        check_optimizer(
            num_steps=self.num_steps, lr=self.lr, optimizer=self.optimizer, lr_schedule=self.schedule,
            clip_norm=self.clip_norm, patience=self.patience, min_delta=self.min_delta, log_every=self.log_every,
        )  # fmt: skip
        if not callable(self.guide):
            check_choice("guide", self.guide, GUIDES)
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size)
        check_count("num_particles", self.num_particles)
        check_count("rank", self.rank)
        if self.average is not None:
            check_number("average", self.average, minimum=0, maximum=1)
        check_choice("kl", self.kl, ("auto", "closed_form", "monte_carlo"))
        check_choice("init_loc", self.init_loc, ("net", "prior"))
        check_number("init_scale", self.init_scale, above=0)
        if not isinstance(self.kl_weight, KLSchedule):
            check_number("kl_weight", self.kl_weight, minimum=0)
        if self.max_scale is not None:
            check_number("max_scale", self.max_scale, above=self.init_scale)
        if self.local_reparameterization and self.flipout:
            raise ValueError(
                "'local_reparameterization' and 'flipout' are two estimators of one gradient: choose one"
            )
        mean_field_only = {
            "local_reparameterization": self.local_reparameterization,
            "flipout": self.flipout,
            "max_scale": self.max_scale is not None,
        }
        for name, chosen in mean_field_only.items():
            if chosen and self.guide != "mean_field":
                raise ValueError(
                    f"{name!r} needs independent normal weights: use guide='mean_field', got {self.guide!r}"
                )

    @property
    def schedule(self) -> Schedule:
        """``lr_schedule``, or the guide's default."""
        if self.lr_schedule != "auto":
            return self.lr_schedule
        # correlated guides follow a gradient whose noise vanishes; the noise of mean-field has to be averaged
        return None if self.guide == "mean_field" else "hold_cosine"

    @property
    def averaged(self) -> float:
        """``average``, or the schedule's default."""
        if self.average is not None:
            return self.average
        return 0.5 if self.schedule is None else 0.0

    def fit(
        self,
        model: BNN | Callable[..., Any],
        x: Any = None,
        y: Any = None,
        *,
        num_draws: int | None = None,
        seed: int = 0,
        init: Posterior | nn.Module | None = None,
        device: str | torch.device | None = None,
        until_ess: float | None = None,
        checkpoint: str | Path | None = None,
        stream_to: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        progress: bool = False,
    ) -> Posterior:
        """Fit the guide and draw from it.

        Args:
            model: a BNN, or a plain Pyro program ``fn(x, y)``.
            x, y: data; or a DataLoader of (x, y), which is streamed.
            num_draws: independent draws of the posterior (one "chain"); default 1000.
            seed: of initialisation, noise, batches and draws.
            init: an earlier posterior or a trained net to start the guide's location at.
            device: where to compute.
            until_ess, checkpoint, stream_to: of :meth:`pyrobnn.NUTS.fit`; refused here.
            callbacks: ``callback(step, metrics) -> bool``; metrics hold loss, elbo, kl, log_likelihood, kl_weight, lr,
                grad_norm and ``snapshot``, a function that returns the present Posterior.
            progress: show a progress bar.

        Returns:
            Posterior with ``log_evidence`` the ELBO (weight one, whole data, standard error in ``meta["elbo_error"]``),
            ``log_q``, ``guide`` and ``history``.

        Raises:
            TypeError, ValueError: bad data, naming the argument.
            FloatingPointError: the loss diverged, naming the step.
        """
        num_draws = check_call(
            self, num_draws, seed, init=init, until_ess=until_ess, checkpoint=checkpoint, stream_to=stream_to
        )
        problem = prepare(model, x, y, points="free", device=device, stream=True, num_draws=num_draws)
        check_batch_size(problem, self.batch_size)
        check_proper(problem.density)
        if not problem.is_bnn:
            check_batched(problem.density, "SVI")
            refuse_dependent(problem.density, "SVI")
        fitted = _Fit(self, problem, init, seed)
        with seeded(seed, problem.device):
            result = fitted.train(callbacks, progress)
            return fitted.posterior(result.params, num_draws, result)

    def memory(self, model: BNN, sizes: Sizes) -> Need:
        """Bytes that ``fit`` will take: the guide's parameters in the optimiser, a step, the ELBO at the end."""
        factors = {"mean_field": 2, "low_rank": 2 + self.rank, "full_rank": 1 + sizes.weights}
        factor = factors.get(self.guide, 4) if isinstance(self.guide, str) else 4
        guide = factor * sizes.flat
        resident = {"optimiser (5 copies)": 5 * guide, "draws": 2 * sizes.num_draws * sizes.flat}
        # run eagerly, every operation of the update and of the KL has a result of its own
        copies = 7 * guide + 4 * sizes.flat if sizes.compiled else 6 * guide + 12 * sizes.flat
        step = copies + self.num_particles * 2 * sizes.batch * sizes.datum
        block = draws_per_block(sizes.weights)  # sites and flat vectors
        evaluation = 2 * block * sizes.flat + sizes.one_pass(block)
        return Need(resident, {"a step": step, "the final ELBO": evaluation})


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


class _Fit:
    """One run: the objective, its batches, and the posterior of any parameters on the way."""

    def __init__(self, config: SVI, problem: Problem, init: Posterior | nn.Module | None, seed: int):
        self.config, self.problem, self.seed = config, problem, seed
        self.elbo, self.start = build_elbo(config, problem, init, seed)
        self.num_batches = _num_batches(problem, config.batch_size)
        schedule = (
            config.kl_weight if isinstance(config.kl_weight, KLSchedule) else Constant(config.kl_weight)
        )
        num_weights = sum(site.size for site in self.elbo.latent)
        self.kl_weights = schedule.factors(config.num_steps, self.num_batches, num_weights).to(problem.device)

    def train(self, callbacks: Sequence[Callback], progress: bool) -> Result:
        config = self.config
        return minimize(
            self._objective,
            self.start,
            self._batches(),
            num_steps=config.num_steps,
            lr=config.lr,
            optimizer=config.optimizer,
            lr_schedule=config.schedule,
            clip_norm=config.clip_norm,
            average=config.averaged,
            tracked=TRACKED,
            patience=config.patience,
            min_delta=config.min_delta,
            log_every=config.log_every,
            callbacks=callbacks,
            snapshot=self._snapshot,
            progress=progress,
            name="SVI",
            compile=config.compile,
        )

    def _objective(self, theta: Tensor, kl_weight: Tensor, *batch: Tensor) -> tuple[Tensor, Tensor]:
        if len(batch) == 3:  # gathered inside the graph
            rows, x, y = batch
            batch = x[rows], y[rows]
        return self.elbo(theta, kl_weight, *batch)

    def _batches(self) -> Iterator[tuple[Tensor, ...]]:
        problem, size = self.problem, self.config.batch_size
        weights = iter(self.kl_weights.unbind())
        if problem.loader is not None:
            yield from ((weight, *batch) for weight, batch in zip(weights, problem.batches(), strict=False))
        elif not problem.is_bnn:
            yield from ((weight,) for weight in weights)
        elif self.num_batches == 1:
            yield from ((weight, problem.x, problem.y) for weight in weights)
        elif size is not None:
            walk = permuted_rows(problem.num_rows, size, problem.device)
            for rows, weight in zip(walk, weights, strict=False):
                yield weight, rows, problem.x, problem.y

    def _snapshot(self, theta: Tensor) -> Posterior:
        with seeded(self.seed, self.problem.device):
            return self.posterior(theta, _SNAPSHOT_DRAWS, None)

    def posterior(self, theta: Tensor, num_draws: int, result: Result | None) -> Posterior:
        """The posterior of guide and point parameters ``theta``; without ``result`` its cheap form."""
        problem, family = self.problem, self.elbo.family
        phi, points = theta[: family.size], theta[family.size :]
        free = [site for site in problem.density.sites if site.kind == "point"]
        offset = problem.density.dim - len(points)
        values = {
            site.name: site.transform(
                points[site.start - offset : site.stop - offset].reshape(site.unconstrained_shape)
            )
            for site in free
        }
        layout = Density(problem.density.program, problem.density.args, points="held", values=values)
        approximation = family.approximation(phi, layout)
        draws = {name: value[None] for name, value in approximation.sample(num_draws).items()}
        meta: dict[str, Any] = {"temperature": effective_temperature(self.kl_weights, self.num_batches)}
        if result is None:
            return make_posterior(
                problem, self.config, draws, seed=self.seed, timings={}, approximation=approximation,
                point_values=values, meta=meta, importance=False,
            )  # fmt: skip
        begun = time.perf_counter()
        stats: dict[str, Tensor] = {}
        value, error, notes = None, math.nan, result.notes(self.config)
        try:
            if not result.interrupted:
                with full_float32(problem.device):
                    stats = importance_stats(problem, layout, approximation, draws)
                    value, error = evaluate_elbo(problem, layout, approximation, self.elbo, theta)
        except KeyboardInterrupt:
            result = replace(result, stopped="interrupt")
            notes = result.notes(self.config)
        if value is None:
            missing = "" if stats else " and no log p of its draws (k-hat, LOO)"
            notes.append(f"its ELBO was not evaluated: there is no log evidence{missing}")
        notes += noise_notes(problem, values | {name: value[0].mean(0) for name, value in draws.items()})
        meta |= {
            "num_steps": result.num_steps, "stopped": result.stopped, "elbo_error": None if value is None else error,
            "log_evidence_kind": "elbo", "grad_norm": float(result.grad_norm),
        }  # fmt: skip
        done = self.kl_weights[: result.num_steps]
        meta["temperature"] = effective_temperature(done, self.num_batches)
        # the ELBO is what a tempered fit gives up: its end is not its best
        track = result.tracked["elbo"] if meta["temperature"] == 1.0 else result.tracked["elbo"][:0]
        if value is not None:
            notes += elbo_notes(track, value, error, draws)
        timings = result.timings | {"evaluate": time.perf_counter() - begun}
        return make_posterior(
            problem, self.config, draws, seed=self.seed, timings=timings, approximation=approximation,
            point_values=values, sample_stats=stats, log_evidence=value, history=_history(result), meta=meta,
            importance=False, notes=notes, interrupted=result.interrupted,
        )  # fmt: skip


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
