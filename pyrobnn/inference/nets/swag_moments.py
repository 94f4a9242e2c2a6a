"""The Gaussian through SGD iterates: its moments, and a Pyro guide that collects them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pyro
import torch
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.infer.autoguide import AutoContinuous
from torch import Tensor
from torch.distributions import biject_to

from pyrobnn.core.checks import Refused, check_count, check_number
from pyrobnn.core.seeding import seeded
from pyrobnn.density.nodes import Node
from pyrobnn.posterior.approximation import FAMILIES

#: smallest variance of a weight, relative to the median one: a density needs a positive one
FLOOR = 1e-8


class SWAGMoments:
    r"""Running moments of iterates :math:`\theta_1, \theta_2, \dots` (dim,), in float64.

    .. math:: \bar\theta_i = \bar\theta_{i-1} + \frac{\theta_i - \bar\theta_{i-1}}{i}, \qquad
        D_i = \theta_i - \bar\theta_i, \qquad \Sigma = \frac{s^2}{2} \Big( \Sigma_{diag} + \frac{D D^\top}{K - 1} \Big)

    :math:`\Sigma_{diag}` is the variance of the iterates (Welford's recursion) and D holds the last ``rank``
    deviations; K counts those collected. With ``diagonal`` the covariance is :math:`s^2 \Sigma_{diag}`.

    Args:
        dim: length of an iterate.
        rank: largest number of columns K, at least 2 (unused with ``diagonal``).
        diagonal: no low-rank part.
        scale: s, multiplies the standard deviations.
        device: where the moments are.

    Raises:
        ValueError: rank below 2 or a scale that is not positive.
    """

    def __init__(
        self,
        dim: int,
        rank: int = 20,
        *,
        diagonal: bool = False,
        scale: float = 1.0,
        device: torch.device | None = None,
    ):
        check_count("rank", rank, minimum=2)
        check_number("scale", scale, above=0)
        self.rank, self.diagonal, self.scale = rank, diagonal, scale
        self.count = 0
        self.mean = torch.zeros(dim, dtype=torch.float64, device=device)
        self._squares = torch.zeros_like(self.mean)
        self._columns: list[Tensor] = []

    def update(self, theta: Tensor) -> None:
        """Take in one iterate (dim,)."""
        theta, count = theta.detach().double(), self.count + 1
        before = theta - self.mean
        mean = self.mean + before / count
        after = theta - mean
        squares = self._squares + before * after
        columns = [] if self.diagonal else [*self._columns, after][-self.rank :]
        # all at once: an interrupt leaves whole moments
        self.count, self.mean, self._squares, self._columns = count, mean, squares, columns

    @property
    def variance(self) -> Tensor:
        """Variance of the iterates (dim,), divided by their number."""
        return self._squares / max(self.count, 1)

    @property
    def deviations(self) -> Tensor:
        """D (dim, K), oldest first."""
        return torch.stack(self._columns, 1)

    def num_floored(self) -> int:
        """How many weights did not move and are given the smallest variance."""
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
        if self.diagonal:
            return "normal", {"loc": self.mean, "scale": variance.sqrt()}
        factor = self.deviations * (self.scale / (2.0 * (len(self._columns) - 1)) ** 0.5)
        return "low_rank", {"loc": self.mean, "cov_factor": factor, "cov_diag": variance / 2}

    def _floor(self) -> Tensor:
        moving = self.variance[self.variance > 0]
        return FLOOR * (moving.median() if len(moving) else self.variance.new_zeros(()))


class AutoSWAG(AutoContinuous):
    r"""A Pyro guide: the SWAG Gaussian over the unconstrained latent sites of a program.

    .. math:: q(\theta) = N\big(\bar\theta,\ \tfrac{s^2}{2} (\Sigma_{diag} + D D^\top / (K - 1)) \big)

    It has no parameters to train. Whatever optimiser moves the weights, hand its iterates to :meth:`collect`; from the
    second on the guide can be sampled, by itself or in ``pyro.infer.Predictive(model, guide=guide, num_samples=…)``.

    Args:
        model: a Pyro program with continuous latent sites.
        rank: largest number K of deviations kept, at least 2.
        diagonal: :math:`s^2 \Sigma_{diag}` alone.
        scale: s, multiplies the standard deviations.

    Raises:
        ValueError: rank or scale out of range; sampling before two iterates were collected.

    Caveat: the width is that of SGD's wandering, which depends on its learning rate, not of the posterior.

    Reference: `A Simple Baseline for Bayesian Uncertainty in Deep Learning (Maddox et al., 2019)
    <https://arxiv.org/abs/1902.02476>`_.

    Example:
        >>> import pyro.distributions as dist
        >>> guide = AutoSWAG(lambda: pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1)), rank=2)
        >>> for value in (0.0, 1.0, 2.0):
        ...     guide.collect({"z": torch.tensor([value, -value])})
        >>> guide.get_posterior().mean
        tensor([ 1., -1.], dtype=torch.float64)
    """

    def __init__(self, model: Any, rank: int = 20, *, diagonal: bool = False, scale: float = 1.0):
        super().__init__(model)
        # one of its kind checks the options now; the dimension is known at the first iterate
        self._of_dim = partial(SWAGMoments, rank=rank, diagonal=diagonal, scale=scale)
        self._of_dim(1)
        self.moments: SWAGMoments | None = None

    def collect(self, values: Mapping[str, Tensor], *args: Any) -> None:
        r"""Take in one iterate.

        Args:
            values: constrained value of every latent site.
            args: arguments of the program; needed once, with the first iterate.

        Raises:
            ValueError: a site is missing.
        """
        if self.prototype_trace is None:
            with seeded(0):
                self._setup_prototype(*args)
        theta = self._flatten(values)
        if self.moments is None:
            self.moments = self._of_dim(self.latent_dim, device=theta.device)
        self.moments.update(theta)

    def get_posterior(self, *args: Any, **kwargs: Any) -> TorchDistribution:
        """The Gaussian over the flat unconstrained vector (dim,), in float64."""
        if self.moments is None:
            raise ValueError("AutoSWAG has collected no iterate: call guide.collect(values) while training")
        name, state = self.moments.family()
        return FAMILIES[name](state)

    def sample_latent(self, *args: Any, **kwargs: Any) -> Tensor:
        """One flat unconstrained draw (dim,), in the program's own precision."""
        latent = pyro.sample(f"_{self._pyro_name}_latent", self.get_posterior(), infer={"is_auxiliary": True})
        return latent.to(next(iter(self._sites().values()))["value"].dtype)

    def log_prob(self, values: Mapping[str, Tensor]) -> Tensor:
        r"""log q of constrained draws (\*batch, \*shape) with respect to the constrained sites; (\*batch,)."""
        flat = self._flatten(values)
        total = self.get_posterior().log_prob(flat.double())
        for name, site in self._sites().items():
            transform = biject_to(site["fn"].support)
            value = values[name]
            term = transform.log_abs_det_jacobian(transform.inv(value), value).double()
            total = total - term.reshape(*flat.shape[:-1], -1).sum(-1)
        return total

    def _loc_scale(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        posterior = self.get_posterior()
        return posterior.mean, posterior.stddev

    def _sites(self) -> dict[str, Node]:
        """The latent sites of the program's first run."""
        return {} if self.prototype_trace is None else dict(self.prototype_trace.iter_stochastic_nodes())

    def _flatten(self, values: Mapping[str, Tensor]) -> Tensor:
        parts = []
        for name, site in self._sites().items():
            if name not in values:
                raise ValueError(f"the site {name!r} is missing; given: {', '.join(values)}")
            value = values[name]
            batch = value.shape[: value.dim() - site["value"].dim()]
            parts.append(biject_to(site["fn"].support).inv(value).reshape(*batch, -1))
        return torch.cat(parts, -1)
