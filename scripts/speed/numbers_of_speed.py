"""The numbers that are held from commit to commit, how they change, and which are worse."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, stdev
from typing import Any, Literal

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Number:
    """A number: its label, whether its changes are factors or differences, and which way is worse."""

    label: str
    kind: Literal["factor", "difference"]
    worse: Literal["higher", "lower"]

    def change(self, old: Sequence[float], new: Sequence[float]) -> tuple[float, float]:
        """Median over the seeds of the logarithm of a factor, or of a difference, and its standard error."""
        scaled = math.log if self.kind == "factor" else float
        changes = [scaled(after) - scaled(before) for before, after in zip(old, new, strict=True)]
        # that of a mean times √(π/2), as for normal changes
        return median(changes), math.sqrt(math.pi / 2) * stdev(changes) / math.sqrt(len(changes))


NUMBERS = {
    "nuts gradient": Number("NUTS, a gradient of 1-50-1", "factor", "higher"),
    "svi step": Number("SVI, a step of 1-50-1", "factor", "higher"),
    "laplace fit": Number("Laplace, a fit of 13-50-50-1", "factor", "higher"),
    "predict": Number("prediction by 400 draws", "factor", "higher"),
    "nuts ess": Number("NUTS, effective draws per 1000 gradients", "factor", "lower"),
    "laplace score": Number("Laplace, held-out log density", "difference", "lower"),
    "svi score": Number("SVI, held-out log density", "difference", "lower"),
}


def worse(record: Record, level: float) -> list[str]:
    """Numbers worse than in the other code, by a t-test of the changes at this level each."""
    from scipy.stats import t

    losses = []
    for name, number in NUMBERS.items():
        old = record["old"][name]
        new = record["new"][name]
        change, error = number.change(old, new)
        change *= 1.0 if number.worse == "higher" else -1.0
        if change > error * t.isf(level, len(new) - 1):
            losses.append(
                f"{number.label}: {median(old):.3g} at {record['against']}, {median(new):.3g} now"
            )
    return losses
