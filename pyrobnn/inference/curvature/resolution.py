"""Floating-point resolution of a curvature that exceeds the prior precision by many powers of ten."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyrobnn.checks import Refused

EPS = torch.finfo(torch.float64).eps


def resolved(values: Tensor) -> Tensor:
    """Which eigenvalues (r,), ascending and in float64, a symmetric matrix of that size can tell from zero; bool."""
    return values > values[-1:].clamp_min(0) * len(values) * EPS


def check_finite(curvature: Tensor) -> Tensor:
    """The curvature itself.

    Raises:
        Refused: it overflows.
    """
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

    def note(self, ratio: float) -> str | None:
        """What to say where the likelihood's curvature counts ``ratio`` times as much against the prior."""
        if self.count and self.cut * ratio > 1:
            directions = "1 direction keeps" if self.count == 1 else f"{self.count} directions keep"
            error = 0.5 * self.count * math.log1p(self.cut * ratio)
            return (
                f"the curvature of the likelihood reaches {self.top * ratio:.2g} prior precisions, and float64 does "
                f"not tell less than {self.cut * ratio:.2g} of them from none: {directions} the "
                f"prior's width, and log_evidence may be too high by up to {error:.2g} nats: use a larger noise or a "
                "tighter prior"
            )
        if self.top * ratio * torch.finfo(self.dtype).eps ** 2 > 1:
            return (
                f"the curvature of the likelihood reaches {self.top * ratio:.2g} prior precisions, more than "
                f"{str(self.dtype).removeprefix('torch.')} resolves: the narrowest widths are rounding. Use a larger "
                "noise, a tighter prior or a float64 net (net.double())"
            )
        return None
