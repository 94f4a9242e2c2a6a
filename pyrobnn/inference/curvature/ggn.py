r"""The generalized Gauss-Newton matrix in three structures, whitened by the prior; and the exact Hessian.

With the prior precision D of the weights, :math:`\tilde H = D^{-1/2} H D^{-1/2}`; for a prior scaled by τ (one number,
or one per layer) and a likelihood scaled by c (a change of noise) the posterior precision is

.. math:: \Lambda(\tau, c) = D^{1/2} \left( \mathrm{diag}(\tau) + c \tilde H \right) D^{1/2}

so that one decomposition of :math:`\tilde H` serves every τ and c.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from pyrobnn.core.checks import Refused
from pyrobnn.core.findings import Finding
from pyrobnn.inference.curvature.gaussian import (
    Block,
    DenseBlock,
    DiagBlock,
    KronBlock,
    LowRankBlock,
    RowsBlock,
)
from pyrobnn.inference.curvature.jacobian import (
    CHUNK_SCALARS,
    Factors,
    Layer,
    NetworkJacobian,
    Root,
)
from pyrobnn.model import Density

#: network output (N, width) of some rows → square root (N, width, k) of the curvature of each
_RowRoot = Callable[..., Tensor]
_EPS = torch.finfo(torch.float64).eps
#: weights without Kronecker factors up to which a layer has all of their correlations
_FEW = 1024


def _with_roots(pieces: Iterable[Tensor], root: _RowRoot) -> Iterator[tuple[Tensor, Root]]:
    """Pieces of the inputs, in their order, each with the root of its rows."""
    start = 0
    for piece in pieces:
        stop = start + len(piece)
        yield piece, partial(root, rows=slice(start, stop))
        start = stop


def _resolved(values: Tensor) -> Tensor:
    """Which eigenvalues (r,), ascending and in float64, a symmetric matrix of that size can tell from zero; bool."""
    return values > values[-1:].clamp_min(0) * len(values) * _EPS


def check_finite(curvature: Tensor) -> Tensor:
    """The curvature itself, refused where it overflows."""
    if not bool(curvature.isfinite().all()):
        raise Refused(
            "the curvature of the likelihood is not finite: the noise is too small for the network's dtype. "
            "Use a larger noise, or a float64 net (net.double())"
        )
    return curvature


Structure = Literal["full", "kron", "diag"]


def ggn(
    jacobian: NetworkJacobian,
    x: Tensor,
    root: _RowRoot,
    structure: Structure,
    prior_prec: Tensor,
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
    setting: positions count as independent data. Beside the products, the scales and shifts of normalizing layers and
    grouped convolutions have exact blocks, of the whole layer up to 1024 weights, else of each channel; all other
    weights (recurrent layers, attention, embeddings, shared ones) an exact block up to 1024 in a module, else the exact
    diagonal.

    Reference: Optimizing Neural Networks with Kronecker-factored Approximate Curvature (Martens & Grosse, 2015);
    Kronecker-Factored Approximate Curvature for Modern Neural Network Architectures (Eschenhagen et al., 2023).
    """
    kinds: dict[str, Callable[..., Curvature]]
    kinds = {
        "full": FullCurvature,
        "kron": KronCurvature,
        "diag": DiagCurvature,
    }
    return kinds[structure](jacobian, x, root, prior_prec)


class Curvature(ABC):
    """A whitened Gauss-Newton matrix H̃ in one structure.

    Attributes: ``index`` (p,) coordinates; ``group_names`` of the layers (a site's name without its last part) and
        ``group`` (p,), each coordinate's; ``averaged``: whether a layer's prior precision had to be averaged over its
        outputs; ``top``, the largest eigenvalue, in prior precisions, ``cut``, below which one counts as zero, and
        ``num_cut`` of the directions taken as zero.
    """

    averaged = False
    top = 0.0
    cut = 0.0
    num_cut = 0

    def __init__(self, jacobian: NetworkJacobian, prior_prec: Tensor):
        self.index = jacobian.index
        self.prior_prec = prior_prec
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

    def findings(self, ratio: float) -> list[Finding]:
        """What is not resolved where the likelihood's curvature counts ``ratio`` times as much against the prior."""
        cut = self.cut * ratio
        if not self.num_cut or cut <= 1:
            return []
        error = 0.5 * self.num_cut * math.log1p(cut)
        numbers = {
            "top": self.top * ratio,
            "cut": cut,
            "count": self.num_cut,
            "error": error,
        }
        return [Finding("curvature_unresolved", numbers)]

    def _spread(self, tau: Tensor) -> Tensor:
        """The factor of each coordinate (p,), float64, from τ (groups,) or (1,)."""
        return tau.double().expand(len(self.index)) if len(tau) == 1 else tau.double()[self.group]


class FullCurvature(Curvature):
    """All correlations. With fewer rows N·k than weights p through the rows' Gram matrix, else the p × p matrix itself.

    Both are exact; the Gram side costs (N·k)² p. On the other side the Gaussian takes one Cholesky factorisation, and
    one factor τ the eigenvalues alone. Where the prior drowns in the rounding of H̃, a factorisation fails or counts
    rounding as curvature: then the spectrum is taken, and what float64 cannot tell from zero is zero.

    Three states: ``whitened_rows`` and their spectrum (fewer rows than weights); ``matrix`` alone; ``matrix`` and its
    eigenvalues, found when first needed. ``cut`` and ``num_cut`` stay 0 until a spectrum is taken, and until then
    ``top`` is a bound, no less than the largest eigenvalue.

    Attributes: ``whitened_rows`` (N·k, p) of the Jacobian, None on the side of the matrix; ``basis`` (p, r),
        eigenvectors of their nonzero eigenvalues, which exists beside them alone; ``matrix`` (p, p), H̃ in float64,
        empty beside the rows; ``size``, the smaller of N·k and p: how many eigenvalues are looked for.
    """

    whitened_rows: Tensor | None = None
    _values: Tensor | None = None
    _grams: Tensor | None = None

    def __init__(
        self,
        jacobian: NetworkJacobian,
        x: Tensor,
        root: _RowRoot,
        prior_prec: Tensor,
    ):
        super().__init__(jacobian, prior_prec)
        prior_sd = prior_prec.rsqrt()
        self.matrix = prior_prec.new_empty(0)
        with torch.no_grad():
            f = jacobian.model.forward(jacobian.params, x[:1])
            num_columns = root(f, rows=slice(0, 1)).shape[-1]
        self.size = min(len(x) * num_columns, jacobian.size)
        chunks = jacobian.chunks(x, 4 * num_columns * jacobian.size)  # float64 copies included
        row_chunks = (
            jacobian.rows(chunk, chunk_root)[1].flatten(0, 1) * prior_sd
            for chunk, chunk_root in _with_roots(chunks, root)
        )
        if self.size < jacobian.size:
            self.whitened_rows = check_finite(torch.cat(list(row_chunks)))
            self._values, self.basis = _spectrum(self.whitened_rows)
            self._note_resolution(self._values)
            return
        matrix = torch.zeros(
            jacobian.size,
            jacobian.size,
            dtype=torch.float64,
            device=x.device,
        )
        for row_chunk in row_chunks:
            matrix += gram(row_chunk)
        self._set_matrix(matrix)

    def _set_matrix(self, matrix: Tensor) -> None:
        """Take H̃ itself, of which no eigenvalue is known yet."""
        self.matrix = check_finite(matrix)
        # the Frobenius norm is no less than the largest eigenvalue
        self.top = float(torch.linalg.matrix_norm(self.matrix))

    def _note_resolution(self, values: Tensor) -> None:
        """Note the largest eigenvalue, the cut, and how many lie below it; ``values`` are the others, ascending."""
        self.top = float(values[-1]) if len(values) else 0.0
        self.cut = self.top * self.size * _EPS
        self.num_cut = self.size - len(values)

    def _eigenvalues(self) -> Tensor:
        """Nonzero eigenvalues (r,) of H̃, ascending, float64; of a ``matrix`` computed at the first call."""
        if self._values is None:
            values = torch.linalg.eigvalsh(self.matrix)
            self._values = values[_resolved(values)]
            self._note_resolution(self._values)
        return self._values

    def _is_stiff(self, tau: Tensor, c: Tensor | float) -> bool:
        """Whether the least prior precision is below the rounding of c H̃."""
        rounding = float(torch.as_tensor(c).detach()) * self.top * self.size * _EPS
        return rounding > float(tau.detach().min())

    def log_det(self, tau: Tensor, c: Tensor) -> Tensor:
        prior = self._spread(tau).log().sum()
        if len(tau) == 1:
            return (c * self._eigenvalues() / tau).log1p().sum() + prior
        # det(diag(τ) + c H̃) = det diag(τ) · det(I + W): W is c H̃ whitened by τ too, or the Gram matrix of its rows
        if self.whitened_rows is None:
            scale = self._spread(tau).rsqrt()
            whitened = c * self.matrix * scale * scale[:, None]
        else:
            whitened = torch.einsum("g,gnm->nm", c / tau, self._layer_grams(self.whitened_rows))
        if self._is_stiff(tau, c):  # its rounding exceeds the 1 that is added to it
            values = torch.linalg.eigvalsh(whitened)
            return torch.where(_resolved(values.detach()), values, 0.0).log1p().sum() + prior
        identity = torch.eye(
            len(whitened),
            dtype=whitened.dtype,
            device=whitened.device,
        )
        factor = torch.linalg.cholesky(whitened + identity)
        return 2 * factor.diagonal().log().sum() + prior

    def _layer_grams(self, whitened_rows: Tensor) -> Tensor:
        """Gram matrix of the rows by layer (groups, N·k, N·k), float64; computed once."""
        if self._grams is None:
            layer_grams = []
            for number in range(len(self.group_names)):
                layer_grams.append(gram(whitened_rows[:, self.group == number].T))
            self._grams = torch.stack(layer_grams)
        return self._grams

    def blocks(self, tau: Tensor, c: float) -> list[Block]:
        """One block over all weights: dense where the matrix is factorised, else of low rank, by a spectrum."""
        weight_tau = self._spread(tau)
        if self.whitened_rows is None and not self._is_stiff(tau, c):
            inverse_sd = self.prior_prec.double().sqrt()
            # in place, for there may be thousands of weights
            whitened_prec = c * self.matrix
            whitened_prec.diagonal().add_(weight_tau)
            # D^½ M D^½ = (D^½ L)(D^½ L)ᵀ: the factor is scaled by rows
            factor = torch.linalg.cholesky(whitened_prec, out=whitened_prec)
            return [DenseBlock(self.index, factor.mul_(inverse_sd.unsqueeze(1)))]
        scale = (self.prior_prec.double() * weight_tau).rsqrt()
        if self.whitened_rows is None:
            self._eigenvalues()  # notes how much of them is resolved, which the findings say
            whitened = c * self.matrix * weight_tau.rsqrt() * weight_tau.rsqrt()[:, None]
            values, basis = torch.linalg.eigh(whitened)
            resolved = _resolved(values)
            return [LowRankBlock(self.index, scale, basis[:, resolved], values[resolved])]
        scale = scale.to(self.whitened_rows)
        if len(tau) == 1:
            values = (c * self._eigenvalues() / tau).to(scale)
            return [LowRankBlock(self.index, scale, self.basis, values)]
        # factors that differ by layer turn the eigenvectors: another spectrum
        values, basis = _spectrum(self.whitened_rows * (c / weight_tau).sqrt().to(scale))
        return [LowRankBlock(self.index, scale, basis, values.to(scale))]


class DiagCurvature(Curvature):
    """Only the diagonal, Σ_n Σ_k (row)²: for layers without shared positions two matrix products."""

    def __init__(
        self,
        jacobian: NetworkJacobian,
        x: Tensor,
        root: _RowRoot,
        prior_prec: Tensor,
    ):
        super().__init__(jacobian, prior_prec)
        total = torch.zeros(
            jacobian.size,
            dtype=torch.float64,
            device=x.device,
        )
        if not jacobian.layers:
            for chunk, chunk_root in _with_roots(jacobian.chunks(x), root):
                total += jacobian.rows(chunk, chunk_root)[1].square().sum((0, 1)).double()
        for chunk, chunk_root in _with_roots(_factor_chunks(jacobian, x), root):
            for layer, factors in zip(jacobian.layers, jacobian.factors(chunk, chunk_root)[1]):
                if isinstance(factors, Factors) and factors.is_outer:
                    grads = factors.grads.square().sum((1, 2))
                    square = grads.T @ factors.inputs.squeeze(1).square()
                else:
                    square = factors.rows().square().sum((0, 1))
                total[jacobian.positions(layer).reshape(-1)] += square.reshape(-1).double()
        self.values = check_finite(total / prior_prec.double())

    def log_det(self, tau: Tensor, c: Tensor) -> Tensor:
        return (self._spread(tau) + c * self.values).log().sum()

    def blocks(self, tau: Tensor, c: float) -> list[Block]:
        whitened_prec = self._spread(tau) + c * self.values
        return [DiagBlock(self.index, (whitened_prec * self.prior_prec).to(self.prior_prec))]


class _KronLayer(NamedTuple):
    """The decomposed Kronecker factors of a layer, whitened by the prior.

    ``flat_index`` (out · in,) of its weights in the flat vector, output by output, and the ``group`` of their prior;
    ``out_basis`` and ``in_basis``, eigenvectors of B and of the whitened A; ``values`` (out, in), products of their
    eigenvalues; ``scale`` (in,), the prior's standard deviation of the weights of an input.
    """

    flat_index: Tensor
    group: int
    out_basis: Tensor
    in_basis: Tensor
    values: Tensor
    scale: Tensor


@dataclass(frozen=True, eq=False)
class _ExactPart:
    """Exact blocks of the whitened curvature, of rows that are independent of each other.

    Attributes: ``index`` (R · m,) of the weights, row by row, and the ``group`` of their prior; ``matrices`` (R, m, m),
        of the whitened curvature; their eigenvalues ``values`` (R, m), and the prior's ``precision`` (R, m).
    """

    index: Tensor
    group: int
    matrices: Tensor
    values: Tensor
    precision: Tensor

    @classmethod
    def of(
        cls,
        sums: _RowSums,
        group: int,
        precision: Tensor,
    ) -> _ExactPart:
        """Of sums (R, m, m) over the data, whitened by the prior's precision (R · m,)."""
        precision = precision.reshape(sums.matrices.shape[:2])
        scale = precision.rsqrt()
        matrices = check_finite(sums.matrices * scale.unsqueeze(1) * scale.unsqueeze(2))
        if matrices.shape[1] == 1:
            values = matrices.squeeze(2)
        else:
            eigenvalues = torch.linalg.eigvalsh(matrices)
            cut = eigenvalues[:, -1:].clamp_min(0) * eigenvalues.shape[1] * _EPS
            values = torch.where(eigenvalues > cut, eigenvalues, 0.0)
        return cls(sums.index, group, matrices, values, precision)

    def block(self, tau: float, c: float) -> Block:
        """The Gaussian for a prior factor τ and a likelihood factor c."""
        num_rows, size = self.values.shape
        inverse_sd = self.precision.sqrt()
        if size == 1:
            return DiagBlock(self.index, ((tau + c * self.values) * self.precision).reshape(-1))
        identity = torch.eye(size).to(self.matrices)
        factor = torch.linalg.cholesky(c * self.matrices + tau * identity)
        factor = factor * inverse_sd.unsqueeze(2)
        if num_rows == 1:
            return DenseBlock(self.index, factor.squeeze(0))
        return RowsBlock(self.index, factor)


class KronCurvature(Curvature):
    r"""One Kronecker product per layer, :math:`H_l \approx B_l \otimes A_l`, bias as a column of ones in A.

    .. math:: B = \sum_{n,k,t} g g^\top, \qquad A = \frac{1}{N T} \sum_{n,t} a a^\top

    over data n, columns k of the root of a datum's curvature and positions t of a convolution, with the inputs a of the
    layer and the gradients g at its outputs.

    A product stays one under whitening only where the prior precision is the same for all outputs of a layer:
    elsewhere each of its inputs has their mean, and ``averaged`` says so. Of ``top``, ``cut`` and
    ``num_cut`` the layer with the largest eigenvalue is the one reported. ``others`` are the weights without such a
    product, with exact blocks.
    """

    others: Sequence[_ExactPart] = ()

    def __init__(
        self,
        jacobian: NetworkJacobian,
        x: Tensor,
        root: _RowRoot,
        prior_prec: Tensor,
    ):
        if not any(layer.is_product for layer in jacobian.products):
            raise Refused(
                f"no Kronecker factors for: {', '.join(jacobian.unsupported)}; only for Linear, Conv1d, Conv2d, "
                "ConvTranspose1d and ConvTranspose2d (ungrouped), each called once, of which this subset has none: use "
                "structure='diag' or 'full'"
            )
        super().__init__(jacobian, prior_prec)
        sums = _sums_over_data(jacobian, x, root)
        products = [part.factors for part in sums if isinstance(part, _KroneckerSums)]
        self._decompose(jacobian, products)
        exact = [part for part in sums if isinstance(part, _RowSums)]
        self.others = [
            _ExactPart.of(part, self.group_of(part.index), self._precisions_at(part.index))
            for part in [*exact, *_remaining_sums(jacobian, x, root)]
        ]
        for part in self.others:
            self._note_values(part.values)

    def group_of(self, index: Tensor) -> int:
        """The number of the layer whose coordinates these are."""
        return int(self.group[torch.searchsorted(self.index, index[0])])

    def _precisions_at(self, index: Tensor) -> Tensor:
        """The prior's precision of some coordinates, float64."""
        return self.prior_prec[torch.searchsorted(self.index, index)].double()

    def _note_values(self, values: Tensor) -> None:
        """Note eigenvalues, of which the largest of all layers and what it drowns are reported."""
        largest = float(values.max())
        if largest >= self.top:  # the layer with the most curvature so far
            self.top = largest
            self.cut = largest * max(values.shape) * _EPS
            self.num_cut = int((values == 0).sum())

    def _decompose(
        self, jacobian: NetworkJacobian, all_factors: Iterable[tuple[Tensor, Tensor]]
    ) -> None:
        """Set the layers, from A (in, in) and B (out, out) of each."""
        self.layers: list[_KronLayer] = []
        layers = [layer for layer in jacobian.products if layer.is_product]
        for layer, (in_factor, out_factor) in zip(layers, all_factors):
            positions = jacobian.positions(layer)
            layer_prec = self.prior_prec[positions].double()
            mean_prec = layer_prec.mean(0)
            self.averaged |= bool(((layer_prec - mean_prec).abs() > 1e-5 * mean_prec).any())
            scale = mean_prec.rsqrt()
            in_values, in_basis = _decomposed(in_factor * (scale.unsqueeze(1) * scale))
            out_values, out_basis = _decomposed(out_factor)
            values = out_values.unsqueeze(1) * in_values
            self._note_values(values)
            group = int(self.group[positions[0, 0]])
            flat_index = layer.index.reshape(-1)
            self.layers.append(_KronLayer(flat_index, group, out_basis, in_basis, values, scale))

    def log_det(self, tau: Tensor, c: Tensor) -> Tensor:
        layer_tau = tau.expand(len(self.group_names))
        parts: list[_KronLayer | _ExactPart] = [*self.layers, *self.others]
        terms = [(layer_tau[part.group] + c * part.values).log().sum() for part in parts]
        return torch.stack(terms).sum()

    def blocks(self, tau: Tensor, c: float) -> list[Block]:
        """One block for each layer, those with a product first."""
        layer_tau = tau.expand(len(self.group_names))
        like = self.prior_prec
        blocks: list[Block] = []
        for layer in self.layers:
            prec = layer_tau[layer.group] + c * layer.values
            block = KronBlock(
                layer.flat_index,
                layer.out_basis.to(like),
                layer.in_basis.to(like),
                prec.to(like),
                layer.scale.to(like),
            )
            blocks.append(block)
        return blocks + [part.block(float(layer_tau[part.group]), c) for part in self.others]


class _KroneckerSums:
    """Sums over the data so far of what the factors A (in, in) and B (out, out) of a layer are made of."""

    def __init__(self, layer: Layer) -> None:
        num_out, num_in = layer.index.shape
        zeros = partial(
            torch.zeros,
            dtype=torch.float64,
            device=layer.index.device,
        )
        self.inputs = zeros(num_in, num_in)
        self.grads = zeros(num_out, num_out)
        self.count = 0

    def add(self, factors: Factors) -> None:
        """Take in a batch."""
        self.inputs += gram(factors.inputs.flatten(0, 1))
        self.grads += gram(factors.grads.flatten(0, 2))
        self.count += factors.inputs.shape[0] * factors.inputs.shape[1]

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """A and B."""
        return self.inputs / self.count, self.grads


class _RowSums:
    """Sums over the data so far of rrᵀ, of rows (N, k, R, m) of the Jacobian; all at once where they are few."""

    def __init__(self, index: Tensor, num_rows: int) -> None:
        """Of coordinates ``index`` (p,) that are ``num_rows`` rows."""
        self.index = index
        self.num_rows = 1 if len(index) <= _FEW else num_rows
        size = len(index) // self.num_rows
        self.matrices = torch.zeros(
            self.num_rows,
            size,
            size,
            dtype=torch.float64,
            device=index.device,
        )

    def add(self, rows: Tensor) -> None:
        """Take in a batch, (N, k, …) with the coordinates in the order of the index."""
        by_row = rows.reshape(-1, *self.matrices.shape[:2])
        if self.num_rows == 1:
            self.matrices += gram(by_row.squeeze(1))
            return
        by_row = by_row.double()
        self.matrices += torch.einsum("nri,nrj->rij", by_row, by_row)


def _sums_over_data(
    jacobian: NetworkJacobian, x: Tensor, root: _RowRoot
) -> list[_KroneckerSums | _RowSums]:
    """Of the layers that have them the sums of Kronecker factors or of exact blocks, float64."""
    sums: list[_KroneckerSums | _RowSums] = []
    for layer in jacobian.products:
        if layer.is_product:
            sums.append(_KroneckerSums(layer))
        else:
            sums.append(_RowSums(layer.index.reshape(-1), len(layer.index)))
    for chunk, chunk_root in _with_roots(jacobian.chunks(x, jacobian.factor_scalars(x)), root):
        for layer_sums, factors in zip(sums, jacobian.factors(chunk, chunk_root)[1]):
            if isinstance(layer_sums, _KroneckerSums):
                layer_sums.add(cast(Factors, factors))
            else:
                layer_sums.add(factors.rows())
    return sums


def _remaining_sums(jacobian: NetworkJacobian, x: Tensor, root: _RowRoot) -> list[_RowSums]:
    """Of the sites that no layer's products cover: the exact block of a module's, or their diagonal where many."""
    remainder = jacobian.remainder
    if remainder is None:
        return []
    owners: dict[str, list[Tensor]] = {}
    place = 0
    for site in remainder.sites:
        owners.setdefault(site.name.rpartition(".")[0], []).append(
            torch.arange(
                place,
                place + site.size,
                device=remainder.index.device,
            )
        )
        place += site.size
    columns = [torch.cat(pieces) for pieces in owners.values()]
    sums = [_RowSums(remainder.index[numbers], len(numbers)) for numbers in columns]
    for chunk, chunk_root in _with_roots(remainder.chunks(x, remainder.pass_scalars(x)), root):
        rows = remainder.rows(chunk, chunk_root)[1]
        for module_sums, numbers in zip(sums, columns):
            module_sums.add(rows[:, :, numbers])
    return sums


def _factor_chunks(jacobian: NetworkJacobian, x: Tensor) -> Iterable[Tensor]:
    return jacobian.chunks(x, jacobian.factor_scalars(x)) if jacobian.layers else ()


def _spectrum(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Nonzero eigenvalues (r,), float64, and orthonormal eigenvectors (p, r), in the rows' dtype, of RᵀR.

    What is cut is what the float64 Gram matrix cannot tell from zero: a cut at float32's resolution would drop
    thousands of prior precisions of curvature. The eigenvectors are formed in float64: Rᵀv cancels down to √λ.
    """
    values, vectors = torch.linalg.eigh(gram(rows.T))
    keep = _resolved(values)
    values = values[keep]
    mix = vectors[:, keep] * values.rsqrt()
    basis = rows.new_empty(rows.shape[1], len(values))
    size = max(1, CHUNK_SCALARS // len(rows))
    for columns, target in zip(rows.T.split(size), basis.split(size)):
        target.copy_(columns.double() @ mix)
    return values, basis


def _decomposed(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, zero where float64 cannot tell them from it, and eigenvectors of a Kronecker factor."""
    values, vectors = torch.linalg.eigh(check_finite(factor))
    return torch.where(_resolved(values), values, 0.0), vectors


def gram(matrix: Tensor) -> Tensor:
    """MᵀM in float64. NumPy's product of a matrix with its own transpose does half the work on the CPU (BLAS syrk)."""
    matrix = matrix.double()
    if matrix.device.type != "cpu":
        return matrix.T @ matrix
    array = matrix.numpy()
    return torch.from_numpy(array.T @ array)


def hessian(density: Density, z: Tensor, index: Tensor | None = None) -> Tensor:
    r"""Exact Hessian of the negative log joint (with Jacobian) in some coordinates.

    .. math:: \Lambda_{ij} = -\partial_i \partial_j \left[ \log p(y, T(z)) + \log |\det T'(z)| \right]

    Args:
        density: any program's density.
        z: where, (dim,).
        index: coordinates (p,), default all; the others are held.

    Returns:
        (p, p), float64, symmetrised.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> program = Density(lambda: pyro.sample("z", dist.Normal(torch.zeros(2), 0.5).to_event(1)))
        >>> hessian(program, torch.ones(2)).diagonal()
        tensor([4., 4.], dtype=torch.float64)
    """
    columns = torch.cat([chunk for _, chunk in _columns(density, z, index)]).double()
    return (columns + columns.T) / 2


def hessian_diagonal(density: Density, z: Tensor, index: Tensor | None = None) -> Tensor:
    """Diagonal (p,) of :func:`hessian`, float64, without the matrix in memory."""
    diagonal = [
        columns.gather(1, numbers[:, None])[:, 0]
        for numbers, columns in _columns(density, z, index)
    ]
    return torch.cat(diagonal).double()


def _columns(density: Density, z: Tensor, index: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """The numbers (m,) of some columns of the Hessian and these, (m, p); chunk by chunk."""
    index = torch.arange(len(z), device=z.device) if index is None else index
    z = z.detach()
    centre = z[index]
    slope = torch.func.grad(lambda values: -density.log_joint(z.index_copy(0, index, values)))

    def product(direction: Tensor) -> Tensor:
        # WORKAROUND(torch<=2.13): reverse over reverse, for forward mode mixes up dtypes where a float32 model is
        # summed in float64
        return torch.func.grad(lambda values: slope(values) @ direction)(centre)

    num_scalars = max((arg.numel() for arg in density.args if isinstance(arg, Tensor)), default=1)
    chunk_size = max(1, CHUNK_SCALARS // (64 * max(len(index), num_scalars)))
    for numbers in torch.arange(len(index), device=z.device).split(chunk_size):
        basis = torch.nn.functional.one_hot(numbers, len(index)).to(z)
        yield numbers, torch.func.vmap(product)(basis).detach()
