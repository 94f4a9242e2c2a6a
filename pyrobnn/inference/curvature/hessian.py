"""The exact Hessian of a negative log joint density, by Hessian-vector products over chunks of basis vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pyrobnn.density.density import Density
from pyrobnn.inference.curvature.jacobian import CHUNK_SCALARS


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
    columns = torch.cat([part for _, part in _columns(density, z, index)]).double()
    return (columns + columns.T) / 2


def hessian_diagonal(density: Density, z: Tensor, index: Tensor | None = None) -> Tensor:
    """Diagonal (p,) of :func:`hessian`, float64, without the matrix in memory."""
    return torch.cat(
        [part.gather(1, rows.unsqueeze(1)).squeeze(1) for rows, part in _columns(density, z, index)]
    ).double()


def gradient(density: Density, z: Tensor) -> Tensor:
    """Gradient of the log joint (with Jacobian), (dim,)."""
    return torch.func.grad(density.log_joint)(z).detach()


def _columns(density: Density, z: Tensor, index: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    index = torch.arange(len(z), device=z.device) if index is None else index
    z = z.detach()

    def energy(part: Tensor) -> Tensor:
        return -density.log_joint(z.index_copy(0, index, part))

    slope: Callable[[Tensor], Tensor] = torch.func.grad(energy)
    centre = z[index]

    def product(direction: Tensor) -> Tensor:
        # reverse over reverse: torch's forward mode mixes up dtypes where a float32 model is summed in float64
        return torch.func.grad(lambda part: slope(part) @ direction)(centre)

    data = max((arg.numel() for arg in density.args if isinstance(arg, Tensor)), default=1)
    at_once = max(1, CHUNK_SCALARS // (64 * max(len(index), data)))
    for rows in torch.arange(len(index), device=z.device).split(at_once):
        basis = torch.nn.functional.one_hot(rows, len(index)).to(z)
        yield rows, torch.func.vmap(product)(basis).detach()
