"""Draws judged by their functions, without a reference: what Hamiltonian moves change of them."""

from __future__ import annotations

import numpy as np
from scipy import stats

from pyrobnn.diagnostics import thresholds
from pyrobnn.diagnostics.ess import mean_ess
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.fidelity import MOST, by_kind
from pyrobnn.diagnostics.verdict import Check, Status, grade, grade_tested, worse
from pyrobnn.groups import MOVED

#: acceptance below which the draws have hardly moved, and the standard errors that are taken off every effect
_LEAST_ACCEPTED, _SIGMAS = 0.2, 2.0
#: correlation of the function with itself before the moves, above which a spread that would fail could seem to pass
_STAYED = np.sqrt(
    (thresholds.SD_RATIO_FAIL**-2 - thresholds.SD_RATIO_PASS**-2) / (thresholds.SD_RATIO_FAIL**-2 - 1.0)
)
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
        return _unmoved(
            f"the draws could not be moved towards it ({acceptance:.0%} of the moves were accepted)"
        )
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
    there, moved = (evidence.draws(MOVED, name) for name in ("before", "after"))
    stayed = 0.0 if there is None or moved is None else _correlation(there, moved)
    if status == "pass" and stayed > _STAYED:
        return _unmoved(f"the moves were too short (it correlates by {stayed:.2f} with where it was)")
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
    if before is None or after is None or acceptance is None or acceptance < _LEAST_ACCEPTED:
        return None
    before, after = (each.reshape(-1).astype(np.float64) for each in (before, after))
    if not (np.isfinite(before).all() and np.isfinite(after).all() and np.ptp(before) > 0.0 < np.ptp(after)):
        return None
    shift, gap, errors = _change(before, after)
    status = worse(
        _graded(float(shift), float(errors[0]), thresholds.DENSITY_SHIFT_WARN, thresholds.DENSITY_SHIFT_FAIL),
        _graded(float(gap), float(errors[1]), thresholds.DENSITY_SPREAD_WARN, thresholds.DENSITY_SPREAD_FAIL),
    )
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
    if acceptance < _LEAST_ACCEPTED or not (np.isfinite(before).all() and np.isfinite(after).all()):
        return None
    columns = before.reshape(*before.shape[:2], -1)
    ess = np.minimum(np.nan_to_num(mean_ess(columns), nan=1.0), columns.shape[0] * columns.shape[1])
    low, high = columns.min((0, 1)), columns.max((0, 1))
    moved = after.reshape(-1, columns.shape[2])
    outside = ((moved < low) | (moved > high)).sum(axis=0)
    p = stats.poisson.sf(outside - 1, 2.0 * len(moved) / (ess + 1.0)) * len(ess)
    worst = int(np.argmin(p))
    share, p_least = float(outside[worst]) / len(moved), min(1.0, float(p[worst]))
    status = grade_tested(
        p_least, share, thresholds.STEIN_RATES, (thresholds.RANGE_WARN, thresholds.RANGE_FAIL)
    )
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


def _correlation(before: np.ndarray, after: np.ndarray) -> float:
    """How closely moved functions (chain, draw, …) follow where they were, in the median of the probes."""
    before, after = (f.reshape(f.shape[0] * f.shape[1], -1) for f in (before, after))
    before, after = (f - f.mean(axis=0) for f in (before, after))
    scale = np.maximum(before.std(axis=0) * after.std(axis=0), np.finfo(float).tiny)
    return float(np.median((before * after).mean(axis=0) / scale))


def _unmoved(why: str) -> Check:
    return Check(
        "function_moves",
        "info",
        None,
        "",
        thresholds.MOVES_SOURCE,
        f"Whether the function is that of the posterior cannot be said: {why}.",
    )
