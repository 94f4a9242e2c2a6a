"""Maximum likelihood: ordinary training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pyrobnn.density import Density
from pyrobnn.inference.fitting.problem import Callback, prepare
from pyrobnn.inference.fitting.sizes import Need, Sizes
from pyrobnn.inference.method import Claim, Kind, Method, check_call, register
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
        """Maximise the likelihood.

        Args:
            model: a BNN, or a plain Pyro program ``fn(x, y)``.
            x, y: the data, or ``x`` a DataLoader.
            num_draws: 1, if given: a point estimate has one draw.
            seed: of mini-batches and of starting values that the net does not give.
            init: where to start: an earlier posterior or a trained net; default the model's own net.
            device: where to compute; default where ``x`` is.
            until_ess, checkpoint, stream_to: of :meth:`pyrobnn.NUTS.fit`; refused here.
            callbacks: ``callback(step, metrics)``; True stops.
            progress: show a bar.

        Returns:
            A posterior of one draw, (1, 1, …).

        Raises:
            FloatingPointError: the loss diverged.
        """
        check_call(
            self, num_draws, seed, init=init, until_ess=until_ess, checkpoint=checkpoint, stream_to=stream_to
        )
        problem = prepare(model, x, y, points="free", device=device, stream=True)

        def log_likelihood(density: Density, theta: Tensor, *batch: Tensor) -> Tensor:
            return density.log_parts(theta, *batch)[1]

        with seeded(seed, problem.device):
            result = find_point(
                self, problem, log_likelihood, init, seed=seed, callbacks=callbacks, progress=progress
            )
        return point_posterior(self, problem, result.params, seed=seed, timings=result.timings, result=result)

    def memory(self, model: BNN, sizes: Sizes) -> Need:
        """Bytes that ``fit`` will take: the optimiser's."""
        return sizes.optimisation()

    def work(self, sizes: Sizes) -> float:
        """Gradients of one datum that ``fit`` takes."""
        return self.num_steps * sizes.batch
