"""The Gaussian through SGD iterates: its moments."""

from __future__ import annotations

import torch
from torch import Tensor

from pyrobnn.core.checks import Refused, check_count, check_number

#: smallest variance of a weight, relative to the median one: a density needs a positive one
FLOOR = 1e-8


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

    Raises:
        ValueError: a rank of one or a scale that is not positive.
    """

    def __init__(
        self,
        dim: int,
        rank: int = 20,
        scale: float = 1.0,
        *,
        latent: int | None = None,
        device: torch.device | None = None,
    ):
        if rank != 0:
            check_count("rank", rank, minimum=2)
        check_number("scale", scale, above=0)
        self.rank, self.scale, self.latent = rank, scale, dim if latent is None else latent
        self.count = 0
        self.mean = torch.zeros(dim, dtype=torch.float64, device=device)
        self._squares = torch.zeros_like(self.mean[: self.latent])
        self._columns: list[Tensor] = []

    def update(self, theta: Tensor) -> None:
        """Take in one iterate (dim,)."""
        theta, count = theta.detach().double(), self.count + 1
        before = theta - self.mean
        mean = self.mean + before / count
        before, after = before[: self.latent], (theta - mean)[: self.latent]
        squares = self._squares + before * after
        columns = [*self._columns, after][-self.rank :] if self.rank else []
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
        loc = self.mean[: self.latent]
        if not self.rank:
            return "normal", {"loc": loc, "scale": variance.sqrt()}
        factor = self.deviations * (self.scale / (2.0 * (len(self._columns) - 1)) ** 0.5)
        return "low_rank", {"loc": loc, "cov_factor": factor, "cov_diag": variance / 2}

    def _floor(self) -> Tensor:
        moving = self.variance[self.variance > 0]
        return FLOOR * (moving.median() if len(moving) else self.variance.new_zeros(()))
