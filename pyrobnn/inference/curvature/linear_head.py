r"""The curvature of a linear last layer from its structure: a sum over rows of Kronecker products.

.. math:: H = \sum_n H_n \otimes \phi_n \phi_n^\top

with the inputs :math:`\phi_n` of the layer and the curvature :math:`H_n` of a row's log density at its output. The
matrix is formed in a tenth of the products that the rows of its Jacobian take, its log determinant is had from products
with it, and where all :math:`H_n` are equal it is one Kronecker product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from pyrobnn.core.seeding import generator
from pyrobnn.inference.curvature.ggn import (
    Curvature,
    FullCurvature,
    KronCurvature,
    gram,
)
from pyrobnn.inference.curvature.jacobian import CHUNK_SCALARS, Layer, NetworkJacobian

#: network output (N, width) of some rows → square root (N, width, k) of the curvature of each
_RowRoot = Callable[..., Tensor]
#: random vectors and steps of Lanczos's iteration for a log determinant
_NUM_PROBES = 8
_NUM_STEPS = 48
#: rows by which the error of a Kronecker product is found
_ROWS_OF_ERROR = 2000
#: standard error of log τ beyond which the eigenvalues themselves are taken
_LARGEST_ERROR = 0.05


@dataclass(frozen=True, eq=False)
class LinearHead:
    """A layer whose output is the net's, with what it is given.

    Attributes: ``inputs`` (N, in) of the layer, a 1 for the bias last, and ``f`` (N, width), what it returns, both
        float64; ``root`` of the rows' curvature; ``probs`` (N, width) where that is diag(p) - ppᵀ, else None.
    """

    layer: Layer
    inputs: Tensor
    f: Tensor
    root: _RowRoot
    probs: Tensor | None

    @classmethod
    def of(
        cls,
        jacobian: NetworkJacobian,
        x: Tensor,
        root: _RowRoot,
        is_softmax: bool,
    ) -> LinearHead | None:
        """The head of a net of which one linear layer varies, the last; None of any other."""
        recorded = jacobian.linear_head(x)
        if recorded is None:
            return None
        f, inputs = recorded
        probs = f.double().softmax(-1) if is_softmax else None
        return cls(jacobian.layers[0], inputs.double(), f, root, probs)

    @property
    def width(self) -> int:
        """Number of outputs."""
        return self.f.shape[1]

    def row_curvatures(self, rows: slice) -> Tensor:
        """H_n of some rows, (n, width, width), float64."""
        if self.probs is not None:
            probs = self.probs[rows]
            return torch.diag_embed(probs) - probs.unsqueeze(2) * probs.unsqueeze(1)
        roots = self.root(self.f[rows], rows=rows).double()
        return roots @ roots.mT

    def pieces(self, num_scalars: int) -> list[slice]:
        """Slices of the rows, each of which takes ``num_scalars``, that stay within the bound of memory."""
        size = max(1, CHUNK_SCALARS // max(num_scalars, 1))
        return [slice(start, start + size) for start in range(0, len(self.inputs), size)]

    def summed_curvature(self) -> Tensor:
        """The sum of H_n, (width, width), float64."""
        if self.probs is not None:
            return _summed(self.probs)
        total = self.inputs.new_zeros(self.width, self.width)
        for rows in self.pieces(2 * self.width**2):
            total += self.row_curvatures(rows).sum(0)
        return total

    def is_product(self) -> bool:
        """Whether all H_n are equal, so that H is one Kronecker product."""
        if self.probs is not None:
            return False
        reference = self.row_curvatures(slice(0, 1))
        bound = 1e-12 * float(reference.abs().max())
        return all(
            float((self.row_curvatures(rows) - reference).abs().max()) <= bound
            for rows in self.pieces(2 * self.width**2)
        )

    def factors(self) -> tuple[Tensor, Tensor]:
        """A and B of the Kronecker product A ⊗ B: mean of φφᵀ and sum of H_n."""
        return self.inputs.T @ self.inputs / len(self.inputs), self.summed_curvature()

    def product_error(self, scale: Tensor) -> float | None:
        """‖H - A ⊗ B‖ / ‖H‖, Frobenius, whitened by ``scale`` (in,); by 2000 rows at most; None if unknown."""
        if self.probs is None:
            return None
        stride = -(-len(self.inputs) // _ROWS_OF_ERROR)
        inputs = self.inputs[::stride] * scale
        probs = self.probs[::stride]
        squared_dots = (inputs @ inputs.T).square()
        # tr(H_n H_m) of diag(p) - ppᵀ and diag(q) - qqᵀ
        with_squares = probs @ probs.square().T
        dots = probs @ probs.T
        traces = dots - with_squares - with_squares.T + dots.square()
        squared_norm = (squared_dots * traces).sum()
        in_factor = inputs.T @ inputs / len(inputs)
        out_factor = _summed(probs)
        # tr(H_n B) by row
        row_traces = probs @ out_factor.diagonal() - ((probs @ out_factor) * probs).sum(1)
        overlap = (row_traces * ((inputs @ in_factor) * inputs).sum(1)).sum()
        squared_norm_of_product = in_factor.square().sum() * out_factor.square().sum()
        squared_error = squared_norm - 2 * overlap + squared_norm_of_product
        return float((squared_error.clamp_min(0) / squared_norm).sqrt())


class HeadCurvature(FullCurvature):
    r"""All correlations of a linear last layer, exact; the log determinant for the search of τ by Lanczos's iteration.

    The eigenvalues of a matrix of thousands of weights take longer than all else, for one number. Gauss's quadrature of
    48 steps from 8 random vectors has the log determinant up to a constant: the τ it leads to has the standard error
    ``log_factor_error``, and where that is above .05 the eigenvalues are taken after all. The evidence at that τ is of
    the factorised matrix, exact.

    Reference: Fast Estimation of tr(f(A)) via Stochastic Lanczos Quadrature (Ubaru, Chen & Saad, 2017).
    """

    _known_quadrature: tuple[Tensor, Tensor, Tensor] | None = None

    def __init__(
        self,
        jacobian: NetworkJacobian,
        head: LinearHead,
        prior_prec: Tensor,
    ):
        # without FullCurvature's own, which forms the rows of the Jacobian
        Curvature.__init__(self, jacobian, prior_prec)
        self.size = jacobian.size
        self.head = head
        self.positions = jacobian.positions(head.layer)
        self.scale = prior_prec.double()[self.positions].rsqrt()
        self._set_matrix(self._whitened_matrix())

    def _whitened_matrix(self) -> Tensor:
        """H̃ (p, p), block by block of two outputs, ``out`` and ``partner``, of which the second is no less."""
        head = self.head
        matrix = head.inputs.new_empty(self.size, self.size)
        num_in = head.inputs.shape[1]
        for out in range(head.width):
            blocks = head.inputs.new_zeros(head.width - out, num_in, num_in)
            for rows in head.pieces(2 * num_in + head.width**2):
                curvatures = head.row_curvatures(rows)[:, out, out:]
                for block, weights in zip(blocks, curvatures.T):
                    block += _weighted_gram(head.inputs[rows], weights)
            for partner, block in enumerate(blocks, out):
                block *= self.scale[partner].unsqueeze(1)
                block *= self.scale[out]
                matrix[self.positions[partner].unsqueeze(1), self.positions[out]] = block
                if partner > out:
                    matrix[self.positions[out].unsqueeze(1), self.positions[partner]] = block.T
        return matrix

    def _times(self, vectors: Tensor) -> Tensor:
        """H̃ v for vectors (m, p)."""
        head = self.head
        if 2 * len(head.inputs) > self.size:
            return vectors @ self.matrix
        # float32 beside the sampling error of a few random vectors
        weights = (vectors[:, self.positions] * self.scale).float()
        product = torch.zeros_like(weights)
        for rows in head.pieces(4 * len(vectors) * head.width):
            inputs = head.inputs[rows].float()
            outputs = (weights @ inputs.T).permute(2, 1, 0)
            curved = torch.bmm(head.row_curvatures(rows).float(), outputs)
            product += curved.permute(2, 1, 0) @ inputs
        result = torch.empty_like(vectors)
        result[:, self.positions.reshape(-1)] = (product * self.scale).flatten(1)
        return result

    def log_det(self, tau: Tensor, c: Tensor) -> Tensor:
        if len(tau) > 1 or self._values is not None:
            return super().log_det(tau, c)
        nodes, weights, _ = self._quadrature()
        prior = self._spread(tau).log().sum()
        return (weights * (c * nodes / tau).log1p()).sum() + prior

    def _quadrature(self) -> tuple[Tensor, Tensor, Tensor]:
        """Nodes and weights (probe, step) of Gauss's quadrature of tr g(H̃), and what they come from.

        That is the tridiagonal matrices of Lanczos's iteration, (2, probe, step): diagonals, and off-diagonals.
        """
        if self._known_quadrature is None:
            signs = torch.randint(
                2,
                (_NUM_PROBES, self.size),
                generator=generator(0),
            )
            probes = (2.0 * signs - 1).to(self.matrix)
            diagonal, off_diagonal = _lanczos(self._times, probes, min(_NUM_STEPS, self.size))
            nodes, weights = _gauss(diagonal, off_diagonal, self.size)
            self._known_quadrature = nodes, weights, torch.stack([diagonal, off_diagonal])
        return self._known_quadrature

    def log_factor_error(self, ratio: float) -> float:
        r"""Standard error of log τ at the best τ/c, ``ratio`` ρ; zero where eigenvalues are known.

        At the highest evidence the number γ of directions that the data decide equals the mode's squared distance from
        the prior mean, τ q, in variances of the scaled prior:

        .. math:: \gamma - \tau q = 0, \qquad \gamma = \sum_i s_i, \quad s_i = \lambda_i / (\lambda_i + \rho)

        The left side falls there by :math:`\gamma + \sum_i s_i (1 - s_i)` for each unit of log τ with c held. By the
        delta method the error of log τ is that of γ by this slope; where c is tuned too, it is no larger.
        """
        if self._values is not None:
            return 0.0
        nodes, weights, recurrence = self._quadrature()
        shares = nodes / (nodes + ratio)
        # γ by each random vector
        num_decided = (weights * shares).sum(1) * _NUM_PROBES
        slope = float(num_decided.mean()) + float((weights * shares * (1 - shares)).sum())
        # the error by ending the iteration: what its last quarter has changed
        num_steps = 3 * recurrence.shape[2] // 4
        diagonal, off_diagonal = recurrence[:, :, :num_steps]
        shorter_nodes, shorter_weights = _gauss(diagonal, off_diagonal, self.size)
        shorter_sum = (shorter_weights * shorter_nodes / (shorter_nodes + ratio)).sum()
        truncation = abs(float(num_decided.mean() - shorter_sum))
        sampling = float(num_decided.std()) / _NUM_PROBES**0.5
        return (sampling**2 + truncation**2) ** 0.5 / slope

    def is_certain(self, ratio: float) -> bool:
        """Whether τ is known well enough; else the eigenvalues are taken, for a search that begins again."""
        if self.log_factor_error(ratio) <= _LARGEST_ERROR:
            return True
        self._eigenvalues()
        return False


class HeadKronCurvature(KronCurvature):
    """A linear last layer as one Kronecker product; ``error``, the relative one of H̃ (Frobenius), 0 where exact."""

    def __init__(
        self,
        jacobian: NetworkJacobian,
        head: LinearHead,
        prior_prec: Tensor,
    ):
        # without KronCurvature's own, which has the factors from pulled-back gradients
        Curvature.__init__(self, jacobian, prior_prec)
        self._decompose(jacobian, [head.factors()])
        exact = head.is_product() and not self.averaged
        self.error = 0.0 if exact else head.product_error(self.layers[0].scale)


def head_curvature(
    jacobian: NetworkJacobian,
    head: LinearHead,
    structure: str,
    prior_prec: Tensor,
) -> Curvature:
    """The curvature of a linear head, ``"full"`` or ``"kron"``; one product also for full, where that is exact."""
    if structure == "full":
        precision = prior_prec[jacobian.positions(head.layer)]
        if not head.is_product() or bool((precision != precision[:1]).any()):
            return HeadCurvature(jacobian, head, prior_prec)
    return HeadKronCurvature(jacobian, head, prior_prec)


def _summed(probs: Tensor) -> Tensor:
    """The sum of diag(p) - ppᵀ over the rows p of ``probs`` (N, width), (width, width)."""
    return torch.diag(probs.sum(0)) - probs.T @ probs


def _weighted_gram(inputs: Tensor, weights: Tensor) -> Tensor:
    """Σ w φφᵀ of rows (N, columns) and weights (N,): half of the work where these have one sign, as classes' have."""
    sign = 1.0 if bool((weights >= 0).all()) else -1.0
    if bool((sign * weights >= 0).all()):
        return sign * gram(inputs * (sign * weights).sqrt().unsqueeze(1))
    return (inputs * weights.unsqueeze(1)).T @ inputs


def _lanczos(
    times: Callable[[Tensor], Tensor], probes: Tensor, num_steps: int
) -> tuple[Tensor, Tensor]:
    """Diagonals (m, steps) of the tridiagonal matrices of vectors (m, p), and off-diagonals, the last of no use."""
    num_probes, size = probes.shape
    basis = probes.new_zeros(num_probes, num_steps, size)
    diagonal = probes.new_zeros(num_probes, num_steps)
    off_diagonal = probes.new_zeros(num_probes, num_steps)
    vector = probes / probes.norm(dim=1, keepdim=True)
    for step in range(num_steps):
        basis[:, step] = vector
        image = times(vector)
        diagonal[:, step] = (vector * image).sum(1)
        basis_so_far = basis[:, : step + 1]
        # once loses half of the digits, which sums of random vectors do not have
        overlaps = torch.bmm(basis_so_far, image.unsqueeze(2))
        image = image - torch.bmm(basis_so_far.mT, overlaps).squeeze(2)
        norm = image.norm(dim=1)
        vector = image / norm.clamp_min(1e-300).unsqueeze(1)
        # the space of a probe may be exhausted
        exhausted = norm <= 1e-14 * diagonal.abs().amax(1)
        off_diagonal[:, step] = torch.where(exhausted, 0.0, norm)
        vector[exhausted] = 0.0
    return diagonal, off_diagonal


def _gauss(diagonal: Tensor, off_diagonal: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights (m, steps) of tridiagonal matrices; their weights sum to ``size`` over all."""
    between = off_diagonal[:, :-1]
    matrices = torch.diag_embed(diagonal)
    matrices += torch.diag_embed(between, 1) + torch.diag_embed(between, -1)
    values, vectors = torch.linalg.eigh(matrices)
    weights = vectors[:, 0].square() * (size / len(diagonal))
    return values.clamp_min(0.0), cast(Tensor, weights)
