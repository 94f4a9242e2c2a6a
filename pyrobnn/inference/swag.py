"""SWA and SWAG: the average of SGD's iterates, and the Gaussian through them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor

from pyrobnn.core.checks import Refused, check_count, check_number, check_optional
from pyrobnn.core.findings import Finding
from pyrobnn.core.seeding import seeded
from pyrobnn.inference.batch_norm import training_norms, with_batch_statistics
from pyrobnn.inference.fitting.batches import (
    Batches,
    check_batch_size,
    independent_batches,
    same,
)
from pyrobnn.inference.fitting.initial import fresh_starts, start_values
from pyrobnn.inference.fitting.problem import (
    Metrics,
    Problem,
    make_posterior,
    require_net,
    snapshot,
)
from pyrobnn.inference.fitting.shares import across
from pyrobnn.inference.fitting.watch import MappedCallback
from pyrobnn.inference.method import OPTIONAL, REFINE, Claim, FitRun, Kind, Method, register
from pyrobnn.inference.optim.free_noise import FreeNoise
from pyrobnn.inference.optim.minimize import Result, minimize
from pyrobnn.inference.optim.path_ends import REFINING_STEPS, Refinement, worths_of
from pyrobnn.inference.optim.paths import MAX_PATHS, Search, num_together
from pyrobnn.inference.optim.training import (
    MOMENTUM,
    TOLERATED_RISE,
    Optimizer,
    OptimizerFactory,
    RateTrial,
    Training,
    constant_rate,
)
from pyrobnn.inference.training_mode import rows_of_training, with_statistics
from pyrobnn.model import Density
from pyrobnn.model.compile.forecast import Compile
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.approximation import FlatApproximation

#: of Adam where no rate is given: that of the other methods
_ADAM_RATE = 1e-2


@dataclass(frozen=True, kw_only=True)
class _Averaged(Method):
    """The options of SGD whose iterates are averaged, and its course."""

    num_steps: int = 2000
    lr: float | None = None
    batch_size: int | None = None
    collect_every: int | None = None
    burn_in: float = 0.25
    compile: Compile = "auto"
    optimizer: str | Optimizer | OptimizerFactory | None = None
    optimizer_options: dict[str, Any] | None = None

    claim: ClassVar[Claim] = "none"
    deterministic: ClassVar[bool] = False
    uses: ClassVar[tuple[str, ...]] = OPTIONAL
    shares_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Training(self.num_steps, 1.0 if self.lr is None else self.lr)  # its checks
        self._check_optimizer()
        check_number(
            "burn_in",
            self.burn_in,
            minimum=0,
            below=1,
        )
        for option in ("batch_size", "collect_every"):
            check_optional(check_count, option, getattr(self, option))
        SWAGMoments(1, *self._rank_and_scale)  # its checks

    def _check_optimizer(self) -> None:
        """ValueError of an optimizer whose iterates cannot be taken, or of options without one."""
        if self.optimizer is None and self.optimizer_options is not None:
            raise ValueError(
                "'optimizer_options' are the keyword arguments of a torch.optim class: give the class too, such as "
                "optimizer=torch.optim.SGD"
            )
        optimizer = self._chosen_optimizer
        if optimizer is None:
            return
        if callable(optimizer.kind) and self.lr is not None:
            raise ValueError(
                f"'lr' is the rate of SGD by the rule or of Adam, got {self.lr:g} beside an optimizer with a rate "
                "of its own: use optimizer_options={'lr': …}"
            )
        if optimizer.average:
            raise ValueError(
                f"'average' must be 0 for {type(self).__name__}, which averages the iterates itself, got "
                f"{optimizer.average}"
            )

    @property
    def _chosen_optimizer(self) -> Optimizer | None:
        """What makes the steps in place of SGD by the rule: at a constant rate, unless it says otherwise."""
        if self.optimizer is None:
            return None
        return Optimizer.of(self.optimizer, None, self.optimizer_options)

    @property
    def _rank_and_scale(self) -> tuple[int, float]:
        """The number of last deviations kept, and what multiplies the standard deviations."""
        return 0, 1.0

    def _prepare(self, run: FitRun, device: str | torch.device | None) -> Problem:
        """The problem of a net whose batch-norm layers may use the statistics of a batch."""
        model = require_net(self, run.given[0])
        random_layers = set(model.stochastic_layers()) - set(training_norms(model))
        if random_layers:
            raise Refused(
                f"the net is in training mode and its layers {', '.join(sorted(random_layers))} are random: "
                "call .eval() on them before building the BNN"
            )
        deterministic = dataclasses.replace(
            run, given=(with_batch_statistics(model), *run.given[1:])
        )
        problem = super()._prepare(deterministic, device)
        return dataclasses.replace(problem, model=model.to(problem.device))

    def _fit(self, problem: Problem, run: FitRun) -> Posterior:
        sgd = _SGD(self, problem, run)
        with seeded(run.seed, problem.device):
            return sgd.posterior(sgd.train())


@register("swa", quick={"num_steps": 1000, "compile": False})
@dataclass(frozen=True)
class SWA(_Averaged):
    r"""Stochastic weight averaging: the mean of the iterates of SGD at a constant learning rate.

    .. math:: \bar\theta = \frac1n \sum_i \theta_i

    Args:
        num_steps: SGD steps, of momentum 0.9.
        lr: learning rate on the loss *per datum*, :math:`-\log p(\theta, y) / N`; None for the one whose wandering is
            closest to the posterior (:func:`pyrobnn.inference.optim.training.constant_rate`), recorded in
            ``meta["lr"]``; with ``optimizer="adam"`` for 0.01.
        batch_size: data per step, drawn independently (a reshuffled epoch cancels the noise of its gradients); None for
            32, or a quarter of small data.
        collect_every: steps between iterates that are taken; None for one epoch.
        burn_in: share of ``num_steps`` before the first is taken, in [0, 1).
        compile: ``"auto"`` compiles the steps where the forecast in ``meta["tier"]`` says that it costs less, as of
            short fits it does not; True and False are obeyed.
        optimizer: what makes the steps of which iterates are taken; None for SGD of momentum 0.9 at that rate. Else
            what :class:`pyrobnn.MAP` takes: ``"adam"``, a ``torch.optim`` class or another function of the parameter
            list (whose own learning rate counts), or an :class:`pyrobnn.Optimizer`. Its rate is constant unless it has
            a schedule.
        optimizer_options: keyword arguments of that class or function, such as ``{"lr": 0.01}``.

    Raises:
        TypeError, ValueError: naming the option.

    Returns, by ``fit``: a posterior of one draw; ``meta`` has num_collected and the lr. Where ``fit`` is given no
    ``init``, Adam goes to the mode first, in as many steps. The rest is as of :class:`SWAG`.

    Caveat: a point has no epistemic uncertainty.

    Reference: `Averaging Weights Leads to Wider Optima and Better Generalization (Izmailov et al., 2018)
    <https://arxiv.org/abs/1803.05407>`_.

    Example:
        >>> SWA(num_steps=1000, lr=0.05).burn_in
        0.25
    """

    kind: ClassVar[Kind] = "point"
    default_draws: ClassVar[int] = 1


@register(
    "swag",
    standard=True,
    full={"num_draws": 1000},
    quick={"num_draws": 500},
)
@dataclass(frozen=True)
class SWAG(_Averaged):
    r"""Stochastic weight averaging, Gaussian: a low-rank plus diagonal normal through the iterates of SGD.

    .. math:: q(\theta) = N\Big(\bar\theta,\ \frac{s^2}{2} \Big( \Sigma_{diag} + \frac{D D^\top}{K - 1} \Big) \Big),
        \qquad D_i = \theta_i - \bar\theta_i

    with :math:`\bar\theta_i` the running mean after its i-th update, in float64. Noise that is learned is trained along
    and held at the mean of its iterates. Batch-norm layers in training mode use the statistics of the batch while
    training, and every draw gets its own, from one pass through the data.

    Where the scale of the noise is free, the search for the mode follows several paths, as that of
    :class:`pyrobnn.MAP` does, and SGD starts at the end of the best evidence (on a stream, and of batch-norm layers in
    training mode, of the highest log joint that the batches or rows show). ``meta["noise_held"]`` and
    ``meta["path_gain"]`` say which path that was and what it gains over the plain one, in nats.

    Args:
        rank: K, the number of last deviations kept; 0 for :math:`s^2 \Sigma_{diag}` alone.
        scale: s, multiplies the standard deviations of the draws.

    The other arguments are those of :class:`SWA`.

    Raises:
        TypeError, ValueError: naming the option.

    Returns, by ``fit``: independent draws (1, num_draws, …) with log_p and log_q; ``meta`` has num_collected, the rank
    reached, and num_floored of the weights that did not move, which get the smallest variance. SGD starts at ``init``,
    or trains to the mode first; callbacks are called with every iterate taken.

    Refused: a plain Pyro program; random layers in training mode; fewer than two iterates.

    Warns:
        UserWarning: the mean of the iterates is worse than the start.

    Caveat: the width is that of SGD's wandering at this learning rate, not of the posterior: compare held-out
    densities for a few values of ``lr`` or ``scale``.

    Reference: `A Simple Baseline for Bayesian Uncertainty in Deep Learning (Maddox et al., 2019)
    <https://arxiv.org/abs/1902.02476>`_;
    `On the Pitfalls of Heteroscedastic Uncertainty Estimation (Seitzer et al., 2022)
    <https://arxiv.org/abs/2203.09168>`_, of the paths.

    Example:
        >>> SWAG(rank=10, lr=0.05).rank
        10
    """

    rank: int = 20
    scale: float = 1.0

    kind: ClassVar[Kind] = "independent"
    has_density: ClassVar[bool] = True
    default_draws: ClassVar[int] = 100
    remedy: ClassVar[str] = (
        f"The Gaussian misses the posterior: take SWAG as a heuristic, {REFINE}, or run NUTS and compare."
    )

    @property
    def _rank_and_scale(self) -> tuple[int, float]:
        return self.rank, self.scale


class _MomentsState(TypedDict):
    """What a checkpoint has of the moments."""

    count: int
    mean: Tensor
    squares: Tensor
    columns: list[Tensor]


class SWAGMoments:
    r"""Running moments of iterates :math:`\theta_1, \theta_2, \dots` (dim,), in float64.

    .. math:: \bar\theta_i = \bar\theta_{i-1} + \frac{\theta_i - \bar\theta_{i-1}}{i}, \qquad
        D_i = \theta_i - \bar\theta_i, \qquad \Sigma = \frac{s^2}{2} \Big( \Sigma_{diag} + \frac{D D^\top}{K - 1} \Big)

    :math:`\Sigma_{diag}` is the variance of the iterates (Welford's recursion) and D holds the last ``rank``
    deviations; K counts those collected. Without a rank the covariance is :math:`s^2 \Sigma_{diag}`.

    Args:
        dim: length of an iterate.
        rank: largest number of columns K, at least 2; 0 for the diagonal alone.
        scale: s, multiplies the standard deviations.
        latent: length of its first part, which the Gaussian is of; of the rest there is the mean. None for all.
        device: where the moments are.
    """

    def __init__(
        self,
        dim: int,
        rank: int = 20,
        scale: float = 1.0,
        *,
        latent: int | None = None,
        device: torch.device | str | None = None,
    ):
        if rank != 0:
            check_count("rank", rank, minimum=2)
        check_number("scale", scale, above=0)
        self.rank = rank
        self.scale = scale
        self.latent = dim if latent is None else latent
        self.count = 0
        self.mean = torch.zeros(
            dim,
            dtype=torch.float64,
            device=device,
        )
        self._squares = torch.zeros_like(self.mean[: self.latent])
        self._columns: list[Tensor] = []

    def update(self, theta: Tensor) -> None:
        """Take in one iterate (dim,)."""
        theta = theta.detach().double()
        count = self.count + 1
        before = theta - self.mean
        mean = self.mean + before / count
        before = before[: self.latent]
        after = (theta - mean)[: self.latent]
        squares = self._squares + before * after
        columns = [*self._columns, after][-self.rank :] if self.rank else []
        # all at once: an interrupt leaves whole moments
        self.count = count
        self.mean = mean
        self._squares = squares
        self._columns = columns

    def state(self) -> _MomentsState:
        """The moments so far."""
        return {
            "count": self.count,
            "mean": self.mean,
            "squares": self._squares,
            "columns": self._columns,
        }

    def restore(self, state: _MomentsState) -> None:
        """Go on from moments that :meth:`state` gave."""
        self.count = state["count"]
        self.mean = state["mean"].to(self.mean.device)
        self._squares = state["squares"].to(self.mean.device)
        self._columns = [column.to(self.mean.device) for column in state["columns"]]

    @property
    def variance(self) -> Tensor:
        """Variance (latent,) of the iterates, divided by their number."""
        return self._squares / max(self.count, 1)

    @property
    def deviations(self) -> Tensor:
        """D (latent, K), oldest first."""
        return torch.stack(self._columns, 1)

    @property
    def num_columns(self) -> int:
        """K, the number of deviations that are kept."""
        return len(self._columns)

    def num_floored(self) -> int:
        """How many weights did not move and are given the smallest variance: a density needs a positive one."""
        return int((self.variance < self._floor()).sum())

    def family(self) -> tuple[str, dict[str, Tensor]]:
        """Name and tensors of the Gaussian, as :class:`pyrobnn.posterior.approximation.FlatApproximation` takes them.

        Raises:
            ValueError: fewer than two iterates, or iterates that do not move.
        """
        if self.count < 2:
            raise Refused(
                f"SWAG needs at least 2 iterates for a covariance, got {self.count}: train longer or collect more often"
            )
        floor = self._floor()
        if not bool(floor > 0):
            raise Refused(
                "the iterates do not move, so they have no covariance: use mini-batches and a larger lr"
            )
        variance = self.variance.clamp_min(floor) * self.scale**2
        loc = self.mean[: self.latent]
        if not self.rank:
            return "normal", {"loc": loc, "scale": variance.sqrt()}
        # in place: another copy would be as large as all that is kept
        factor = self.deviations.mul_(self.scale / (2.0 * (self.num_columns - 1)) ** 0.5)
        return "low_rank", {
            "loc": loc,
            "cov_factor": factor,
            "cov_diag": variance / 2,
        }

    def _floor(self) -> Tensor:
        moving = self.variance[self.variance > 0]
        return 1e-8 * (moving.median() if len(moving) else self.variance.new_zeros(()))


class _SGD:
    """SGD from a mode with its iterates taken on the way: the run of a SWA or SWAG.

    ``lr`` is the rate of its steps, ``path`` what ``meta`` holds of the way to its start.
    """

    # set by :meth:`train`
    lr: float
    path: dict[str, Any]

    def __init__(
        self,
        method: _Averaged,
        problem: Problem,
        run: FitRun,
    ):
        self.method = method
        self.problem = problem
        self.run = run
        # as the steps have it; after them the problem of all rows counts
        self.share = problem.of_share(run.seed)
        check_batch_size(problem, method.batch_size)
        size = method.batch_size or max(1, min(32, problem.num_rows // 4))
        self.batch_size = size if problem.stream is None else None
        epoch = problem.stream.num_batches if problem.stream else max(1, problem.num_rows // size)
        self.every = method.collect_every or epoch
        self.first = round(method.burn_in * method.num_steps)
        planned = method.num_steps // self.every - self.first // self.every
        if planned < 2:
            raise Refused(
                f"num_steps={method.num_steps} with burn_in={method.burn_in:g} and one iterate every {self.every} "
                f"steps takes {planned} iterates, but at least 2 are needed: raise num_steps or lower collect_every"
            )
        density = problem.density
        latent = sum(site.size for site in density.sites if site.kind == "latent")
        self.moments = SWAGMoments(
            density.dim,
            *method._rank_and_scale,
            latent=latent,
            device=problem.device,
        )

    def train(self) -> Result:
        """Run SGD; returns its record."""
        method = self.method
        problem = self.share
        loss = _loss_per_datum(problem)
        batches = independent_batches(problem, self.batch_size)
        theta, seconds, self.path = self._start(loss, batches)
        optimizer = method._chosen_optimizer
        if optimizer is not None:
            self.lr = optimizer.first_rate(method.lr or _ADAM_RATE)
        else:
            self.lr = method.lr or self._constant_rate(loss, theta, batches)
            optimizer = _sgd(self.lr)
        callbacks = [
            MappedCallback(callback, self._with_posterior) for callback in self.run.callbacks
        ]
        result = minimize(
            loss,
            theta,
            batches,
            Training(method.num_steps, self.lr, optimizer, method.compile, self.every),
            observe=self._collect,
            stage=self.run.stages.begin(batches, self.moments),
            callbacks=callbacks,
            snapshot=lambda theta: theta,
            progress=self.run.progress,
            name=type(method).__name__,
        )
        result.timings["fit"] += seconds
        self._check_moments(result)
        self._note_worse_mean(loss, theta, batches)
        return result

    def _constant_rate(
        self,
        loss: Callable[..., Tensor],
        theta: Tensor,
        batches: Batches[tuple[Tensor, ...]],
    ) -> float:
        """The rate by the rule, at the mode ``theta``."""

        def compute() -> float:
            return constant_rate(
                loss,
                theta,
                batches,
                num_data=self.problem.num_rows,
                momentum=MOMENTUM,
                num_steps=self.method.num_steps,
            )

        return self.run.stages.begin(batches).once(compute)

    def _collect(self, step: int, iterate: Callable[[], Tensor]) -> None:
        """Take in the iterate of this step, if it is one to be taken."""
        if step > self.first and step % self.every == 0:
            self.moments.update(iterate())

    def _with_posterior(self, metrics: Metrics) -> Metrics:
        """What the user's callbacks are told: the posterior so far, and the iterate beside it."""
        iterate = metrics["snapshot"]
        return {
            **metrics,
            "iterate": iterate,
            "snapshot": partial(self._snapshot, iterate),
        }

    def _check_moments(self, result: Result) -> None:
        """Stop a run that took fewer than two iterates, or one that is not finite."""
        method = self.method
        moments = self.moments
        if moments.count < 2 and not result.interrupted and method.kind == "independent":
            moments.family()  # refuses
        if result.interrupted and moments.count < 2:
            raise KeyboardInterrupt(
                f"{result.notes(method)[0]}: it had taken {moments.count} iterates of at least 2"
            )
        if not bool(torch.isfinite(moments.mean).all()):
            raise FloatingPointError(
                f"an iterate of {type(method).__name__} is not finite by step {result.num_steps} "
                f"(loss {float(result.losses[-1]):.4g}): use a smaller lr than {self.lr:g}"
            )

    def _note_worse_mean(
        self,
        loss: Callable[..., Tensor],
        theta: Tensor,
        batches: Batches[tuple[Tensor, ...]],
    ) -> None:
        """Note it where SGD wandered out of the basin: around a mode, its mean is no worse than where it started."""
        num_batches = RateTrial.affordable(self.method.num_steps).num_batches
        samples = list(itertools.islice(batches, num_batches))
        mean = self.moments.mean.to(theta.dtype)
        rise_of = across(batches.shares, lambda *batch: loss(mean, *batch) - loss(theta, *batch))
        rises = [float(rise_of(*batch)) for batch in samples]
        rise = sum(rises) / len(samples)
        if not rise <= TOLERATED_RISE:
            self.problem.note(Finding("worse_mean", {"rise": rise, "lr": self.lr}))

    def _start(
        self, loss: Callable[..., Tensor], batches: Batches[tuple[Tensor, ...]]
    ) -> tuple[Tensor, float, dict[str, Any]]:
        """Where SGD starts, the seconds that it took to get there, and by which path: ``init``, or near a mode."""
        method = self.method
        run = self.run
        problem = self.share
        theta = problem.density.initial(start_values(problem.bnn, run.init), run.seed)
        if run.init is not None:
            return theta, 0.0, {}
        training = Training(
            method.num_steps,
            optimizer=Optimizer(schedule="cosine"),
            compile=method.compile,
        )
        name = f"the start of {type(method).__name__}"
        noise = FreeNoise.of(problem)
        if noise is None:
            result = minimize(
                loss,
                theta,
                batches,
                training,
                stage=run.stages.begin(batches),
                progress=run.progress,
                name=name,
            )
        else:
            result = self._search(noise, batches, training, theta, name).best(theta)
        if result.interrupted:
            raise KeyboardInterrupt(f"{result.notes(method)[0]}: it had not begun to take iterates")
        return result.params, sum(result.timings.values()), result.path

    def _search(
        self,
        noise: FreeNoise,
        batches: Batches[tuple[Tensor, ...]],
        training: Training,
        start: Tensor,
        name: str,
    ) -> Search:
        """The search for a mode where the noise is free."""
        problem = self.share
        # a net whose batch-norm layers use the batch has no outputs row by row
        by_rows = problem.loader is None and not training_norms(problem.bnn)
        num_paths = num_together(problem, self.batch_size, 1, MAX_PATHS)
        refinement = None
        if by_rows and num_together(problem, None, 1, MAX_PATHS) > 1:
            # the gradients of all rows cost no more than those of a few, and have no noise that hides the function
            batches = same((problem.x, problem.y))
            refinement = Refinement(problem.density, REFINING_STEPS, 0)
        return Search(
            problem,
            noise,
            Density.log_joint,
            partial(
                worths_of,
                problem,
                evidence=by_rows,
            ),
            training,
            lambda: batches,
            num_paths,
            refinement,
            other_starts=partial(fresh_starts, problem, self.run.seed, start),
            stages=self.run.stages,
            progress=self.run.progress,
            name=name,
        )

    def _fitted(self, flat: Tensor, num_draws: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Draws of the Gaussian through two iterates or more, or else the point ``flat``; what a posterior is told."""
        density = self.problem.density
        values = density.constrain(flat)
        points = density.initial_points | {
            site.name: values[site.name] for site in density.sites if site.kind == "point"
        }
        draws = {name: value[None, None] for name, value in values.items() if name not in points}
        facts: dict[str, Any] = {"seed": self.run.seed, "point_values": points}
        if self.method.kind == "independent" and self.moments.count > 1:
            # over the latent sites, point parameters held at their means
            layout = density.holding(points)
            approximation = FlatApproximation(layout, *self.moments.family())
            facts["approximation"] = approximation
            draws = {name: value[None] for name, value in approximation.sample(num_draws).items()}
        return draws, facts

    def posterior(self, result: Result) -> Posterior:
        """The posterior of the run, with batch-norm statistics of its draws' own."""
        moments = self.moments
        draws, facts = self._fitted(moments.mean.to(self.problem.density.dtype), self.run.num_draws)
        facts |= result.account(self.method, self.problem.num_rows, moments.latent)
        facts["meta"] |= {
            "num_collected": moments.count,
            "lr": self.lr,
            **self.path,
        }
        if self.method.kind == "independent":
            facts["meta"]["num_floored"] = moments.num_floored()
            if moments.rank:
                facts["meta"]["rank"] = moments.num_columns
        # a streamed loader shows one batch at a time: there is no joint density of all data to evaluate
        importance = self.problem.loader is None
        posterior = make_posterior(
            self.problem,
            self.method,
            draws,
            importance=importance,
            rows_seen=self._rows_seen,
            **facts,
        )
        return self._with_statistics(posterior)

    def _with_statistics(self, posterior: Posterior) -> Posterior:
        """The posterior with batch-norm statistics of its draws' own."""
        return with_statistics(self.problem, posterior, self._rows_seen)

    @property
    def _rows_seen(self) -> int:
        """The rows that SGD sends through the net."""
        return rows_of_training(self.problem, self.method.num_steps, self.batch_size)

    def _snapshot(self, iterate: Callable[[], Tensor]) -> Posterior:
        """The posterior of the iterates so far; before the first, of the present one."""
        flat = self.moments.mean.to(self.problem.density.dtype) if self.moments.count else iterate()
        with seeded(self.run.seed, self.problem.device):
            draws, facts = self._fitted(flat, 50)
        posterior = snapshot(
            self.problem,
            self.method,
            draws,
            **facts,
        )
        return self._with_statistics(posterior)


def _sgd(lr: float) -> Optimizer:
    """SGD with momentum at a constant rate."""
    sgd = partial(
        torch.optim.SGD,
        lr=lr,
        momentum=MOMENTUM,
    )
    return Optimizer(sgd, None)


def _loss_per_datum(problem: Problem) -> Callable[..., Tensor]:
    """(θ, \\*batch) → minus the log joint density divided by the number of data."""

    def loss(theta: Tensor, *batch: Tensor) -> Tensor:
        return -problem.density.log_joint(theta, *batch) / problem.num_rows

    return loss
