"""Whether classes are as frequent as predicted, and as often right as the confidence in them says."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import stats
from scipy.optimize import brentq
from scipy.special import expit, logsumexp, softmax

from pyrobnn.core.groups import HELD_OUT, PREDICTIONS
from pyrobnn.diagnostics.class_points import class_arrays, class_replicates
from pyrobnn.diagnostics.evidence import Evidence, statistic
from pyrobnn.diagnostics.grades import Found, Limits, Status, grade_tested
from pyrobnn.diagnostics.limits import FEWEST_HELD_OUT, MIN_DATA, NUM_SIMULATED
from pyrobnn.diagnostics.prediction_metrics import expected_calibration_error


class Labelled(NamedTuple):
    """Labels (point,) beside class probabilities (point, class).

    Args:
        share_variance: variance (class,) of the predicted shares over draws of the function, which all share.
        where: "held-out" or "training".
    """

    probs: np.ndarray
    labels: np.ndarray
    share_variance: np.ndarray | float = 0.0
    where: str = "held-out"


@statistic
def labelled(evidence: Evidence) -> Labelled | None:
    """The held-out labels of a tree, else those of the training data with the shares of their replicates."""
    return _held_out_labels(evidence) or _training_labels(evidence)


def _held_out_labels(evidence: Evidence) -> Labelled | None:
    """The held-out labels, with the variance of the predicted shares over draws of the function, where it has any."""
    probs = evidence.values(PREDICTIONS, "probs")
    y = evidence.values(HELD_OUT, "y")
    if probs is None or y is None or len(y) < FEWEST_HELD_OUT:
        return None
    probs, labels = class_arrays(probs, y)
    f = evidence.draws(PREDICTIONS, "f")
    if f is None or f.ndim != 4 or f.shape[3] not in (1, probs.shape[1]):
        return Labelled(probs, labels)
    if f.shape[3] > 1:
        by_draw = softmax(f, axis=-1)
    else:
        by_draw = np.concatenate([1.0 - expit(f), expit(f)], axis=-1)
    return Labelled(probs, labels, by_draw.mean(axis=2).var(axis=(0, 1)))


def _training_labels(evidence: Evidence) -> Labelled | None:
    """The training labels, with the shares of their replicates for probabilities."""
    outcomes = class_replicates(evidence)
    if outcomes is None or len(outcomes[1]) < MIN_DATA:
        return None
    draws, labels = outcomes
    num_classes = 1 + max(int(draws.max()), int(labels.max()))
    is_class = draws[..., None] == np.arange(num_classes)
    probs = is_class.mean(axis=0)
    return Labelled(probs, labels, is_class.mean(axis=1).var(axis=0), "training")


def class_calibration(evidence: Evidence, limits: Limits) -> Found | None:
    """Compares how often each class occurs, and how often a prediction is right, with the predicted probabilities.

    Whether predictions are right is asked of held-out data. The error is what exceeds that of a perfectly calibrated
    forecast on as many data.
    """
    error_beyond_chance, *limits_of_shares = limits
    data = labelled(evidence)
    if data is None:
        return None
    shares = _shares(data, tuple(limits_of_shares), evidence.rates)
    if shares.status == "fail" or data.where == "training":
        return shares
    confidence = data.probs.max(axis=1)
    correct = data.probs.argmax(axis=1) == data.labels
    ece, _ = expected_calibration_error(confidence, correct)
    limit = _ece_by_chance(confidence)
    gap = float(confidence.mean() - correct.mean())
    numbers = {"gap": gap, "count": len(correct)}
    if ece <= limit:
        return Found("pass", ece, "", numbers, limit) if shares.status == "pass" else shares
    status: Status = "fail" if ece > limit + error_beyond_chance else "warn"
    code = "overconfident" if gap > 0 else "underconfident"
    return Found(status, ece, code, numbers, limit)


def _ece_by_chance(confidence: np.ndarray) -> float:
    """The calibration error that forecasts which are right as often as they say exceed one time in a hundred."""
    uniform = np.random.default_rng(0).random((NUM_SIMULATED, len(confidence)))
    simulated = [expected_calibration_error(confidence, row)[0] for row in uniform < confidence]
    return float(np.quantile(simulated, 0.99))


def temperature(evidence: Evidence, limits: Limits) -> Found | None:
    r"""Whether probabilities are too sharp or too flat: whether another power :math:`p^\beta` fits the labels better.

    β is one over what is usually called the temperature. By the likelihood ratio, whose tail is Lugannani and Rice's:
    labels that were thought impossible are few and heavy.
    """
    data = labelled(evidence)
    if data is None or len(data.labels) < MIN_DATA:
        return None
    logs = np.log(np.maximum(data.probs, 1e-12))
    log_score = float(logs[np.arange(len(logs)), data.labels].sum())
    if _tilted(logs, 0.0).variance < 1e-9:
        return None
    tilt = _best_tilt(logs, log_score)
    p = _p_of_tilt(logs, log_score, tilt)
    status = grade_tested(p, abs(tilt), evidence.rates, limits)
    limit = 1.0 + np.sign(tilt) * limits[0]
    return Found(status, 1.0 + tilt, "", {"count": len(logs), "p": p}, limit)


def _p_of_tilt(logs: np.ndarray, log_score: float, tilt: float) -> float:
    """Two-sided p-value of a log score by Lugannani and Rice's signed root, at the tilt that expects it."""
    tilted = _tilted(logs, tilt)
    w = np.sign(tilt) * np.sqrt(max(2.0 * (tilt * log_score - tilted.cumulant), 0.0))
    v = tilt * np.sqrt(tilted.variance)
    root = w + np.log(v / w) / w if abs(w) > 0.05 and v / w > 0.0 else w
    return float(2.0 * stats.norm.sf(abs(root)))


class _Tilted(NamedTuple):
    """Cumulant generating function of the log score at a tilt; mean and variance there are its first derivatives."""

    cumulant: float
    mean: float
    variance: float


def _tilted(logs: np.ndarray, tilt: float) -> _Tilted:
    """The log score at a tilt; ``logs`` are log probabilities (point, class), and labels are drawn from them."""
    powers = (1.0 + tilt) * logs
    weights = softmax(powers, axis=1)
    means = (weights * logs).sum(axis=1)
    cumulants = logsumexp(powers, axis=1) - logsumexp(logs, axis=1)
    variance = (weights * logs**2).sum() - (means**2).sum()
    return _Tilted(float(cumulants.sum()), float(means.sum()), float(variance))


def _best_tilt(logs: np.ndarray, log_score: float) -> float:
    """The tilt whose expected log score is the one that was seen, between -0.99 and 20."""
    low = -0.99
    high = 20.0

    def excess(tilt: float) -> float:
        return _tilted(logs, tilt).mean - log_score

    if excess(low) < 0.0 < excess(high):
        return float(brentq(excess, low, high))
    return low if excess(0.0) > 0.0 else high


def _shares(data: Labelled, limits: Limits, rates: tuple[float, float]) -> Found:
    """The class whose share of the data is farthest from the one predicted, beyond chance and the error of that."""
    probs, labels, share_variance, where = data
    num_classes = probs.shape[1]
    predicted = probs.mean(axis=0)
    observed = np.bincount(labels, minlength=num_classes)[:num_classes] / len(labels)
    variance = (probs * (1.0 - probs)).mean(axis=0) / len(labels) + share_variance
    difference = np.abs(observed - predicted)
    p_values = 2.0 * stats.norm.sf(difference / np.sqrt(np.maximum(variance, 1e-12))) * num_classes
    worst = int(np.argmax(np.where(p_values < rates[0], 1.0, 0.0) + difference))
    gap = float(difference[worst])
    p = float(min(1.0, p_values[worst]))
    numbers = {
        "which": worst,
        "seen": float(observed[worst]),
        "said": float(predicted[worst]),
        "count": len(labels),
        "where": where,
        "p": p,
    }
    return Found(grade_tested(p, gap, rates, limits), gap, "class_shares", numbers, limits[0])
