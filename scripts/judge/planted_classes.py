"""Labels of classes as outcomes, probabilities of them, and their planted faults."""

from __future__ import annotations

import numpy as np
from judge.planted_case import Planted, power
from scipy.special import log_softmax

#: fault of classes → power of the probabilities, log odds of the first class
CLASSES = {
    "right": (1.0, 0.0),
    "temperature 0.9": (1 / 0.9, 0.0),
    "temperature 0.5": (2.0, 0.0),
    "temperature 2": (0.5, 0.0),
    "odds of one class doubled": (1.0, np.log(2.0)),
}


def classes(fault: str, n: int, rng: np.random.Generator) -> Planted:
    """Labels of two or of ten classes, and their probabilities."""
    count = int(rng.choice([2, 10]))
    x = rng.normal(size=(n, count))
    logs = log_softmax(2.0 * x, axis=1)
    sharper, odds = CLASSES[fault]
    predicted_logs = log_softmax(sharper * logs + odds * (np.arange(count) == 0), axis=1)
    of_prediction = (predicted_logs + rng.gumbel(size=(100, n, count))).argmax(-1)
    of_truth = (logs + rng.gumbel(size=(100, n, count))).argmax(-1)
    ratios = logs - predicted_logs
    null = ratios[np.arange(n), of_prediction].sum(1)
    alternative = ratios[np.arange(n), of_truth].sum(1)
    return Planted(
        {f"{count} classes": np.exp(predicted_logs)},
        of_truth[0],
        known={"x": x[:, :5]},
        power=power(null, alternative),
    )
