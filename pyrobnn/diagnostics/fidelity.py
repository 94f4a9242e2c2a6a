"""How close a posterior is to a reference run, in function space: the question that R-hat cannot answer."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import xarray as xr
from scipy import stats
from scipy.special import softmax

from pyrobnn.diagnostics import reading, thresholds
from pyrobnn.diagnostics.convergence import convergence
from pyrobnn.diagnostics.verdict import Check

_MAX_COLUMNS = 512
_ELPD_NOISE = 4.0


@dataclass(frozen=True)
class Fidelity:
    """Distances of one posterior from a reference.

    Args:
        per_point: Dataset over (point, output): ``wasserstein`` (1-Wasserstein distance of f, in reference sd)
            and ``sd_ratio`` (sd of f over the reference's).
        at: Where the points lie: "probes" or "held-out points".
        agreement: Share of held-out points with the same predicted class; None for regression.
        total_variation: Mean of ½ Σ_c |p_c − p_c^ref|; None for regression.
        elpd_difference: Mean held-out log density minus the reference's, summed over points; negative is worse
            than the reference.
        elpd_difference_se: Its standard error over points.
    """

    per_point: xr.Dataset | None
    at: str
    agreement: float | None
    total_variation: float | None
    elpd_difference: float | None
    elpd_difference_se: float | None


def fidelity(tree: xr.DataTree, reference: xr.DataTree) -> Fidelity:
    """Compare a posterior with a reference posterior (a long NUTS run) of the same model and data.

    Args:
        tree: The posterior to judge.
        reference: The reference; probes or held-out points must be those of `tree` to be compared.

    Returns:
        Every distance that the two trees allow.

    Caveat:
        One-dimensional distances per point: dependence between points is not compared. With S effective draws,
        1-Wasserstein has a floor of about 1/√S sd.

    References:
        What are Bayesian neural network posteriors really like? (Izmailov et al., 2021)
        https://arxiv.org/abs/2104.14421
    """
    per_point, at = _per_point(tree, reference)
    ours, theirs = _probabilities(tree), _probabilities(reference)
    agreement = total_variation = None
    if (
        ours is not None
        and theirs is not None
        and ours.shape == theirs.shape
        and _same_points(tree, reference)
    ):
        agreement = float((ours.argmax(axis=1) == theirs.argmax(axis=1)).mean())
        total_variation = float(0.5 * np.abs(ours - theirs).sum(axis=1).mean())
    difference = error = None
    log_prob = [reading.values_of(each, "predictions", "log_prob") for each in (tree, reference)]
    if log_prob[0] is not None and log_prob[1] is not None and log_prob[0].shape == log_prob[1].shape:
        per_datum = (log_prob[0] - log_prob[1]).ravel()
        if np.isfinite(per_datum).all() and per_datum.size > 1 and _same_points(tree, reference):
            difference = float(per_datum.sum())
            error = float(np.sqrt(per_datum.size) * per_datum.std(ddof=1))
    return Fidelity(per_point, at, agreement, total_variation, difference, error)


def cost_per_draw(tree: xr.DataTree) -> float | None:
    """Seconds of fitting per effective draw of f: the smallest bulk ESS for chains, the number of draws otherwise."""
    seconds = reading.seconds(tree, "fit")
    if seconds is None or reading.is_point(tree):
        return None
    if reading.is_iid(tree):
        return seconds / reading.num_draws(tree)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        found = convergence(tree)
    if found is None or not np.isfinite(found.table["ess_bulk"]).any():
        return None
    return seconds / max(1.0, float(found.table["ess_bulk"].min()))


def fidelity_checks(tree: xr.DataTree, reference: xr.DataTree) -> list[Check]:
    """Distances to the reference with their thresholds; information only where the reference has not converged."""
    found = fidelity(tree, reference)
    trusted, why = _reference_converged(reference)
    checks = []
    if found.per_point is not None:
        checks.append(_wasserstein_check(found, trusted, why))
        checks.append(_sd_check(found, trusted, why))
    if found.agreement is not None and found.total_variation is not None:
        checks.append(_class_check(found, trusted, why))
    if found.elpd_difference is not None and found.elpd_difference_se is not None:
        low = found.elpd_difference < -max(_ELPD_NOISE, 2.0 * found.elpd_difference_se)
        checks.append(
            Check(
                "elpd_against_reference",
                "warn" if low else "pass",
                found.elpd_difference,
                f"≥ −{_ELPD_NOISE:.0f} or within two standard errors",
                thresholds.LOO_SOURCE,
                f"The held-out log density is {found.elpd_difference:+.1f} ± {found.elpd_difference_se:.1f} "
                "from the reference's.",
                "Prefer the reference for prediction." if low else "",
            )
        )
    if not checks:
        checks.append(
            Check(
                "fidelity",
                "info",
                None,
                "",
                thresholds.FIDELITY_SOURCE,
                "The reference was evaluated at other points, so nothing can be compared.",
            )
        )
    return checks


def _grade(value: float, good: float, bad: float, *, higher: bool = False) -> str:
    if higher:
        value, good, bad = -value, -good, -bad
    return "pass" if value <= good else "fail" if value > bad else "warn"


def _wasserstein_check(found: Fidelity, trusted: bool, why: str) -> Check:
    distance = found.per_point["wasserstein"].values
    median, largest = float(np.median(distance)), float(distance.max())
    status = _grade(median, thresholds.WASSERSTEIN_PASS, thresholds.WASSERSTEIN_FAIL)
    return Check(
        "wasserstein",
        status if trusted else "info",
        median,
        f"median ≤ {thresholds.WASSERSTEIN_PASS} reference sd; > {thresholds.WASSERSTEIN_FAIL:.0f} fails",
        thresholds.FIDELITY_SOURCE,
        f"f at the {found.at} is {median:.2f} reference sd from the reference in the median and {largest:.2f} "
        f"at most{why}.",
        ""
        if status == "pass" or not trusted
        else "The functions differ from the reference: use a richer approximation, or the reference.",
    )


def _sd_check(found: Fidelity, trusted: bool, why: str) -> Check:
    ratio = found.per_point["sd_ratio"].values
    median = float(np.median(ratio))
    status = _grade(
        min(median, 1.0 / max(median, 1e-12)), thresholds.SD_RATIO_PASS, thresholds.SD_RATIO_FAIL, higher=True
    )
    side = "under" if median < 1.0 else "over"
    return Check(
        "sd_ratio",
        status if trusted else "info",
        median,
        f"median within [{thresholds.SD_RATIO_PASS}, {1 / thresholds.SD_RATIO_PASS:.2f}]; outside "
        f"[{thresholds.SD_RATIO_FAIL}, {1 / thresholds.SD_RATIO_FAIL:.0f}] fails",
        thresholds.FIDELITY_SOURCE,
        f"The sd of f at the {found.at} is {median:.2f} times the reference's in the median "
        f"({ratio.min():.2f} to {ratio.max():.2f}){why}.",
        ""
        if status == "pass" or not trusted
        else f"Epistemic uncertainty is {side}estimated: use a guide with correlations (low_rank, full_rank), "
        "or the reference.",
    )


def _class_check(found: Fidelity, trusted: bool, why: str) -> Check:
    grades = (
        _grade(found.agreement, thresholds.AGREEMENT_PASS, thresholds.AGREEMENT_FAIL, higher=True),
        _grade(found.total_variation, thresholds.TOTAL_VARIATION_PASS, thresholds.TOTAL_VARIATION_FAIL),
    )
    status = "fail" if "fail" in grades else "warn" if "warn" in grades else "pass"
    return Check(
        "total_variation",
        status if trusted else "info",
        found.total_variation,
        f"≤ {thresholds.TOTAL_VARIATION_PASS} with agreement ≥ {thresholds.AGREEMENT_PASS:.0%}; > "
        f"{thresholds.TOTAL_VARIATION_FAIL} or < "
        f"{thresholds.AGREEMENT_FAIL:.0%} fails",
        thresholds.FIDELITY_SOURCE,
        f"Predicted classes agree with the reference at {found.agreement:.1%} of points; class probabilities are "
        f"{found.total_variation:.3f} apart in total variation{why}.",
        ""
        if status == "pass" or not trusted
        else "The predictive differs from the reference: use a richer approximation, or the reference.",
    )


def _same_points(tree: xr.DataTree, reference: xr.DataTree) -> bool:
    ours = reading.values_of(tree, "predictions_constant_data", "x")
    theirs = reading.values_of(reference, "predictions_constant_data", "x")
    if ours is None or theirs is None:
        return True
    return ours.shape == theirs.shape and bool(np.allclose(ours, theirs, rtol=1e-4, atol=1e-6))


def _per_point(tree: xr.DataTree, reference: xr.DataTree) -> tuple[xr.Dataset | None, str]:
    probes = [reading.values_of(each, "function", "probe_x") for each in (tree, reference)]
    ours, theirs, at = reading.functions(tree), reading.functions(reference), "probes"
    same = all(x is not None for x in probes) and probes[0].shape == probes[1].shape
    if (
        ours is None
        or theirs is None
        or not (same and np.allclose(probes[0], probes[1], rtol=1e-4, atol=1e-6))
    ):
        ours, theirs = (reading.draws_of(each, "predictions", "f") for each in (tree, reference))
        at = "held-out points"
        if ours is None or theirs is None or not _same_points(tree, reference):
            return None, at
    ours, theirs = (f.reshape(f.shape[0] * f.shape[1], f.shape[2], -1) for f in (ours, theirs))
    if ours.shape[1:] != theirs.shape[1:] or not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        return None, at
    every = -(-ours.shape[1] * ours.shape[2] // _MAX_COLUMNS)
    ours, theirs = ours[:, ::every], theirs[:, ::every]
    scale = theirs.std(axis=0)
    if (scale <= 0.0).any():
        return None, at
    distance = np.empty(scale.shape)
    for index in np.ndindex(*scale.shape):
        column = (slice(None), *index)
        distance[index] = stats.wasserstein_distance(ours[column], theirs[column]) / scale[index]
    dims = ("point", "output")
    return xr.Dataset({"wasserstein": (dims, distance), "sd_ratio": (dims, ours.std(axis=0) / scale)}), at


def _probabilities(tree: xr.DataTree) -> np.ndarray | None:
    probs = reading.values_of(tree, "predictions", "probs")
    if probs is not None and len(probs):
        probs = np.asarray(probs, dtype=np.float64).reshape(len(probs), -1)
        return np.concatenate([1.0 - probs, probs], axis=1) if probs.shape[1] == 1 else probs
    f = reading.draws_of(tree, "predictions", "f")
    if f is None or reading.text(tree, "likelihood") != "categorical":
        return None
    return softmax(f, axis=-1).mean(axis=(0, 1))


def _reference_converged(reference: xr.DataTree) -> tuple[bool, str]:
    """Whether the reference can judge, with the reason in words if it cannot."""
    if reading.is_iid(reference):
        return False, "; the reference is itself an approximation, so this decides nothing"
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        found = convergence(reference)
    if found is None or not np.isfinite(found.table["rhat"]).any():
        return False, "; the convergence of the reference is unknown, so this decides nothing"
    largest = float(found.table["rhat"].max())
    if largest > thresholds.RHAT_FAIL:
        return False, f"; the reference has not converged (R-hat {largest:.2f}), so this decides nothing"
    return True, ""
