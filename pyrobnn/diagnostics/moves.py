"""Draws judged by their functions, without a reference: what Hamiltonian moves change of them."""

from __future__ import annotations

import numpy as np
from scipy import stats
from scipy.special import ndtri, owens_t

from pyrobnn.chains import ess
from pyrobnn.diagnostics import thresholds
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.fidelity import MOST, by_kind
from pyrobnn.diagnostics.verdict import Check, Status, grade, grade_tested, worse
from pyrobnn.groups import MOVED

#: acceptance below which the draws have hardly moved, and the standard errors that are taken off every effect
_LEAST_ACCEPTED, _SIGMAS = 0.2, 2.0
_NOT_MOVED = "the draws could not be moved towards it ({:.0%} of the moves were accepted)"
_TOO_SHORT = "the moves were too short (correlation {:.2f} with where they began)"
_OF_CHAINS = (
    "Check that data, prior and likelihood are those that the chains were run on, then fit again with a smaller step "
    "size or a longer warm-up."
)


def check_moves(evidence: Evidence) -> Check | None:
    """Whether the function stays as it is when draws are moved towards the posterior, as those of it would."""
    after, acceptance = evidence.draws(MOVED, "after"), evidence.values(MOVED, "acceptance")
    before = evidence.f
    if after is None or acceptance is None or before is None or after.shape[2:] != before.shape[2:]:
        return None
    if evidence.likelihood == "categorical" and after.shape[-1] > 1:
        after = after - after.mean(axis=-1, keepdims=True)
    before, after = (f.reshape(-1, *f.shape[2:]) for f in (before, after))
    finite = bool(np.isfinite(before).all() and np.isfinite(after).all())
    if acceptance < _LEAST_ACCEPTED or not finite or not (np.ptp(before, 0).all() and np.ptp(after, 0).all()):
        return _unmoved(_NOT_MOVED.format(acceptance))
    shift, gap, errors = _change(before, after)
    shifts = by_kind(np.maximum(np.abs(shift) - _SIGMAS * errors[0], 0.0), evidence, "probes")
    gaps = by_kind(np.maximum(np.abs(gap) - _SIGMAS * errors[1], 0.0), evidence, "probes")
    narrow, too_narrow = -np.log([thresholds.SD_RATIO_PASS, thresholds.SD_RATIO_FAIL])
    limits = thresholds.WASSERSTEIN_PASS, thresholds.WASSERSTEIN_FAIL
    status = worse(
        *(grade(float(np.median(each)), *limits) for each in shifts.values()),
        *(
            grade(float(np.quantile(each, MOST)), *(2.0 * limit for limit in limits))
            for each in shifts.values()
        ),
        *(grade(float(np.median(each)), narrow, too_narrow) for each in gaps.values()),
        *(grade(float(np.quantile(each, MOST)), too_narrow, 2.0 * too_narrow) for each in gaps.values()),
    )
    stayed = _correlation(evidence)
    if status == "pass" and stayed > _blind(limits, (narrow, too_narrow)):
        return _unmoved(_TOO_SHORT.format(stayed))
    kind = max(gaps, key=lambda name: float(np.median(gaps[name])))
    ratio = float(np.exp(np.median(by_kind(gap, evidence, "probes")[kind])))
    side = "under" if ratio < 1.0 else "over"
    return Check(
        "function_moves",
        status,
        ratio,
        f"sd within [{thresholds.SD_RATIO_PASS}, {1 / thresholds.SD_RATIO_PASS:.2f}] of that of the moved draws and "
        f"mean within {limits[0]} sd at the median of each kind of probe, beyond {_SIGMAS:.0f} standard errors; "
        f"outside [{thresholds.SD_RATIO_FAIL}, {1 / thresholds.SD_RATIO_FAIL:.0f}] or {limits[1]:.0f} sd fails",
        thresholds.MOVES_SOURCE,
        f"Before Hamiltonian Monte Carlo moves the draws on, the sd of f is {ratio:.2f} times what it is afterwards "
        f"in the median of the probes {kind}, and its mean {np.median(np.abs(shift)):.2f} sd away.",
        ""
        if status == "pass"
        else f"Epistemic uncertainty is {side}estimated or in the wrong place. "
        + (evidence.remedy if evidence.is_iid else _OF_CHAINS),
    )


def check_density(evidence: Evidence) -> Check | None:
    """Whether the log density of chains keeps its mean and spread when their draws are moved.

    Draws of another distribution with the posterior's own mean and covariance, as those without its tails, or in
    another shape, have right functions and means of gradients: how their log density varies is theirs alone.
    """
    before, after = (evidence.draws(MOVED, f"density_{when}") for when in ("before", "after"))
    acceptance = evidence.values(MOVED, "acceptance")
    if before is None or after is None or acceptance is None:
        return None
    what = "the log density varies as that of the posterior does"
    before, after = (each.reshape(-1).astype(np.float64) for each in (before, after))
    finite = bool(np.isfinite(before).all() and np.isfinite(after).all())
    if acceptance < _LEAST_ACCEPTED or not finite or not np.ptp(before) > 0.0 < np.ptp(after):
        return _unmoved(_NOT_MOVED.format(acceptance), "density_moves", what)
    shift, gap, errors = _change(before, after)
    status = worse(
        _graded(float(shift), float(errors[0]), thresholds.DENSITY_SHIFT_WARN, thresholds.DENSITY_SHIFT_FAIL),
        _graded(float(gap), float(errors[1]), thresholds.DENSITY_SPREAD_WARN, thresholds.DENSITY_SPREAD_FAIL),
    )
    stayed = float(np.corrcoef(before, after)[0, 1])
    if status == "pass" and stayed > _blind_to_density(errors):
        return _unmoved(_TOO_SHORT.format(stayed), "density_moves", what)
    ratio = float(np.exp(gap))
    low, high = (np.exp(sign * thresholds.DENSITY_SPREAD_WARN) for sign in (-1, 1))
    return Check(
        "density_moves",
        status,
        ratio,
        f"sd within [{low:.2f}, {high:.2f}] of that of the moved draws and mean within "
        f"{thresholds.DENSITY_SHIFT_WARN} sd, beyond {thresholds.DENSITY_SIGMAS_WARN} standard errors; "
        f"{np.exp(thresholds.DENSITY_SPREAD_FAIL):.1f} times more or less, or {thresholds.DENSITY_SHIFT_FAIL} sd, "
        f"beyond {thresholds.DENSITY_SIGMAS_FAIL} standard errors fails",
        thresholds.MOVES_SOURCE,
        f"Before Hamiltonian Monte Carlo moves the draws on, the sd of the log density is {ratio:.2f} times what it is "
        f"afterwards, and its mean {abs(float(shift)):.2f} sd away.",
        ""
        if status == "pass"
        else f"The draws have another shape than the posterior (in tails or peaks). {_OF_CHAINS}",
    )


def check_range(evidence: Evidence) -> Check | None:
    """Whether moved draws of chains stay where the function of all draws is: none can leave the range of right ones.

    Of draws that lack what lies beyond an edge, as one half of the functions, many cross it at once; of n right draws
    two in n + 1 lie outside of the others.
    """
    after, acceptance, before = (
        evidence.draws(MOVED, "after"), evidence.values(MOVED, "acceptance"), evidence.f
    )  # fmt: skip
    if after is None or acceptance is None or before is None or after.shape[2:] != before.shape[2:]:
        return None
    if evidence.likelihood == "categorical" and after.shape[-1] > 1:
        before, after = (f - f.mean(axis=-1, keepdims=True) for f in (before, after))
    what = "the draws lack a part of the posterior"
    if acceptance < _LEAST_ACCEPTED or not (np.isfinite(before).all() and np.isfinite(after).all()):
        return _unmoved(_NOT_MOVED.format(acceptance), "range_moves", what)
    columns = before.reshape(*before.shape[:2], -1)
    worth = np.nan_to_num(ess(np.moveaxis(columns, 2, 0), "mean"), nan=1.0)
    worth = np.minimum(worth, columns.shape[0] * columns.shape[1])
    low, high = columns.min((0, 1)), columns.max((0, 1))
    moved = after.reshape(-1, columns.shape[2])
    outside = ((moved < low) | (moved > high)).sum(axis=0)
    p = stats.poisson.sf(outside - 1, 2.0 * len(moved) / (worth + 1.0)) * len(worth)
    worst = int(np.argmin(p))
    share, p_least = float(outside[worst]) / len(moved), min(1.0, float(p[worst]))
    status = grade_tested(
        p_least, share, thresholds.STEIN_RATES, (thresholds.RANGE_WARN, thresholds.RANGE_FAIL)
    )
    stayed = _correlation(evidence)
    if status == "pass" and not _range_would_tell(stayed, len(moved), float(np.median(worth)), len(worth)):
        return _unmoved(_TOO_SHORT.format(stayed), "range_moves", what)
    return Check(
        "range_moves",
        status,
        share,
        f"p ≥ {thresholds.STEIN_RATE_WARN} (Bonferroni) or ≤ {thresholds.RANGE_WARN:.0%} outside; p < "
        f"{thresholds.STEIN_RATE_FAIL} with more than {thresholds.RANGE_FAIL:.0%} fails",
        thresholds.MOVES_SOURCE,
        f"When Hamiltonian Monte Carlo moves the draws on, {share:.1%} of them leave the range of f over all draws, "
        f"at the probe where most do (p = {p_least:.2g}).",
        "" if status == "pass" else f"The draws lack a part of the posterior. {_OF_CHAINS}",
    )


def _graded(effect: float, error: float, warns: float, fails: float) -> Status:
    """The grade of an effect that counts where it is beyond chance."""
    size, sigmas = abs(effect), abs(effect) / max(error, np.finfo(float).tiny)
    if size > fails and sigmas > thresholds.DENSITY_SIGMAS_FAIL:
        return "fail"
    return "warn" if size > warns and sigmas > thresholds.DENSITY_SIGMAS_WARN else "pass"


def _change(
    before: np.ndarray, after: np.ndarray
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Shift of the mean in sd of `after`, log ratio of the sds, and the standard errors of both, of draws (draw, …)."""
    sds, shifts, ratios = [], [], []
    for f in (before, after):
        squares = (f - f.mean(axis=0)) ** 2
        sds.append(np.sqrt(squares.mean(axis=0)))
        shifts.append(sds[-1] / np.sqrt(len(f)))
        ratios.append(0.5 * squares.std(axis=0) / squares.mean(axis=0) / np.sqrt(len(f)))
    shift = (after.mean(axis=0) - before.mean(axis=0)) / sds[1]
    return shift, np.log(sds[0] / sds[1]), (np.hypot(*shifts) / sds[1], np.hypot(*ratios))


def _correlation(evidence: Evidence) -> float:
    """How closely moved functions follow where they were, in the median of the probes; 0 where nobody says."""
    there, moved = (evidence.draws(MOVED, name) for name in ("before", "after"))
    if there is None or moved is None:
        return 0.0
    before, after = (f.reshape(f.shape[0] * f.shape[1], -1) for f in (there, moved))
    before, after = (f - f.mean(axis=0) for f in (before, after))
    scale = np.maximum(before.std(axis=0) * after.std(axis=0), np.finfo(float).tiny)
    return float(np.median((before * after).mean(axis=0) / scale))


def _blind(shifts: tuple[float, float], gaps: tuple[float, float]) -> float:
    """The correlation of draws with where they were above which a fault that should fail could seem to pass.

    Mean and variance are then nearer to those of the posterior by 1 − r and 1 − r² alone: of a mean that is off, an sd
    that is too small, and one that is too large, the one that is seen least decides.

    Args:
        shifts: of the mean, in sd, that does not pass, and that fails.
        gaps: log ratios of the sd, likewise.
    """
    least, fails = (np.exp(2.0 * gap) for gap in gaps)
    squares = 1.0 - (least - 1.0) / (fails - 1.0), (fails / least - 1.0) / (fails - 1.0)
    return float(min(1.0 - shifts[0] / shifts[1], np.sqrt(max(0.0, min(squares)))))


def _blind_to_density(errors: tuple[np.ndarray, np.ndarray]) -> float:
    """The same of the log density, of which an effect counts beyond its standard errors alone."""

    def limits(warns: float, fails: float, error: np.ndarray) -> tuple[float, float]:
        sigmas = thresholds.DENSITY_SIGMAS_WARN, thresholds.DENSITY_SIGMAS_FAIL
        return max(warns, sigmas[0] * float(error)), max(fails, sigmas[1] * float(error))

    return _blind(
        limits(thresholds.DENSITY_SHIFT_WARN, thresholds.DENSITY_SHIFT_FAIL, errors[0]),
        limits(thresholds.DENSITY_SPREAD_WARN, thresholds.DENSITY_SPREAD_FAIL, errors[1]),
    )


def _range_would_tell(stayed: float, num_moved: int, ess: float, num_places: int) -> bool:
    r"""Whether draws that lack the share of the posterior that should fail would not have passed.

    .. math:: P(Z > h, Z' < h) = 2 T(h, \sqrt{(1 - r) / (1 + r)})

    of normal pairs of correlation r is what crosses an edge h, by Owen's T.
    """
    lack, stayed = thresholds.RANGE_FAIL, min(max(stayed, 0.0), 1.0)
    crossing = 2.0 * float(owens_t(ndtri(lack), np.sqrt((1.0 - stayed) / (1.0 + stayed)))) / (1.0 - lack)
    p = num_places * stats.poisson.sf(round(crossing * num_moved) - 1, 2.0 * num_moved / (ess + 1.0))
    return crossing > thresholds.RANGE_WARN and p < thresholds.STEIN_RATE_WARN


def _unmoved(
    why: str, name: str = "function_moves", what: str = "the function is that of the posterior"
) -> Check:
    return Check(
        name,
        "info",
        None,
        "",
        thresholds.MOVES_SOURCE,
        f"Whether {what} cannot be said: {why}.",
    )
