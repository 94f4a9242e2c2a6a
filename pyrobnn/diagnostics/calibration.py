"""Calibration checks: are predictive intervals as wide as the errors are large, overall and region by region?"""

from __future__ import annotations

import numpy as np
import torch
import xarray as xr
from scipy import stats

from pyrobnn import metrics
from pyrobnn.diagnostics import reading, thresholds
from pyrobnn.diagnostics.loo import loo_weights
from pyrobnn.diagnostics.scores import class_tensors, expected_calibration_error, predictive_draws, score
from pyrobnn.diagnostics.verdict import Check

_MIN_DATA = 20
_MIN_DRAWS = 25
_MAX_DATA = 2000
_MAX_FEATURES = 20
_NUM_REGIONS = 4
_REGION_GAP = 0.25
_MAX_UNRELIABLE = 0.1
_LEVEL = 0.9
_NUM_SIMULATED = 400


def pit(tree: xr.DataTree) -> np.ndarray | None:
    """Probability integral transform of held-out y, (point, output): uniform when predictions are calibrated.

    Returns:
        `pyrobnn.metrics.pit` of the held-out replicates; None where the tree has fewer than 25.
    """
    draws = predictive_draws(tree)
    y = reading.values_of(tree, "predictions_constant_data", "y")
    if draws is None or y is None or len(y) == 0 or len(draws) < _MIN_DRAWS:
        return None
    y = y.astype(np.float64).reshape(len(y), -1)
    return metrics.pit(torch.as_tensor(draws), torch.as_tensor(y)).numpy()


def loo_pit(tree: xr.DataTree) -> tuple[np.ndarray, np.ndarray] | None:
    """Leave-one-out PIT of the training data: each datum against the predictive that has not seen it.

    The weights are the Pareto-smoothed ones of `loo`; for approximations they include p/q.

    Returns:
        Indices of (at most 2000, evenly spread) data, and their PIT (datum, output); None where replicates or
        log-likelihood are missing, or leave-one-out is undefined (see `loo`).

    References:
        Visualization in Bayesian workflow (Gabry et al., 2019) https://doi.org/10.1111/rssa.12378
    """
    replicates = _replicates(tree)
    if replicates is None:
        return None
    draws, y = replicates
    points = np.unique(np.linspace(0, len(y) - 1, min(len(y), _MAX_DATA)).astype(int))
    found = loo_weights(tree, points)
    if found is None or (found[1] > thresholds.good_k(len(draws))).mean() > _MAX_UNRELIABLE:
        return None
    weights = np.exp(found[0]).reshape(len(points), -1)
    draws, y = draws[:, points], y[points]
    below = (draws < y) + 0.5 * (draws == y)
    return points, np.clip(np.einsum("ps,spo->po", weights, below), 0.0, 1.0)


def calibration_checks(tree: xr.DataTree) -> list[Check]:
    """PIT, LOO-PIT, coverage and calibration by region for regression; ECE for classes."""
    if reading.values_of(tree, "predictions", "probs") is not None:
        return _class_checks(tree)
    if reading.text(tree, "likelihood") in ("categorical", "bernoulli"):
        return []
    checks = []
    held_out = pit(tree)
    if held_out is not None and held_out.shape[0] >= _MIN_DATA:
        checks.append(_uniform_check("pit", held_out, thresholds.PIT_SOURCE, "held-out"))
        checks.extend(_coverage_check(tree))
    left_out = loo_pit(tree)
    if left_out is not None and left_out[1].shape[0] >= _MIN_DATA:
        checks.append(_uniform_check("loo_pit", left_out[1], thresholds.LOO_PIT_SOURCE, "left-out"))
    checks.extend(_region_check(tree, held_out, left_out))
    return checks


def _replicates(tree: xr.DataTree) -> tuple[np.ndarray, np.ndarray] | None:
    """Training replicates (draw, obs, output) and observed y (obs, output), in the same units; None where missing."""
    if "posterior_predictive" not in tree.children or "observed_data" not in tree.children:
        return None
    shared = [
        str(name)
        for name in tree["posterior_predictive"].data_vars
        if name in tree["observed_data"].data_vars
    ]
    if not shared:
        return None
    draws = reading.stored_draws(tree, "posterior_predictive", shared[0])
    y = reading.values_of(tree, "observed_data", shared[0])
    if (
        draws is None
        or y is None
        or y.ndim == 0
        or len(y) == 0
        or draws.shape[0] * draws.shape[1] < _MIN_DRAWS
    ):
        return None
    if draws.shape[2:] != y.shape or not np.issubdtype(y.dtype, np.floating):
        return None
    pointwise = reading.log_likelihood(tree)
    if pointwise is not None and pointwise.shape[2] != len(y):
        return None
    return draws.reshape(-1, len(y), y.size // len(y)), y.reshape(len(y), -1)


def _uniform_check(name: str, values: np.ndarray, source: str, which: str) -> Check:
    u = values.ravel()
    test = stats.kstest(u, "uniform")
    distance, p = float(test.statistic), float(test.pvalue)
    fails = p < thresholds.PIT_FAIL and distance > thresholds.PIT_DISTANCE_FAIL
    status = "fail" if fails else "warn" if p < thresholds.PIT_WARN else "pass"
    outer = float(((u < 0.05) | (u > 0.95)).mean())
    bias = float(u.mean() - 0.5)
    if status == "pass":
        action = ""
    elif abs(bias) > 0.1:
        action = "Predictions are biased: use a more flexible network, or check how y was standardised."
    elif outer > 0.1:
        action = (
            "Intervals are too narrow: let the noise be inferred, use a richer posterior, or a "
            "heavier-tailed likelihood."
        )
    else:
        action = "Intervals are too wide: infer the noise instead of fixing it, or tighten the prior on it."
    return Check(
        name,
        status,
        distance,
        f"Kolmogorov–Smirnov p ≥ {thresholds.PIT_WARN} to pass, < {thresholds.PIT_FAIL} with distance > "
        f"{thresholds.PIT_DISTANCE_FAIL} to fail",
        source,
        f"The PIT of {u.size} {which} values is {distance:.3f} from uniform (p = {p:.2g}); {outer:.0%} lie in "
        "the outer 10 %.",
        action,
    )


def _coverage_check(tree: xr.DataTree) -> list[Check]:
    scores = score(tree)
    if "coverage_90" not in scores:
        return []
    found = scores["coverage_90"]
    error = np.hypot(np.sqrt(_LEVEL * (1 - _LEVEL) / scores.num_data), found.mc_se or 0.0)
    z = abs(found.value - _LEVEL) / float(error)
    status = "pass" if z <= thresholds.COVERAGE_SIGMAS else "warn"
    side = "narrow" if found.value < _LEVEL else "wide"
    return [
        Check(
            "coverage_90",
            status,
            found.value,
            f"0.90 within {thresholds.COVERAGE_SIGMAS:.0f} standard errors",
            thresholds.PIT_SOURCE,
            f"90 % intervals cover {found.value:.1%} of {scores.num_data} held-out values (standard error "
            f"{error:.1%}).",
            ""
            if status == "pass"
            else f"Intervals are too {side}: infer the noise, or recalibrate on held-out data.",
        )
    ]


def _region_check(
    tree: xr.DataTree, held_out: np.ndarray | None, left_out: tuple[np.ndarray, np.ndarray] | None
) -> list[Check]:
    """Whether errors are as large as predicted everywhere: the mark of constant noise on heteroskedastic data."""
    for u, covariates in _region_data(tree, held_out, left_out):
        if u.shape[0] < _MIN_DATA * _NUM_REGIONS or not covariates:
            continue
        inside = (np.abs(u - 0.5) <= 0.5 * _LEVEL).mean(axis=1)
        size = np.abs(u - 0.5).mean(axis=1)
        results = []
        for name, values in covariates.items():
            if np.ptp(values) == 0.0:
                continue
            parts = np.array_split(np.argsort(values, kind="stable"), _NUM_REGIONS)
            p = float(stats.kruskal(*[size[part] for part in parts]).pvalue) if np.ptp(size) > 0 else 1.0
            results.append((p, name, [(values[part], float(inside[part].mean())) for part in parts]))
        if not results:
            continue
        p, name, regions = min(results, key=lambda result: result[0])
        p = min(1.0, p * len(results))
        covered = [coverage for _, coverage in regions]
        low, high = int(np.argmin(covered)), int(np.argmax(covered))
        gap = covered[high] - covered[low]
        status = (
            "fail"
            if p < thresholds.PIT_FAIL and gap > _REGION_GAP
            else "warn"
            if p < thresholds.PIT_WARN and gap > 0.5 * _REGION_GAP
            else "pass"
        )
        ends = [f"{regions[i][0].min():.4g} ≤ {name} ≤ {regions[i][0].max():.4g}" for i in (low, high)]
        seen = (
            f"90 % intervals cover {covered[low]:.0%} where {ends[0]} but {covered[high]:.0%} where {ends[1]}"
            if gap > 0
            else f"90 % intervals cover {covered[low]:.0%} in all {_NUM_REGIONS} regions of {name}"
        )
        return [
            Check(
                "coverage_by_region",
                status,
                gap,
                f"Kruskal–Wallis p ≥ {thresholds.PIT_WARN} over {_NUM_REGIONS} regions (Bonferroni); < "
                f"{thresholds.PIT_FAIL} with a "
                f"coverage gap > {_REGION_GAP} fails",
                thresholds.LOO_PIT_SOURCE,
                f"{seen} (p = {p:.2g}).",
                ""
                if status == "pass"
                else f"The noise depends on {name}: use a heteroskedastic likelihood (HeteroskedasticGaussian).",
            )
        ]
    return []


def _region_data(
    tree: xr.DataTree, held_out: np.ndarray | None, left_out: tuple[np.ndarray, np.ndarray] | None
) -> list[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """PIT values with what they may depend on: each feature, the predicted mean; training data first, being more."""
    found = []
    replicates = _replicates(tree)
    if replicates is not None:
        draws, y = replicates
        if left_out is None:
            # without leave-one-out the datum is its own judge: a little too lenient, in all regions alike
            points = np.unique(np.linspace(0, len(y) - 1, min(len(y), _MAX_DATA)).astype(int))
            u = metrics.pit(torch.as_tensor(draws[:, points]), torch.as_tensor(y[points])).numpy()
        else:
            points, u = left_out
        x = reading.values_of(tree, "constant_data", "x")
        mean = draws[:, points, 0].mean(axis=0)
        found.append((u, _covariates(None if x is None else x[points], mean)))
    if held_out is not None:
        x = reading.values_of(tree, "predictions_constant_data", "x")
        mean = reading.values_of(tree, "predictions", "mean")
        found.append(
            (held_out, _covariates(x, None if mean is None else mean.reshape(len(held_out), -1)[:, 0]))
        )
    return found


def _covariates(x: np.ndarray | None, mean: np.ndarray | None) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    if x is not None:
        flat = np.asarray(x, dtype=np.float64).reshape(len(x), -1)
        if flat.shape[1] == 1:
            found["x"] = flat[:, 0]
        elif flat.shape[1] <= _MAX_FEATURES:
            found.update({f"x[{index}]": flat[:, index] for index in range(flat.shape[1])})
    if mean is not None:
        found["the predicted mean"] = mean
    return {name: values for name, values in found.items() if np.isfinite(values).all()}


def _class_checks(tree: xr.DataTree) -> list[Check]:
    probs = np.asarray(reading.values_of(tree, "predictions", "probs"), dtype=np.float64)
    y = reading.values_of(tree, "predictions_constant_data", "y")
    if y is None or len(y) < _MIN_DATA:
        return []
    p_class, labels = class_tensors(probs, y)
    confidence, correct = p_class.max(dim=1).values.numpy(), (p_class.argmax(dim=1) == labels).numpy()
    ece, _ = expected_calibration_error(confidence, correct)
    # what a perfectly calibrated forecast would score on as many data
    rng = np.random.default_rng(0)
    simulated = rng.random((_NUM_SIMULATED, len(y))) < confidence
    null = np.array([expected_calibration_error(confidence, row)[0] for row in simulated])
    limit, p = float(np.quantile(null, 0.99)), float((null >= ece).mean())
    status = "pass" if ece <= limit else "fail" if ece > limit + thresholds.PIT_DISTANCE_FAIL else "warn"
    gap = float(confidence.mean() - correct.mean())
    direction = "over" if gap > 0 else "under"
    return [
        Check(
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
            else f"Predictions are {direction}confident: use a richer posterior, or temper the logits on "
            "validation data.",
        )
    ]
