"""SWA and SWAG: the average of SGD's iterates, and the Gaussian through them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from pyrobnn.core.checks import Refused, check_choice, check_count, check_number
from pyrobnn.core.seeding import seeded
from pyrobnn.density.density import Density
from pyrobnn.inference.fitting.batches import Inputs, check_batch_size, independent_batches
from pyrobnn.inference.fitting.initial import start_values
from pyrobnn.inference.fitting.problem import Problem, make_posterior, prepare, snapshot
from pyrobnn.inference.fitting.ranks import ranks
from pyrobnn.inference.fitting.sizes import Need, Sizes
from pyrobnn.inference.fitting.watch import MappedCallback
from pyrobnn.inference.method import Claim, FitRun, Kind, Method, register
from pyrobnn.inference.nets.batch_norm import refreshed_statistics, training_norms, with_batch_statistics
from pyrobnn.inference.nets.swag_moments import SWAGMoments
from pyrobnn.inference.optim.minimize import Result, minimize
from pyrobnn.inference.optim.sgd_rate import NUM_GRADIENTS, TOLERATED_RISE, constant_rate
from pyrobnn.inference.optim.training import OptimizerFactory, Training
from pyrobnn.inference.optim.unfinished import falling
from pyrobnn.model import BNN
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.approximation import FlatApproximation
from pyrobnn.wording.findings import Finding

#: draws of the Gaussian while it forms
_SNAPSHOT_DRAWS = 50


@dataclass(frozen=True, kw_only=True)
class _Averaged(Method):
    """The options of SGD whose iterates are averaged, and its course."""

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

    claim: ClassVar[Claim] = "none"
    #: the number of last deviations kept
    columns: ClassVar[int] = 0

    def __post_init__(self) -> None:
        lr, optimizer = self.lr or 1.0, self.optimizer or "adam"
        Training.of(self, lr=lr, optimizer=optimizer, lr_schedule=None)  # its checks
        if self.lr is not None:
            check_number("lr", self.lr, above=0)
        check_number("init_lr", self.init_lr, above=0)
        check_count("init_steps", self.init_steps, minimum=0)
        check_number("momentum", self.momentum, minimum=0, below=1)
        check_number("burn_in", self.burn_in, minimum=0, below=1)
        check_choice("lr_schedule", self.lr_schedule, ("constant", "cyclical"))
        if self.collect_every is not None:
            check_count("collect_every", self.collect_every)

    def _prepare(self, run: FitRun, device: str | torch.device | None) -> tuple[Problem, FitRun]:
        """The problem of a net whose batch-norm layers may use the statistics of a batch.

        Raises:
            TypeError, Refused: no BNN; random layers in training mode; such layers where ranks share the rows.
        """
        model, x, y = run.given
        if not isinstance(model, BNN):
            raise (Refused if callable(model) else TypeError)(
                f"{type(self).__name__} trains a network, so 'model' must be a pyrobnn.BNN, got {model!r}: "
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

    def _moments(self, dim: int, device: torch.device) -> SWAGMoments:
        return SWAGMoments(dim, diagonal=True, device=device)

    def memory(self, model: BNN, sizes: Sizes) -> Need:
        """Bytes that ``fit`` will take: the optimiser's, the moments of the iterates, the Gaussian through them."""
        wide = 8 * sizes.weights
        every = self.collect_every or max(1, sizes.num_data // sizes.batch)
        rank = min(self.columns, max(2, int(self.num_steps * (1 - self.burn_in)) // every))
        search, phases = sizes.optimisation()
        resident = search | {"moments": (3 + rank) * wide, "draws": 2 * sizes.num_draws * sizes.flat}
        gaussian = (2 * rank + 2 * sizes.num_draws + 4) * wide + sizes.one_pass(sizes.num_draws)
        return Need(resident, phases | {"the Gaussian": gaussian})


@register("swa", quick={"num_steps": 1000, "compile": False})
@dataclass(frozen=True)
class SWA(_Averaged):
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

    Returns, by ``fit``: a posterior of one draw; ``meta`` has num_collected and the lr. The rest is as of
    :class:`SWAG`.

    Caveat: a point has no epistemic uncertainty.

    Reference: `Averaging Weights Leads to Wider Optima and Better Generalization (Izmailov et al., 2018)
    <https://arxiv.org/abs/1803.05407>`_.

    Example:
        >>> SWA(num_steps=1000, lr=0.05).momentum
        0.9
    """

    kind: ClassVar[Kind] = "point"
    shares_rows: ClassVar[bool] = True
    default_draws: ClassVar[int] = 1

    def _fit(self, problem: Problem, run: FitRun) -> Posterior:
        sgd = _SGD(self, problem, run)
        with seeded(run.seed, problem.device):
            result, points = sgd.train()
            draws = sgd.layout(points).constrain(sgd.moments.mean.to(problem.density.dtype))
            return sgd.posterior({name: value[None, None] for name, value in draws.items()}, result, points)


@register("swag", full={"num_draws": 1000}, quick={"num_draws": 500})
@dataclass(frozen=True)
class SWAG(_Averaged):
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

    The other arguments are those of :class:`SWA`.

    Raises:
        TypeError, ValueError: naming the option.

    Returns, by ``fit``: independent draws (1, num_draws, …) with log_p and log_q; ``meta`` has num_collected and the
    rank reached. SGD starts at ``init``, or trains to the mode first; callbacks are called with every iterate taken.

    Refused: a plain Pyro program; random layers in training mode; fewer than two iterates.

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

    kind: ClassVar[Kind] = "independent"
    shares_rows: ClassVar[bool] = True
    has_density: ClassVar[bool] = True
    default_draws: ClassVar[int] = 100
    remedy: ClassVar[str] = (
        "The Gaussian misses the posterior: take SWAG as a heuristic, or run NUTS and compare."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._moments(1)  # its checks

    @property
    def columns(self) -> int:  # type: ignore[override]  # of the instance, not of the class
        """The number of last deviations kept."""
        return 0 if self.diagonal else self.rank

    def _moments(self, dim: int, device: torch.device | None = None) -> SWAGMoments:
        return SWAGMoments(dim, self.rank, diagonal=self.diagonal, scale=self.scale, device=device)

    def _fit(self, problem: Problem, run: FitRun) -> Posterior:
        sgd = _SGD(self, problem, run)
        with seeded(run.seed, problem.device):
            result, points = sgd.train()
            approximation = FlatApproximation(sgd.layout(points), *sgd.moments.family())
            draws = {name: value[None] for name, value in approximation.sample(run.num_draws).items()}
            if floored := sgd.moments.num_floored():
                problem.note(Finding("unmoved_weights", {"count": floored}))
            meta = {"num_floored": floored}
            if not self.diagonal:
                meta["rank"] = sgd.moments.deviations.shape[1]
            return sgd.posterior(draws, result, points, meta=meta, approximation=approximation)


class _SGD:
    """SGD from a mode with its iterates taken on the way: the run of a SWA or SWAG."""

    def __init__(self, method: _Averaged, problem: Problem, run: FitRun):
        self.method, self.problem, self.run, self.seed = method, problem, run, run.seed
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
        self.moments = method._moments(self.latent_dim, problem.device)
        if self.epoch == 1 and problem.loader is None:
            problem.note(Finding("no_mini_batches"))
        if planned < method.columns:
            problem.note(Finding("few_iterates", {"planned": planned, "rank": method.columns}))

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

    def train(self) -> tuple[Result, dict[str, Tensor]]:
        """Run SGD; returns its record and the values of the point parameters."""
        method, density, moments = self.method, self.problem.density, self.moments

        def loss(theta: Tensor, *batch: Tensor) -> Tensor:
            return -density.log_joint(theta, *batch) / self.problem.num_rows

        batches = independent_batches(self.problem, self.batch_size)
        theta, seconds = self._warm_up(loss, batches)
        points = SWAGMoments(density.dim - self.latent_dim, diagonal=True, device=self.problem.device)

        def collect(step: int, metrics: Mapping[str, Any]) -> None:
            if step > self.first and step % self.every == 0:
                iterate = metrics["snapshot"]()
                moments.update(iterate[: self.latent_dim])
                points.update(iterate[self.latent_dim :])

        def retold(metrics: Mapping[str, Any]) -> dict[str, Any]:
            iterate = metrics["snapshot"]
            present = functools.partial(self._snapshot, iterate, points)
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
            callbacks=(collect, *(MappedCallback(callback, retold) for callback in self.run.callbacks)),
            snapshot=lambda theta: theta,
            progress=self.run.progress,
            name=type(method).__name__,
        )
        result.timings["fit"] += seconds
        self._check_moments(result)
        fixed = torch.cat([moments.mean, points.mean]).to(density.dtype)
        self._warn_if_worse(loss, theta, fixed, batches)
        values = density.constrain(fixed)
        return result, {s.name: values[s.name] for s in density.sites if s.kind == "point"}

    def _snapshot(self, iterate: Callable[[], Tensor], points: SWAGMoments) -> Posterior:
        """The mean of the iterates so far and draws of the Gaussian through them; before the first the present one."""
        density, moments = self.problem.density, self.moments
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
        self, loss: Callable[..., Tensor], batches: Iterator[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, float]:
        """Where SGD starts, and the seconds that it took to get there: the user's ``init``, or near a mode."""
        method, start = self.method, start_values(self.problem.bnn, self.run.init)
        theta = self.problem.density.initial(start, self.seed)
        if self.run.init is not None or not method.init_steps:
            return theta, 0.0
        found = minimize(
            loss, theta, batches,
            Training(method.init_steps, lr=method.init_lr, lr_schedule="cosine", compile=method.compile),
            progress=self.run.progress, name=f"the start of {type(method).__name__}",
        )  # fmt: skip
        if found.interrupted:
            raise KeyboardInterrupt(f"{found.notes(method)[0]}: it had not begun to take iterates")
        return found.params, sum(found.timings.values())

    def _check_moments(self, result: Result) -> None:
        """Stop a run whose iterates make no distribution."""
        moments = self.moments
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
            self.problem.note(Finding("worse_mean", {"rise": rise, "lr": self.lr}))

    def layout(self, points: dict[str, Tensor]) -> Density:
        """The density over the latent sites alone, point parameters held at ``points``."""
        density = self.problem.density
        return Density(density.program, density.args, points="held", values=points)

    def posterior(
        self,
        draws: dict[str, Tensor],
        result: Result,
        points: dict[str, Tensor],
        *,
        meta: Mapping[str, Any] | None = None,
        **rest: Any,
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
            meta={"num_collected": self.moments.count, **(meta or {}), "lr": self.lr}
            | {"num_steps": result.num_steps, "stopped": result.stopped}
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
