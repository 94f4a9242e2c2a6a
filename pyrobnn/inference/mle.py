"""Maximum likelihood: ordinary training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from pyrobnn.density import Density
from pyrobnn.inference.fitting.problem import Problem
from pyrobnn.inference.fitting.sizes import Need, Sizes
from pyrobnn.inference.method import Claim, FitRun, Kind, Method, register
from pyrobnn.inference.optim.minimize import OptimizerFactory
from pyrobnn.inference.optim.point import check_point_options, find_point, point_posterior
from pyrobnn.model import BNN
from pyrobnn.posterior import Posterior
from pyrobnn.seeding import seeded


@register("mle", quick={"num_steps": 500, "compile": False})
@dataclass(frozen=True)
class MLE(Method):
    r"""Maximum likelihood: ordinary training, the prior left out.

    .. math:: \hat\theta = \arg\max_\theta \; \sum_n \log p(y_n \mid x_n, \theta)

    Args: as :class:`pyrobnn.MAP`, without polishing.

    Raises:
        TypeError, ValueError: naming the option.

    Returns, by ``fit``: a posterior of one draw, (1, 1, …), whose callbacks are told the loss.

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

    num_steps: int = 2000
    lr: float = 1e-2
    optimizer: str | OptimizerFactory = "adam"
    lr_schedule: str | Callable[..., Any] | None = "cosine"
    batch_size: int | None = None
    clip_norm: float | None = None
    patience: int | None = None
    compile: bool = True

    kind: ClassVar[Kind] = "point"
    claim: ClassVar[Claim] = "none"
    shares_rows: ClassVar[bool] = True
    default_draws: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_point_options(self)

    def _fit(self, problem: Problem, run: FitRun) -> Posterior:
        def log_likelihood(density: Density, theta: Tensor, *batch: Tensor) -> Tensor:
            return density.log_parts(theta, *batch)[1]

        with seeded(run.seed, problem.device):
            result = find_point(self, problem, log_likelihood, run)
        return point_posterior(self, problem, result.params, run.seed, result)

    def memory(self, model: BNN, sizes: Sizes) -> Need:
        """Bytes that ``fit`` will take: the optimiser's."""
        return sizes.optimisation()
