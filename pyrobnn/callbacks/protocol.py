"""What a callback is, and the numbers among what it is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor


class Callback(Protocol):
    """Called after a step; True stops the run."""

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> bool | None: ...


def scalars(metrics: Mapping[str, Any], names: tuple[str, ...] | None = None) -> dict[str, float]:
    """The metrics that are single numbers (no truth values), among ``names`` when given."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if (names is None or name in names)
        and (
            (isinstance(value, (int, float)) and not isinstance(value, bool))
            or (isinstance(value, Tensor) and value.ndim == 0 and value.dtype != torch.bool)
        )
    }
