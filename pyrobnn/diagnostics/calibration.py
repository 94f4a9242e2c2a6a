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
        tested = [
            p_binned(each, levels) if len(levels) else p_moments(each, dependence) for each in u.T
        ]
        return uniform(u[:, np.argmin(tested)], limits, "held-out", evidence.rates, _least(*tested))
    covered = float((np.abs(u - 0.5) <= 0.5 * LEVEL).mean())
    count = max(1, round(len(u) / dependence.coverage**2))
    p = float(stats.binom.cdf(round(covered * count), count, LEVEL))
    numbers = {"count": u.size, "which": "held-out", "outer": 1.0 - covered, "p": p}
    status: Status = (
        "fail" if p < evidence.rates[1] else "warn" if p < evidence.rates[0] else "info"
    )
    return Found(
        status, covered, "calibrated" if status == "info" else "too_narrow", numbers, LEVEL
    )


def left_out(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    """Whether the leave-one-out PIT of the training data is uniform; where there is none, that of their replicates.

    A model misses its training data by less than new data, but only as far as its parameters allow: residuals shrink
    to √((1 − h) / (1 + h)) of what is predicted, h the parameters per datum. Beyond that error bars are too wide.
    """
    found = left_out_pit(evidence)
    if found is not None and len(found[1]) >= MIN_DATA:
        return uniform(found[1], limits, "left-out")
    outcomes = None if found is not None or has_classes(evidence) else replicates(evidence)
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
        status = grade_tested(
            float(stats.norm.sf(gap * np.sqrt(u.size) / _SD_SIZE)), gap, RATES, limits
        )
    return replace(trained, status="info" if status == "pass" else status)


def _free_parameters(evidence: Evidence) -> int:
    """How many directions the draws of the posterior move in: all, where they are too few to show how many."""
    draws = np.concatenate([flattened(each, 2) for each in evidence.sites.values()], axis=2)
    moves = np.diff(draws.astype(np.float64), axis=1).reshape(-1, draws.shape[2])
    few = moves[spread(len(moves), MAX_DATA), :MAX_DATA]
    few = few[:, few.any(axis=0)]
    rank = (
        int(np.linalg.matrix_rank(few / np.linalg.norm(few, axis=0), rtol=1e-3)) if few.size else 0
    )
    return rank if rank < len(few) else moves.shape[1]


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
    distance = np.median(
        np.maximum(ordered - place, place + 1.0 / size - ordered).max(axis=1)
    )  # Kolmogorov's
    share = (np.abs(flat - 0.5) <= 0.5 * LEVEL).mean(axis=1)
    factors = (
        distance / stats.kstwo.median(size),
        share.std() / np.sqrt(LEVEL * (1.0 - LEVEL) / size),
        flat.mean(axis=1).std() / _SD_MEAN * np.sqrt(size),
        np.abs(flat - 0.5).mean(axis=1).std() / _SD_SIZE * np.sqrt(size),
    )
    return Dependence(*(max(1.0, float(factor)) for factor in factors))


def uniform(
    u: np.ndarray,
    limits: tuple[float, ...],
    which: str,
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
        z = (
            np.abs([mean - 0.5, np.abs(u - 0.5).mean() - 0.25])
            / np.array([_SD_MEAN, _SD_SIZE])
            * np.sqrt(u.size)
        )
        p = _least(stats.kstwo.sf(distance, u.size), *2.0 * stats.norm.sf(z))
    status = grade_tested(p, distance, rates, limits)
    # intervals that are too wide for most and yet too narrow for the last per cent: noise with heavy tails
    outer, extreme = (float((np.abs(u - 0.5) > 0.5 - tail).mean()) for tail in (0.05, 0.005))
    numbers = {
        "count": u.size,
        "which": which,
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
    counts = own_stream().multinomial(u.size, share, size=20_000)
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
        each = (
            softmax(f, axis=-1)
            if f.shape[3] > 1
            else np.concatenate([1.0 - expit(f), expit(f)], axis=-1)
        )
        return Labelled(*arrays, each.mean(axis=2).var(axis=(0, 1)))
    outcomes = class_replicates(evidence)
    if outcomes is None or len(outcomes[1]) < MIN_DATA:
        return None
    is_class = outcomes[0][..., None] == np.arange(1 + max(int(part.max()) for part in outcomes))
    return Labelled(
        is_class.mean(axis=0), outcomes[1], is_class.mean(axis=1).var(axis=0), "training"
    )


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
    status: Status = "pass" if ece <= limit else "fail" if ece > limit + limits[0] else "warn"
    if status == "pass" and shares.status != "pass":
        return shares
    gap = float(confidence.mean() - correct.mean())
    code = "" if status == "pass" else "overconfident" if gap > 0 else "underconfident"
    return Found(status, ece, code, {"gap": gap, "count": len(correct)}, limit)


def temperature(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    r"""Whether probabilities are too sharp or too flat: whether another power :math:`p^\beta` fits the labels better.

    By the likelihood ratio, whose tail is Lugannani and Rice's: labels that were thought impossible are few and heavy.
    """
    data = labelled(evidence)
    if data is None or len(data.labels) < MIN_DATA:
        return None
    logs = np.log(np.maximum(data.probs, 1e-12))
    score = float(logs[np.arange(len(logs)), data.labels].sum())

    def moments(t: float) -> tuple[float, float, float]:
        tilted = (1.0 + t) * logs
        weights = softmax(tilted, axis=1)
        mean = (weights * logs).sum(axis=1)
        total = logsumexp(tilted, axis=1) - logsumexp(logs, axis=1)
        return (
            float(total.sum()),
            float(mean.sum()),
            float((weights * logs**2).sum() - (mean**2).sum()),
        )

    low = -0.99
    high = 20.0
    if moments(0.0)[2] < 1e-9:
        return None
    if moments(low)[1] < score < moments(high)[1]:
        t = float(brentq(lambda t: moments(t)[1] - score, low, high))
    else:
        t = low if score < moments(0.0)[1] else high
    total, _, variance = moments(t)
    w = np.sign(t) * np.sqrt(max(2.0 * (t * score - total), 0.0))
    v = t * np.sqrt(variance)
    root = w + np.log(v / w) / w if abs(w) > 0.05 and v / w > 0.0 else w
    p = float(2.0 * stats.norm.sf(abs(root)))
    status = grade_tested(p, abs(t), evidence.rates, limits)
    return Found(status, 1.0 + t, "", {"count": len(logs), "p": p}, 1.0 + np.sign(t) * limits[0])


def _shares(data: Labelled, limits: tuple[float, ...], rates: tuple[float, float]) -> Found:
    """The class whose share of the data is farthest from the one predicted, beyond chance and the error of that."""
    probs, labels, error, where = data
    said = probs.mean(axis=0)
    seen = np.bincount(labels, minlength=probs.shape[1])[: probs.shape[1]] / len(labels)
    variance = (probs * (1.0 - probs)).mean(axis=0) / len(labels) + error
    p = 2.0 * stats.norm.sf(np.abs(seen - said) / np.sqrt(np.maximum(variance, 1e-12))) * len(said)
    worst = int(np.argmax(np.where(p < rates[0], 1.0, 0.0) + np.abs(seen - said)))
    gap = float(abs(seen - said)[worst])
    least = float(min(1.0, p[worst]))
    numbers = {
        "which": worst,
        "seen": float(seen[worst]),
        "said": float(said[worst]),
        "count": len(labels),
    }
    status = grade_tested(least, gap, rates, limits)
    return Found(status, gap, "class_shares", numbers | {"where": where, "p": least}, limits[0])
