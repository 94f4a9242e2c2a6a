"""SWA and SWAG: the average of SGD's iterates, and the Gaussian through them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from pyrobnn.inference.fitting.problem import Problem
from pyrobnn.inference.fitting.sizes import Need, Sizes
from pyrobnn.inference.method import Claim, FitRun, Kind, Method, register
from pyrobnn.inference.nets.averaging import (
    AveragingRun,
    averaging_memory,
    check_averaging,
    prepare_averaging,
)
from pyrobnn.inference.nets.swag_moments import SWAGMoments
from pyrobnn.inference.optim.training import OptimizerFactory
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

    Returns, by ``fit``: a posterior of one draw; ``meta`` has num_collected and the lr. The rest is as of
    :class:`SWAG`.

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
    shares_rows: ClassVar[bool] = True
    default_draws: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_averaging(self)

    def _prepare(self, run: FitRun, device: str | torch.device | None) -> tuple[Problem, FitRun]:
        return prepare_averaging(self, run, device)

    def _fit(self, problem: Problem, run: FitRun) -> Posterior:
        sgd = AveragingRun(self, problem, run)
        with seeded(run.seed, problem.device):
            moments = SWAGMoments(sgd.latent_dim, diagonal=True, device=problem.device)
            result, points = sgd.train(moments, run.callbacks, run.progress)
            draws = sgd.layout(points).constrain(moments.mean.to(problem.density.dtype))
            draws = {name: value[None, None] for name, value in draws.items()}
            return sgd.posterior(draws, result, points, meta={"num_collected": moments.count})

    def memory(self, model: BNN, sizes: Sizes) -> Need:
        """Bytes that ``fit`` will take, as :meth:`SWAG.memory` without deviations."""
        return averaging_memory(sizes, 0)


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
    shares_rows: ClassVar[bool] = True
    has_density: ClassVar[bool] = True
    default_draws: ClassVar[int] = 100
    remedy: ClassVar[str] = (
        "The Gaussian misses the posterior: take SWAG as a heuristic, or run NUTS and compare."
    )

    def __post_init__(self) -> None:
        check_averaging(self)
        SWAGMoments(1, self.rank, diagonal=self.diagonal, scale=self.scale)  # its checks

    def _prepare(self, run: FitRun, device: str | torch.device | None) -> tuple[Problem, FitRun]:
        return prepare_averaging(self, run, device)

    def _fit(self, problem: Problem, run: FitRun) -> Posterior:
        sgd = AveragingRun(self, problem, run)
        with seeded(run.seed, problem.device):
            sgd.warn_about_rank(0 if self.diagonal else self.rank)
            moments = SWAGMoments(
                sgd.latent_dim,
                self.rank,
                diagonal=self.diagonal,
                scale=self.scale,
                device=problem.device,
            )
            result, points = sgd.train(moments, run.callbacks, run.progress)
            approximation = FlatApproximation(sgd.layout(points), *moments.family())
            draws = {name: value[None] for name, value in approximation.sample(run.num_draws).items()}
            if floored := moments.num_floored():
                problem.note(f"{floored} weights did not move and got the smallest variance")
            meta = {"num_collected": moments.count, "num_floored": floored}
            if not self.diagonal:
                meta["rank"] = moments.deviations.shape[1]
            return sgd.posterior(draws, result, points, meta=meta, approximation=approximation)

    def memory(self, model: BNN, sizes: Sizes) -> Need:
        """Bytes that ``fit`` will take: the optimiser's, the moments of the iterates, the Gaussian through them."""
        every = self.collect_every or max(1, sizes.num_data // sizes.batch)
        collected = max(2, int(self.num_steps * (1 - self.burn_in)) // every)
        return averaging_memory(sizes, 0 if self.diagonal else min(self.rank, collected))
