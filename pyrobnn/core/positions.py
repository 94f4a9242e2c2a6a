"""Positions that are evenly spaced over a length: how draws and rows are thinned."""

from __future__ import annotations

import torch
from torch import Tensor


def evenly_spaced(length: int, count: int, dtype: torch.dtype | None = None) -> Tensor:
    """``count`` positions (count,) below ``length``, evenly spaced from the first to the last; some twice of fewer.

    ``dtype``: in which they are computed, torch's default otherwise; float32 has no number for positions beyond 2**24.

    >>> evenly_spaced(10, 4).tolist()
    [0, 3, 6, 9]
    """
    return torch.linspace(0, length - 1, count, dtype=dtype).round().long()
