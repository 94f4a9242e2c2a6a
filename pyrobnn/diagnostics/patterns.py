"""Patterns in what the predictive leaves unexplained: the mark of a mean function that the noise has swallowed."""

from __future__ import annotations

import numpy as np
from scipy import stats
from scipy.special import ndtri

from pyrobnn.diagnostics import thresholds
from pyrobnn.diagnostics.calibration import ORDER, in_order, regions_of
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.points import CLASSES, is_classification
from pyrobnn.diagnostics.verdict import Check, grade_tested

_MIN_DATA = 40
_NUM_REGIONS = 4


def check_pattern(evidence: Evidence) -> Check | None:
    """Whether the *signed* PIT depends on an input: outcomes above the predictive here and below it there.

    By region, and between neighbours along each input; the size of an error alone (`check_regions`) sees neither.
    """
    if is_classification(evidence) or evidence.likelihood in CLASSES:
        return None
    found = [
        each
        for u, covariates in regions_of(evidence)
        if len(u) >= _MIN_DATA
        for name, values in covariates.items()
        if name != ORDER
        for each in _patterns(u, name, values)
    ]
    if not found:
        return None
    p, effect, seen, name = min(found, key=lambda each: each[0])
    p = min(1.0, p * len(found))
    status = grade_tested(p, effect, thresholds.PIT_RATES, (thresholds.PATTERN_WARN, thresholds.PATTERN_FAIL))
    return Check(
        "pattern",
        status,
        effect,
        f"p ≥ {thresholds.PIT_WARN} (Bonferroni) or an effect ≤ {thresholds.PATTERN_WARN}; p < "
        f"{thresholds.PIT_FAIL} with an effect > {thresholds.PATTERN_FAIL} fails",
        thresholds.PIT_SOURCE,
        f"{seen} (p = {p:.2g}).",
        ""
        if status == "pass"
        else f"The mean function misses how y depends on {name}, and the noise covers for it: use a more flexible "
        "network or a wider prior.",
    )


def check_order(evidence: Evidence) -> Check | None:
    """Whether rows that stand beside one another depend on one another: a time series, groups, or a drift.

    By the signed PIT's correlation between neighbours and its differences between four stretches of rows, in training
    and held-out data together; not of rows that are sorted by their outcomes.
    """
    if is_classification(evidence) or evidence.likelihood in CLASSES:
        return None
    sets = [
        _patterns(u, ORDER, covariates[ORDER])
        for u, covariates in regions_of(evidence)
        if len(u) >= _MIN_DATA and ORDER in covariates
    ]
    kinds = [list(found) for found in zip(*sets)]  # stretches and neighbours, of each output
    if not kinds:
        return None
    together = [
        float(stats.combine_pvalues([max(each[0], 1e-300) for each in kind]).pvalue) for kind in kinds
    ]
    first = int(np.argmin(together))
    p, worst = min(1.0, together[first] * len(together)), max(kinds[first], key=lambda each: each[1])
    status = grade_tested(
        p, worst[1], thresholds.PIT_RATES, (thresholds.PATTERN_WARN, thresholds.PATTERN_FAIL)
    )
    return Check(
        "row_order",
        status,
        worst[1],
        f"p ≥ {thresholds.PIT_WARN} (Bonferroni) or an effect ≤ {thresholds.PATTERN_WARN}; p < "
        f"{thresholds.PIT_FAIL} with an effect > {thresholds.PATTERN_FAIL} fails",
        thresholds.PIT_SOURCE,
        f"{worst[2]} (p = {p:.2g}).",
        ""
        if status == "pass"
        else "Rows that stand beside one another depend on one another (a time series, groups, a drift), but count as "
        "independent: the function is less certain than it is said to be. Give time or the group as an input, and hold "
        "out whole stretches of rows.",
    )


def _patterns(u: np.ndarray, name: str, values: np.ndarray) -> list[tuple[float, float, str, str]]:
    """p-value, effect and words for each output's PIT (point, output), by region and between neighbours."""
    if np.ptp(values) == 0.0:
        return []
    order, found = in_order(values), []
    for column in u.T:
        if np.ptp(column) == 0.0:
            continue
        parts = np.array_split(column[order], _NUM_REGIONS)
        means = [float(part.mean()) for part in parts]
        p = float(stats.kruskal(*parts).pvalue)
        seen = f"The mean PIT is {min(means):.2f} to {max(means):.2f} over {_NUM_REGIONS} regions of {name}"
        found.append((p, max(means) - min(means), seen, name))
        normal = ndtri(np.clip(column[order], 1e-3, 1.0 - 1e-3))
        r = float(np.corrcoef(normal[:-1], normal[1:])[0, 1])
        # leaving out or fitting a datum makes neighbours' errors differ, never agree: one side is tested
        p = float(stats.norm.sf(r * np.sqrt(len(normal) - 1)))
        found.append((p, r, f"The PIT of neighbours along {name} correlate by {r:.2f}", name))
    return found
