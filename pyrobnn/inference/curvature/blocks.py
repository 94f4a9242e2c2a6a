"""Gaussians by their precision, one class per structure: sample, log determinant, quadratic form, covariance of rows.

All are zero-mean over p coordinates; ``root(rows)`` gives R with R Rᵀ = rows Λ⁻¹ rowsᵀ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from pyrobnn.inference.curvature.layers import Factors


class Block(Protocol):
    """A zero-mean Gaussian over the coordinates ``index`` (p,) of the flat vector, by its precision Λ."""

    kind: ClassVar[str]

    @property
    def index(self) -> Tensor:
        """Coordinates (p,) in the flat vector."""

    def log_det(self) -> Tensor:
        """log det Λ, scalar."""

    def sample(self, noise: Tensor) -> Tensor:
        """Draws (S, p) from standard normal ``noise`` (S, p)."""

    def quad(self, delta: Tensor) -> Tensor:
        """δᵀ Λ δ for δ (\\*batch, p); (\\*batch,)."""

    def root(self, rows: Tensor) -> Tensor:
        """Square root (M, r) of the covariance of ``rows`` (M, p)."""


@dataclass(frozen=True, eq=False)
class DenseBlock:
    """Λ = L Lᵀ with ``prec_tril`` L (p, p)."""

    kind: ClassVar[str] = "dense"
    index: Tensor
    prec_tril: Tensor

    def log_det(self) -> Tensor:
        return 2 * self.prec_tril.diagonal().log().sum()

    def sample(self, noise: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.prec_tril.T, noise.to(self.prec_tril).T, upper=True).T

    def quad(self, delta: Tensor) -> Tensor:
        return (delta.to(self.prec_tril) @ self.prec_tril).square().sum(-1)

    def root(self, rows: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.prec_tril, rows.to(self.prec_tril).T, upper=False).T


@dataclass(frozen=True, eq=False)
class LowRankBlock:
    """Λ = D (I + V diag(s) Vᵀ) D: ``scale`` 1/D (p,), orthonormal ``basis`` V (p, r), ``values`` s (r,)."""

    kind: ClassVar[str] = "lowrank"
    index: Tensor
    scale: Tensor
    basis: Tensor
    values: Tensor

    def log_det(self) -> Tensor:
        return self.values.double().log1p().sum() - 2 * self.scale.double().log().sum()

    def sample(self, noise: Tensor) -> Tensor:
        return self.root_transpose(noise.to(self.basis)) * self.scale

    def root_transpose(self, noise: Tensor) -> Tensor:
        # symmetric root of (I + V s Vᵀ)⁻¹, so only the span of V is touched
        shrink = (1 + self.values).rsqrt() - 1
        return noise + (noise @ self.basis * shrink) @ self.basis.T

    def quad(self, delta: Tensor) -> Tensor:
        white = delta.to(self.basis) / self.scale
        inside = (white @ self.basis).double().square() * self.values
        return white.double().square().sum(-1) + inside.sum(-1)

    def root(self, rows: Tensor) -> Tensor:
        return self.root_transpose(rows.to(self.basis) * self.scale)


@dataclass(frozen=True, eq=False)
class DiagBlock:
    """Λ = diag(``prec``), (p,)."""

    kind: ClassVar[str] = "diag"
    index: Tensor
    prec: Tensor

    def log_det(self) -> Tensor:
        return self.prec.double().log().sum()

    def sample(self, noise: Tensor) -> Tensor:
        return noise.to(self.prec) * self.prec.rsqrt()

    def quad(self, delta: Tensor) -> Tensor:
        return (delta.double().square() * self.prec).sum(-1)

    def root(self, rows: Tensor) -> Tensor:
        return rows.to(self.prec) * self.prec.rsqrt()


@dataclass(frozen=True, eq=False)
class KronBlock:
    r"""Λ of a layer's matrix (rows, columns): eigenvectors of both factors and the precision in their basis.

    .. math:: \theta = (U_{out}\, (\varepsilon / \sqrt{\mathrm{prec}})\, U_{in}^\top)\, \mathrm{diag}(\mathrm{scale})
    """

    kind: ClassVar[str] = "kron"
    index: Tensor
    out_basis: Tensor
    in_basis: Tensor
    prec: Tensor
    scale: Tensor

    def log_det(self) -> Tensor:
        return self.prec.double().log().sum() - 2 * len(self.prec) * self.scale.double().log().sum()

    def sample(self, noise: Tensor) -> Tensor:
        white = noise.to(self.prec).reshape(-1, *self.prec.shape) * self.prec.rsqrt()
        return ((self.out_basis @ white @ self.in_basis.T) * self.scale).flatten(1)

    def quad(self, delta: Tensor) -> Tensor:
        white = self._rotated(delta.to(self.prec).reshape(*delta.shape[:-1], *self.prec.shape) / self.scale)
        return (white.square() * self.prec).double().sum((-1, -2))

    def root(self, rows: Tensor) -> Tensor:
        white = self._rotated(rows.to(self.prec).reshape(-1, *self.prec.shape) * self.scale)
        return (white * self.prec.rsqrt()).flatten(1)

    def output_covariance(self, factors: Factors) -> Tensor:
        """Covariance (N, k, k) of the rows that ``factors`` stand for, without forming them."""
        inputs = (factors.inputs.to(self.prec) * self.scale) @ self.in_basis
        grads = factors.grads.to(self.prec) @ self.out_basis
        return _product_covariance(Factors(inputs, grads), self.prec)

    def _rotated(self, matrix: Tensor) -> Tensor:
        return self.out_basis.T @ matrix @ self.in_basis


def diagonal_output_covariance(prec: Tensor, factors: Factors) -> Tensor:
    """Covariance (N, k, k) under a diagonal precision of the layer's matrix (rows, columns)."""
    return _product_covariance(Factors(factors.inputs.to(prec), factors.grads.to(prec)), prec)


def _product_covariance(factors: Factors, prec: Tensor) -> Tensor:
    if factors.inputs.shape[1] == 1:
        inputs, grads = factors.inputs.squeeze(1), factors.grads.squeeze(2)
        weight = inputs.square() @ prec.reciprocal().T
        return (grads * weight.unsqueeze(1)) @ grads.transpose(1, 2)
    rows = (factors.rows() * prec.rsqrt()).flatten(2)
    return rows @ rows.transpose(1, 2)


KINDS: dict[str, type] = {block.kind: block for block in (DenseBlock, LowRankBlock, DiagBlock, KronBlock)}
