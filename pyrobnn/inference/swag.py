"""SWA and SWAG: the average of SGD's iterates, and the Gaussian through them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from pyrobnn.checks import Refused, check_choice, check_count, check_number
from pyrobnn.density import Density
from pyrobnn.inference.fitting.batches import Inputs, check_batch_size, independent_batches
from pyrobnn.inference.fitting.noise_check import noise_notes
from pyrobnn.inference.fitting.problem import Callback, make_posterior, prepare
from pyrobnn.inference.fitting.sizes import Need, Sizes
from pyrobnn.inference.method import Claim, Kind, Method, check_call, register
from pyrobnn.inference.nets.batch_norm import refreshed_statistics, training_norms, with_batch_statistics
from pyrobnn.inference.nets.swag_moments import SWAGMoments
from pyrobnn.inference.optim.minimize import OptimizerFactory, Result, check_optimizer, minimize
from pyrobnn.inference.optim.point import start_values
from pyrobnn.inference.optim.sgd_rate import NUM_GRADIENTS, SLACK, constant_rate
from pyrobnn.model import BNN
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.approximation import FlatApproximation
from pyrobnn.seeding import seeded


@register("swa", quick={"num_steps": 1000, "compile": False})
@dataclass(frozen=True)
class SWA(Method):
    r"""Stochastic weight averaging: the mean of the iterates of SGD at a constant or cyclical learning rate.

    .. math:: \bar\theta = \frac1n \sum_i \theta_i

    Args:
        num_steps: SGD steps.
        lr: learning rate on the loss *per datum*, :math:`-\log p(\theta, y) / N`; None for the one whose wandering is
            closest to the posterior (:func:`pyrobnn.inference.optim.sgd_rate.constant_rate`), recorded in
            ``meta["lr"]``.
        lr_schedule: ``"constant"``, or ``"cyclical"``: within each ``collect_every`` steps it falls linearly from
            ``lr`` to a hundredth of it, and the iterate is taken at the end.
        momentum: of SGD.
        optimizer: None for SGD, or a function of the parameter list that returns a torch optimizer (then ``lr`` and
            ``momentum`` are its own).
        batch_size: data per step, drawn independently (a reshuffled epoch cancels the noise of its gradients); None for
            32, or a quarter of small data.
        collect_every: steps between iterates that are taken; None for one epoch.
        burn_in: share of ``num_steps`` before the first is taken, in [0, 1).
        init_steps, init_lr: Adam's, to the mode, where ``fit`` is given no ``init``.
        compile: False runs eagerly, with the same numbers up to rounding.

    Raises:
        TypeError, ValueError: naming the option.

    Caveat: a point has no epistemic uncertainty.

    Reference: `Averaging Weights Leads to Wider Optima and Better Generalization (Izmailov et al., 2018)
    <https://arxiv.org/abs/1803.05407>`_.

    Example:
        >>> SWA(num_steps=1000, lr=0.05).momentum
        0.9
    """

    num_steps: int = 2000
    lr: float | None = None
    lr_schedule: Literal["constant", "cyclical"] = "constant"
    momentum: float = 0.9
    optimizer: OptimizerFactory | None = None
    batch_size: int | None = None
    collect_every: int | None = None
    burn_in: float = 0.25
    init_steps: int = 2000
    init_lr: float = 0.01
    compile: bool = True

    kind: ClassVar[Kind] = "point"
    claim: ClassVar[Claim] = "none"
    default_draws: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _check_training(self)

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
        """Average SGD's iterates; the arguments are those of :meth:`SWAG.fit`, with ``num_draws`` 1."""
        num_draws = check_call(
            self, num_draws, seed, init=init, until_ess=until_ess, checkpoint=checkpoint, stream_to=stream_to
        )
        run = _Run(self, model, x, y, num_draws=num_draws, seed=seed, init=init, device=device)
        with seeded(seed, run.problem.device):
            moments = SWAGMoments(run.latent_dim, diagonal=True, device=run.problem.device)
            result, points = run.train(moments, callbacks, progress)
            draws = run.layout(points).constrain(moments.mean.to(run.problem.density.dtype))
            draws = {name: value[None, None] for name, value in draws.items()}
            return run.posterior(draws, result, points, meta={"num_collected": moments.count})

    def memory(self, model: BNN, sizes: Sizes) -> Need:
        """Bytes that ``fit`` will take, as :meth:`SWAG.memory` without deviations."""
        return _memory(sizes, 0)


@register("swag", full={"num_draws": 1000}, quick={"num_draws": 500})
@dataclass(frozen=True)
class SWAG(Method):
    r"""Stochastic weight averaging, Gaussian: a low-rank plus diagonal normal through the iterates of SGD.

    .. math:: q(\theta) = N\Big(\bar\theta,\ \frac{s^2}{2} \Big( \Sigma_{diag} + \frac{D D^\top}{K - 1} \Big) \Big),
        \qquad D_i = \theta_i - \bar\theta_i

    with :math:`\bar\theta_i` the running mean after its i-th update, in float64. Noise that is learned is trained along
    and held at the mean of its iterates. Batch-norm layers in training mode use the statistics of the batch while
    training, and every draw gets its own, from one pass through the data.

    Args:
        rank: K, the number of last deviations kept.
        diagonal: :math:`s^2 \Sigma_{diag}` alone.
        scale: s, multiplies the standard deviations of the draws.
        The rest as in :class:`SWA`.

    Raises:
        TypeError, ValueError: naming the option.

    Warns:
        UserWarning: fewer iterates than ``rank`` will be taken; there are no mini-batches; the mean of the iterates is
            worse than the start.

    Caveat: the width is that of SGD's wandering at this learning rate, not of the posterior: compare held-out
    densities for a few values of ``lr`` or ``scale``.

    Reference: `A Simple Baseline for Bayesian Uncertainty in Deep Learning (Maddox et al., 2019)
    <https://arxiv.org/abs/1902.02476>`_.

    Example:
        >>> SWAG(rank=10, lr=0.05).rank
        10
    """

    rank: int = 20
    diagonal: bool = False
    scale: float = 1.0
    num_steps: int = 2000
    lr: float | None = None
    lr_schedule: Literal["constant", "cyclical"] = "constant"
    momentum: float = 0.9
    optimizer: OptimizerFactory | None = None
    batch_size: int | None = None
    collect_every: int | None = None
    burn_in: float = 0.25
    init_steps: int = 2000
    init_lr: float = 0.01
    compile: bool = True

    kind: ClassVar[Kind] = "independent"
    claim: ClassVar[Claim] = "none"
    has_density: ClassVar[bool] = True
    default_draws: ClassVar[int] = 100
    remedy: ClassVar[str] = (
        "The Gaussian misses the posterior: take SWAG as a heuristic, or run NUTS and compare."
    )

    def __post_init__(self) -> None:
        _check_training(self)
        SWAGMoments(1, self.rank, diagonal=self.diagonal, scale=self.scale)  # its checks

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
        """Run SGD and draw from the Gaussian through its iterates.

        Args:
            model: a BNN.
            x, y: the data; or ``x`` a DataLoader, whose batches are then used.
            num_draws: independent draws; default 100.
            seed: of batches and draws.
            init: where SGD starts: a MAP or MLE posterior or a trained net; None trains to the mode first.
            device: where to compute; default where ``x`` is.
            until_ess, checkpoint, stream_to: of :meth:`pyrobnn.NUTS.fit`; refused here.
            callbacks: called with every iterate taken; True stops.
            progress: show a bar.

        Returns:
            Posterior (1, num_draws, …) with log_p and log_q; ``meta`` has num_collected and the rank reached.

        Raises:
            Refused: a plain Pyro program.
            ValueError: bad data, random layers in training mode, fewer than two iterates.
            FloatingPointError: the loss diverged; names step and loss.
        """
        num_draws = check_call(
            self, num_draws, seed, init=init, until_ess=until_ess, checkpoint=checkpoint, stream_to=stream_to
        )
        run = _Run(self, model, x, y, num_draws=num_draws, seed=seed, init=init, device=device)
        with seeded(seed, run.problem.device):
            run.warn_about_rank(0 if self.diagonal else self.rank)
            moments = SWAGMoments(
                run.latent_dim,
                self.rank,
                diagonal=self.diagonal,
                scale=self.scale,
                device=run.problem.device,
            )
            result, points = run.train(moments, callbacks, progress)
            approximation = FlatApproximation(run.layout(points), *moments.family())
            draws = {name: value[None] for name, value in approximation.sample(num_draws).items()}
            if floored := moments.num_floored():
                run.problem.note(f"{floored} weights did not move and got the smallest variance")
            meta = {"num_collected": moments.count, "num_floored": floored}
            if not self.diagonal:
                meta["rank"] = moments.deviations.shape[1]
            return run.posterior(draws, result, points, meta=meta, approximation=approximation)

    def memory(self, model: BNN, sizes: Sizes) -> Need:
        """Bytes that ``fit`` will take: the optimiser's, the moments of the iterates, the Gaussian through them."""
        every = self.collect_every or max(1, sizes.num_data // sizes.batch)
        collected = max(2, int(self.num_steps * (1 - self.burn_in)) // every)
        return _memory(sizes, 0 if self.diagonal else min(self.rank, collected))


class _Run:
    """One training run of SWA or SWAG, under its own random state."""

    def __init__(
        self,
        method: SWA | SWAG,
        model: Any,
        x: Any,
        y: Any,
        *,
        num_draws: int,
        seed: int,
        init: Posterior | nn.Module | None,
        device: str | torch.device | None,
    ):
        if not isinstance(model, BNN):
            raise (Refused if callable(model) else TypeError)(
                f"{type(method).__name__} trains a network, so 'model' must be a pyrobnn.BNN, got {model!r}: "
                "use SVI, NUTS or Laplace(curvature='hessian')"
            )
        others = set(model.stochastic_layers()) - set(training_norms(model))
        if others:
            raise Refused(
                f"the net is in training mode and its layers {', '.join(sorted(others))} are random: "
                "call .eval() on them before building the BNN"
            )
        self.method, self.seed, self.init = method, seed, init
        self.start = start_values(model, init)
        pure = with_batch_statistics(model)
        problem = prepare(
            pure, x, y, points="free", device=device, stream=True, deterministic=False, num_draws=num_draws
        )
        self.problem = dataclasses.replace(problem, model=model.to(problem.device))
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

        theta = density.initial(self.start, self.seed)
        batches = independent_batches(self.problem, self.batch_size)
        seconds = 0.0
        if self.init is None and method.init_steps:
            warm = minimize(
                loss, theta, batches, num_steps=method.init_steps, lr=method.init_lr, lr_schedule="cosine",
                progress=progress, name=f"the start of {type(method).__name__}", compile=method.compile,
            )  # fmt: skip
            if warm.interrupted:
                raise KeyboardInterrupt(f"{warm.notes(method)[0]}: it had not begun to take iterates")
            theta, seconds = warm.params, sum(warm.timings.values())
        points = SWAGMoments(density.dim - self.latent_dim, diagonal=True, device=self.problem.device)

        def collect(step: int, metrics: Any) -> None:
            if step > self.first and step % self.every == 0:
                iterate = metrics["snapshot"]()
                moments.update(iterate[: self.latent_dim])
                points.update(iterate[self.latent_dim :])

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
            num_steps=method.num_steps,
            lr=self.lr,
            optimizer=method.optimizer or sgd,
            lr_schedule=self._falling if method.lr_schedule == "cyclical" else None,
            log_every=self.every,
            callbacks=(collect, *callbacks),
            snapshot=lambda theta: theta,
            progress=progress,
            name=type(method).__name__,
            compile=method.compile,
        )
        if result.interrupted and moments.count < 2:
            raise KeyboardInterrupt(
                f"{result.notes(method)[0]}: it had taken {moments.count} iterates of at least 2"
            )
        result.timings["fit"] += seconds
        if not bool(torch.isfinite(moments.mean).all()):
            raise FloatingPointError(
                f"an iterate of {type(method).__name__} is not finite by step {result.num_steps} "
                f"(loss {float(result.losses[-1]):.4g}): use a smaller lr than {self.lr:g}"
            )
        fixed = torch.cat([moments.mean, points.mean]).to(density.dtype)
        self._warn_if_worse(loss, theta, fixed, batches)
        values = density.constrain(fixed)
        return result, {s.name: values[s.name] for s in density.sites if s.kind == "point"}

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
        if not rise <= SLACK:
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
        centre = points | {name: value[0].mean(0) for name, value in draws.items()}
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
            meta={**meta, "lr": self.lr, "num_steps": result.num_steps, "stopped": result.stopped},
            notes=[*result.notes(self.method), *noise_notes(self.problem, centre)],
            interrupted=result.interrupted,
            **rest,
        )
        statistics = refreshed_statistics(self.problem.bnn, posterior.draws, Inputs(self.problem))
        return dataclasses.replace(posterior, draws=posterior.draws | statistics)

    def _falling(self, step: int) -> float:
        """Cyclical factor: linearly from 1 to 0.01 within each period."""
        return 1.0 - 0.99 * (step % self.every) / max(self.every - 1, 1)


def _memory(sizes: Sizes, rank: int) -> Need:
    wide = 8 * sizes.weights
    search, phases = sizes.optimisation()
    resident = search | {"moments": (3 + rank) * wide, "draws": 2 * sizes.num_draws * sizes.flat}
    gaussian = (2 * rank + 2 * sizes.num_draws + 4) * wide + sizes.one_pass(sizes.num_draws)
    return Need(resident, phases | {"the Gaussian": gaussian})


def _check_training(method: SWA | SWAG) -> None:
    lr = 1.0 if method.lr is None else method.lr
    check_optimizer(num_steps=method.num_steps, lr=lr, optimizer=method.optimizer or "adam")
    check_number("init_lr", method.init_lr, above=0)
    check_count("init_steps", method.init_steps, minimum=0)
    check_number("momentum", method.momentum, minimum=0, below=1)
    check_number("burn_in", method.burn_in, minimum=0, below=1)
    check_choice("lr_schedule", method.lr_schedule, ("constant", "cyclical"))
    for name in ("batch_size", "collect_every"):
        if getattr(method, name) is not None:
            check_count(name, getattr(method, name))
