"""SGD whose iterates are averaged: the run that SWA and SWAG share."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from pyrobnn.checks import Refused, check_choice, check_count, check_number
from pyrobnn.density import Density
from pyrobnn.inference.fitting.batches import Inputs, check_batch_size, independent_batches
from pyrobnn.inference.fitting.initial import start_values
from pyrobnn.inference.fitting.problem import Callback, Problem, make_posterior, prepare
from pyrobnn.inference.fitting.ranks import ranks
from pyrobnn.inference.fitting.sizes import Need, Sizes
from pyrobnn.inference.fitting.snapshot import snapshot
from pyrobnn.inference.fitting.watch import Retold
from pyrobnn.inference.nets.batch_norm import refreshed_statistics, training_norms, with_batch_statistics
from pyrobnn.inference.nets.swag_moments import SWAGMoments
from pyrobnn.inference.optim.minimize import Result, minimize
from pyrobnn.inference.optim.sgd_rate import NUM_GRADIENTS, TOLERATED_RISE, constant_rate
from pyrobnn.inference.optim.training import Training
from pyrobnn.inference.optim.unfinished import falling
from pyrobnn.model import BNN
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.approximation import FlatApproximation
from pyrobnn.seeding import seeded

if TYPE_CHECKING:
    from pyrobnn.inference.method import FitRun
    from pyrobnn.inference.swag import SWA, SWAG

    Averaging: TypeAlias = SWA | SWAG


#: draws of the Gaussian while it forms
_SNAPSHOT_DRAWS = 50


def prepare_averaging(
    method: Averaging, run: FitRun, device: str | torch.device | None
) -> tuple[Problem, FitRun]:
    """The problem of a net whose batch-norm layers may use the statistics of a batch.

    Raises:
        TypeError, Refused: no BNN; random layers in training mode; such layers where ranks share the rows.
    """
    model, x, y = run.given
    if not isinstance(model, BNN):
        raise (Refused if callable(model) else TypeError)(
            f"{type(method).__name__} trains a network, so 'model' must be a pyrobnn.BNN, got {model!r}: "
            "use SVI, NUTS or Laplace(curvature='hessian')"
        )
    norms = training_norms(model)
    if norms and ranks() is not None:
        raise Refused(
            f"the layers {', '.join(norms)} use the statistics of a batch, and ranks see a part of it each: fit in "
            "one process, or call .eval() on them"
        )
    if others := set(model.stochastic_layers()) - set(norms):
        raise Refused(
            f"the net is in training mode and its layers {', '.join(sorted(others))} are random: "
            "call .eval() on them before building the BNN"
        )
    pure, num_draws = with_batch_statistics(model), run.num_draws
    problem = prepare(
        pure, x, y, points="free", device=device, stream=True, deterministic=False, num_draws=num_draws
    )
    return dataclasses.replace(problem, model=model.to(problem.device)), run


class AveragingRun:
    """SGD from a mode with its iterates taken on the way: the run of a SWA or SWAG."""

    def __init__(self, method: Averaging, problem: Problem, run: FitRun):
        self.method, self.problem, self.seed, self.init = method, problem, run.seed, run.init
        self.start = start_values(problem.bnn, run.init)
        self.latent_dim = sum(site.size for site in problem.density.sites if site.kind == "latent")
        self.batch_size, self.epoch = self._batching()
        self.every = method.collect_every or self.epoch
        self.first = round(method.burn_in * method.num_steps)
        planned = self.num_planned()
        if planned < 2:
            raise Refused(
                f"num_steps={method.num_steps} with burn_in={method.burn_in:g} and one iterate every {self.every} "
                f"steps takes {planned} iterates, but at least 2 are needed: raise num_steps or lower collect_every"
            )
        if self.epoch == 1 and self.problem.loader is None:
            self.problem.note(
                "there are no mini-batches (batch_size is all the data): SGD without gradient noise converges"
            )

    def _batching(self) -> tuple[int | None, int]:
        """Batch size and steps per epoch."""
        check_batch_size(self.problem, self.method.batch_size)
        if (stream := self.problem.stream) is not None:
            return None, stream.num_batches
        num_data = self.problem.num_rows
        size = self.method.batch_size or max(1, min(32, num_data // 4))
        return size, max(1, num_data // size)

    def num_planned(self) -> int:
        """Iterates that will be taken."""
        return self.method.num_steps // self.every - self.first // self.every

    def warn_about_rank(self, rank: int) -> None:
        """Say so if fewer iterates than ``rank`` will be taken."""
        if self.num_planned() < rank:
            self.problem.note(
                f"only {self.num_planned()} iterates will be taken for rank={rank}: the covariance has that rank; "
                "raise num_steps or lower collect_every"
            )

    def train(
        self, moments: SWAGMoments, callbacks: Sequence[Callback], progress: bool
    ) -> tuple[Result, dict[str, Tensor]]:
        """Run SGD into ``moments``; returns its record and the values of the point parameters."""
        method, density = self.method, self.problem.density

        def loss(theta: Tensor, *batch: Tensor) -> Tensor:
            return -density.log_joint(theta, *batch) / self.problem.num_rows

        batches = independent_batches(self.problem, self.batch_size)
        theta, seconds = self._warm_up(loss, batches, progress)
        points = SWAGMoments(density.dim - self.latent_dim, diagonal=True, device=self.problem.device)

        def collect(step: int, metrics: Mapping[str, Any]) -> None:
            if step > self.first and step % self.every == 0:
                iterate = metrics["snapshot"]()
                moments.update(iterate[: self.latent_dim])
                points.update(iterate[self.latent_dim :])

        def retold(metrics: Mapping[str, Any]) -> dict[str, Any]:
            iterate = metrics["snapshot"]
            present = functools.partial(self._snapshot, iterate, moments, points)
            return {**metrics, "iterate": iterate, "snapshot": present}

        if method.optimizer is not None:
            self.lr = method.optimizer([torch.zeros(1, requires_grad=True)]).param_groups[0]["lr"]
        else:
            self.lr = method.lr or constant_rate(
                loss, theta, batches, num_data=self.problem.num_rows, momentum=method.momentum
            )
        sgd = functools.partial(torch.optim.SGD, lr=self.lr, momentum=method.momentum)
        result = minimize(
            loss,
            theta,
            batches,
            Training(
                method.num_steps,
                lr=self.lr,
                optimizer=method.optimizer or sgd,
                lr_schedule=self._falling if method.lr_schedule == "cyclical" else None,
                log_every=self.every,
                compile=method.compile,
            ),
            callbacks=(collect, *(Retold(callback, retold) for callback in callbacks)),
            snapshot=lambda theta: theta,
            progress=progress,
            name=type(method).__name__,
        )
        result.timings["fit"] += seconds
        self._check_moments(moments, result)
        fixed = torch.cat([moments.mean, points.mean]).to(density.dtype)
        self._warn_if_worse(loss, theta, fixed, batches)
        values = density.constrain(fixed)
        return result, {s.name: values[s.name] for s in density.sites if s.kind == "point"}

    def _snapshot(
        self, iterate: Callable[[], Tensor], moments: SWAGMoments, points: SWAGMoments
    ) -> Posterior:
        """The mean of the iterates so far and draws of the Gaussian through them; before the first the present one."""
        density = self.problem.density
        flat = torch.cat([moments.mean, points.mean]).to(density.dtype) if moments.count else iterate()
        values = density.constrain(flat)
        held = {site.name: values[site.name] for site in density.sites if site.kind == "point"}
        draws = {name: value[None, None] for name, value in values.items() if name not in held}
        approximation = None
        if self.method.kind == "independent" and moments.count > 1:
            approximation = FlatApproximation(self.layout(held), *moments.family())
            with seeded(self.seed, self.problem.device):
                draws = {name: value[None] for name, value in approximation.sample(_SNAPSHOT_DRAWS).items()}
        found = snapshot(
            self.problem, self.method, draws, seed=self.seed, point_values=held, approximation=approximation
        )
        statistics = refreshed_statistics(self.problem.bnn, found.draws, Inputs(self.problem))
        return dataclasses.replace(found, draws=found.draws | statistics)

    def _warm_up(
        self, loss: Callable[..., Tensor], batches: Iterator[tuple[Tensor, Tensor]], progress: bool
    ) -> tuple[Tensor, float]:
        """Where SGD starts, and the seconds that it took to get there: the user's ``init``, or near a mode."""
        method, theta = self.method, self.problem.density.initial(self.start, self.seed)
        if self.init is not None or not method.init_steps:
            return theta, 0.0
        found = minimize(
            loss, theta, batches,
            Training(method.init_steps, lr=method.init_lr, lr_schedule="cosine", compile=method.compile),
            progress=progress, name=f"the start of {type(method).__name__}",
        )  # fmt: skip
        if found.interrupted:
            raise KeyboardInterrupt(f"{found.notes(method)[0]}: it had not begun to take iterates")
        return found.params, sum(found.timings.values())

    def _check_moments(self, moments: SWAGMoments, result: Result) -> None:
        """Stop a run whose iterates make no distribution."""
        if result.interrupted and moments.count < 2:
            raise KeyboardInterrupt(
                f"{result.notes(self.method)[0]}: it had taken {moments.count} iterates of at least 2"
            )
        if not bool(torch.isfinite(moments.mean).all()):
            raise FloatingPointError(
                f"an iterate of {type(self.method).__name__} is not finite by step {result.num_steps} "
                f"(loss {float(result.losses[-1]):.4g}): use a smaller lr than {self.lr:g}"
            )

    def _warn_if_worse(
        self,
        loss: Callable[..., Tensor],
        start: Tensor,
        mean: Tensor,
        batches: Iterator[tuple[Tensor, Tensor]],
    ) -> None:
        """Where SGD wandered out of the basin, its mean is worse than where it started: around a mode it is not."""
        drawn = list(itertools.islice(batches, NUM_GRADIENTS))
        rise = sum(float(loss(mean, *batch) - loss(start, *batch)) for batch in drawn) / len(drawn)
        if not rise <= TOLERATED_RISE:
            self.problem.note(
                f"the mean of the iterates is worse than the start by {rise:.3g} nats per datum: SGD left the mode; "
                f"use a smaller lr than {self.lr:g}"
            )

    def layout(self, points: dict[str, Tensor]) -> Density:
        """The density over the latent sites alone, point parameters held at ``points``."""
        density = self.problem.density
        return Density(density.program, density.args, points="held", values=points)

    def posterior(
        self, draws: dict[str, Tensor], result: Result, points: dict[str, Tensor], meta: Any, **rest: Any
    ) -> Posterior:
        """The posterior of ``draws``, with batch-norm statistics of their own."""
        posterior = make_posterior(
            self.problem,
            self.method,
            draws,
            seed=self.seed,
            timings=result.timings,
            point_values=points,
            history={"loss": result.losses},
            # a streamed loader shows one batch at a time: there is no joint density of all data to evaluate
            importance=self.problem.loader is None,
            meta={**meta, "lr": self.lr, "num_steps": result.num_steps, "stopped": result.stopped}
            | falling(result, result.losses, self.problem.num_rows, self.latent_dim),
            notes=result.notes(self.method),
            interrupted=result.interrupted,
            **rest,
        )
        statistics = refreshed_statistics(self.problem.bnn, posterior.draws, Inputs(self.problem))
        return dataclasses.replace(posterior, draws=posterior.draws | statistics)

    def _falling(self, step: int) -> float:
        """Cyclical factor: linearly from 1 to 0.01 within each period."""
        return 1.0 - 0.99 * (step % self.every) / max(self.every - 1, 1)


def averaging_memory(sizes: Sizes, rank: int) -> Need:
    """Bytes of a fit that keeps ``rank`` deviations."""
    wide = 8 * sizes.weights
    search, phases = sizes.optimisation()
    resident = search | {"moments": (3 + rank) * wide, "draws": 2 * sizes.num_draws * sizes.flat}
    gaussian = (2 * rank + 2 * sizes.num_draws + 4) * wide + sizes.one_pass(sizes.num_draws)
    return Need(resident, phases | {"the Gaussian": gaussian})


def check_averaging(method: Averaging) -> None:
    """The options that SWA and SWAG share.

    Raises:
        TypeError, ValueError: naming the option.
    """
    lr = 1.0 if method.lr is None else method.lr
    Training(
        method.num_steps, lr=lr, optimizer=method.optimizer or "adam", batch_size=method.batch_size
    )  # its checks
    check_number("init_lr", method.init_lr, above=0)
    check_count("init_steps", method.init_steps, minimum=0)
    check_number("momentum", method.momentum, minimum=0, below=1)
    check_number("burn_in", method.burn_in, minimum=0, below=1)
    check_choice("lr_schedule", method.lr_schedule, ("constant", "cyclical"))
    if method.collect_every is not None:
        check_count("collect_every", method.collect_every)
