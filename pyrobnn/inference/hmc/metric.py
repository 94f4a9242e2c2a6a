r"""A metric from draws and gradients, and the three forms in which the HMC machine holds a metric.

Positions are whitened, :math:`z = A q`, with :math:`A A^\top` the inverse mass matrix. The form of :math:`A` is that of
its tensor: a scale (dim,); a matrix (dim, dim); or low rank and diagonal, :math:`A = D (I + U S U^\top)` with U
orthonormal, as (2, 1 + rank, dim): ``[0, 0]`` is the diagonal of D, ``[0, 1:]`` the rows of :math:`U^\top`, ``[1, 1:]``
those of :math:`S U^\top`. Rows of zeros are directions that the diagonal serves well enough.

*Preconditioning Hamiltonian Monte Carlo by Minimizing Fisher Divergence* (Seyboldt, Carlson & Carpenter, 2026),
https://arxiv.org/abs/2603.18845
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from pyrobnn.density.gradient import Gradient

Form = Literal["auto", "diag", "dense", "low_rank"]
_DIRECTIONS = 10  # widest and narrowest, each: two products of this size are cheap beside a gradient
_SLOTS = 8  # draws of each chain in one call: for a small program a call costs the same for one and for eight
_CUTOFF = 2.0  # of a variance: what the diagonal misses by less stays with it
#: how much, and how strongly, both covariances are drawn to the same multiple
_PRIOR_DRAWS, _PRIOR_VARIANCE = 5.0, 1e-2
_SHORTER = 0.9  # of a trajectory: what directions must at least save to be worth their products


def form_of(mass_matrix: Form, is_bnn: bool) -> Form:
    """The form of a run's metric: a net is spared the search for directions, as none serve all of its modes."""
    return "diag" if mass_matrix == "auto" and is_bnn else mass_matrix


def scaled(scale: Tensor, form: str) -> Tensor:
    """The diagonal A of a scale (dim,) in a form: ``"diag"``, ``"dense"``, or ``"low_rank"``, as ``"auto"`` has."""
    if form == "diag":
        return scale
    if form == "dense":
        return torch.diag(scale)
    out = scale.new_zeros(2, 1 + min(2 * _DIRECTIONS, len(scale)), len(scale))
    out[0, 0] = scale
    return out


def described(a: Tensor, asked: Form) -> str:
    """What A is, in words; of Pyro's sampler, which does not tell its own, what was ``asked`` for."""
    if a.dim() == 2 or (not a.numel() and asked == "dense"):
        return "dense"
    if a.dim() == 1:
        return "diag"
    directions = int(a[0, 1:].any(-1).sum())
    return f"low_rank, with directions beside the diagonal: {directions}" if directions else "diag"


def unwhiten(q: Tensor, a: Tensor) -> Tensor:
    """Positions :math:`A q` of whitened ones (…, dim)."""
    if a.dim() == 1:
        return q * a
    if a.dim() == 2:
        return q @ a.T
    return (q + (q @ a[0, 1:].T) @ a[1, 1:]) * a[0, 0]


def pulled(g: Tensor, a: Tensor) -> Tensor:
    r"""Whitened gradients :math:`A^\top g` (…, dim)."""
    if a.dim() == 1:
        return g * a
    if a.dim() == 2:
        return g @ a
    g = g * a[0, 0]
    return g + (g @ a[0, 1:].T) @ a[1, 1:]


def whiten(z: Tensor, a: Tensor) -> Tensor:
    """Whitened positions :math:`A^{-1} z` (chain, dim)."""
    if a.dim() == 1:
        return z / a
    if a.dim() == 2:
        return torch.linalg.solve_triangular(a, z.T, upper=False).T.contiguous()
    q = z / a[0, 0]
    stretch = (a[0, 1:] * a[1, 1:]).sum(-1)
    return q - (q @ a[0, 1:].T * (stretch / (1 + stretch))) @ a[0, 1:]


def standard_deviations(a: Tensor) -> Tensor:
    """The standard deviation along each coordinate that A stands for (dim,)."""
    if a.dim() == 1:
        return a
    if a.dim() == 2:
        return a.norm(dim=1)
    stretch = (a[0, 1:] * a[1, 1:]).sum(-1, keepdim=True)
    more = ((2 * stretch + stretch.square()) * a[0, 1:].square()).sum(0)
    return a[0, 0] * (1 + more).clamp(min=0).sqrt()


def centred(x: Tensor, counts: Tensor) -> tuple[Tensor, int]:
    """Deviations (chain * slot, dim) in float64, zero where there is no draw, and their degrees of freedom.

    Around each chain's mean where they are long enough to tell, so that chains in different modes do not pass for one
    wide mode; around the mean of all where they are short.
    Of ``x`` (chain, slot, dim), draws or gradients, each chain's first ``counts`` (chain,) are valid.
    """
    total = int(counts.sum())
    valid = (torch.arange(x.shape[1], device=x.device) < counts.unsqueeze(-1)).unsqueeze(-1)
    x = torch.where(valid, x.double(), 0.0)
    own = counts.double().mean() >= 20
    per_chain = counts.clamp(min=1).reshape(-1, 1, 1)
    mean = x.sum(1, keepdim=True) / per_chain if own else (x.sum((0, 1)) / total).reshape(1, 1, -1)
    return torch.where(valid, x - mean, 0.0).flatten(0, 1), max(total - (len(counts) if own else 1), 1)


def gradients(gradient: Gradient, z: Tensor, counts: Tensor) -> Tensor:
    """The gradients (chain, slot, dim) at the draws of a window, up to the last slot that any chain has filled."""
    z = z[:, : int(counts.max())]
    several = torch.func.vmap(gradient, in_dims=1, out_dims=(1, 1))
    try:
        return torch.cat([several(block)[0] for block in z.split(_SLOTS, 1)], 1)
    except RuntimeError:  # a program that cannot be batched
        return torch.stack([gradient(each)[0] for each in z.unbind(1)], 1)


def low_rank(z: Tensor, g: Tensor, counts: Tensor, scale: Tensor) -> Tensor:
    r"""The A, low rank and diagonal, of a window of draws and gradients; the diagonal is ``scale``.

    Of all normals the Fisher divergence to the posterior is least for the covariance :math:`\Sigma` with
    :math:`\Sigma \, \mathrm{cov}(g) \, \Sigma = \mathrm{cov}(z)`. In units of ``scale`` it is found within the span of
    the ten widest directions of the draws and the ten widest of the gradients, which are the posterior's narrowest. A
    normal's is exact from as many draws as there are directions, whatever the draws: the noise of the two covariances
    cancels. Eigenvalues within a factor of two of one are left to the diagonal. With few draws both covariances are
    drawn to the same multiple of the identity, which leaves all to the diagonal.

    The paper's diagonal, :math:`\mathrm{sd}(z_i) / \mathrm{sd}(g_i)` as the variance, is not taken: it was worse than
    the draws' own variance where a posterior is no normal (scripts/results).

    Of draws ``z`` and gradients ``g`` (chain, slot, dim) each chain's first ``counts`` (chain,) are valid.
    """
    out = scaled(scale, "low_rank")
    (x, freedom), (s, _) = centred(z[:, : g.shape[1]], counts), centred(g, counts)
    x, s = x / scale.double(), s * scale.double()
    if not bool(torch.isfinite(s).all()):
        return out
    basis = torch.linalg.qr(torch.cat([_widest(x, freedom), _widest(s, freedom)]).T)[0]
    total = int(counts.sum())
    trust = total / (total + _PRIOR_DRAWS)
    ridge = (1 - trust) * _PRIOR_VARIANCE * torch.eye(basis.shape[1], dtype=x.dtype, device=x.device)
    wide, steep = (trust / freedom * (y @ basis).T @ (y @ basis) + ridge for y in (x, s))
    values, vectors = torch.linalg.eigh(_between(wide, steep))
    kept = (values > _CUTOFF) | (values < 1 / _CUTOFF)
    rows = (basis @ vectors[:, kept]).T
    out[0, 1 : 1 + len(rows)] = rows
    out[1, 1 : 1 + len(rows)] = (values[kept].sqrt() - 1).unsqueeze(-1) * rows
    return out


def low_rank_helps(z: Tensor, g: Tensor, counts: Tensor, scale: Tensor) -> bool:
    """Whether the directions of one half of the chains shorten the trajectories of the other half.

    A trajectory takes as many leapfrogs as the whitened posterior's widest scale has of its narrowest, which bounds the
    step. Directions that belong to the place where a chain is, as a net's do, make both worse elsewhere. The halves of
    one chain stand for two. Arguments as of :func:`low_rank`.
    """
    z = z[:, : g.shape[1]]
    if len(z) == 1:
        half = int(counts) // 2
        z, g = (torch.stack([x[0, :half], x[0, half : 2 * half]]) for x in (z, g))
        counts = counts.new_full((2,), half)
    diagonal, ratio = scaled(scale, "diag"), 1.0
    halves = slice(0, None, 2), slice(1, None, 2)
    for fitted, held in (halves, halves[::-1]):
        a, window = low_rank(z[fitted], g[fitted], counts[fitted], scale), (z[held], g[held], counts[held])
        ratio *= _leapfrogs(*window, a) / _leapfrogs(*window, diagonal)
    return ratio < _SHORTER**2  # not so where it is not a number


def _leapfrogs(z: Tensor, g: Tensor, counts: Tensor, a: Tensor) -> float:
    """The widest scale of a whitened window over the narrowest: the gradients' widest is its inverse."""
    a = a.double()
    widths = []
    for x in (whiten(z.double().flatten(0, 1), a), pulled(g.double().flatten(0, 1), a)):
        x, freedom = centred(x.reshape(z.shape), counts)
        small = x @ x.T if x.shape[0] < x.shape[1] else x.T @ x
        finite = bool(torch.isfinite(small).all())
        widths.append(float(torch.linalg.eigvalsh(small)[-1]) / freedom if finite else math.nan)
    return math.sqrt(widths[0] * widths[1]) or math.nan


def _widest(x: Tensor, freedom: int) -> Tensor:
    """The directions (direction, dim) of largest variance of the rows of ``x``, which are centred."""
    num = min(_DIRECTIONS, x.shape[1], freedom)
    if x.shape[0] >= x.shape[1]:
        return torch.linalg.eigh(x.T @ x)[1][:, -num:].T
    values, vectors = torch.linalg.eigh(x @ x.T)
    return vectors[:, -num:].T @ x / values[-num:].clamp(min=1e-300).sqrt().unsqueeze(-1)


def _between(draws: Tensor, gradients: Tensor) -> Tensor:
    r"""The positive definite :math:`\Sigma` with :math:`\Sigma G \Sigma = C`."""
    root, inverse = _roots(gradients)
    middle, _ = _roots(root @ draws @ root)
    return inverse @ middle @ inverse


def _roots(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The symmetric square root of a positive definite matrix, and its inverse."""
    values, vectors = torch.linalg.eigh(matrix)
    root = values.clamp(min=torch.finfo(values.dtype).tiny).sqrt()
    return (vectors * root) @ vectors.T, (vectors / root) @ vectors.T
