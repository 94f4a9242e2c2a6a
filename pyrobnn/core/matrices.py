"""Roots of positive semidefinite matrices."""

from __future__ import annotations

import torch
from torch import Tensor


def symmetric_root(matrix: Tensor) -> Tensor:
    """The symmetric square roots of positive semidefinite matrices (…, p, p); rounding below zero counts as zero."""
    values, basis = torch.linalg.eigh(matrix)
    return (basis * values.clamp_min(0).sqrt().unsqueeze(-2)) @ basis.mT
