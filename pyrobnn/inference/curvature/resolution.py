"""Floating-point resolution of a curvature that exceeds the prior precision by many powers of ten."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyrobnn.checks import Refused
from pyrobnn.findings import Finding

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
