"""The widest gap between training inputs, where a Bayesian model should be unsure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyrobnn.core.groups import CONSTANT_DATA, GRID
from pyrobnn.diagnostics.evidence import Evidence, statistic
from pyrobnn.diagnostics.points import one_output


@dataclass(frozen=True)
class Gap:
    """The widest gap between neighbouring training inputs of a 1-D problem.

    Args:
        low, high: its ends. ratio: epistemic sd at its centre over the median at the training inputs; None
            when the method claims no epistemic uncertainty at all.
    """

    low: float
    high: float
    ratio: float | None


def gap_between(inputs: np.ndarray) -> tuple[float, float] | None:
    """Ends of the widest gap of inputs (N,), or None: wider than uniform inputs leave by chance, one time in twenty.

    The widest of n spacings between uniform inputs is above the mean spacing times (log n + 3) with probability
    1 − exp(−e⁻³) = 4.9 %. It also has to be 5 % of the range, to be seen.
    """
    inputs = np.sort(inputs)
    spacing = np.diff(inputs)
    if len(spacing) < 3:
        return None
    span = inputs[-1] - inputs[0]
    widest = int(spacing.argmax())
    by_chance = (np.log(len(spacing)) + 3) / len(spacing)
    if spacing[widest] <= span * max(0.05, by_chance):
        return None
    return float(inputs[widest]), float(inputs[widest + 1])


@statistic
def widest_gap(evidence: Evidence, output: int = 0) -> Gap | None:
    """The gap that a Bayesian model should be unsure in, or None where the inputs leave none.

    Which spacing counts as one: :func:`gap_between`.
    """
    x = evidence.values(CONSTANT_DATA, "x")
    grid = evidence.values(GRID, "x")
    variance = evidence.variable(GRID, "epistemic_var")
    if x is None or grid is None or variance is None or x.size == 0 or x.size != len(x):
        return None
    inputs = x.reshape(-1)
    points = grid.reshape(-1)
    ends = gap_between(inputs)
    if ends is None:
        return None
    sd = np.sqrt(np.maximum(one_output(variance, output).values, 0))
    sd_at_inputs = np.median(np.interp(inputs, points, sd))
    ratio = (
        float(np.interp(0.5 * sum(ends), points, sd) / sd_at_inputs) if sd_at_inputs > 0 else None
    )
    return Gap(*ends, ratio)
