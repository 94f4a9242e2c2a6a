"""Deep ensembles: several nets, trained together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from pyrobnn.checks import check_choice, check_count
from pyrobnn.inference.fitting.problem import Problem
from pyrobnn.inference.fitting.program import check_batched
from pyrobnn.inference.fitting.sizes import Need, Sizes
from pyrobnn.inference.method import Claim, FitRun, Kind, Method, register
from pyrobnn.inference.optim.minimize import OptimizerFactory
from pyrobnn.inference.optim.point import (
    check_point_options,
    objective_of,
    optimize_points,
    point_posterior,
)
from pyrobnn.model import BNN
from pyrobnn.posterior import Posterior
from pyrobnn.seeding import seeded


@register("ensemble", standard=True, quick={"num_steps": 500, "compile": False})
@dataclass(frozen=True)
class DeepEnsemble(Method):
    r"""Deep ensemble: the same net trained from several random starts, all members in one batched update.

    .. math:: \hat\theta_m = \arg\max_\theta \; \log p(\theta) + \sum_n \log p(y_n \mid x_n, \theta)

    Args:
        num_members: number of nets M.
        objective: ``"map"`` keeps the prior (regularised members), ``"mle"`` drops it.

    The other arguments are those of :class:`pyrobnn.MAP`.

    Raises:
        TypeError, ValueError: naming the option.

    Returns, by ``fit``: a posterior with one draw a member, (1, num_members, …). ``init`` is refused: every member
    starts at a net initialised anew.

    Caveat: members are modes, not posterior draws: their spread is useful and has no guarantee; with few members the
    epistemic variance itself is noisy.

    Reference: `Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles (Lakshminarayanan et al.,
    2017) <https://arxiv.org/abs/1612.01474>`_.

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
    objective: Literal["map", "mle"] = "map"
    num_steps: int = 2000
    lr: float = 1e-2
    optimizer: str | OptimizerFactory = "adam"
    lr_schedule: str | Callable[..., Any] | None = "cosine"
    batch_size: int | None = None
    clip_norm: float | None = None
    patience: int | None = None
    compile: bool = True

    kind: ClassVar[Kind] = "independent"
    claim: ClassVar[Claim] = "none"
    uses: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_point_options(self)
        check_count("num_members", self.num_members)
        check_choice("objective", self.objective, ("map", "mle"))

    @property
    def default_draws(self) -> int:  # type: ignore[override]  # of the instance, not of the class
        """One draw a member."""
        return self.num_members

    def _fit(self, problem: Problem, run: FitRun) -> Posterior:
        if run.num_draws != self.num_members:
            raise ValueError(
                f"'num_draws' must be num_members={self.num_members}, got {run.num_draws}: set num_members"
            )
        check_batched(problem.density.subsampled(), "DeepEnsemble")
        start = torch.stack([problem.density.initial(*member) for member in self._starts(problem, run.seed)])
        density, num_rows = objective_of(self, problem, start)
        # each member draws a subsample of its own
        randomness = "error" if density.stochastic is None else "different"

        def loss(theta: Tensor, *batch: Tensor) -> Tensor:
            prior, likelihood = density.log_parts(theta, *batch)
            return -(likelihood + prior if self.objective == "map" else likelihood) / num_rows[0]

        def losses(thetas: Tensor, *batch: Tensor) -> Tensor:
            in_dims = (0, *(None for _ in batch))
            return torch.func.vmap(loss, in_dims=in_dims, randomness=randomness)(thetas, *batch)

        with seeded(run.seed, problem.device):
            result = optimize_points(self, problem, losses, start, run)
        return point_posterior(self, problem, result.params, run.seed, result)

    def memory(self, model: BNN, sizes: Sizes) -> Need:
        """Bytes that ``fit`` will take: the optimiser's, of all members at once."""
        return sizes.optimisation(self.num_members)

    def _starts(self, problem: Problem, seed: int) -> Iterator[tuple[dict[str, Tensor], int]]:
        """Values and seed of each member's start: a net initialised anew; prior medians for a plain program."""
        for member in range(self.num_members):
            own = seed * self.num_members + member
            yield (problem.bnn.reinitialized(own).initial_values() if problem.is_bnn else {}), own
