"""What every planted case has: predictions with a fault, outcomes, and the power of the best test of the fault."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats

#: a distribution, quantiles by level, or an array of draws (draw, row) or of probabilities (row, class)
Predictions = torch.distributions.Distribution | dict[float, np.ndarray] | np.ndarray
#: the best test's rate of false alarms, which is the judge's of warnings
RATE = 2e-2


@dataclass(frozen=True)
class Planted:
    """Predictions in each form by its name, the outcomes, what else the judge is given, and the best test's power."""

    forms: dict[str, Predictions]
    y: np.ndarray
    known: dict[str, np.ndarray]
    power: float


def power(null: np.ndarray, alternative: np.ndarray) -> float:
    """Power of the likelihood ratio at the rate `RATE`, its distributions taken for normal."""
    if null.std() == 0.0:
        return RATE
    critical = null.mean() + stats.norm.isf(RATE) * null.std()
    return float(stats.norm.sf((critical - alternative.mean()) / alternative.std()))
