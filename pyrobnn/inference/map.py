"""Maximum a posteriori: the mode of the posterior."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from pyrobnn.checks import check_count
from pyrobnn.density import Density
from pyrobnn.inference.fitting.problem import Problem
from pyrobnn.inference.fitting.sizes import Need, Sizes
from pyrobnn.inference.method import Claim, FitRun, Kind, Method, register
from pyrobnn.inference.optim.minimize import OptimizerFactory
from pyrobnn.inference.optim.point import check_point_options, find_point, gain_left, point_posterior, polish
from pyrobnn.inference.optim.unfinished import unfinished
from pyrobnn.model import BNN
from pyrobnn.posterior import Posterior
from pyrobnn.seeding import seeded

#: rows of which a fit by mini-batches looks at all together in the end
_WHOLE = 5000


@register("map", standard=True, quick={"num_steps": 500, "compile": False})
@dataclass(frozen=True)
class MAP(Method):
    r"""Maximum a posteriori: one set of parameters, the mode of the joint density over the constrained sites.

    .. math:: \hat\theta = \arg\max_\theta \; \log p(\theta) + \sum_n \log p(y_n \mid x_n, \theta)

    Args:
        num_steps: updates of the optimiser.
        lr: its peak learning rate.
        optimizer: ``"adam"`` or a function of the parameter list that returns a torch optimizer.
        lr_schedule: None, ``"cosine"``, ``"hold_cosine"``, ``"one_cycle"``, a function step → factor, or a torch
            ``LRScheduler`` class.
        batch_size: mini-batches of this size; None uses all data at once.
        clip_norm: rescale gradients to at most this norm.
        patience: stop when the mean loss of this many steps no longer falls.
        polish_steps: L-BFGS steps on the whole data afterwards, to the very mode (only where a batch holds all of it).
        compile: compile the update; False gives the same numbers slower.

    Raises:
        TypeError, ValueError: naming the option.

    Returns, by ``fit``: a posterior of one draw, (1, 1, …); ``meta["gradient_norm"]`` says how far from the mode it is.

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

    num_steps: int = 2000
    lr: float = 1e-2
    optimizer: str | OptimizerFactory = "adam"
    lr_schedule: str | Callable[..., Any] | None = "cosine"
    batch_size: int | None = None
    clip_norm: float | None = None
    patience: int | None = None
    polish_steps: int = 200
    compile: bool = True

    kind: ClassVar[Kind] = "point"
    claim: ClassVar[Claim] = "none"
    shares_rows: ClassVar[bool] = True
    default_draws: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_point_options(self)
        check_count("polish_steps", self.polish_steps, minimum=0)

    def _fit(self, problem: Problem, run: FitRun) -> Posterior:
        density = problem.density

        def log_joint(noisy: Density, theta: Tensor, *batch: Tensor) -> Tensor:
            return noisy.log_joint(theta, *batch, jacobian=False)

        with seeded(run.seed, problem.device):
            result = find_point(self, problem, log_joint, run)
            theta, meta, notes = result.params, {}, []
            if self._whole(problem.loader is None, problem.num_rows) and not result.interrupted:
                try:
                    theta, meta["gradient_norm"] = polish(density.log_joint, theta, self.polish_steps)
                except KeyboardInterrupt:
                    result = replace(result, stopped="interrupt")
                if density.stochastic is not None and self.polish_steps == 0 and not result.interrupted:
                    notes.append(
                        f"the plate {density.stochastic!r} draws a subsample, so this point is where noisy steps ended "
                        f"and not the mode of all data (gradient norm {meta['gradient_norm']:.3g} "
                        "there): leave polish_steps at 200"
                    )
            if self._sees_all(problem) and not result.interrupted:
                try:
                    meta |= unfinished(gain_left(density.log_joint, theta), density.dim)
                except KeyboardInterrupt:
                    result = replace(result, stopped="interrupt")
        return point_posterior(self, problem, theta, run.seed, result, meta=meta, notes=notes)

    def _sees_all(self, problem: Problem) -> bool:
        """Whether a few gradients on all of the data are to be had, cheaply and without noise."""
        few = problem.num_rows <= _WHOLE
        whole = self._whole(problem.loader is None, problem.num_rows) or (problem.loader is None and few)
        return whole and problem.density.stochastic is None

    def _whole(self, in_memory: bool, num_rows: int) -> bool:
        """Whether every step sees all of the data: a batch that holds all rows is one by another name."""
        return in_memory and (self.batch_size is None or self.batch_size >= num_rows)

    def memory(self, model: BNN, sizes: Sizes) -> Need:
        """Bytes that ``fit`` will take: the optimiser's."""
        return sizes.optimisation()
