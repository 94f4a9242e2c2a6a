r"""The generalized Gauss-Newton matrix in three structures, whitened by the prior.

With the prior precision D of the weights, :math:`\tilde H = D^{-1/2} H D^{-1/2}`; for a prior scaled by τ (one number,
or one per layer) and a likelihood scaled by c (a change of noise) the posterior precision is

.. math:: \Lambda(\tau, c) = D^{1/2} \left( \mathrm{diag}(\tau) + c \tilde H \right) D^{1/2}

so that one decomposition of :math:`\tilde H` serves every τ and c.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from pyrobnn.core.checks import Refused
from pyrobnn.inference.curvature.gaussian import Block, DenseBlock, DiagBlock, KronBlock, LowRankBlock
from pyrobnn.inference.curvature.jacobian import CHUNK_SCALARS, NetworkJacobian, Root
from pyrobnn.wording.findings import Finding

#: network output (N, width) of some rows → square root (N, width, k) of the curvature of each
RowRoot = Callable[..., Tensor]


def with_roots(pieces: Iterable[Tensor], root: RowRoot) -> Iterator[tuple[Tensor, Root]]:
    """Pieces of the inputs, in their order, each with the root of its rows."""
    start = 0
    for piece in pieces:
        stop = start + len(piece)
        yield piece, partial(root, rows=slice(start, stop))
        start = stop


EPS = torch.finfo(torch.float64).eps


def resolved(values: Tensor) -> Tensor:
    """Which eigenvalues (r,), ascending and in float64, a symmetric matrix of that size can tell from zero; bool."""
    return values > values[-1:].clamp_min(0) * len(values) * EPS


def check_finite(curvature: Tensor) -> Tensor:
    """The curvature itself, refused where it overflows."""
    if not bool(curvature.isfinite().all()):
        raise Refused(
            "the curvature of the likelihood is not finite: the noise is too small for the network's dtype. "
            "Use a larger noise, or a float64 net (net.double())"
        )
    return curvature


@dataclass(frozen=True)
class Resolution:
    """How far down a whitened curvature is known.

    Attributes: ``top``, the largest eigenvalue, in prior precisions; ``cut``, below which one counts as zero; ``count``
        of the directions taken as zero; ``dtype`` of the rows that it was made of.
    """

    top: float
    cut: float
    count: int
    dtype: torch.dtype

    def findings(self, ratio: float) -> list[Finding]:
        """What to report where the likelihood's curvature counts ``ratio`` times as much against the prior."""
        top, cut = self.top * ratio, self.cut * ratio
        if self.count and cut > 1:
            error = 0.5 * self.count * math.log1p(cut)
            seen = {"top": top, "cut": cut, "count": self.count, "error": error}
            return [Finding("curvature_unresolved", seen)]
        if top * torch.finfo(self.dtype).eps ** 2 > 1:
            return [Finding("widths_unresolved", {"top": top, "dtype": name_of(self.dtype)})]
        return []


def name_of(dtype: torch.dtype) -> str:
    """float32, say."""
    return str(dtype).removeprefix("torch.")


Structure = Literal["full", "kron", "diag"]


def ggn(
    jacobian: NetworkJacobian, x: Tensor, root: RowRoot, structure: Structure, prior_prec: Tensor
) -> Curvature:
    r"""Whitened Gauss-Newton matrix of the log likelihood, :math:`H = \sum_n J_n^\top H_n J_n`.

    Args:
        jacobian: the network around the mode.
        x: all inputs (N, …).
        root: called with the output (N, width) and ``rows``, a slice of the data; a square root (N, width, k) of H_n.
        structure: ``"full"``, ``"kron"`` (one Kronecker product per layer) or ``"diag"``.
        prior_prec: the prior's precision D (p,).

    Raises:
        ValueError: Kronecker factors asked for where a layer is not a product; the layer is named.

    Caveat: ``"kron"`` and ``"diag"`` drop all correlations between layers, and ``"kron"`` is exact within a layer only
    for one datum, a linear network or inputs independent of the backpropagated vectors. Convolutions use the *expand*
    setting: positions count as independent data.

    Reference: Optimizing Neural Networks with Kronecker-factored Approximate Curvature (Martens & Grosse, 2015);
    Kronecker-Factored Approximate Curvature for Modern Neural Network Architectures (Eschenhagen et al., 2023).
    """
    kinds: dict[str, Callable[..., Curvature]] = {
        "full": FullCurvature,
        "kron": KronCurvature,
        "diag": DiagCurvature,
    }
    return kinds[structure](jacobian, x, root, prior_prec)


class Curvature(ABC):
    """A whitened Gauss-Newton matrix H̃ in one structure.

    Attributes: ``index`` (p,) coordinates; ``group_names`` of the layers (a site's name without its last part) and
        ``group`` (p,), each coordinate's; ``averaged``: whether a layer's prior precision had to be averaged over its
        output rows; ``cheap``: whether :meth:`log_det` takes no new factorisation.
    """

    averaged = False
    cheap = True

    def __init__(self, jacobian: NetworkJacobian, prior_prec: Tensor):
        self.index, self.prior_prec, self.dtype = jacobian.index, prior_prec, prior_prec.dtype
        owners = [site.name.rpartition(".")[0] for site in jacobian.sites]
        self.group_names = list(dict.fromkeys(owners))
        number = torch.tensor([self.group_names.index(owner) for owner in owners])
        sizes = torch.tensor([site.size for site in jacobian.sites])
        self.group = number.repeat_interleave(sizes).to(jacobian.index.device)

    @abstractmethod
    def log_det(self, tau: Tensor, c: Tensor) -> Tensor:
        r"""log det(diag(τ) + c H̃) for τ (groups,) or (1,), scalar; differentiable."""

    @abstractmethod
    def blocks(self, tau: Tensor, c: float) -> list[Block]:
        """The posterior as Gaussian blocks for prior factors τ (groups,) or (1,) and likelihood factor c."""

    def resolution(self) -> Resolution:
        """How far down the curvature is known."""
        return Resolution(0.0, 0.0, 0, self.dtype)

    def _spread(self, tau: Tensor) -> Tensor:
        return tau.double().expand(len(self.index)) if len(tau) == 1 else tau.double()[self.group]


class FullCurvature(Curvature):
    """All correlations. With fewer rows N·k than weights p through the rows' Gram matrix, else the p × p matrix itself.

    Both are exact; the Gram side costs (N·k)² p and its spectrum is one small eigendecomposition. On the other side an
    eigendecomposition costs some seventy Cholesky factorisations (measured at p = 3301), so these are used, as long as
    the prior does not drown in the rounding of H̃. Where it does, a factorisation fails or counts rounding as curvature:
    then the spectrum is taken, and what float64 cannot tell from zero is zero.
    """

    def __init__(self, jacobian: NetworkJacobian, x: Tensor, root: RowRoot, prior_prec: Tensor):
        super().__init__(jacobian, prior_prec)
        whiten = prior_prec.rsqrt()
        #: the whitened rows (N·k, p); None while the p × p matrix stands in their place
        self.rows: Tensor | None = None
        self.matrix = prior_prec.new_empty(0)
        self._grams: Tensor | None = None
        with torch.no_grad():
            _, first = next(with_roots([x[:1]], root))
            num_rows = len(x) * first(jacobian.model.forward(jacobian.params, x[:1])).shape[-1]
        self.num_rows = num_rows
        width = num_rows // len(x)
        parts = jacobian.chunks(x, 4 * width * jacobian.size)  # float64 copies included
        if num_rows < jacobian.size:
            pairs = with_roots(parts, root)
            rows = [jacobian.rows(part, here)[1].flatten(0, 1) * whiten for part, here in pairs]
            self.rows = check_finite(torch.cat(rows))
            self.dtype = self.rows.dtype
            self.values, self.basis = _spectrum(self.rows)
            return
        if width > 1 and len(jacobian.layers) == 1:
            matrix = _single_layer_matrix(jacobian, x, root, whiten.double())
        else:
            matrix = torch.zeros(jacobian.size, jacobian.size, dtype=torch.float64, device=x.device)
            for part, here in with_roots(parts, root):
                matrix += _gram(jacobian.rows(part, here)[1].flatten(0, 1) * whiten)
        self.matrix = check_finite(matrix)
        #: no less than the largest eigenvalue
        self.norm = float(torch.linalg.matrix_norm(self.matrix))

    def _stiff(self, tau: Tensor, c: Tensor | float) -> bool:
        """Whether the least prior precision is below the rounding of c H̃."""
        size = len(self.index) if self.rows is None else self.num_rows
        return float(torch.as_tensor(c).detach()) * self.resolution().top * size * EPS > float(
            tau.detach().min()
        )

    def _decompose(self) -> None:
        """Rows √λ vᵀ in place of the matrix."""
        values, vectors = torch.linalg.eigh(self.matrix)
        keep = resolved(values)
        self.values, self.basis = values[keep], vectors[:, keep]
        self.rows, self.matrix = (self.basis * self.values.sqrt()).T, values.new_empty(0)

    def resolution(self) -> Resolution:
        if self.rows is None:
            return Resolution(self.norm, 0.0, 0, self.dtype)
        top = float(self.values[-1]) if len(self.values) else 0.0
        size = min(self.num_rows, len(self.index))
        return Resolution(top, top * size * EPS, size - len(self.values), self.dtype)

    @property
    def cheap(self) -> bool:  # type: ignore[override]
        return self.rows is not None

    def log_det(self, tau: Tensor, c: Tensor) -> Tensor:
        if self.rows is None and self._stiff(tau, c):
            self._decompose()
        if self.rows is not None and len(tau) == 1:
            return (c * self.values / tau).log1p().sum() + len(self.index) * tau.log().sum()
        if self.rows is None:
            matrix = c * self.matrix + torch.diag(self._spread(tau))
            return 2 * torch.linalg.cholesky(matrix).diagonal().log().sum()
        sizes = torch.bincount(self.group).to(tau)
        inside = torch.einsum("g,gnm->nm", c / tau, self._layer_grams(self.rows))
        if self._stiff(tau, c):  # its rounding exceeds the 1 that is added to it
            values = torch.linalg.eigvalsh(inside)
            values = torch.where(resolved(values.detach()), values, 0.0)
            return values.log1p().sum() + (sizes * tau.log()).sum()
        inside = inside + torch.eye(len(inside), dtype=inside.dtype, device=inside.device)
        return 2 * torch.linalg.cholesky(inside).diagonal().log().sum() + (sizes * tau.log()).sum()

    def _layer_grams(self, rows: Tensor) -> Tensor:
        """Gram matrix of the rows by layer (groups, N·k, N·k), float64; computed once."""
        if self._grams is None:
            parts = [rows[:, self.group == g] for g in range(len(self.group_names))]
            self._grams = torch.stack([_gram(part.T) for part in parts])
        return self._grams

    def blocks(self, tau: Tensor, c: float) -> list[Block]:
        if self.rows is None and self._stiff(tau, c):
            self._decompose()
        if self.rows is None:
            scale = self.prior_prec.double().sqrt()
            matrix = c * self.matrix + torch.diag(self._spread(tau))
            # D^½ M D^½ = (D^½ L)(D^½ L)ᵀ: the factor is scaled by rows
            return [DenseBlock(self.index, scale.unsqueeze(1) * torch.linalg.cholesky(matrix))]
        scale = (self.prior_prec.double() * self._spread(tau)).rsqrt().to(self.rows)
        if len(tau) == 1:
            values = (c * self.values / tau).to(self.rows)
            return [LowRankBlock(self.index, scale, self.basis, values)]
        rows = self.rows * (c / self._spread(tau)).sqrt().to(self.rows)
        values, basis = _spectrum(rows)
        return [LowRankBlock(self.index, scale, basis, values.to(rows))]


class DiagCurvature(Curvature):
    """Only the diagonal, Σ_n Σ_k (row)²: for layers without shared positions two matrix products."""

    def __init__(self, jacobian: NetworkJacobian, x: Tensor, root: RowRoot, prior_prec: Tensor):
        super().__init__(jacobian, prior_prec)
        total = torch.zeros(jacobian.size, dtype=torch.float64, device=x.device)
        if not jacobian.layers:
            for part, here in with_roots(jacobian.chunks(x), root):
                total += jacobian.rows(part, here)[1].square().sum((0, 1)).double()
        for part, here in with_roots(_factor_chunks(jacobian, x), root):
            for layer, factors in zip(jacobian.layers, jacobian.factors(part, here)[1]):
                if factors.inputs.shape[1] == 1:
                    grads = factors.grads.square().sum((1, 2))
                    square = grads.T @ factors.inputs.squeeze(1).square()
                else:
                    square = factors.rows().square().sum((0, 1))
                total[jacobian.positions(layer).reshape(-1)] += square.reshape(-1).double()
        self.values = check_finite(total / prior_prec.double())

    def log_det(self, tau: Tensor, c: Tensor) -> Tensor:
        return (self._spread(tau) + c * self.values).log().sum()

    def blocks(self, tau: Tensor, c: float) -> list[Block]:
        white = self._spread(tau) + c * self.values
        return [DiagBlock(self.index, (white * self.prior_prec).to(self.prior_prec))]


class KronCurvature(Curvature):
    r"""One Kronecker product per layer, :math:`H_l \approx B_l \otimes A_l`, bias as a column of ones in A.

    .. math:: B = \sum_{n,k,t} g g^\top, \qquad A = \frac{1}{N T} \sum_{n,t} a a^\top
    """

    def __init__(self, jacobian: NetworkJacobian, x: Tensor, root: RowRoot, prior_prec: Tensor):
        if not jacobian.layers:
            raise Refused(
                f"no Kronecker factors for: {', '.join(jacobian.unsupported)}; supported are Linear, Conv1d, Conv2d "
                "(ungrouped) and Embedding, each called once: use structure='diag' or 'full', or leave these "
                "parameters out with subset="
            )
        super().__init__(jacobian, prior_prec)
        like: dict[str, Any] = {"dtype": torch.float64, "device": x.device}
        shapes = [layer.index.shape for layer in jacobian.layers]
        inputs = [torch.zeros(columns, columns, **like) for _, columns in shapes]
        grads = [torch.zeros(rows, rows, **like) for rows, _ in shapes]
        counts = [0] * len(shapes)
        for part, here in with_roots(_factor_chunks(jacobian, x), root):
            for i, factors in enumerate(jacobian.factors(part, here)[1]):
                inputs[i] += _gram(factors.inputs.flatten(0, 1))
                grads[i] += _gram(factors.grads.flatten(0, 2))
                counts[i] += factors.inputs.shape[0] * factors.inputs.shape[1]
        self.layers = []
        self.resolutions: list[Resolution] = []
        for layer, a, b, count in zip(jacobian.layers, inputs, grads, counts):
            place = jacobian.positions(layer)
            prior = prior_prec[place].double()
            columns = prior.mean(0)
            self.averaged |= bool(((prior - columns).abs() > 1e-5 * columns).any())
            white = a / count * (columns.rsqrt().unsqueeze(1) * columns.rsqrt())
            in_values, in_basis = _decomposed(white)
            out_values, out_basis = _decomposed(b)
            values = out_values.unsqueeze(1) * in_values
            top, least = float(values[-1, -1]), max(values.shape) * EPS
            self.resolutions.append(Resolution(top, top * least, int((values == 0).sum()), prior_prec.dtype))
            group = int(self.group[place[0, 0]])
            self.layers.append((layer.index.reshape(-1), group, out_basis, in_basis, values, columns.rsqrt()))

    def log_det(self, tau: Tensor, c: Tensor) -> Tensor:
        parts = [
            (tau[group if len(tau) > 1 else 0] + c * values).log().sum()
            for _, group, _, _, values, _ in self.layers
        ]
        return torch.stack(parts).sum()

    def blocks(self, tau: Tensor, c: float) -> list[Block]:
        like = self.prior_prec
        return [
            KronBlock(
                index,
                out_basis.to(like),
                in_basis.to(like),
                (tau[group if len(tau) > 1 else 0] + c * values).to(like),
                scale.to(like),
            )
            for index, group, out_basis, in_basis, values, scale in self.layers
        ]

    def resolution(self) -> Resolution:
        return max(self.resolutions, key=lambda layer: layer.top)


def _single_layer_matrix(jacobian: NetworkJacobian, x: Tensor, root: RowRoot, whiten: Tensor) -> Tensor:
    """Σ_n B_n ⊗ a_n a_nᵀ with B_n = Σ_k g gᵀ: the k columns are summed before the inputs multiply them."""
    layer = jacobian.layers[0]
    place = jacobian.positions(layer)
    outs, ins = place.shape
    total = torch.zeros(outs, ins, outs, ins, dtype=torch.float64, device=x.device)
    for part, here in with_roots(jacobian.chunks(x, 4 * (outs + 1) * ins), root):
        factors = jacobian.factors(part, here)[1][0]
        if factors.inputs.shape[1] > 1:  # shared positions: the rows themselves
            total += _gram(factors.rows().flatten(2).flatten(0, 1)).reshape(total.shape)
            continue
        inputs, grads = factors.inputs.squeeze(1).double(), factors.grads.squeeze(2).double()
        inner = grads.transpose(1, 2) @ grads
        for out in range(outs):
            # only pairs of outputs on one side of the diagonal
            weighted = inner[:, out, out:].unsqueeze(2) * inputs.unsqueeze(1)
            total[out, :, out:] += (inputs.T @ weighted.flatten(1)).reshape(ins, outs - out, ins)
    for out in range(outs):
        total[out + 1 :, :, out] = total[out, :, out + 1 :].permute(1, 2, 0)
    flat = place.reshape(-1)
    matrix = torch.zeros(jacobian.size, jacobian.size, dtype=torch.float64, device=x.device)
    matrix[flat[:, None], flat] = total.reshape(len(flat), -1)
    matrix *= whiten.unsqueeze(1) * whiten
    return matrix


def _factor_chunks(jacobian: NetworkJacobian, x: Tensor) -> Iterable[Tensor]:
    if not jacobian.layers:
        return ()
    return jacobian.chunks(x, jacobian.factor_scalars(x))


def _spectrum(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Nonzero eigenvalues (r,), float64, and orthonormal eigenvectors (p, r), in the rows' dtype, of RᵀR.

    What is cut is what the float64 Gram matrix cannot tell from zero: about the square of the rows' own rounding where
    these are float32. A cut at float32's resolution would drop thousands of prior precisions of curvature. For the same
    reason the eigenvectors are formed in float64: Rᵀv cancels down to √λ.
    """
    values, vectors = torch.linalg.eigh(_gram(rows.T))
    keep = resolved(values)
    values = values[keep]
    mix = vectors[:, keep] * values.rsqrt()
    basis = rows.new_empty(rows.shape[1], len(values))
    size = max(1, CHUNK_SCALARS // len(rows))
    for part, target in zip(rows.T.split(size), basis.split(size)):
        target.copy_(part.double() @ mix)
    return values, basis


def _decomposed(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, zero where float64 cannot tell them from it, and eigenvectors of a Kronecker factor."""
    values, vectors = torch.linalg.eigh(check_finite(factor))
    return torch.where(resolved(values), values, 0.0), vectors


def _gram(matrix: Tensor) -> Tensor:
    """MᵀM in float64. NumPy's product of a matrix with its own transpose does half the work on the CPU (BLAS syrk)."""
    wide = matrix.double()
    if wide.device.type != "cpu":
        return wide.T @ wide
    array = wide.numpy()
    return torch.from_numpy(array.T @ array)
