"""Numbers as outcomes, normal predictions of them, and their planted faults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from judge.planted_case import Planted, Predictions, power
from scipy import stats

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
#: fault → scale of the predicted sd, shift of the mean in sds
WIDTHS = {
    "right": (1.0, 0.0),
    "sd × 0.7": (0.7, 0.0),
    "sd × 1.4": (1.4, 0.0),
    "biased by 0.5 sd": (1.0, 0.5),
}
SHAPES = (
    "noise grows with x, sd constant",
    "mean 1 sd off in a quarter of x",
    "skewed errors as normal",
)
COPIED = "half of the rows copied from training"


class Law(Protocol):
    """What is used of a distribution of SciPy."""

    def rvs(self, *, size: int | tuple[int, ...], random_state: np.random.Generator) -> np.ndarray:
        """Draws."""

    def logpdf(self, x: np.ndarray) -> np.ndarray:
        """Log densities."""


@dataclass(frozen=True)
class Truth:
    """The distribution of the outcomes: a mean and a scale of each row (row,), and the law of the errors."""

    mean: np.ndarray
    scale: np.ndarray
    errors: Law

    def draws(self, size: int | tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
        return self.mean + self.scale * self.errors.rvs(size=size, random_state=rng)

    def log_density(self, y: np.ndarray) -> np.ndarray:
        """At most 50 nats below that of the scale, where the law has no density."""
        return np.maximum(self.errors.logpdf((y - self.mean) / self.scale), -50.0) - np.log(
            self.scale
        )


def regression(fault: str, n: int, rng: np.random.Generator) -> Planted:
    """Outcomes and normal predictions of them; the best test knows the truth and the prediction."""
    x, x_train = rng.normal(size=(2, n, 3))
    truth = _truth(fault, x)
    mean, sd = _prediction(fault, x, truth)
    y = truth.draws(n, rng)
    y_train = mean_at(x_train) + rng.normal(size=n)
    if fault == COPIED:
        half = slice(0, n // 2)
        x_train[half] = x[half]
        y_train[half] = y[half]

    def log_ratio(y: np.ndarray) -> np.ndarray:
        """Of the truth over the prediction, summed over the rows."""
        return (truth.log_density(y) - stats.norm.logpdf(y, mean, sd)).sum(-1)

    null = mean + sd * rng.normal(size=(100, n))
    alternative = truth.draws((100, n), rng)
    return Planted(
        forms_of(mean, sd, rng),
        y,
        known={"x": x, "x_train": x_train, "y_train": y_train},
        power=1.0 if fault == COPIED else power(log_ratio(null), log_ratio(alternative)),
    )


def mean_at(x: np.ndarray) -> np.ndarray:
    """The mean of the outcomes."""
    return np.sin(x[:, 0]) + x @ [1.0, 0.5, 0.0]


def _truth(fault: str, x: np.ndarray) -> Truth:
    """Of unit scale but where the noise grows with x, and normal but where its errors are skewed."""
    scale = np.ones(len(x))
    if fault == SHAPES[0]:
        scale = np.exp(0.6 * np.clip(x[:, 0], -2.5, 2.5))
    skewed = stats.gamma(
        2.0,
        loc=-np.sqrt(2.0),
        scale=np.sqrt(0.5),
    )
    return Truth(mean_at(x), scale, skewed if fault == SHAPES[2] else stats.norm)


def _prediction(fault: str, x: np.ndarray, truth: Truth) -> tuple[np.ndarray, np.ndarray]:
    """Mean and sd (row,) of what is predicted: the truth's mean and root mean square, and the fault."""
    factor, shift = WIDTHS.get(fault, (1.0, 0.0))
    sd = np.full(len(x), factor * np.sqrt((truth.scale**2).mean()))
    shift_of_quarter = 1.0 * (x[:, 1] > 0.674) if fault == SHAPES[1] else 0.0
    return truth.mean + shift + shift_of_quarter, sd


def forms_of(mean: np.ndarray, sd: np.ndarray, rng: np.random.Generator) -> dict[str, Predictions]:
    """Normal predictions in each form that the judge takes."""
    return {
        "normal": torch.distributions.Normal(torch.tensor(mean), torch.tensor(sd)),
        "quantiles": {level: mean + sd * stats.norm.ppf(level) for level in LEVELS},
        "draws": mean + sd * rng.normal(size=(200, len(mean))),
    }
