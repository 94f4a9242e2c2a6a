"""Calibration checks: are predictive intervals as wide as the errors are large, overall and region by region?"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from scipy import stats

from pyrobnn import metrics
from pyrobnn.diagnostics import thresholds
from pyrobnn.diagnostics.advice import Advice
from pyrobnn.diagnostics.evidence import Evidence, statistic
from pyrobnn.diagnostics.leave_one_out import loo_pit
from pyrobnn.diagnostics.names import feature_names
from pyrobnn.diagnostics.points import CLASSES, FEWEST_DRAWS, is_classification, predictive_draws, replicates
from pyrobnn.diagnostics.rows import ORDER, in_order, merged, order_of
from pyrobnn.diagnostics.scores import class_tensors, expected_calibration_error, score
from pyrobnn.diagnostics.verdict import Check, Status, grade_tested
from pyrobnn.groups import CONSTANT_DATA, HELD_OUT, PREDICTIONS

_MIN_DATA = 20
#: held-out values of which coverage and confidence say something, by an exact tail and a simulated one: that none of
#: eight lies inside happens to nobody
_FEWEST_HELD_OUT = 8
_MAX_DATA = 2000
_MAX_FEATURES = 20
_NUM_REGIONS = 4
_LEVEL = 0.9
_NUM_SIMULATED = 400
#: sd of a uniform value, and of its distance from a half
_SD_MEAN, _SD_SIZE = 12.0**-0.5, 48.0**-0.5


@statistic
def pit(evidence: Evidence) -> np.ndarray | None:
    """Probability integral transform of held-out y, (point, output): uniform when predictions are calibrated.

    Args:
        tree: A DataTree with ``predictions`` and ``predictions_constant_data``.

    Returns:
        `pyrobnn.metrics.pit` of the held-out replicates; None where the tree has fewer than 25.
    """
    draws = predictive_draws(evidence)
    y = evidence.values(HELD_OUT, "y")
    if draws is None or y is None or len(y) == 0 or len(draws) < FEWEST_DRAWS:
        return None
    y = y.astype(np.float64).reshape(len(y), -1)
    return metrics.pit(torch.as_tensor(draws), torch.as_tensor(y)).numpy()


def _held_out(evidence: Evidence) -> np.ndarray | None:
    """The PIT of held-out data of a regression."""
    return None if is_classification(evidence) or evidence.likelihood in CLASSES else pit(evidence)


def _left_out(evidence: Evidence) -> tuple[np.ndarray, np.ndarray] | None:
    """The LOO-PIT of the training data of a regression."""
    return None if is_classification(evidence) or evidence.likelihood in CLASSES else loo_pit(evidence)


def few_held_out(evidence: Evidence) -> bool:
    """Whether held-out data can tell that intervals hold hardly any of them, and no more: too few for a PIT."""
    found = _held_out(evidence)
    return found is not None and _FEWEST_HELD_OUT <= len(found) < _MIN_DATA


def check_pit(evidence: Evidence) -> Check | None:
    """Whether the PIT of held-out data is uniform."""
    found = _held_out(evidence)
    if found is None or len(found) < _MIN_DATA:
        return None
    return _uniform_check(
        "pit", found, thresholds.PIT_SOURCE, "held-out", Advice.of(evidence), _dependence(evidence)
    )


def check_loo_pit(evidence: Evidence) -> Check | None:
    """Whether the leave-one-out PIT of the training data is uniform."""
    found = _left_out(evidence)
    if found is None or len(found[1]) < _MIN_DATA:
        return None
    return _uniform_check("loo_pit", found[1], thresholds.LOO_PIT_SOURCE, "left-out", Advice.of(evidence))


def check_training_pit(evidence: Evidence) -> Check | None:
    """Whether intervals hold the training data, where leave-one-out cannot be had: who misses those misses all."""
    outcomes = replicates(evidence)
    if outcomes is None or _left_out(evidence) is not None or len(outcomes[1]) < _MIN_DATA:
        return None
    draws, y = (torch.as_tensor(part) for part in outcomes)
    u = metrics.pit(draws, y).numpy()
    found = _uniform_check("training_pit", u, thresholds.PIT_SOURCE, "training", Advice.of(evidence))
    narrow = found.status in ("warn", "fail") and "narrow" in found.action
    if narrow:
        return found
    seen = found.evidence.rstrip(".")
    return replace(
        found,
        status="info",
        evidence=f"{seen}: they have been trained on, so that decides nothing.",
        action="",
    )


class Dependence(NamedTuple):
    """Factors, at the least 1, by which errors exceed those of independent data.

    Args:
        distance: of the distance of the PIT from uniform. coverage: of the share in 90 % intervals.
        mean, size: of the mean of the PIT, and of its mean distance from a half.
    """

    distance: float = 1.0
    coverage: float = 1.0
    mean: float = 1.0
    size: float = 1.0


_INDEPENDENT = Dependence()


@statistic
def _dependence(evidence: Evidence) -> Dependence:
    """By what the errors of the PIT of held-out data exceed those of independent data.

    All held-out predictions share the one function, whose error is common to them: replicates of all points by one draw
    say by how much, being outcomes of the model itself.
    """
    draws = predictive_draws(evidence)
    if draws is None:
        return _INDEPENDENT
    points = np.unique(np.linspace(0, draws.shape[1] - 1, min(draws.shape[1], _MAX_DATA)).astype(int))
    chosen = draws[np.linspace(0, len(draws) - 1, min(len(draws), _NUM_SIMULATED)).astype(int)][:, points]
    u = (chosen.argsort(axis=0).argsort(axis=0) + 0.5) / len(chosen)
    flat = u.reshape(len(u), -1)
    size = flat.shape[1]
    ordered, place = np.sort(flat, axis=1), np.arange(size) / size
    distance = np.median(
        np.maximum(ordered - place, place + 1.0 / size - ordered).max(axis=1)
    )  # Kolmogorov's
    share = (np.abs(flat - 0.5) <= 0.5 * _LEVEL).mean(axis=1)
    independent = np.sqrt(_LEVEL * (1.0 - _LEVEL) / size)
    moments = flat.mean(axis=1).std() / _SD_MEAN, np.abs(flat - 0.5).mean(axis=1).std() / _SD_SIZE
    factors = (
        distance / stats.kstwo.median(size),
        share.std() / independent,
        *(moment * np.sqrt(size) for moment in moments),
    )
    return Dependence(*(max(1.0, float(factor)) for factor in factors))


def _p_uniform(u: np.ndarray, distance: float, dependence: Dependence) -> float:
    """p-value of values (point,) being uniform, by their distance, their mean and their size (Bonferroni).

    A shift moves the mean, a wrong width the size, both by more of their errors than the distance by its.
    """
    errors = np.array([_SD_MEAN * dependence.mean, _SD_SIZE * dependence.size]) / np.sqrt(u.size)
    z = np.abs([u.mean() - 0.5, np.abs(u - 0.5).mean() - 0.25]) / errors
    each = (float(stats.kstwo.sf(distance / dependence.distance, u.size)), *(2.0 * stats.norm.sf(z)))
    return float(min(1.0, len(each) * min(each)))


def _uniform_check(
    name: str,
    values: np.ndarray,
    source: str,
    which: str,
    advice: Advice,
    dependence: Dependence = _INDEPENDENT,
) -> Check:
    u = values.ravel()
    distance = float(stats.kstest(u, "uniform").statistic)
    p = _p_uniform(u, distance, dependence)
    limits = thresholds.PIT_DISTANCE_WARN, thresholds.PIT_DISTANCE_FAIL
    status = grade_tested(p, distance, thresholds.PIT_RATES, limits)
    outer = float(((u < 0.05) | (u > 0.95)).mean())
    # intervals that are too wide for most and yet too narrow for the last per cent: noise with heavy tails
    extreme = float(((u < 0.005) | (u > 0.995)).mean())
    bias = float(u.mean() - 0.5)
    if status == "pass":
        action = ""
    elif abs(bias) > 0.1:
        action = "Predictions are biased: use a more flexible network, or check how y was standardised."
    elif extreme > 0.015 and outer < 0.1:
        action = advice.tails()
    else:
        action = advice.intervals("narrow" if outer > 0.1 else "wide")
    return Check(
        name,
        status,
        distance,
        f"p (of distance, mean and width) ≥ {thresholds.PIT_WARN} or distance ≤ "
        f"{thresholds.PIT_DISTANCE_WARN} to pass, p < {thresholds.PIT_FAIL} with distance > "
        f"{thresholds.PIT_DISTANCE_FAIL} to fail",
        source,
        f"The PIT of {u.size} {which} values is {distance:.3f} from uniform (p = {p:.2g}); {outer:.0%} lie in "
        "the outer 10 %.",
        action,
    )


def check_coverage(evidence: Evidence) -> Check | None:
    """Whether 90 % intervals hold 90 % of the held-out data."""
    held_out, scores = _held_out(evidence), score(evidence)
    if held_out is None or len(held_out) < _FEWEST_HELD_OUT or "coverage_90" not in scores:
        return None
    found, dependence = scores["coverage_90"], _dependence(evidence).coverage
    error = np.sqrt(_LEVEL * (1 - _LEVEL) / scores.num_data) * dependence
    error = np.hypot(error, found.mc_se or 0.0)
    gap = abs(found.value - _LEVEL)
    z = gap / float(error)
    fails = z > thresholds.COVERAGE_SIGMAS_FAIL and gap > thresholds.COVERAGE_GAP_FAIL
    warns = z > thresholds.COVERAGE_SIGMAS and gap > thresholds.COVERAGE_GAP_WARN
    if len(held_out) < _MIN_DATA:  # too few for an error bar
        count = max(1, round(len(held_out) / dependence**2))
        tail = float(stats.binom.cdf(round(found.value * count), count, _LEVEL))
        fails, warns = tail < thresholds.PIT_FAIL, tail < thresholds.PIT_WARN
    status: Status = "fail" if fails else "warn" if warns else "pass"
    action = Advice.of(evidence).intervals("narrow" if found.value < _LEVEL else "wide").rstrip(".")
    return Check(
        "coverage_90",
        status,
        found.value,
        f"0.90 within {thresholds.COVERAGE_SIGMAS:.0f} standard errors or {thresholds.COVERAGE_GAP_WARN}; "
        f"{thresholds.COVERAGE_GAP_FAIL} off fails",
        thresholds.PIT_SOURCE,
        f"90 % intervals cover {found.value:.1%} of {scores.num_data} held-out values (standard error "
        f"{error:.1%}).",
        "" if status == "pass" else f"{action}; or recalibrate on held-out data.",
    )


def check_regions(evidence: Evidence) -> Check | None:
    """Whether errors are as large as predicted everywhere: the mark of constant noise on heteroskedastic data."""
    if is_classification(evidence) or evidence.likelihood in CLASSES:
        return None
    sets = [(u, covariates) for u, covariates in regions_of(evidence) if len(u) >= 2 * _MIN_DATA]
    found = []
    for name in dict.fromkeys(name for _, covariates in sets for name in covariates):
        of_name = [(u, covariates[name]) for u, covariates in sets if name in covariates]
        if all(np.ptp(values) > 0.0 for _, values in of_name):
            regions = max((_regions(*each) for each in of_name), key=lambda parts: _gap(parts))
            found.append((_p_trend(of_name), name, regions))
    if not found:
        return None
    # of two that say the same, as an input and a line's mean, the first
    p, name, parts = min(found, key=lambda result: float(f"{result[0]:.6g}"))
    return _region_check(min(1.0, p * len(found)), name, parts, Advice.of(evidence))


def _p_trend(sets: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """p-value of errors that do not grow along a covariate, from PIT values (point, output) and it, of every set.

    By rank correlation with it and with the distance from its middle: a trend has one degree of freedom, regions three.
    Fisher's z of all sets is added up, so that what is weak in each is seen where the sets agree.
    """
    total, information = np.zeros(2), 0.0
    for u, values in sets:
        size = np.abs(u - 0.5).mean(axis=1)
        if np.ptp(size) == 0.0:
            continue
        along = (values, np.abs(stats.rankdata(values) - 0.5 * (len(values) + 1)))
        r = np.array([stats.spearmanr(size, each).statistic if np.ptp(each) > 0.0 else 0.0 for each in along])
        # 1.06 / (n − 3) is the variance for ranks
        weight = (len(size) - 3) / 1.06
        total += weight * np.arctanh(np.clip(r, -0.999, 0.999))
        information += weight
    if information == 0.0:
        return 1.0
    return min(1.0, len(total) * float(2.0 * stats.norm.sf(np.abs(total).max() / np.sqrt(information))))


def _regions(u: np.ndarray, values: np.ndarray) -> list[tuple[np.ndarray, float]]:
    """The values of a covariate in each of four regions, and how much 90 % intervals cover there."""
    inside = (np.abs(u - 0.5) <= 0.5 * _LEVEL).mean(axis=1)
    parts = np.array_split(in_order(values), _NUM_REGIONS)
    return [(values[part], float(inside[part].mean())) for part in parts]


def _gap(regions: list[tuple[np.ndarray, float]]) -> float:
    covered = [coverage for _, coverage in regions]
    return max(covered) - min(covered)


def _region_check(p: float, name: str, regions: list[tuple[np.ndarray, float]], advice: Advice) -> Check:
    covered = [coverage for _, coverage in regions]
    low, high = int(np.argmin(covered)), int(np.argmax(covered))
    gap = covered[high] - covered[low]
    status = grade_tested(
        p, gap, thresholds.PIT_RATES, (thresholds.REGION_GAP_WARN, thresholds.REGION_GAP_FAIL)
    )
    ends = [f"{regions[i][0].min():.4g} ≤ {name} ≤ {regions[i][0].max():.4g}" for i in (low, high)]
    seen = (
        f"90 % intervals cover {covered[low]:.0%} where {ends[0]} but {covered[high]:.0%} where {ends[1]}"
        if gap > 0
        else f"90 % intervals cover {covered[low]:.0%} in all {_NUM_REGIONS} regions of {name}"
    )
    return Check(
        "coverage_by_region",
        status,
        gap,
        f"p of the rank correlation ≥ {thresholds.PIT_WARN} (Bonferroni) or a coverage gap of {_NUM_REGIONS} regions ≤ "
        f"{thresholds.REGION_GAP_WARN}; < "
        f"{thresholds.PIT_FAIL} with a coverage gap > {thresholds.REGION_GAP_FAIL} fails",
        thresholds.LOO_PIT_SOURCE,
        f"{seen} (p = {p:.2g}).",
        ""
        if status == "pass"
        else advice.by(name)
        + (", with time (or what the order stands for) as an input." if name == ORDER else "."),
    )


@statistic
def regions_of(evidence: Evidence) -> list[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """PIT values, training data first, with what they may depend on: each feature, the mean, the order of rows."""
    found = []
    outcomes, held_out, left_out = replicates(evidence), _held_out(evidence), _left_out(evidence)
    if outcomes is not None:
        draws, y = outcomes
        if left_out is None:
            # without leave-one-out the datum is its own judge: a little too lenient, in all regions alike
            points = np.unique(np.linspace(0, len(y) - 1, min(len(y), _MAX_DATA)).astype(int))
            u = metrics.pit(torch.as_tensor(draws[:, points]), torch.as_tensor(y[points])).numpy()
        else:
            points, u = left_out
        x = evidence.values(CONSTANT_DATA, "x")
        mean = draws[:, points, 0].mean(axis=0)
        covariates = _covariates(evidence, None if x is None else x[points], mean)
        found.append((u, covariates | order_of(y[points], covariates)))
    if held_out is not None:
        x, mean = evidence.values(HELD_OUT, "x"), evidence.values(PREDICTIONS, "mean")
        mean = None if mean is None else mean.reshape(len(held_out), -1)[:, 0]
        covariates = _covariates(evidence, x, mean)
        found.append((held_out, covariates | order_of(evidence.values(HELD_OUT, "y"), covariates)))
    return found


def _covariates(evidence: Evidence, x: np.ndarray | None, mean: np.ndarray | None) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    if x is not None:
        flat = np.asarray(x, dtype=np.float64).reshape(len(x), -1)
        if flat.shape[1] <= _MAX_FEATURES:
            found |= dict(zip(feature_names(evidence, flat.shape[1]), flat.T, strict=True))
    if mean is not None:
        found["the predicted mean"] = merged(np.asarray(mean, dtype=np.float64))
    return {name: values for name, values in found.items() if np.isfinite(values).all()}


def check_ece(evidence: Evidence) -> Check | None:
    """Whether confidence and accuracy of classes agree, held against what perfect calibration would score."""
    probs, y = evidence.values(PREDICTIONS, "probs"), evidence.values(HELD_OUT, "y")
    if probs is None or y is None or len(y) < _FEWEST_HELD_OUT:
        return None
    p_class, labels = class_tensors(probs, y)
    confidence, correct = p_class.max(dim=1).values.numpy(), (p_class.argmax(dim=1) == labels).numpy()
    ece, _ = expected_calibration_error(confidence, correct)
    # what a perfectly calibrated forecast would score on as many data
    rng = np.random.default_rng(0)
    simulated = rng.random((_NUM_SIMULATED, len(y))) < confidence
    null = np.array([expected_calibration_error(confidence, row)[0] for row in simulated])
    limit, p = float(np.quantile(null, 0.99)), float((1 + (null >= ece).sum()) / (1 + len(null)))
    status: Status = (
        "pass" if ece <= limit else "fail" if ece > limit + thresholds.PIT_DISTANCE_FAIL else "warn"
    )
    gap = float(confidence.mean() - correct.mean())
    direction = "over" if gap > 0 else "under"
    return Check(
        "ece",
        status,
        ece,
        f"≤ {limit:.3f}, the 99 % quantile under perfect calibration; {thresholds.PIT_DISTANCE_FAIL} "
        "above it fails",
        thresholds.ECE_SOURCE,
        f"Confidence and accuracy differ by {ece:.3f} on average over {len(y)} held-out values (p = "
        f"{p:.2g}); mean confidence "
        f"minus accuracy is {gap:+.3f}.",
        ""
        if status == "pass"
        else f"Predictions are {direction}confident: "
        + ("" if evidence.claim == "exact" else "use a richer posterior, or ")
        + "temper the logits on validation data.",
    )
