"""Predictions of numbers beside their outcomes, held out or of the training data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import xarray as xr
from scipy import stats

from pyrobnn.core.groups import HELD_OUT, OBSERVED_DATA, PREDICTIONS, SAMPLE_DIMS
from pyrobnn.diagnostics.evidence import FEWEST_DRAWS, Evidence, draws_first, statistic
from pyrobnn.diagnostics.limits import NUM_QUANTILES
from pyrobnn.diagnostics.prediction_metrics import pit_of

COUNTS = ("poisson", "negative_binomial")


def same_data(trees: Iterable[Evidence]) -> bool:
    """Whether the trees are of one data set: their observed and held-out outcomes are the same where they have them."""
    trees = list(trees)
    for group in (OBSERVED_DATA, HELD_OUT):
        stored = [evidence.values(group, "y") for evidence in trees]
        outcomes = [y for y in stored if y is not None]
        if not all(np.array_equal(y, outcomes[0]) for y in outcomes):
            return False
    return True


def is_censored(evidence: Evidence) -> bool:
    """Whether an outcome is only known to lie beyond its value: how far off a mean is, or what it explains, is not."""
    flags = [evidence.values(group, "observed") for group in (OBSERVED_DATA, HELD_OUT)]
    return any(observed is not None and not observed.all() for observed in flags)


def predictive_draws(evidence: Evidence) -> np.ndarray | None:
    """Held-out replicates of y as (draw, point, output), chains one after another; None where missing.

    Where a method has few draws (an ensemble) its tree holds several replicates of each, as ``y_sample``.
    """
    sample = evidence.values(PREDICTIONS, "y_sample")
    if sample is not None:
        return sample.reshape(sample.shape[0], sample.shape[1], -1)
    y = evidence.draws(PREDICTIONS, "y")
    return None if y is None else y.reshape(y.shape[0] * y.shape[1], y.shape[2], -1)


@statistic
def pit(evidence: Evidence) -> np.ndarray | None:
    """Probability integral transform of held-out y, (point, output): uniform when predictions are calibrated.

    Args:
        tree: A DataTree with ``predictions`` and ``predictions_constant_data``.

    Returns:
        ``predictions/pit`` where it is stored, else `pyrobnn.metrics.pit` of the held-out replicates; None where the
        tree has fewer than 25.
    """
    stored = evidence.values(PREDICTIONS, "pit")
    if stored is not None:
        return stored
    draws = predictive_draws(evidence)
    y = evidence.values(HELD_OUT, "y")
    if draws is None or y is None or len(y) == 0 or len(draws) < FEWEST_DRAWS:
        return None
    return pit_of(draws, y.astype(np.float64).reshape(len(y), -1))


def held_out_pit(evidence: Evidence) -> np.ndarray | None:
    """The PIT of held-out data of a regression."""
    return None if evidence.has_classes else pit(evidence)


@dataclass(frozen=True, eq=False)
class Points:
    """Predictions at points with known outcomes, one output of a regression.

    Args:
        y, mean: shape (point,), in original units.
        aleatoric_sd, epistemic_sd: shape (point,); None where only the predictive draws are known.
        total_sd: shape (point,), of both parts, else of the draws.
        draws: predictive draws of y, shape (sample, point), or None.
        held_out: False where only the training data could be used.
    """

    y: np.ndarray
    mean: np.ndarray
    aleatoric_sd: np.ndarray | None
    epistemic_sd: np.ndarray | None
    total_sd: np.ndarray
    draws: np.ndarray | None
    held_out: bool

    @property
    def sample(self) -> np.ndarray | None:
        """Draws of y (sample, point); quantiles of its Gaussian for a point estimate, whose draws are too few."""
        if self.aleatoric_sd is None or (
            self.draws is not None and len(self.draws) >= FEWEST_DRAWS
        ):
            return self.draws
        z = stats.norm.ppf((np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES)
        return self.mean + self.total_sd * z[:, None]

    def interval(self, level: float, *, whole: bool) -> tuple[np.ndarray, np.ndarray]:
        """Ends (point,) of the central interval, of draws where there are any; of whole numbers two of these."""
        tails = (1 - level) / 2, (1 + level) / 2
        if self.draws is None or len(self.draws) < FEWEST_DRAWS:
            half = self.total_sd * stats.norm.ppf(tails[1])
            return self.mean - half, self.mean + half
        low, high = np.quantile(
            self.draws,
            tails,
            axis=0,
            method="inverted_cdf" if whole else "linear",
        )
        return low, high

    @property
    def pit(self) -> np.ndarray | None:
        """`pyrobnn.diagnostics.prediction_metrics.pit` of the outcomes, shape (point,); None without draws."""
        return None if self.sample is None else pit_of(self.sample, self.y)


def one_output(values: xr.DataArray, output: int) -> xr.DataArray:
    """One output of what has several."""
    return values.isel(output=output) if "output" in values.dims else values


@statistic
def regression_points(evidence: Evidence, output: int = 0) -> Points | None:
    """Held-out predictions with outcomes; else the training data's posterior predictive; else None."""
    if evidence.predicts_classes:
        return None
    y = evidence.variable(HELD_OUT, "y")
    mean = evidence.variable(PREDICTIONS, "mean")
    if y is not None and mean is not None and mean.size:
        return _held_out_points(evidence, y, mean, output)
    return None if evidence.has_classes else _training_points(evidence, output)


def _training_points(evidence: Evidence, output: int) -> Points | None:
    """The posterior predictive of the training data with their outcomes."""
    pair = evidence.outcome_and_replicates
    if pair is None:
        return None
    outcomes = one_output(pair[0], output).values
    draws = draws_first(one_output(pair[1], output))
    if draws.ndim != 2 or draws.size == 0:
        return None
    if outcomes.ndim != 1 or outcomes.dtype.kind not in "fiu":
        return None
    return Points(
        outcomes,
        draws.mean(0),
        None,
        None,
        draws.std(0),
        draws,
        held_out=False,
    )


def _held_out_points(
    evidence: Evidence,
    y: xr.DataArray,
    mean: xr.DataArray,
    output: int,
) -> Points | None:
    """Held-out predictions with outcomes; None where the tree holds neither draws nor both variances."""
    stored = evidence.variable(PREDICTIONS, "y_sample")
    if stored is None:
        stored = evidence.variable(PREDICTIONS, "y")
    draws = None
    if stored is not None:
        draws_of_output = one_output(stored, output)
        of_chains = set(SAMPLE_DIMS) <= set(draws_of_output.dims)
        draws = draws_first(draws_of_output) if of_chains else draws_of_output.values
    aleatoric = _stored_sd(evidence, "aleatoric", output)
    epistemic = _stored_sd(evidence, "epistemic", output)
    if aleatoric is not None and epistemic is not None:
        total = np.hypot(aleatoric, epistemic)
    elif draws is not None:
        total = draws.std(0)
    else:
        return None
    outcomes = one_output(y, output).values
    expected = one_output(mean, output).values
    return Points(
        outcomes,
        expected,
        aleatoric,
        epistemic,
        total,
        draws,
        held_out=True,
    )


def _stored_sd(evidence: Evidence, kind: str, output: int) -> np.ndarray | None:
    variance = evidence.variable(PREDICTIONS, f"{kind}_var")
    if variance is None:
        return None
    return np.sqrt(np.maximum(one_output(variance, output).values, 0))
