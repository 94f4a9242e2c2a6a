"""How close a posterior is to a reference run: the question that R-hat cannot answer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xarray as xr
from scipy import stats
from scipy.special import softmax

from pyrobnn.diagnostics import thresholds
from pyrobnn.diagnostics.convergence import convergence
from pyrobnn.diagnostics.evidence import Evidence, statistic
from pyrobnn.diagnostics.points import regression_points
from pyrobnn.diagnostics.scores import units
from pyrobnn.diagnostics.verdict import Check, Status, grade, worse
from pyrobnn.groups import FUNCTION, HELD_OUT, PREDICTIONS

_MAX_COLUMNS = 512
_MAX_POINTS = 200
#: share of the points that the looser limits are held against
MOST = 0.9


@dataclass(frozen=True, eq=False)
class Fidelity:
    """Distances of one posterior from a reference.

    Args:
        per_point: Dataset over (point, output): ``wasserstein`` (1-Wasserstein distance of f, in reference sd)
            and ``sd_ratio`` (sd of f over the reference's).
        at: Where the points lie: "probes" or "held-out points".
        agreement: Share of held-out points with the same predicted class; None for regression.
        total_variation: Mean of ``½ Σ_c |p_c − p_c^ref|``; None for regression.
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


def fidelity(tree: xr.DataTree | Evidence, reference: xr.DataTree | Evidence) -> Fidelity:
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
    return _fidelity(Evidence.of(tree), Evidence.of(reference, "reference"))


@statistic
def _fidelity(evidence: Evidence, reference: Evidence) -> Fidelity:
    per_point, at = _per_point(evidence, reference)
    ours, theirs = _probabilities(evidence), _probabilities(reference)
    agreement = total_variation = None
    same = _same_points(evidence, reference)
    if ours is not None and theirs is not None and ours.shape == theirs.shape and same:
        agreement = float((ours.argmax(axis=1) == theirs.argmax(axis=1)).mean())
        total_variation = float(0.5 * np.abs(ours - theirs).sum(axis=1).mean())
    each = _log_prob_difference(evidence, reference) if same else None
    difference = error = None
    if each is not None:
        difference = float(each.sum())
        error = float(np.sqrt(each.size) * each.std(ddof=1))
    return Fidelity(per_point, at, agreement, total_variation, difference, error)


def paired_difference(
    tree: xr.DataTree | Evidence, reference: xr.DataTree | Evidence
) -> tuple[float, float] | None:
    """Mean difference of held-out log density per point, tree − reference, and its standard error over the points."""
    each = _log_prob_difference(Evidence.of(tree), Evidence.of(reference, "reference"))
    return None if each is None else (float(each.mean()), float(each.std(ddof=1) / np.sqrt(each.size)))


def _log_prob_difference(evidence: Evidence, reference: Evidence) -> np.ndarray | None:
    """Held-out log density minus the reference's (point,); None for fewer than two points, or what is not finite."""
    pair = [each.values(PREDICTIONS, "log_prob") for each in (evidence, reference)]
    if pair[0] is None or pair[1] is None or pair[0].shape != pair[1].shape or pair[0].size < 2:
        return None
    difference = np.ravel(pair[0] - pair[1])
    return difference if np.isfinite(difference).all() else None


def predictive_distance(tree: xr.DataTree | Evidence, reference: xr.DataTree | Evidence) -> float | None:
    r"""Mean 1-Wasserstein distance between two predictive distributions at the held-out points.

    .. math:: W_1 = \tfrac1n \sum_i \int |F_i(y) - F_i^{\mathrm{ref}}(y)| \, dy

    in the outcome's units, over at most 200 points; of several outputs the mean of each one's distance in standard
    deviations of its training targets. None unless both trees predict the same points. With S draws it has a floor of
    about sd/√S. (`fidelity` measures f at the probes, in reference sd.)
    """
    evidence, reference = Evidence.of(tree), Evidence.of(reference, "reference")
    mine, others = evidence.values(HELD_OUT, "y"), reference.values(HELD_OUT, "y")
    if mine is None or others is None or mine.shape != others.shape:
        return None
    scale = units(evidence)
    if not np.array_equal(mine, others) or scale is None:
        return None
    distances = []
    for output, unit in enumerate(scale):
        points = [regression_points(each, output) for each in (evidence, reference)]
        samples = [each.sample for each in points if each is not None and each.held_out]
        found = [sample for sample in samples if sample is not None]
        if len(found) < 2:
            return None
        ours, theirs = found
        index = np.linspace(0, ours.shape[1] - 1, min(ours.shape[1], _MAX_POINTS)).round().astype(int)
        each = [stats.wasserstein_distance(ours[:, i], theirs[:, i]) for i in np.unique(index)]
        distances.append(np.mean(each) / unit)
    return float(np.mean(distances))


@statistic
def cost_per_draw(evidence: Evidence) -> float | None:
    """Seconds of fitting per effective draw of f: the smallest bulk ESS for chains, the number of draws otherwise."""
    seconds = evidence.seconds("fit")
    if seconds is None or evidence.is_point:
        return None
    if evidence.is_iid:
        return seconds / evidence.num_draws
    found = convergence(evidence)
    if found is None or not np.isfinite(found.table["ess_bulk"]).any():
        return None
    return seconds / max(1.0, float(found.table["ess_bulk"].min()))


def check_elpd_against(evidence: Evidence, reference: Evidence) -> Check | None:
    """Whether the held-out log density is as high as the reference's."""
    found = _fidelity(evidence, reference)
    if found.elpd_difference is None or found.elpd_difference_se is None:
        return None
    low = found.elpd_difference < -max(thresholds.ELPD_WARN, 2.0 * found.elpd_difference_se)
    return Check(
        "elpd_against_reference",
        "warn" if low else "pass",
        found.elpd_difference,
        f"≥ −{thresholds.ELPD_WARN:.0f} or within two standard errors",
        thresholds.LOO_SOURCE,
        f"The held-out log density is {found.elpd_difference:+.1f} ± {found.elpd_difference_se:.1f} "
        "from the reference's.",
        "Prefer the reference for prediction." if low else "",
    )


def check_comparable(evidence: Evidence, reference: Evidence) -> Check | None:
    """Information where nothing of the two trees can be compared."""
    found = _fidelity(evidence, reference)
    if found.per_point is not None or found.agreement is not None or found.elpd_difference is not None:
        return None
    return Check(
        "fidelity",
        "info",
        None,
        "",
        thresholds.FIDELITY_SOURCE,
        "The reference was evaluated at other points, so nothing can be compared.",
    )


def by_kind(values: np.ndarray, evidence: Evidence, at: str) -> dict[str, np.ndarray]:
    """The values (point, output) of each kind of probe, named by where it lies; all as one elsewhere."""
    kinds = evidence.probe_kinds(len(values)) if at == "probes" else np.full(len(values), "train")
    words = {"train": "at the data", "between": "between the data", "outside": "outside the data"}
    return {words.get(str(kind), "there"): values[kinds == kind].ravel() for kind in np.unique(kinds)}


def check_wasserstein(evidence: Evidence, reference: Evidence) -> Check | None:
    """How far the function is from the reference's, at the median point."""
    found, (trusted, why) = _fidelity(evidence, reference), _reference_converged(reference)
    if found.per_point is None:
        return None
    distance = found.per_point["wasserstein"].values
    kinds = by_kind(distance, evidence, found.at)
    median, largest = float(max(np.median(each) for each in kinds.values())), float(distance.max())
    kind, high = max(
        ((k, float(np.quantile(each, MOST))) for k, each in kinds.items()), key=lambda pair: pair[1]
    )
    status: Status = worse(
        grade(median, thresholds.WASSERSTEIN_PASS, thresholds.WASSERSTEIN_FAIL),
        grade(high, 2 * thresholds.WASSERSTEIN_PASS, 2 * thresholds.WASSERSTEIN_FAIL),
    )
    return Check(
        "wasserstein",
        status if trusted else "info",
        median,
        f"median of each kind of point ≤ {thresholds.WASSERSTEIN_PASS} reference sd, nine in ten ≤ "
        f"{2 * thresholds.WASSERSTEIN_PASS}; > {thresholds.WASSERSTEIN_FAIL:.0f} or "
        f"{2 * thresholds.WASSERSTEIN_FAIL:.0f} fails",
        thresholds.FIDELITY_SOURCE,
        f"f at the {found.at} is {median:.2f} reference sd from the reference in the median, {high:.2f} at one in ten "
        f"of those {kind} and {largest:.2f} at most{why}.",
        ""
        if status == "pass" or not trusted
        else f"The functions differ from the reference. {_closer(evidence)}",
    )


def check_sd_ratio(evidence: Evidence, reference: Evidence) -> Check | None:
    """Whether the function is as uncertain as the reference's, at the median point."""
    found, (trusted, why) = _fidelity(evidence, reference), _reference_converged(reference)
    if found.per_point is None:
        return None
    ratio = found.per_point["sd_ratio"].values
    kinds = by_kind(np.minimum(ratio, 1.0 / np.maximum(ratio, 1e-12)), evidence, found.at)
    usual, kind = min((float(np.median(each)), kind) for kind, each in kinds.items())
    low = min(float(np.quantile(each, 1.0 - MOST)) for each in kinds.values())
    status: Status = worse(
        grade(usual, thresholds.SD_RATIO_PASS, thresholds.SD_RATIO_FAIL, higher=True),
        grade(low, thresholds.SD_RATIO_FAIL, thresholds.SD_RATIO_FAIL / 2, higher=True),
    )
    median = float(np.median(by_kind(ratio, evidence, found.at)[kind]))
    side = "under" if median < 1.0 else "over"
    return Check(
        "sd_ratio",
        status if trusted else "info",
        median,
        f"median of each kind of point within [{thresholds.SD_RATIO_PASS}, {1 / thresholds.SD_RATIO_PASS:.2f}], nine "
        f"in ten within [{thresholds.SD_RATIO_FAIL}, {1 / thresholds.SD_RATIO_FAIL:.0f}]; outside that, or twice it, "
        "fails",
        thresholds.FIDELITY_SOURCE,
        f"The sd of f at the {found.at} is {median:.2f} times the reference's in the median of those {kind} "
        f"({ratio.min():.2f} to {ratio.max():.2f}){why}.",
        ""
        if status == "pass" or not trusted
        else f"Epistemic uncertainty is {side}estimated. {_exact(evidence) or evidence.remedy}",
    )


def check_classes(evidence: Evidence, reference: Evidence) -> Check | None:
    """Whether classes and their probabilities agree with the reference's."""
    found, (trusted, why) = _fidelity(evidence, reference), _reference_converged(reference)
    if found.agreement is None or found.total_variation is None:
        return None
    grades = (
        grade(found.agreement, thresholds.AGREEMENT_PASS, thresholds.AGREEMENT_FAIL, higher=True),
        grade(found.total_variation, thresholds.TOTAL_VARIATION_PASS, thresholds.TOTAL_VARIATION_FAIL),
    )
    status = worse(*grades)
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
        else f"The predictive differs from the reference. {_closer(evidence)}",
    )


def _exact(evidence: Evidence) -> str:
    """What to do where draws that would be exact differ from the reference's; empty for others."""
    if evidence.claim != "exact":
        return ""
    return (
        evidence.remedy
        if evidence.is_iid
        else "One of the two has missed a part: run both for longer, from new starts."
    )


def _closer(evidence: Evidence) -> str:
    return _exact(evidence) or "Use a richer approximation, or the reference."


def _same_points(evidence: Evidence, reference: Evidence) -> bool:
    ours = evidence.values(HELD_OUT, "x")
    theirs = reference.values(HELD_OUT, "x")
    if ours is None or theirs is None:
        return True
    return ours.shape == theirs.shape and bool(np.allclose(ours, theirs, rtol=1e-4, atol=1e-6))


def _per_point(evidence: Evidence, reference: Evidence) -> tuple[xr.Dataset | None, str]:
    mine, other = evidence.values(FUNCTION, "probe_x"), reference.values(FUNCTION, "probe_x")
    ours, theirs, at = evidence.f, reference.f, "probes"
    if mine is None or other is None or mine.shape != other.shape:
        same = False
    else:
        same = np.allclose(mine, other, rtol=1e-4, atol=1e-6)
    if ours is None or theirs is None or not same:
        ours, theirs = (each.draws(PREDICTIONS, "f") for each in (evidence, reference))
        at = "held-out points"
        if ours is None or theirs is None or not _same_points(evidence, reference):
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


def _probabilities(evidence: Evidence) -> np.ndarray | None:
    probs = evidence.values(PREDICTIONS, "probs")
    if probs is not None and len(probs):
        probs = np.asarray(probs, dtype=np.float64).reshape(len(probs), -1)
        return np.concatenate([1.0 - probs, probs], axis=1) if probs.shape[1] == 1 else probs
    f = evidence.draws(PREDICTIONS, "f")
    if f is None or evidence.likelihood != "categorical":
        return None
    return softmax(f, axis=-1).mean(axis=(0, 1))


@statistic
def _reference_converged(reference: Evidence) -> tuple[bool, str]:
    """Whether the reference can judge, with the reason in words if it cannot."""
    if reference.is_iid:
        return False, "; the reference is itself an approximation, so this decides nothing"
    found = convergence(reference)
    if found is None or not np.isfinite(found.table["rhat"]).any():
        return False, "; the convergence of the reference is unknown, so this decides nothing"
    largest = float(found.table["rhat"].max())
    if largest > thresholds.RHAT_FAIL:
        return False, f"; the reference has not converged (R-hat {largest:.2f}), so this decides nothing"
    return True, ""
