"""Predictions beside their outcomes, held out or of the training data: what scores, checks and figures compare."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import xarray as xr
from scipy import stats

from pyrobnn.core.groups import (
    CONSTANT_DATA,
    GRID,
    HELD_OUT,
    OBSERVED_DATA,
    POSTERIOR_PREDICTIVE,
    PREDICTIONS,
    SAMPLE_DIMS,
)
from pyrobnn.diagnostics import prediction_metrics as metrics
from pyrobnn.diagnostics.evidence import Evidence, labels, statistic

FEWEST_DRAWS = 25
NUM_QUANTILES = 400
CLASSES = ("categorical", "bernoulli", "ordinal")
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


def is_classification(evidence: Evidence) -> bool:
    """Whether the tree predicts class probabilities."""
    return evidence.variable(PREDICTIONS, "probs") is not None


def is_censored(evidence: Evidence) -> bool:
    """Whether an outcome is only known to lie beyond its value: how far off a mean is, or what it explains, is not."""
    flags = [evidence.values(group, "observed") for group in (OBSERVED_DATA, HELD_OUT)]
    return any(observed is not None and not observed.all() for observed in flags)


def has_classes(evidence: Evidence) -> bool:
    """Whether the outcome is a label: the tree predicts class probabilities, or its likelihood is one of classes."""
    return is_classification(evidence) or evidence.likelihood in CLASSES


def predictive_draws(evidence: Evidence) -> np.ndarray | None:
    """Held-out replicates of y as (draw, point, output), chains one after another; None where missing.

    Where a method has few draws (an ensemble) its tree holds several replicates of each, as ``y_sample``.
    """
    sample = evidence.values(PREDICTIONS, "y_sample")
    if sample is not None:
        return sample.reshape(sample.shape[0], sample.shape[1], -1)
    y = evidence.draws(PREDICTIONS, "y")
    return None if y is None else y.reshape(y.shape[0] * y.shape[1], y.shape[2], -1)


def replicates(evidence: Evidence, *, whole: bool = False) -> tuple[np.ndarray, np.ndarray] | None:
    """Training replicates (draw, obs, output) and observed y (obs, output) of a regression; None where too few.

    With `whole` also those of labels and counts that are kept as integers.
    """
    pair = _observed(evidence)
    if pair is None:
        return None
    y = pair[0].values
    sample = evidence.values(POSTERIOR_PREDICTIVE, "y_sample")
    draws = _draws_first(pair[1])
    if sample is not None and len(draws) < FEWEST_DRAWS:
        draws = sample
    if y.ndim == 0 or len(y) == 0 or len(draws) < FEWEST_DRAWS or draws.shape[1:] != y.shape:
        return None
    if y.dtype.kind not in ("fiub" if whole else "f"):
        return None
    return draws.reshape(len(draws), len(y), -1), y.reshape(len(y), -1)


def class_replicates(evidence: Evidence) -> tuple[np.ndarray, np.ndarray] | None:
    """Training replicates (draw, obs) and labels (obs,) of one label a row; None where there are none."""
    pair = replicates(evidence, whole=True) if has_classes(evidence) else None
    if pair is None:
        return None
    draws, labels = pair
    if labels.shape[1] != 1 or labels.min() < 0:
        return None
    return draws[..., 0].astype(int), labels[:, 0].astype(int)


def _observed(evidence: Evidence) -> tuple[xr.DataArray, xr.DataArray] | None:
    """The outcome of a tree and its replicates: ``y``, or under whatever name if it is the only one."""
    known = evidence.names(POSTERIOR_PREDICTIVE)
    name = _only([name for name in evidence.names(OBSERVED_DATA) if name in known])
    if name is None:
        return None
    y = evidence.variable(OBSERVED_DATA, name)
    draws = evidence.variable(POSTERIOR_PREDICTIVE, name)
    if y is None or draws is None or not set(SAMPLE_DIMS) <= set(draws.dims):
        return None
    return y, draws


def _draws_first(values: xr.DataArray) -> np.ndarray:
    """Chains and draws merged into one leading axis: shape (sample, ...)."""
    ordered = values.transpose(*SAMPLE_DIMS, ...).values
    return ordered.reshape(ordered.shape[0] * ordered.shape[1], *ordered.shape[2:])


def pit_of(draws: np.ndarray, y: np.ndarray) -> np.ndarray:
    """`pyrobnn.diagnostics.prediction_metrics.pit` of arrays."""
    return metrics.pit(torch.as_tensor(draws), torch.as_tensor(y)).numpy()


@dataclass(frozen=True, eq=False)
class Points:
    """Predictions at points with known outcomes, one output of a regression.

    Args:
        y, mean, aleatoric_sd, epistemic_sd: shape (point,), in original units.
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
    if is_classification(evidence):
        return None
    y = evidence.variable(HELD_OUT, "y")
    mean = evidence.variable(PREDICTIONS, "mean")
    if y is not None and mean is not None and mean.size:
        return _held_out_points(evidence, y, mean, output)
    pair = None if evidence.likelihood in CLASSES else _observed(evidence)
    if pair is None:
        return None
    outcomes = one_output(pair[0], output).values
    draws = _draws_first(one_output(pair[1], output))
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
        in_order = "sample" in draws_of_output.dims
        draws = draws_of_output.values if in_order else _draws_first(draws_of_output)
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


@dataclass(frozen=True, eq=False)
class ClassPoints:
    """Class probabilities at points with known labels.

    Args:
        y: labels, shape (point,). probs: shape (point, class).
        aleatoric, epistemic: entropies in nats, shape (point,), or None. x: inputs (point, feature) or None.
    """

    y: np.ndarray
    probs: np.ndarray
    aleatoric: np.ndarray | None
    epistemic: np.ndarray | None
    x: np.ndarray | None

    @property
    def correct(self) -> np.ndarray:
        """Whether the most probable class is the label, shape (point,)."""
        return self.probs.argmax(1) == self.y


@statistic
def class_points(evidence: Evidence) -> ClassPoints | None:
    """Held-out class probabilities with labels, or None. One probability per point is read as P(y = 1)."""
    probs = evidence.values(PREDICTIONS, "probs")
    y = evidence.values(HELD_OUT, "y")
    if probs is None or y is None or probs.size == 0:
        return None
    aleatoric = _stored_entropy(evidence, "aleatoric")
    epistemic = _stored_entropy(evidence, "epistemic")
    x = evidence.values(HELD_OUT, "x")
    x = None if x is None else x.reshape(len(probs), -1)
    return ClassPoints(y.reshape(-1).astype(int), of_each_class(probs), aleatoric, epistemic, x)


def _stored_entropy(evidence: Evidence, kind: str) -> np.ndarray | None:
    entropy = evidence.values(PREDICTIONS, f"{kind}_entropy")
    return None if entropy is None else entropy.reshape(-1)


def of_each_class(probs: np.ndarray) -> np.ndarray:
    """Probabilities (point, class); one per point is read as P(y = 1)."""
    probs = probs.reshape(len(probs), -1)
    return np.concatenate([1.0 - probs, probs], axis=1) if probs.shape[1] == 1 else probs


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
    inside = np.median(np.interp(inputs, points, sd))
    ratio = float(np.interp(0.5 * sum(ends), points, sd) / inside) if inside > 0 else None
    return Gap(*ends, ratio)


# the names that users gave


def feature_names(evidence: Evidence, count: int) -> list[str]:
    """Names of the features: ``x``, or ``x[0]`` …, where the tree has none."""
    unnamed = ["x"] if count == 1 else [f"x[{index}]" for index in range(count)]
    return _labels(evidence, (CONSTANT_DATA, HELD_OUT), "x", "feature", count) or unnamed


def class_names(evidence: Evidence, count: int) -> list[str]:
    """Names of the classes: their numbers where the tree has none."""
    return _labels(evidence, (PREDICTIONS,), "probs", "class", count) or [
        str(i) for i in range(count)
    ]


def output_names(evidence: Evidence, count: int) -> list[str]:
    """Names of the outputs: that of the target, or ``y``, numbered where there are several and none has a name."""
    names = _labels(evidence, (PREDICTIONS,), "mean", "output", count)
    names = names or _labels(evidence, (OBSERVED_DATA, HELD_OUT), "y", "output", count)
    if names:
        return names
    target = evidence.text("target") or outcome(evidence) or "y"
    return [target] if count == 1 else [f"{target}[{index}]" for index in range(count)]


def outcome(evidence: Evidence) -> str | None:
    """Name of the observed variable: ``y``, or whatever it is called where it is the only one."""
    return _only(evidence.names(OBSERVED_DATA))


def _only(names: list[str]) -> str | None:
    if "y" in names:
        return "y"
    return names[0] if len(names) == 1 else None


def unit(evidence: Evidence) -> str:
    """Unit of the outcome, where the tree says it (the attribute ``units`` of the observed y); else empty."""
    y = evidence.variable(OBSERVED_DATA, outcome(evidence) or "y")
    return "" if y is None else str(y.attrs.get("units", ""))


def _labels(
    evidence: Evidence,
    groups: tuple[str, ...],
    variable: str,
    dim: str,
    count: int,
) -> list[str] | None:
    """The names along a dimension of the first group that has as many."""
    by_group = (labels(evidence.variable(group, variable), dim) for group in groups)
    return next((names for names in by_group if names and len(names) == count), None)
