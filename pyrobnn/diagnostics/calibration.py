"""Calibration: whether predictive intervals are as wide as errors are large, and classes as frequent as predicted."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from scipy import stats
from scipy.optimize import brentq
from scipy.special import expit, logsumexp, ndtri, softmax

from pyrobnn.core.groups import HELD_OUT, PREDICTIONS
from pyrobnn.core.seeding import own_stream
from pyrobnn.diagnostics.evidence import RATES, Evidence, flattened, spread, statistic
from pyrobnn.diagnostics.leave_one_out import MAX_DATA, loo_pit
from pyrobnn.diagnostics.points import (
    FEWEST_DRAWS,
    class_replicates,
    has_classes,
    pit_of,
    predictive_draws,
    replicates,
)
from pyrobnn.diagnostics.scores import class_arrays, expected_calibration_error
from pyrobnn.diagnostics.verdict import Found, Status, grade_tested

MIN_DATA = 20
#: held-out values of which coverage and confidence say something, by an exact tail and a simulated one
FEWEST_HELD_OUT = 8
LEVEL = 0.9
_NUM_SIMULATED = 400
#: sd of a uniform value, and of its distance from a half
_SD_MEAN = 12.0**-0.5
_SD_SIZE = 48.0**-0.5


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
    return None if has_classes(evidence) else pit(evidence)


def left_out_pit(evidence: Evidence) -> tuple[np.ndarray, np.ndarray] | None:
    """The LOO-PIT of the training data of a regression, and which data those are."""
    return None if has_classes(evidence) else loo_pit(evidence)


def held_out(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    """Whether the PIT of held-out data is uniform, by the worst output; of few, whether 90 % intervals hold enough."""
    u = held_out_pit(evidence)
    draws = predictive_draws(evidence)
    if u is None or draws is None or len(u) < FEWEST_HELD_OUT:
        return None
    stored = evidence.tree[PREDICTIONS].attrs
    dependence = dependence_of(draws) if stored.get("joint", True) else Dependence()
    levels = stored.get("levels", ())
    if len(u) >= MIN_DATA:
        if len(levels):
            p_values = [p_binned(column, levels) for column in u.T]
        else:
            p_values = [p_moments(column, dependence) for column in u.T]
        worst = u[:, np.argmin(p_values)]
        return uniform(worst, limits, "held-out", evidence.rates, _least(*p_values))
    covered = float((np.abs(u - 0.5) <= 0.5 * LEVEL).mean())
    count = max(1, round(len(u) / dependence.coverage**2))
    p = float(stats.binom.cdf(round(covered * count), count, LEVEL))
    numbers = {
        "count": u.size,
        "which": "held-out",
        "outer": 1.0 - covered,
        "p": p,
    }
    if p >= evidence.rates[0]:
        return Found("info", covered, "calibrated", numbers, LEVEL)
    status: Status = "fail" if p < evidence.rates[1] else "warn"
    return Found(status, covered, "too_narrow", numbers, LEVEL)


def left_out(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    """Whether the leave-one-out PIT of the training data is uniform; where there is none, that of their replicates.

    A model misses its training data by less than new data, but only as far as its parameters allow: residuals shrink
    to √((1 − h) / (1 + h)) of what is predicted, h the parameters per datum. Beyond that error bars are too wide.
    """
    left_out_values = left_out_pit(evidence)
    if left_out_values is not None:
        u = left_out_values[1]
        return uniform(u, limits, "left-out") if len(u) >= MIN_DATA else None
    outcomes = None if has_classes(evidence) else replicates(evidence)
    if outcomes is None or len(outcomes[1]) < MIN_DATA:
        return None
    u = pit_of(*outcomes)
    trained = uniform(u, limits, "training")
    status = trained.status
    if trained.code == "too_wide":
        share = min(1.0, _free_parameters(evidence) / len(u))
        # E|Φ(s Z) − ½| = arctan(s) / π
        allowed = float(np.arctan(np.sqrt((1.0 - share) / (1.0 + share)))) / np.pi
        gap = allowed - float(np.abs(u - 0.5).mean())
        p = float(stats.norm.sf(gap * np.sqrt(u.size) / _SD_SIZE))
        status = grade_tested(p, gap, RATES, limits)
    return replace(trained, status="info" if status == "pass" else status)


def _free_parameters(evidence: Evidence) -> int:
    """How many directions the draws of the posterior move in: all, where they are too few to show how many."""
    sites = [flattened(values, 2) for values in evidence.sites.values()]
    draws = np.concatenate(sites, axis=2).astype(np.float64)
    steps = np.diff(draws, axis=1).reshape(-1, draws.shape[2])
    sample = steps[spread(len(steps), MAX_DATA), :MAX_DATA]
    sample = sample[:, sample.any(axis=0)]
    rank = 0
    if sample.size:
        directions = sample / np.linalg.norm(sample, axis=0)
        rank = int(np.linalg.matrix_rank(directions, rtol=1e-3))
    return rank if rank < len(sample) else steps.shape[1]


class Dependence(NamedTuple):
    """Factors, at the least 1, by which errors exceed those of independent data.

    Of the distance of the PIT from uniform, the share in 90 % intervals, the PIT's mean, its mean distance from a half.
    """

    distance: float = 1.0
    coverage: float = 1.0
    mean: float = 1.0
    size: float = 1.0


def dependence_of(draws: np.ndarray) -> Dependence:
    """By what the errors of the PIT exceed those of independent data, from draws (draw, point[, output]).

    All predictions share the one function, whose error is common to them: replicates of all points by one draw say by
    how much, being outcomes of the model itself.
    """
    chosen = draws[spread(len(draws), _NUM_SIMULATED)][:, spread(draws.shape[1], MAX_DATA)]
    u = (chosen.argsort(axis=0).argsort(axis=0) + 0.5) / len(chosen)
    flat = u.reshape(len(u), -1)
    size = flat.shape[1]
    ordered = np.sort(flat, axis=1)
    place = np.arange(size) / size
    # Kolmogorov's
    distances = np.maximum(ordered - place, place + 1.0 / size - ordered).max(axis=1)
    share = (np.abs(flat - 0.5) <= 0.5 * LEVEL).mean(axis=1)
    factors = (
        np.median(distances) / stats.kstwo.median(size),
        share.std() / np.sqrt(LEVEL * (1.0 - LEVEL) / size),
        flat.mean(axis=1).std() / _SD_MEAN * np.sqrt(size),
        np.abs(flat - 0.5).mean(axis=1).std() / _SD_SIZE * np.sqrt(size),
    )
    return Dependence(*(max(1.0, float(factor)) for factor in factors))


def uniform(
    u: np.ndarray,
    limits: tuple[float, ...],
    source: str,
    rates: tuple[float, float] = RATES,
    p: float | None = None,
) -> Found:
    """Whether PIT values are uniform: by a distance that matters, and that chance does not explain.

    By the p-value of their distance, mean and size, unless another test's is given.
    """
    u = u.ravel()
    distance = float(stats.kstest(u, "uniform").statistic)
    mean = float(u.mean())
    if p is None:
        departures = np.abs([mean - 0.5, np.abs(u - 0.5).mean() - 0.25])
        errors = np.array([_SD_MEAN, _SD_SIZE]) / np.sqrt(u.size)
        tails = 2.0 * stats.norm.sf(departures / errors)
        p = _least(stats.kstwo.sf(distance, u.size), *tails)
    status = grade_tested(p, distance, rates, limits)
    # intervals that are too wide for most and yet too narrow for the last per cent: noise with heavy tails
    outer = float((np.abs(u - 0.5) > 0.45).mean())
    extreme = float((np.abs(u - 0.5) > 0.495).mean())
    numbers = {
        "count": u.size,
        "which": source,
        "outer": outer,
        "extreme": extreme,
        "mean": mean,
        "p": p,
    }
    code = "too_narrow" if outer > 0.1 else "too_wide"
    if status == "pass":
        code = "calibrated"
    elif abs(mean - 0.5) > 0.1:
        code = "biased"
    elif extreme > 0.015 and outer < 0.1:
        code = "heavy_tails"
    return Found(status, distance, code, numbers, limits[0])


def _least(*p: float) -> float:
    """The least of some p-values, times their number (Bonferroni)."""
    return float(min(1.0, len(p) * min(p)))


def p_moments(u: np.ndarray, dependence: Dependence) -> float:
    """p-value of the worst of four tests of u: its distance from uniform, mean and variance of Φ⁻¹(u), skewness.

    The most powerful for a bias and a width, and of a skewness Neyman's smooth test: Legendre's polynomial of degree 3.
    """
    z = ndtri(np.clip(u, 1e-6, 1.0 - 1e-6))
    root = np.sqrt(u.size)
    square = float((z**2).sum())
    skew = np.sqrt(7.0) * (((20.0 * u - 30.0) * u + 12.0) * u - 1.0).mean()
    tail = min(stats.chi2.cdf(square, u.size), stats.chi2.sf(square, u.size))
    sizes = (
        abs(z.mean()) * root / dependence.mean,
        stats.norm.isf(tail) / dependence.size,
        abs(skew) * root,
    )
    distance = stats.kstest(u, "uniform").statistic / dependence.distance
    return _least(stats.kstwo.sf(distance, u.size), *2.0 * stats.norm.sf(sizes))


def p_binned(u: np.ndarray, levels: tuple[float, ...]) -> float:
    """p-value of the worst of the three moments where the levels that u (point,) lies between are all that is known.

    Each value counts as its bin's mean; the distribution of the largest of the three is simulated.
    """
    edges = np.array([0.0, *levels, 1.0])
    share = np.diff(edges)
    z = np.clip(ndtri(edges), -40.0, 40.0)
    density = stats.norm.pdf(z)
    integrals = -density, -z * density, edges * (((5.0 * edges - 10.0) * edges + 6.0) * edges - 1.0)
    counts = own_stream().multinomial(
        u.size,
        share,
        size=20_000,
    )
    sums = np.vstack([np.histogram(u, edges)[0], counts]) @ (np.diff(integrals) / share).T
    largest = np.abs(sums / sums.std(axis=0)).max(axis=1)
    return float((largest >= largest[0] - 1e-9).mean())


# classes


class Labelled(NamedTuple):
    """Labels (point,) beside class probabilities (point, class).

    Args:
        error: variance (class,) of the predicted shares, as all predictions share one function.
        where: "held-out" or "training".
    """

    probs: np.ndarray
    labels: np.ndarray
    error: np.ndarray | float = 0.0
    where: str = "held-out"


@statistic
def labelled(evidence: Evidence) -> Labelled | None:
    """The held-out labels of a tree, else those of the training data with the shares of their replicates."""
    probs = evidence.values(PREDICTIONS, "probs")
    y = evidence.values(HELD_OUT, "y")
    if probs is not None and y is not None and len(y) >= FEWEST_HELD_OUT:
        arrays = class_arrays(probs, y)
        f = evidence.draws(PREDICTIONS, "f")
        if f is None or f.ndim != 4 or f.shape[3] not in (1, arrays[0].shape[1]):
            return Labelled(*arrays)
        if f.shape[3] > 1:
            by_draw = softmax(f, axis=-1)
        else:
            by_draw = np.concatenate([1.0 - expit(f), expit(f)], axis=-1)
        return Labelled(*arrays, by_draw.mean(axis=2).var(axis=(0, 1)))
    outcomes = class_replicates(evidence)
    if outcomes is None or len(outcomes[1]) < MIN_DATA:
        return None
    draws, labels = outcomes
    num_classes = 1 + max(int(draws.max()), int(labels.max()))
    is_class = draws[..., None] == np.arange(num_classes)
    probs = is_class.mean(axis=0)
    return Labelled(probs, labels, is_class.mean(axis=1).var(axis=0), "training")


def class_calibration(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    """Whether classes are as frequent as predicted, and held-out ones as often right as their confidence says.

    Confidence is held against what a perfectly calibrated forecast would score on as many data.
    """
    data = labelled(evidence)
    if data is None:
        return None
    shares = _shares(data, limits[1:], evidence.rates)
    if shares.status == "fail" or data.where == "training":
        return shares
    confidence = data.probs.max(axis=1)
    correct = data.probs.argmax(axis=1) == data.labels
    ece, _ = expected_calibration_error(confidence, correct)
    simulated = np.random.default_rng(0).random((_NUM_SIMULATED, len(correct))) < confidence
    null = [expected_calibration_error(confidence, row)[0] for row in simulated]
    limit = float(np.quantile(null, 0.99))
    gap = float(confidence.mean() - correct.mean())
    numbers = {"gap": gap, "count": len(correct)}
    if ece <= limit:
        return Found("pass", ece, "", numbers, limit) if shares.status == "pass" else shares
    status: Status = "fail" if ece > limit + limits[0] else "warn"
    code = "overconfident" if gap > 0 else "underconfident"
    return Found(status, ece, code, numbers, limit)


def temperature(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    r"""Whether probabilities are too sharp or too flat: whether another power :math:`p^\beta` fits the labels better.

    By the likelihood ratio, whose tail is Lugannani and Rice's: labels that were thought impossible are few and heavy.
    """
    data = labelled(evidence)
    if data is None or len(data.labels) < MIN_DATA:
        return None
    logs = np.log(np.maximum(data.probs, 1e-12))
    score = float(logs[np.arange(len(logs)), data.labels].sum())
    if _tilted_moments(logs, 0.0)[2] < 1e-9:
        return None
    tilt = _best_tilt(logs, score)
    total, _, variance = _tilted_moments(logs, tilt)
    w = np.sign(tilt) * np.sqrt(max(2.0 * (tilt * score - total), 0.0))
    v = tilt * np.sqrt(variance)
    root = w + np.log(v / w) / w if abs(w) > 0.05 and v / w > 0.0 else w
    p = float(2.0 * stats.norm.sf(abs(root)))
    status = grade_tested(p, abs(tilt), evidence.rates, limits)
    limit = 1.0 + np.sign(tilt) * limits[0]
    return Found(status, 1.0 + tilt, "", {"count": len(logs), "p": p}, limit)


def _tilted_moments(logs: np.ndarray, tilt: float) -> tuple[float, float, float]:
    """Cumulant generating function of the log score at a tilt, with its first two derivatives.

    ``logs`` are log probabilities (point, class); labels are drawn from them.
    """
    tilted = (1.0 + tilt) * logs
    weights = softmax(tilted, axis=1)
    mean = (weights * logs).sum(axis=1)
    total = logsumexp(tilted, axis=1) - logsumexp(logs, axis=1)
    variance = (weights * logs**2).sum() - (mean**2).sum()
    return float(total.sum()), float(mean.sum()), float(variance)


def _best_tilt(logs: np.ndarray, score: float) -> float:
    """The tilt whose expected log score is the one that was seen, between -0.99 and 20."""
    low = -0.99
    high = 20.0

    def excess(tilt: float) -> float:
        return _tilted_moments(logs, tilt)[1] - score

    if excess(low) < 0.0 < excess(high):
        return float(brentq(excess, low, high))
    return low if excess(0.0) > 0.0 else high


def _shares(data: Labelled, limits: tuple[float, ...], rates: tuple[float, float]) -> Found:
    """The class whose share of the data is farthest from the one predicted, beyond chance and the error of that."""
    probs, labels, error, where = data
    num_classes = probs.shape[1]
    predicted = probs.mean(axis=0)
    observed = np.bincount(labels, minlength=num_classes)[:num_classes] / len(labels)
    variance = (probs * (1.0 - probs)).mean(axis=0) / len(labels) + error
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
