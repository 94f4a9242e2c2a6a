r"""The metric of the HMC machine: :math:`z = A q` of whitened positions q, :math:`A A^\top` the inverse mass matrix.

A is a scale (dim,), the diagonal metric, or a lower triangular matrix (dim, dim), the dense one.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Form = Literal["diag", "dense"]
#: coordinates up to which "auto" gives a program a dense metric, cheap beside its gradient
_MAX_DENSE = 100
#: numbers of a window that are copied in float64 at once
_BLOCK = 2**24


def form_of(mass_matrix: Literal["auto"] | Form, is_bnn: bool, dim: int) -> Form:
    """The form that ``"auto"`` stands for: the modes of a net share no covariance, a small program's chains do."""
    if mass_matrix != "auto":
        return mass_matrix
    return "diag" if is_bnn or dim > _MAX_DENSE else "dense"


def unwhiten(q: Tensor, a: Tensor) -> Tensor:
    """Positions :math:`A q` of whitened ones (…, dim)."""
    return q * a if a.dim() == 1 else q @ a.T


def pulled(g: Tensor, a: Tensor) -> Tensor:
    r"""Whitened gradients :math:`A^\top g` (…, dim)."""
    return g * a if a.dim() == 1 else g @ a


def whiten(z: Tensor, a: Tensor) -> Tensor:
    """Whitened positions :math:`A^{-1} z` (chain, dim)."""
    if a.dim() == 1:
        return z / a
    return torch.linalg.solve_triangular(
        a,
        z.T,
        upper=False,
    ).T.contiguous()


def standard_deviations(a: Tensor) -> Tensor:
    """The standard deviation along each coordinate that A stands for (dim,)."""
    return a if a.dim() == 1 else a.norm(dim=1)


def whitening(z: Tensor, counts: Tensor, old: Tensor) -> Tensor:
    """A of the pooled covariance of a window (chain, slot, dim), in the form of ``old``; ``old`` if it says nothing.

    Of each chain the first ``counts`` (chain,) draws are valid.
    """
    total = int(counts.sum())
    if total < 3:
        return old
    if old.dim() == 2:
        return _dense_whitening(z, counts, old)
    if z.numel() > _BLOCK and z.shape[-1] > 1:
        halves = zip(
            z.chunk(2, -1),
            old.chunk(2, -1),
            strict=True,
        )
        return torch.cat([whitening(half, counts, scale) for half, scale in halves])
    deviations, freedom = _centred(z, counts)
    var = deviations.square().sum(0) / freedom
    before = old.double().square()
    shrink, added = _shrinkage(total, var, before)
    return torch.where(var > 0, shrink * var + added, before).sqrt().to(old.dtype)


def _shrinkage(total: int, var: Tensor, before: Tensor) -> tuple[float, Tensor]:
    """The factor of a variance (dim,) that was estimated from so many draws, and what is added to it.

    Stan adds 1e-3, which hides scales far below it: here no more than lies between the estimate and what is in use.
    """
    shrink = total / (total + 5.0)
    return shrink, (1 - shrink) * 1e-3 * (var * before).sqrt().clamp(max=1.0)


def _dense_whitening(z: Tensor, counts: Tensor, old: Tensor) -> Tensor:
    """Of a window (chain, slot, dim), in the coordinates that ``old`` whitens.

    With few draws for many dimensions the off-diagonal part is mostly noise: it shrinks by its share. As that is done
    in the coordinates that are in use, the condition number that remains falls from window to window.
    """
    deviations, freedom = _centred(z, counts)
    x = whiten(deviations, old.double())
    var = x.square().sum(0) / freedom
    before = torch.ones_like(var)
    total = int(counts.sum())
    shrink, added = _shrinkage(total, var, before)
    trust = total / (total + 0.5 * len(var))
    cov = shrink * (trust * (x.T @ x / freedom) + (1 - trust) * var.diag_embed())
    cov = cov + torch.where(var > 0, added, before).diag_embed()
    # of positions that ran away to infinity there is no factor
    factor, failed = torch.linalg.cholesky_ex(cov)
    if failed:
        return old
    # LAPACK returns the factor transposed
    return (old.double() @ factor).to(old.dtype).contiguous()


def _centred(x: Tensor, counts: Tensor) -> tuple[Tensor, int]:
    """Deviations (chain * slot, dim) in float64, zero where there is no draw, and their degrees of freedom.

    Around each chain's mean where they are long enough to tell, so that chains in different modes do not pass for one
    wide mode; around the mean of all where they are short.
    """
    total = int(counts.sum())
    valid = (torch.arange(x.shape[1], device=x.device) < counts.unsqueeze(-1)).unsqueeze(-1)
    x = torch.where(valid, x.double(), 0.0)
    if counts.double().mean() >= 20:
        mean = x.sum(1, keepdim=True) / counts.clamp(min=1).reshape(-1, 1, 1)
        num_means = len(counts)
    else:
        mean = (x.sum((0, 1)) / total).reshape(1, 1, -1)
        num_means = 1
    deviations = torch.where(valid, x - mean, 0.0).flatten(0, 1)
    return deviations, max(total - num_means, 1)
