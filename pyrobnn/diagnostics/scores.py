"""Held-out scores, with error bars for the finite data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from pyrobnn.core.groups import HELD_OUT, OBSERVED_DATA, PREDICTIONS
from pyrobnn.diagnostics.class_points import class_arrays
from pyrobnn.diagnostics.evidence import Evidence, statistic
from pyrobnn.diagnostics.points import predictive_draws
from pyrobnn.diagnostics.prediction_metrics import crps, expected_calibration_error, pit_of

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
    return {entry.name: entry for entry in scores}


def _mean_score(name: str, values: np.ndarray, better: str) -> Score:
    flat = np.asarray(values, dtype=np.float64).ravel()
    data_se = float(flat.std(ddof=1) / math.sqrt(flat.size)) if flat.size > 1 else None
    return Score(name, float(flat.mean()), data_se, better, flat)


def _regression_scores(evidence: Evidence, y: np.ndarray) -> list[Score]:
    num_outputs = y.shape[1]
    mean = _scored_mean(evidence, y)
    draws = predictive_draws(evidence)
    if num_outputs == 1:
        return _scores_of(y, mean, draws)
    scores = _standardized_scores(y, mean, draws, training_sd(evidence, num_outputs))
    for output in range(num_outputs):
        column = slice(output, output + 1)
        mean_of_output = None if mean is None else mean[..., column]
        draws_of_output = None if draws is None else draws[..., column]
        scores += _scores_of(y[:, column], mean_of_output, draws_of_output, f"[{output}]")
    return scores


def _scored_mean(evidence: Evidence, y: np.ndarray) -> np.ndarray | None:
    """The predicted mean at the outcomes y (point, output); None where rows are censored.

    How far it is from a value that was not seen, nobody knows.
    """
    mean = evidence.values(PREDICTIONS, "mean")
    observed = evidence.values(HELD_OUT, "observed")
    if mean is None or (observed is not None and not observed.all()):
        return None
    return mean.reshape(len(y), -1)[:, : y.shape[1]]


def _standardized_scores(
    y: np.ndarray,
    mean: np.ndarray | None,
    draws: np.ndarray | None,
    sd: np.ndarray | None,
) -> list[Score]:
    """Scores of all outputs together, each in multiples of its spread; without one only those that have no unit.

    Outputs have units of their own: nothing else is averaged over them.
    """
    scale = np.ones(y.shape[1]) if sd is None else sd
    standard_mean = None if mean is None else mean / scale
    standard_draws = None if draws is None else draws / scale
    scores = _scores_of(y / scale, standard_mean, standard_draws, "_standardized")
    if sd is None:
        return [entry for entry in scores if entry.better == "nominal"]
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
    crps_of_entry = crps(torch.as_tensor(draws), torch.as_tensor(y)).numpy()
    scores.append(_mean_score(f"crps{suffix}", crps_of_entry.mean(axis=1), "lower"))
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


def _class_scores(probs: np.ndarray, y: np.ndarray) -> list[Score]:
    p, labels = class_arrays(probs, y)
    correct = p.argmax(axis=1) == labels
    one_hot = labels[:, None] == np.arange(p.shape[1])
    return [
        _mean_score("accuracy", correct, "higher"),
        _mean_score("brier", ((p - one_hot) ** 2).sum(axis=1), "lower"),
        Score("ece", expected_calibration_error(p.max(axis=1), correct)[0], None, "lower"),
    ]
