"""From the real line to the positive definite matrices, as of a Wishart prior."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.transforms import Transform


class FromCholesky(Transform):
    r"""The matrix of a Cholesky factor whose lower triangle is a vector, its diagonal by logs.

    .. math:: S = L L^T, \qquad
        \log \left| \det \frac{\partial S}{\partial u} \right| = d \log 2 + \sum_{i=1}^d (d - i + 2) u_{ii}

    Vectors (\*batch, d(d + 1)/2), matrices (\*batch, d, d). As Stan transforms a covariance matrix; torch knows no
    Jacobian of its own transform.
    """

    domain = constraints.real_vector
    codomain = constraints.positive_definite
    bijective = True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FromCholesky)

    def __hash__(self) -> int:
        return hash(FromCholesky)

    def forward_shape(self, shape: torch.Size) -> torch.Size:
        size = _side(shape[-1])
        return torch.Size([*shape[:-1], size, size])

    def inverse_shape(self, shape: torch.Size) -> torch.Size:
        size = shape[-1]
        return torch.Size([*shape[:-2], size * (size + 1) // 2])

    def _call(self, x: Tensor) -> Tensor:
        factor = self._factor(x)
        return factor @ factor.mT

    def _inverse(self, y: Tensor) -> Tensor:
        factor = torch.linalg.cholesky(y)
        rows, columns = torch.tril_indices(
            y.shape[-1],
            y.shape[-1],
            device=y.device,
        )
        logs = factor.tril(-1) + factor.diagonal(dim1=-2, dim2=-1).log().diag_embed()
        return logs[..., rows, columns]

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        size = y.shape[-1]
        powers = torch.arange(size + 1, 1, -1).to(x)
        logs = self._triangle(x).diagonal(dim1=-2, dim2=-1)
        return (logs * powers).sum(-1) + size * math.log(2.0)

    def _factor(self, x: Tensor) -> Tensor:
        """The Cholesky factor."""
        triangle = self._triangle(x)
        return triangle.tril(-1) + triangle.diagonal(dim1=-2, dim2=-1).exp().diag_embed()

    def _triangle(self, x: Tensor) -> Tensor:
        """The vector as a lower triangle; above it, whatever."""
        size = _side(x.shape[-1])
        rows = torch.arange(size, device=x.device)
        place = rows[:, None] * (rows[:, None] + 1) // 2 + rows.clamp(max=rows[:, None])
        return x[..., place]


def _side(length: int) -> int:
    """The side of a matrix whose lower triangle has that many entries."""
    return (math.isqrt(8 * length + 1) - 1) // 2
