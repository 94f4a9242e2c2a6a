"""The Gaussian guides as arithmetic on one flat parameter vector: draw, log density, moments, entropy.

Every family lives in the unconstrained space of a :class:`pyrobnn.Density`'s latent sites, and is a few tensor
operations, so that it disappears into the compiled step. ``pyro_guides`` wraps Pyro's own guides the same way.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pyrobnn.inference.fitting.rng import Noise
from pyrobnn.inference.fitting.sizes import require
from pyrobnn.model import Density
from pyrobnn.posterior.approximation import Approximation, FlatApproximation

_LOG_2PI = math.log(2 * math.pi)
#: low-rank columns relative to the scales: their size at the start, and an optimiser's step of them. Collinear weights
#: need columns many times the scale, which a step of one takes too long to reach.
_COLUMN_START, _COLUMN_STEP = 0.2, 2.0


class Moments(NamedTuple):
    """Mean and marginal variance (dim,) of a Gaussian family, and its entropy () in nats."""

    mean: Tensor
    var: Tensor
    entropy: Tensor


class Draw(NamedTuple):
    """One draw ``z`` (dim,) of a guide, its log density (), and moments of the family where they have a closed form.

    ``score`` is the gradient of log q with respect to ``z`` (dim,), a constant; None where it is not known.
    """

    z: Tensor
    log_q: Tensor
    moments: Moments | None
    score: Tensor | None


class Family(Protocol):
    """What the ELBO asks of a guide; ``phi`` is its flat parameter vector."""

    size: int
    #: whether the coordinates are independent, so that a closed form may condition on the other sites
    factorized: bool

    def initial(self) -> Tensor:
        """Where the optimisation starts, (size,)."""

    def draw(self, phi: Tensor, noise: Noise) -> Draw:
        """One reparameterised draw."""

    def approximation(self, phi: Tensor, layout: Density) -> Approximation:
        """The fitted guide as an approximation over the latent sites of ``layout``."""


class _Normal:
    """Normals whose parameters begin with the means ``loc`` and softplus⁻¹ of the standard deviations."""

    factorized = False

    def __init__(self, loc: Tensor, init_scale: float, num_further: int):
        self.loc, self.init_scale, self.dim = loc, init_scale, len(loc)
        self.size = 2 * self.dim + num_further

    def initial(self) -> Tensor:
        rest = self.loc.new_zeros(self.size - 2 * self.dim)
        return torch.cat([self.loc, raw_scale(self.loc, self.init_scale), rest])

    def parts(self, phi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Means and standard deviations, both (dim,), and the further parameters."""
        loc, raw, rest = phi.split([self.dim, self.dim, self.size - 2 * self.dim])
        return loc, F.softplus(raw), rest


class MeanField(_Normal):
    r"""Independent normals, :math:`z_i = \mu_i + \sigma_i \epsilon_i`.

    ``max_scale`` is a cap on the standard deviations, or None.

    Caveat: it matches conditional, not marginal, variances: they are underestimated where weights correlate.
    """

    factorized = True

    def __init__(self, loc: Tensor, init_scale: float, max_scale: float | None = None):
        super().__init__(loc, init_scale, 0)
        self.max_scale = max_scale

    def initial(self) -> Tensor:
        if self.max_scale is None:
            return super().initial()
        share = self.init_scale / self.max_scale
        return torch.cat([self.loc, torch.full_like(self.loc, math.log(share / (1 - share)))])

    def loc_scale(self, phi: Tensor) -> tuple[Tensor, Tensor]:
        """Means and standard deviations, both (dim,)."""
        if self.max_scale is None:
            return self.parts(phi)[:2]
        # a sigmoid and not a clamp: a scale that has reached the cap can still come back
        return phi[: self.dim], self.max_scale * torch.sigmoid(phi[self.dim :])

    def draw(self, phi: Tensor, noise: Noise) -> Draw:
        loc, scale = self.loc_scale(phi)
        epsilon = noise.normal(loc)
        half_log_det = scale.log().sum(dtype=torch.float64)
        moments = Moments(loc, scale.square(), _entropy(half_log_det, self.dim))
        return Draw(loc + scale * epsilon, _log_q(epsilon, half_log_det), moments, -(epsilon / scale).detach())

    def approximation(self, phi: Tensor, layout: Density) -> FlatApproximation:
        loc, scale = self.loc_scale(phi)
        return FlatApproximation(layout, "normal", {"loc": loc, "scale": scale})


class FullRank(_Normal):
    r"""A normal with any covariance, :math:`z = \mu + \sigma \odot (I + C / \sqrt{n}) \epsilon`, C strictly lower.

    Raises:
        ValueError: the covariance factor would not fit in memory.
    """

    def __init__(self, loc: Tensor, init_scale: float):
        super().__init__(loc, init_scale, len(loc) * (len(loc) - 1) // 2)
        # the optimiser's copies of the matrix, and those of a step
        needed = 11 * (self.dim + 1) * self.dim * loc.element_size()
        what = f"guide='full_rank' of {self.dim} weights"
        require(needed, loc.device, what, "use guide='low_rank' or 'mean_field'")
        row, column = torch.tril_indices(self.dim, self.dim, -1, device=loc.device)
        # where each entry of the matrix is read from: the strict lower triangle, else a slot that is masked
        self._source = torch.zeros(self.dim, self.dim, dtype=torch.long, device=loc.device)
        self._source[row, column] = torch.arange(len(row), device=loc.device)
        # Adam moves every parameter by lr, and so a row of n of them by √n lr: divided by √n, a row moves like a scale.
        # Without it the noise of many small entries makes a factor whose inverse grows exponentially with n.
        unit = torch.full((self.dim, self.dim), 1 / math.sqrt(self.dim), dtype=loc.dtype, device=loc.device)
        self._lower = unit.tril(-1)
        self._eye = torch.eye(self.dim, dtype=loc.dtype, device=loc.device)

    def factor(self, phi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Means (dim,), diagonal (dim,) and Cholesky factor (dim, dim)."""
        loc, scale, rest = self.parts(phi)
        if self.dim == 1:
            return loc, scale, scale[:, None]  # no lower triangle to read from
        tril = scale[:, None] * (self._eye + rest[self._source] * self._lower)
        return loc, scale, tril

    def draw(self, phi: Tensor, noise: Noise) -> Draw:
        loc, scale, tril = self.factor(phi)
        epsilon = noise.normal(loc)
        half_log_det = scale.log().sum(dtype=torch.float64)
        moments = Moments(loc, tril.square().sum(1), _entropy(half_log_det, self.dim))
        fixed = tril.detach()
        score = -torch.linalg.solve_triangular(fixed.T, epsilon[:, None], upper=True)[:, 0]
        return Draw(loc + tril @ epsilon, _log_q(epsilon, half_log_det), moments, score)

    def approximation(self, phi: Tensor, layout: Density) -> FlatApproximation:
        loc, _, tril = self.factor(phi)
        # log q solves with the factor: float64
        state = {"loc": loc.double(), "scale_tril": tril.double()}
        return FlatApproximation(layout, "full_rank", state)


class LowRank(_Normal):
    r"""A normal of diagonal plus low-rank covariance, :math:`z = \mu + \sigma \odot (\epsilon + V \epsilon')`.

    ``rank`` is the number of columns of V; ``seed`` is of its small random start, without which its gradient vanishes.
    """

    def __init__(self, loc: Tensor, init_scale: float, rank: int, seed: int):
        self.seed, self.rank = seed, min(rank, len(loc))
        super().__init__(loc, init_scale, len(loc) * self.rank)

    def initial(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        columns = torch.randn(self.dim * self.rank, generator=generator, dtype=torch.float64).to(self.loc)
        return torch.cat([super().initial()[: 2 * self.dim], columns * (_COLUMN_START / _COLUMN_STEP)])

    def factors(self, phi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Means (dim,), diagonal standard deviations (dim,) and columns (dim, rank)."""
        loc, scale, columns = self.parts(phi)
        # in units of the scale, which an optimiser's step of lr would dwarf where weights are well determined
        return loc, scale, scale[:, None] * columns.reshape(self.dim, self.rank) * _COLUMN_STEP

    def draw(self, phi: Tensor, noise: Noise) -> Draw:
        loc, scale, columns = self.factors(phi)
        offset = columns @ noise.normal(columns[0]) + scale * noise.normal(loc)
        # Woodbury: determinant and quadratic form through the (rank, rank) capacitance
        whitened, u = columns / scale[:, None], offset / scale
        eye = torch.eye(self.rank, dtype=loc.dtype, device=loc.device)
        # a fit that diverges is told by its loss: NaN here, where cholesky would raise an error of its own
        chol, failed = torch.linalg.cholesky_ex(eye + whitened.T @ whitened)
        chol = torch.where(failed > 0, torch.nan, chol)
        inner = torch.linalg.solve_triangular(chol, (whitened.T @ u)[:, None], upper=False)
        half_log_det = scale.log().sum(dtype=torch.float64) + chol.diagonal().log().sum(dtype=torch.float64)
        quadratic = u.square().sum(dtype=torch.float64) - inner.square().sum(dtype=torch.float64)
        log_q = -0.5 * quadratic - half_log_det - 0.5 * self.dim * _LOG_2PI
        var = scale.square() + columns.square().sum(1)
        explained = whitened @ torch.linalg.solve_triangular(chol.T, inner, upper=True)[:, 0]
        score = -((u - explained) / scale).detach()
        return Draw(loc + offset, log_q, Moments(loc, var, _entropy(half_log_det, self.dim)), score)

    def approximation(self, phi: Tensor, layout: Density) -> FlatApproximation:
        loc, scale, columns = self.factors(phi)
        state = {"loc": loc, "cov_factor": columns, "cov_diag": scale.square()}
        # LowRankMultivariateNormal inverts the capacitance: float64
        return FlatApproximation(layout, "low_rank", {name: value.double() for name, value in state.items()})


def base_distribution(fn: Any) -> Any:
    """The distribution of one scalar, of a distribution of independent ones."""
    while isinstance(fn, torch.distributions.Independent):
        fn = fn.base_dist
    return fn


def raw_scale(loc: Tensor, scale: float) -> Tensor:
    """What softplus makes ``scale`` of, for every coordinate of ``loc``."""
    return torch.full_like(loc, math.log(math.expm1(scale)))


def _log_q(noise: Tensor, half_log_det: Tensor) -> Tensor:
    return -0.5 * noise.square().sum(dtype=torch.float64) - half_log_det - 0.5 * len(noise) * _LOG_2PI


def _entropy(half_log_det: Tensor, dim: int) -> Tensor:
    return half_log_det + 0.5 * dim * (1 + _LOG_2PI)
