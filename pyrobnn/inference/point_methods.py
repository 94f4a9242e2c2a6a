"""Points found by gradient steps: MLE, MAP and deep ensembles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyrobnn.core.checks import check_count
from pyrobnn.core.seeding import seeded
from pyrobnn.inference.batch_norm import training_norms
from pyrobnn.inference.fitting.batches import Batches, MemberRows, check_batch_size, of_rows, same
from pyrobnn.inference.fitting.initial import fresh_starts, start_values, starts_of
from pyrobnn.inference.fitting.problem import Problem, make_posterior
from pyrobnn.inference.fitting.program import check_batched, why_impossible
from pyrobnn.inference.method import OPTIONAL, Claim, FitRun, Kind, Method, register
from pyrobnn.inference.optim.descent import NUM_LOOKS, gain_left, polish, unfinished
from pyrobnn.inference.optim.free_noise import FreeNoise
from pyrobnn.inference.optim.minimize import Result, minimize
from pyrobnn.inference.optim.occam import Units, weight_spreads
from pyrobnn.inference.optim.path_ends import REFINING_STEPS, Refinement, worths_of
from pyrobnn.inference.optim.paths import (
    MAX_PATHS,
    Search,
    num_together,
    relative_cost,
    search_each,
)
from pyrobnn.inference.optim.saddle import MAX_COORDINATES, below_saddle
from pyrobnn.inference.optim.training import Optimizer, OptimizerFactory, Training
from pyrobnn.model import Density
from pyrobnn.model.compile.forecast import Compile
from pyrobnn.posterior import Posterior

#: rounds in the units of a Gaussian around each end of a search, which bring the highest near to its mode; and those
#: that bring all to rest, whose evidence is compared
_VALLEY_ROUNDS = 24
_ROUNDS_TO_REST = 96
#: of the steps of a search that compares ends by their log joint, those before the rounds: with all of them the modes
#: were as often lower as higher
_SHARE_BEFORE_VALLEYS = 0.5
#: rows up to which passes over all of them are cheap
_MANY_ROWS = 5000
#: of the cost of a search by mini-batches, that of a look at its end
_LOOK_SHARE = 0.25
#: what is added to the seed of a member for that of its batches
_BATCHES = 2**40


@dataclass(frozen=True, kw_only=True)
class Trained(Method):
    """The options of a search by gradient steps, and the posterior of the points that it finds."""

    num_steps: int = 2000
    lr: float = 1e-2
    optimizer: str | Optimizer | OptimizerFactory = "adam"
    optimizer_options: dict[str, Any] | None = None
    batch_size: int | None = None
    compile: Compile = "auto"

    claim: ClassVar[Claim] = "none"
    trains: ClassVar[bool] = True
    uses: ClassVar[tuple[str, ...]] = OPTIONAL
    shares_rows: ClassVar[bool] = True
    #: paths of each member that are followed together where that costs little
    max_paths: ClassVar[int] = MAX_PATHS
    #: whether ends of several paths are compared by their evidence, else by their log joint
    by_evidence: ClassVar[bool] = False
    #: whether some of those paths are smoothed: an end need not be a mode
    smooths: ClassVar[bool] = False

    def __post_init__(self) -> None:
        Training.of(self, "cosine")  # its checks

    @property
    def _title(self) -> str:
        """What a bar calls the search."""
        return type(self).__name__

    @staticmethod
    def _target(density: Density, theta: Tensor, *batch: Tensor) -> Tensor:
        """What is maximised."""
        return density.log_joint(theta, *batch, jacobian=False)

    def _start(self, problem: Problem, run: FitRun) -> Tensor:
        """Where the search begins, (dim,) or (members, dim)."""
        return problem.density.initial(start_values(problem.model, run.init), run.seed)

    def _own_rows(self, problem: Problem, run: FitRun) -> Batches[Tensor] | None:
        """Endless row numbers (member, batch_size) of batches of each member's own; None where all see the same."""
        return None

    def _batches(self, problem: Problem, run: FitRun) -> Batches[Any]:
        """Endless batches (x, y); of members with batches of their own (rows (member, batch_size), x, y) of all."""
        rows = self._own_rows(problem, run)
        if rows is None:
            return problem.batches(self.batch_size)
        return rows.mapped(lambda of_members: (of_members, problem.x, problem.y))

    def _fit(self, problem: Problem, run: FitRun) -> Posterior:
        with seeded(run.seed, problem.device):
            result = self._search(problem, self._start(problem, run), run)
        return self._posterior(problem, result.params, run.seed, result)

    def fit_each(self, problem: Problem, ys: Tensor, run: FitRun) -> list[Posterior]:
        """Points given each of several targets (set, N, …) in the place of the problem's, all found in one search.

        Where the noise is free every set follows several paths, as :meth:`fit` does, from its one start.
        """
        points = self.points_each(problem, ys, run)
        return [self._posterior(problem, theta, run.seed) for theta in points]

    def points_each(self, problem: Problem, ys: Tensor, run: FitRun) -> Tensor:
        """The points (set, member, dim) of :meth:`fit_each`."""
        with seeded(run.seed, problem.device):
            start = self._start(problem, run)
            start = start.reshape(-1, problem.density.dim)
            if self._is_bounded(problem):
                training = Training.of(self, "cosine")
                points = search_each(
                    problem, start, ys, self._target, self._worths, training, self._title
                )
                if points is not None:
                    return points
            result = self._search(
                problem, start.repeat(len(ys), 1), run, ys.repeat_interleave(len(start), 0)
            )
            return result.params.unflatten(0, (len(ys), -1))

    def _search(
        self,
        problem: Problem,
        start: Tensor,
        run: FitRun,
        ys: Tensor | None = None,
        snapshot: Callable | None = None,
    ) -> Result:
        """Maximise from ``start``: one point (dim,), or several together (members, dim), each of its ``ys`` if given.

        Where the noise is free, along several paths.
        """
        snapshot = snapshot or partial(self._posterior, problem, seed=run.seed)
        problem = problem.of_share(run.seed)
        noise = FreeNoise.of(problem) if ys is None and self._is_bounded(problem) else None
        if noise is None:
            return self._plain_search(problem, start, run, ys, snapshot)
        members = start.reshape(-1, start.shape[-1])
        other_starts = None
        if run.init is None:
            other_starts = partial(fresh_starts, problem, run.seed, members[0])
        search = Search(
            problem,
            noise,
            self._target,
            partial(self._worths, problem),
            Training.of(self, "cosine"),
            partial(self._batches, problem, run),
            own_rows=self._own_rows(problem, run) is not None,
            num_paths=num_together(problem, self.batch_size, len(members), self.max_paths),
            refinement=self._refinement(problem),
            other_starts=other_starts,
            weight_spreads=self._weight_spreads(problem),
            stages=run.stages,
            callbacks=run.callbacks,
            snapshot=snapshot,
            progress=run.progress,
            name=self._title,
        )
        return search.best(start)

    def _is_bounded(self, problem: Problem) -> bool:
        """Whether ends of several paths can be compared: no density grows without bound on one of them."""
        return True

    def _worths(self, problem: Problem, ends: Sequence[Result]) -> Tensor:
        """By what the ends of several paths are compared, (end,) in nats."""
        return worths_of(
            problem,
            ends,
            evidence=self._compares_evidence(problem),
        )

    def _compares_evidence(self, problem: Problem) -> bool:
        """Whether ends of several paths are compared by their evidence."""
        # a net whose batch-norm layers use the batch has no outputs row by row, nor has a stream all rows
        return self.by_evidence and problem.loader is None and not training_norms(problem.bnn)

    def _weight_spreads(self, problem: Problem) -> Tensor | None:
        """Spreads of the weights (dim,), for paths that are smoothed; None where none are."""
        smoothed = self.smooths and self._compares_evidence(problem)
        return weight_spreads(problem.density) if smoothed else None

    def _is_whole(self, problem: Problem) -> bool:
        """Whether a batch holds all of the data: one of as many rows is that by another name."""
        return problem.loader is None and (
            self.batch_size is None or self.batch_size >= problem.num_rows
        )

    @property
    def _refining_steps(self) -> int:
        """L-BFGS evaluations that bring the ends of several paths to where they can be compared."""
        return 0

    @property
    def _polishing_steps(self) -> int:
        """L-BFGS evaluations of the end that is kept."""
        return 0

    def _refinement(self, problem: Problem) -> Refinement | None:
        if not self._refining_steps or not self._is_whole(problem):
            return None
        if problem.density.stochastic is not None:  # without the noise its mode is another
            return None
        options = (problem.density, self._refining_steps, self._polishing_steps)
        # the units of a valley are taken row by row, which batch-norm layers that use the batch do not have
        if not self._polishing_steps or training_norms(problem.bnn):
            return Refinement(*options)
        if self._compares_evidence(problem):
            return Refinement(*options, valley_rounds=_ROUNDS_TO_REST)
        return Refinement(
            *options,
            valley_rounds=_VALLEY_ROUNDS,
            share_before=_SHARE_BEFORE_VALLEYS,
        )

    def _plain_search(
        self,
        problem: Problem,
        start: Tensor,
        run: FitRun,
        ys: Tensor | None,
        snapshot: Callable,
    ) -> Result:
        """Along one path. A program that subsamples draws a subsample at every call, for every member another."""
        density = problem.density.subsampled()

        def loss(theta: Tensor, *batch: Tensor) -> Tensor:
            return -self._target(density, theta, *of_rows(batch)) / problem.num_rows

        def losses(thetas: Tensor, *batch: Tensor) -> Tensor:
            randomness = "error" if density.stochastic is None else "different"
            in_dims: tuple[int | None, ...] = (0, *(None for _ in batch))
            if ys is not None:
                in_dims = (0, None, 0)
            elif len(batch) == 3:
                in_dims = (0, 0, None, None)
            return torch.func.vmap(
                loss,
                in_dims=in_dims,
                randomness=randomness,
            )(thetas, *batch)

        batches: Batches[Any] = same(())
        if ys is not None:
            batches = same((problem.x, ys))
        elif self.batch_size is not None or problem.loader is not None:
            batches = self._batches(problem, run)
        return minimize(
            loss if start.dim() == 1 else losses,
            start,
            batches,
            Training.of(self, "cosine"),
            stage=run.stages.begin(batches),
            callbacks=run.callbacks,
            snapshot=snapshot,
            progress=run.progress,
            name=self._title,
            explain=lambda theta: why_impossible(
                problem.density, theta.reshape(-1, problem.density.dim)
            ),
        )

    def _posterior(
        self,
        problem: Problem,
        theta: Tensor,
        seed: int,
        result: Result | None = None,
        mode_meta: Mapping[str, Any] | None = None,
    ) -> Posterior:
        """A posterior of one draw (1, 1), or of one draw a member for ``theta`` (members, dim)."""
        meta: dict[str, Any] = {}
        if theta.dim() > 1 and len(theta) > 1:
            meta["common_start"] = False
        draws = problem.density.constrain(theta.reshape(1, -1, problem.density.dim))
        account: dict[str, Any] = {"timings": {}}
        if result is not None:
            account = result.account(self, problem.num_rows, problem.density.dim)
            meta |= account.pop("meta") | dict(mode_meta or {})
        return make_posterior(
            problem,
            self,
            draws,
            seed=seed,
            meta=meta,
            **account,
        )


@register("mle", quick={"num_steps": 500, "compile": False})
@dataclass(frozen=True)
class MLE(Trained):
    r"""Maximum likelihood: ordinary training, without the prior.

    .. math:: \hat\theta = \arg\max_\theta \; \sum_n \log p(y_n \mid x_n, \theta)

    Args: as :class:`pyrobnn.MAP`, without polishing.

    Raises:
        TypeError, ValueError: naming the option.

    Returns, by ``fit``: a posterior of one draw, (1, 1, …), whose callbacks receive the loss.

    Reference: `On the Pitfalls of Heteroscedastic Uncertainty Estimation (Seitzer et al., 2022)
    <https://arxiv.org/abs/2203.09168>`_, of the paths.

    Caveat: nothing holds it back: with many weights it fits the noise, and with learned noise the density can grow
    without bound. It is the baseline, not a posterior.

    Example:
        >>> import pyro.distributions as dist, pyrobnn as pb, torch
        >>> with torch.random.fork_rng():
        ...     net = torch.nn.Linear(1, 1)
        >>> model = pb.BNN(net, pb.priors.IIDPrior(dist.Normal(0.0, 1.0)), pb.likelihoods.HomoskedasticGaussian(1.0))
        >>> x = torch.tensor([[-1.0], [1.0]])
        >>> posterior = pb.MLE(num_steps=500, lr=0.05, compile=False).fit(model, x, 3 * x)
        >>> round(posterior.draws["net.weight"].item(), 2)
        3.0
    """

    kind: ClassVar[Kind] = "point"
    default_draws: ClassVar[int] = 1

    def _is_bounded(self, problem: Problem) -> bool:
        # without a prior, a net of as many weights as there are rows passes through them all
        return problem.density.dim < problem.num_rows

    @staticmethod
    def _target(density: Density, theta: Tensor, *batch: Tensor) -> Tensor:
        return density.log_parts(theta, *batch)[1]


@register(
    "map",
    standard=True,
    quick={"num_steps": 500, "compile": False},
)
@dataclass(frozen=True)
class MAP(Trained):
    r"""Maximum a posteriori: one set of parameters, the mode of the joint density over the constrained sites.

    .. math:: \hat\theta = \arg\max_\theta \; \log p(\theta) + \sum_n \log p(y_n \mid x_n, \theta)

    Where the scale of the noise is free, a search may take the function for noise (Seitzer et al., 2022). It then
    follows several paths: the plain one, and others that hold the noise small for the first half of their steps, with
    Adam at three to thirty times the rate (at most 0.3): a small one stays in the first basin. Where a net is small the
    ends go on to their modes in the units of the Gaussian around each, in which narrow valleys are wide. The
    end of the highest log joint, in unconstrained coordinates, is kept. ``meta["noise_held"]`` is the scale at which it
    was held first on the path that is kept, as a share of the targets' standard deviation (0: the plain path), and
    ``meta["path_gain"]`` the nats that this path gains over the plain one.

    At a saddle, and in the bend of a narrow valley, L-BFGS stands still though the density rises. Of a net of up to 500
    parameters the exact curvature shows it, and the search goes on in units of that, for a quarter of its time at most;
    ``meta["saddle"]`` has the ``lowest_curvature`` at its end (in units of a Gaussian's, negative at a saddle), the
    nats of ``gain``, and whether that led to a mode, ``at_mode``.

    A net in training mode is trained so: batch-norm layers use the statistics of each batch, and running statistics
    of the training data when they predict (``net.<layer>.running_mean`` and ``running_var`` in the draws); dropout is
    noise of the training, from ``seed``, and predictions drop nothing. ``meta["findings"]`` says what it means for the
    density.

    Args:
        num_steps: updates of the optimiser; half as many in a search along several paths, which L-BFGS goes on from.
        lr: its peak learning rate.
        optimizer: ``"adam"``, a ``torch.optim`` class or another function of the parameter list that returns a torch
            optimizer (whose own learning rate counts), or an :class:`pyrobnn.Optimizer`, which also has the schedule
            of the rate (by default a cosine), a bound on the gradient norm and averaging.
        optimizer_options: keyword arguments of that class or function, such as ``{"lr": 0.1, "momentum": 0.9}``.
        batch_size: mini-batches of this size; None uses all data at once.
        polish_steps: L-BFGS steps on the whole data afterwards, to the very mode (only where a batch holds all of it).
        compile: ``"auto"`` compiles the update where the forecast in ``meta["tier"]`` says that it costs less, as of
            short fits it does not; True and False are obeyed.

    Raises:
        TypeError, ValueError: naming the option.

    Returns, by ``fit``: a posterior of one draw, (1, 1, …); ``meta["gradient_norm"]`` says how far from the mode it is.

    Reference: `On the Pitfalls of Heteroscedastic Uncertainty Estimation (Seitzer et al., 2022)
    <https://arxiv.org/abs/2203.09168>`_, of the paths.

    Caveat: a point has no epistemic uncertainty. The mode depends on the parameterisation, and in many dimensions it
    is far from where the posterior mass lies.

    Example:
        >>> import pyro.distributions as dist, pyrobnn as pb, torch
        >>> with torch.random.fork_rng():
        ...     net = torch.nn.Linear(1, 1)
        >>> model = pb.BNN(net, pb.priors.IIDPrior(dist.Normal(0.0, 1.0)), pb.likelihoods.HomoskedasticGaussian(1.0))
        >>> x = torch.tensor([[-1.0], [1.0]])
        >>> posterior = pb.MAP(num_steps=200, compile=False).fit(model, x, 3 * x)
        >>> round(posterior.draws["net.weight"].item(), 4)  # ridge: 3 · 2 / (2 + 1)
        2.0
    """

    polish_steps: int = 200

    #: whether a search goes on below a saddle
    leaves_saddles: ClassVar[bool] = True
    kind: ClassVar[Kind] = "point"
    default_draws: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(
            "polish_steps",
            self.polish_steps,
            minimum=0,
        )

    @property
    def _refining_steps(self) -> int:
        return min(REFINING_STEPS, self.polish_steps)

    @property
    def _polishing_steps(self) -> int:
        return self.polish_steps

    def mode(self, problem: Problem, run: FitRun) -> Result:
        """The end of the search, at the very mode where a batch holds all of the data and nothing is dropped."""
        result = self._search(problem, self._start(problem, run), run)
        # the mode without the noise of a training is another
        is_noisy = problem.is_bnn and problem.density.stochastic is not None
        if not self._is_whole(problem) or is_noisy or result.interrupted:
            return result
        try:
            if "gradient_norm" not in result.path:  # else Search.best has polished it
                result = self._polished(problem, result)
            return self._below_saddle(problem, result)
        except KeyboardInterrupt:
            return replace(result, stopped="interrupt")

    def _polished(self, problem: Problem, result: Result) -> Result:
        """The end of a search at the mode that L-BFGS leads to."""
        theta, norm = polish(problem.density.log_joint, result.params, self.polish_steps)
        return replace(
            result,
            params=theta,
            path=result.path | {"gradient_norm": norm},
        )

    def _below_saddle(self, problem: Problem, result: Result) -> Result:
        """The end of a search of a small net below the saddle at which it stands; the end itself where it does not."""
        theta = result.params
        is_small = len(theta) <= MAX_COORDINATES and problem.num_rows <= _MANY_ROWS
        if not (self.leaves_saddles and self.polish_steps and problem.is_bnn and is_small):
            return result
        units = None
        # the units are taken row by row, which batch-norm layers that use the batch do not have
        if not training_norms(problem.bnn):
            units = Units.around(problem, theta.unsqueeze(0))
        if units is None:
            return result
        root = units.roots(theta.unsqueeze(0))[0].double()
        density = problem.in_double().density

        def loss(steps: Tensor) -> Tensor:
            return -density.log_joint(theta.double() + steps @ root, jacobian=False)

        start = torch.zeros_like(root[0])
        try:
            end, saddle = below_saddle(loss, start, self.num_steps, problem.num_rows)
        except RuntimeError:
            # no second derivative
            return result
        path = result.path | {"saddle": saddle._asdict()}
        if not saddle.gain:
            return replace(result, path=path)
        path.pop("gain_left", None)
        moved = theta + (end @ root).to(theta)
        return self._polished(problem, replace(result, params=moved, path=path))

    def _pays_for_look(self, problem: Problem, result: Result) -> bool:
        """Whether a look at what is left to gain, on all rows, is a small part of a search by mini-batches."""
        if self.batch_size is None or problem.loader is not None or problem.num_rows > _MANY_ROWS:
            return False
        dim = problem.density.dim
        look = NUM_LOOKS * relative_cost(problem.num_rows * dim)
        search = result.num_steps * relative_cost(self.batch_size * dim)
        return look <= _LOOK_SHARE * search

    def _fit(self, problem: Problem, run: FitRun) -> Posterior:
        density = problem.density
        with seeded(run.seed, problem.device):
            result = self.mode(problem, run)
            meta: dict[str, Any] = {}
            # a few gradients on all of the data, where they are to be had cheaply and without noise
            is_cheap = self._is_whole(problem) or self._pays_for_look(problem, result)
            try:
                if is_cheap and density.stochastic is None and not result.interrupted:
                    if "gain_left" in result.path:
                        gain = result.path["gain_left"]
                    else:
                        gain = gain_left(density.log_joint, result.params)
                    meta |= unfinished(gain, density.dim)
            except KeyboardInterrupt:
                result = replace(result, stopped="interrupt")
        return self._posterior(problem, result.params, run.seed, result, meta)


@register(
    "ensemble",
    quick={"num_steps": 500, "compile": False},
)
@dataclass(frozen=True)
class DeepEnsemble(Trained):
    r"""Deep ensemble: the same net trained from several random starts, all members in one batched update.

    .. math:: \hat\theta_m = \arg\max_\theta \; \log p(\theta) + \sum_n \log p(y_n \mid x_n, \theta)

    Where the scale of the noise is free, a search may take the function for noise (Seitzer et al., 2022). It then
    follows several paths: the plain one, and others that hold the noise small for the first half of their steps, one of
    them with noise in the weights too, which leads to broad modes. Every member keeps the end of the best evidence; one
    that ends ten nats below the best of all takes the best end that no other has. ``meta["noise_held"]`` and
    ``meta["path_gain"]``, one entry a member, are those of
    :class:`pyrobnn.MAP`, in nats of evidence.

    Args:
        num_members: number of nets M.

    With ``batch_size`` every member has batches of its own, in an order by its own seed; those of a DataLoader are
    shared by all members.

    The other arguments are those of :class:`pyrobnn.MAP`.

    Raises:
        TypeError, ValueError: naming the option.

    Returns, by ``fit``: a posterior with one draw a member, (1, num_members, …). ``init`` is refused: every member
    starts at a net initialised anew.

    Caveat: members are modes, not posterior draws: their spread is useful and has no guarantee; with few members the
    epistemic variance itself is noisy.

    Reference: `Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles (Lakshminarayanan et al.,
    2017) <https://arxiv.org/abs/1612.01474>`_; `On the Pitfalls of Heteroscedastic Uncertainty Estimation (Seitzer et
    al., 2022) <https://arxiv.org/abs/2203.09168>`_, of the paths.

    Example:
        >>> import pyro.distributions as dist, pyrobnn as pb, torch
        >>> with torch.random.fork_rng():
        ...     net = pb.networks.mlp(1, (8,))
        >>> model = pb.BNN(net, pb.priors.IIDPrior(dist.Normal(0.0, 1.0)), pb.likelihoods.HomoskedasticGaussian(0.1))
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> pb.DeepEnsemble(num_members=3, num_steps=50, compile=False).fit(model, x, x**2)
        Posterior(DeepEnsemble, 1 chains x 3 draws, 4 sites)
    """

    num_members: int = 5

    max_paths: ClassVar[int] = 3
    by_evidence: ClassVar[bool] = True
    smooths: ClassVar[bool] = True
    kind: ClassVar[Kind] = "independent"
    uses: ClassVar[tuple[str, ...]] = ("checkpoint",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("num_members", self.num_members)
        object.__setattr__(self, "default_draws", self.num_members)  # one a member

    def _fit(self, problem: Problem, run: FitRun) -> Posterior:
        if run.num_draws != self.num_members:
            raise ValueError(
                f"'num_draws' must be num_members={self.num_members}, got {run.num_draws}"
            )
        check_batched(problem.density.subsampled(), "DeepEnsemble")
        return super()._fit(problem, run)

    @property
    def _refining_steps(self) -> int:
        return REFINING_STEPS

    def _num_gradients(self, num_draws: int) -> int:
        return self.num_members * self.num_steps

    def _seeds(self, run: FitRun) -> list[int]:
        """Of each member."""
        return [run.seed * self.num_members + member for member in range(self.num_members)]

    def _start(self, problem: Problem, run: FitRun) -> Tensor:
        return starts_of(problem, self._seeds(run))

    def _own_rows(self, problem: Problem, run: FitRun) -> Batches[Tensor] | None:
        check_batch_size(problem, self.batch_size)
        if self.batch_size is None or self._is_whole(problem):
            return None
        # other numbers than those that a member starts with
        seeds = [_BATCHES + seed for seed in self._seeds(run)]
        return MemberRows(problem.num_rows, self.batch_size, problem.device, seeds)
