"""Roots and leading eigenvectors of symmetric matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor


def symmetric_root(matrix: Tensor) -> Tensor:
    """The symmetric square roots of positive semidefinite matrices (…, p, p); rounding below zero counts as zero."""
    values, basis = torch.linalg.eigh(matrix)
    return (basis * values.clamp_min(0).sqrt().unsqueeze(-2)) @ basis.mT


def power_iteration(
    product: Callable[[Tensor], Tensor],
    start: Tensor,
    num_steps: int,
) -> Iterator[Tensor]:
    """The power iteration of a symmetric matrix, or of several at once.

    Args:
        product: from unit vectors (…, dim) to the matrix times each.
        start: vectors (…, dim).
        num_steps: products that are taken.

    Yields:
        each product (…, dim): its norm approaches the largest eigenvalue in size, its direction that eigenvector.
    """
    vector = start
    for _ in range(num_steps):
        vector = product(vector / vector.norm(dim=-1, keepdim=True).clamp_min(1e-30))
        yield vector
