"""Held-out scores, with error bars for the finite data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from pyrobnn.core.groups import HELD_OUT, OBSERVED_DATA, PREDICTIONS
from pyrobnn.diagnostics import prediction_metrics as metrics
from pyrobnn.diagnostics.evidence import Evidence, statistic
from pyrobnn.diagnostics.points import of_each_class, pit_of, predictive_draws

LEVELS = (0.5, 0.9, 0.95)


@dataclass(frozen=True, eq=False)
class Score:
    """One score with its error bar.

    Args:
        name: ``"log_prob"``, ``"crps"``, ``"rmse"``, ``"coverage_90"``, ``"width_90"``; for
            classes ``"log_prob"``, ``"accuracy"``, ``"brier"``, ``"ece"``. Of several outputs there is one of each,
            ``"rmse[0]"`` …, and ``"rmse_standardized"`` and the like: the mean over outputs of score / standard
            deviation of the output's training targets. Coverage has no unit: it is of all outputs together.
        value: The score, a mean over held-out data, in original units unless its name says otherwise.
        data_se: Standard error from the finite number of data; None where it has no simple estimate.
        better: ``"higher"``, ``"lower"``, or ``"nominal"`` for coverage.
        points: What it is the mean of, (point,), for paired differences between methods (of the RMSE the squared
            errors); None where it is not a mean.
    """

    name: str
    value: float
    data_se: float | None
    better: str
    points: np.ndarray | None = field(default=None, repr=False, compare=False)


@statistic
def score(evidence: Evidence) -> dict[str, Score]:
    """Held-out log density, CRPS, RMSE, coverage and width; for classes accuracy, Brier score and ECE.

    Of censored rows no RMSE; the CRPS is that of what could be seen of them.

    Everything is read from the groups ``predictions`` and ``predictions_constant_data``.

    Args:
        tree: A DataTree.

    Returns:
        Name → score, of all that the tree allows, possibly none.

    Caveat:
        ``data_se`` treats held-out data as independent.

    References:
        Strictly proper scoring rules (Gneiting & Raftery, 2007) https://doi.org/10.1198/016214506000001437
    """
    y = evidence.values(HELD_OUT, "y")
    if y is None or len(y) == 0:
        return {}
    scores: list[Score] = []
    log_prob = evidence.values(PREDICTIONS, "log_prob")
    if log_prob is not None:
        scores.append(_mean_score("log_prob", log_prob, "higher"))
    probs = evidence.values(PREDICTIONS, "probs")
    if probs is not None:
        scores += _class_scores(probs, y)
    else:
        scores += _regression_scores(evidence, y.astype(np.float64).reshape(len(y), -1))
    return {score.name: score for score in scores}


def expected_calibration_error(
    confidence: np.ndarray, correct: np.ndarray, *, num_bins: int = 10
) -> tuple[float, np.ndarray]:
    """Expected calibration error in bins of equal *count*, and the reliability table behind it.

    Equal counts leave no bin to a handful of points, as equal widths do (:func:`pyrobnn.metrics.ece`).

    Args:
        confidence: Probability of the predicted class (point,).
        correct: Whether it was right (point,).
        num_bins: Number of bins.

    Returns:
        The error, and an array (bin, 3) of mean confidence, share correct and count.
    """
    order = np.argsort(confidence, kind="stable")
    bins = [rows for rows in np.array_split(order, num_bins) if len(rows)]
    table = np.array([(confidence[rows].mean(), correct[rows].mean(), len(rows)) for rows in bins])
    claimed, accuracy, counts = table.T
    return float(np.average(np.abs(claimed - accuracy), weights=counts)), table


def _mean_score(name: str, values: np.ndarray, better: str) -> Score:
    flat = np.asarray(values, dtype=np.float64).ravel()
    data_se = float(flat.std(ddof=1) / math.sqrt(flat.size)) if flat.size > 1 else None
    return Score(name, float(flat.mean()), data_se, better, flat)


def _regression_scores(evidence: Evidence, y: np.ndarray) -> list[Score]:
    num_data, num_outputs = y.shape
    mean = evidence.values(PREDICTIONS, "mean")
    if mean is not None:
        mean = mean.reshape(num_data, -1)[:, :num_outputs]
    observed = evidence.values(HELD_OUT, "observed")
    if observed is not None and not observed.all():
        mean = None  # how far it is from a value that was not seen, nobody knows
    draws = predictive_draws(evidence)
    if num_outputs == 1:
        return _scores_of(y, mean, draws)
    # outputs have units of their own: nothing is averaged over them but multiples of their spread
    sd = training_sd(evidence, num_outputs)
    scale = np.ones(num_outputs) if sd is None else sd
    standard_mean = None if mean is None else mean / scale
    standard_draws = None if draws is None else draws / scale
    scores = _scores_of(y / scale, standard_mean, standard_draws, "_standardized")
    if sd is None:
        scores = [score for score in scores if score.better == "nominal"]
    for output in range(num_outputs):
        column = slice(output, output + 1)
        mean_of_output = None if mean is None else mean[..., column]
        draws_of_output = None if draws is None else draws[..., column]
        scores += _scores_of(y[:, column], mean_of_output, draws_of_output, f"[{output}]")
    return scores


def training_sd(evidence: Evidence, num_outputs: int) -> np.ndarray | None:
    """Standard deviation (output,) of the training targets, 1 where constant; None where the tree lacks them."""
    y = evidence.values(OBSERVED_DATA, "y")
    if y is None or y.ndim == 0 or y.size != len(y) * num_outputs:
        return None
    sd = y.astype(np.float64).reshape(len(y), num_outputs).std(axis=0)
    return np.where(sd > 0, sd, 1.0)


def num_outputs(evidence: Evidence) -> int:
    """Number of outputs of a regression, 1 where the tree does not say."""
    for group in (HELD_OUT, OBSERVED_DATA):
        y = evidence.values(group, "y")
        if y is not None and y.ndim > 0:
            return math.prod(y.shape[1:])
    return 1


def units(evidence: Evidence) -> np.ndarray | None:
    """What values of each output are divided by before they are averaged over outputs; None where it is unknown."""
    count = num_outputs(evidence)
    return np.ones(1) if count == 1 else training_sd(evidence, count)


def _scores_of(
    y: np.ndarray,
    mean: np.ndarray | None,
    draws: np.ndarray | None,
    suffix: str = "",
) -> list[Score]:
    """Scores of (point, output) in one unit, each the mean of its values for the outputs."""
    scores: list[Score] = []
    if mean is not None:
        scores.append(_rmse(y, mean, suffix))
    if draws is None or len(draws) < 2:
        return scores
    crps = metrics.crps(torch.as_tensor(draws), torch.as_tensor(y)).numpy()
    scores.append(_mean_score(f"crps{suffix}", crps.mean(axis=1), "lower"))
    for level, inside, width in zip(LEVELS, *_intervals(draws, y), strict=True):
        percent = f"{100 * level:.0f}"
        # Laplace's rule keeps the binomial error positive at 0 and 1; the outputs of one point may go together
        share = (inside.mean() * len(y) + 1.0) / (len(y) + 2.0)
        data_se = math.sqrt(share * (1.0 - share) / len(y))
        name = f"coverage_{percent}{suffix.replace('_standardized', '')}"  # a share has no unit
        scores.append(Score(name, float(inside.mean()), data_se, "nominal"))
        scores.append(_mean_score(f"width_{percent}{suffix}", width.mean(axis=1), "lower"))
    return scores


def _rmse(y: np.ndarray, mean: np.ndarray, suffix: str) -> Score:
    """The mean of the outputs' errors, with its standard error by the delta method."""
    square = (mean - y) ** 2
    rmse = np.sqrt(square.mean(axis=0))
    data_se = None
    if len(y) > 1 and (rmse > 0).all():
        influence = (square / (2 * rmse)).mean(axis=1)
        data_se = float(influence.std(ddof=1) / math.sqrt(len(y)))
    return Score(f"rmse{suffix}", float(rmse.mean()), data_se, "lower", square.mean(axis=1))


def _intervals(draws: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whether y (point, output) lies in the central interval of each level, and its width, (level, point, output).

    Intervals of counts hold more than their level. Where draws equal y, a count or the limit of a censored row, it lies
    inside by its randomised transform, which holds what it says.
    """
    tails = 0.5 - 0.5 * np.array(LEVELS)
    low = np.quantile(draws, tails, axis=0)
    high = np.quantile(draws, 1.0 - tails, axis=0)
    if not (draws == y).any():
        return (y >= low) & (y <= high), high - low
    u = pit_of(draws, y)
    return np.stack([np.abs(u - 0.5) <= level / 2 for level in LEVELS]), high - low


def class_arrays(probs: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Class probabilities (point, class), rows summing to one, and labels (point,)."""
    probs = of_each_class(probs.astype(np.float64))
    return probs / probs.sum(axis=1, keepdims=True), y.reshape(len(y)).astype(np.int64)


def _class_scores(probs: np.ndarray, y: np.ndarray) -> list[Score]:
    p, labels = class_arrays(probs, y)
    correct = p.argmax(axis=1) == labels
    one_hot = labels[:, None] == np.arange(p.shape[1])
    return [
        _mean_score("accuracy", correct, "higher"),
        _mean_score("brier", ((p - one_hot) ** 2).sum(axis=1), "lower"),
        Score("ece", expected_calibration_error(p.max(axis=1), correct)[0], None, "lower"),
    ]
