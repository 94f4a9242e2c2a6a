"""Patterns in what the predictive leaves unexplained: the mark of a mean function that the noise has swallowed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import stats
from scipy.special import ndtri

from pyrobnn.diagnostics import thresholds
from pyrobnn.diagnostics.calibration import regions_of
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.points import CLASSES, is_classification
from pyrobnn.diagnostics.rows import ORDER, in_order
from pyrobnn.diagnostics.verdict import Check, grade_tested

_MIN_DATA = 40
_NUM_REGIONS = 4


class Pattern(NamedTuple):
    """What the PIT of one output does along one input.

    Args:
        p: of no dependence at all. effect: the means' span or the neighbours' correlation.
        name: the input.
        means: of the regions, least and greatest; None where neighbours were compared.
    """

    p: float
    effect: float
    name: str
    means: tuple[float, float] | None = None


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
    worst = min(found, key=lambda each: each.p)
    p = min(1.0, worst.p * len(found))
    status = grade_tested(
        p, worst.effect, thresholds.PIT_RATES, (thresholds.PATTERN_WARN, thresholds.PATTERN_FAIL)
    )
    return Check(
        "pattern",
        status,
        worst.effect,
        f"p ≥ {thresholds.PIT_WARN} (Bonferroni) or an effect ≤ {thresholds.PATTERN_WARN}; p < "
        f"{thresholds.PIT_FAIL} with an effect > {thresholds.PATTERN_FAIL} fails",
        thresholds.PIT_SOURCE,
        _seen(worst, p),
        ""
        if status == "pass"
        else f"The mean function misses how y depends on {worst.name}, and the noise covers for it: use a more "
        "flexible network or a wider prior.",
    )


def check_order(evidence: Evidence) -> Check | None:
    """Whether rows that stand beside one another depend on one another: a time series, groups, or a drift.

    By the signed PIT's correlation between neighbours and its differences between four stretches of rows, in training
    and held-out data together; not of rows that are sorted by their outcomes or by an input.
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
    together = [float(stats.combine_pvalues([max(each.p, 1e-300) for each in kind]).pvalue) for kind in kinds]
    first = int(np.argmin(together))
    p, worst = min(1.0, together[first] * len(together)), max(kinds[first], key=lambda each: each.effect)
    status = grade_tested(
        p, worst.effect, thresholds.PIT_RATES, (thresholds.PATTERN_WARN, thresholds.PATTERN_FAIL)
    )
    return Check(
        "row_order",
        status,
        worst.effect,
        f"p ≥ {thresholds.PIT_WARN} (Bonferroni) or an effect ≤ {thresholds.PATTERN_WARN}; p < "
        f"{thresholds.PIT_FAIL} with an effect > {thresholds.PATTERN_FAIL} fails",
        thresholds.PIT_SOURCE,
        _seen(worst, p),
        ""
        if status == "pass"
        else "Rows that stand beside one another depend on one another (a time series, groups, a drift), but count as "
        "independent: the function is less certain than it is said to be. Give time or the group as an input, and hold "
        "out whole stretches of rows.",
    )


def _seen(pattern: Pattern, p: float) -> str:
    if pattern.means is None:
        return f"The PIT values of neighbours along {pattern.name} correlate by {pattern.effect:.2f} (p = {p:.2g})."
    low, high = pattern.means
    return f"The mean PIT is {low:.2f} to {high:.2f} over {_NUM_REGIONS} regions of {pattern.name} (p = {p:.2g})."


def _patterns(u: np.ndarray, name: str, values: np.ndarray) -> list[Pattern]:
    """Each output's PIT (point, output) along an input: by region, and between neighbours."""
    if np.ptp(values) == 0.0:
        return []
    order, found = in_order(values), []
    for column in u.T:
        if np.ptp(column) == 0.0:
            continue
        parts = np.array_split(column[order], _NUM_REGIONS)
        means = [float(part.mean()) for part in parts]
        p = float(stats.kruskal(*parts).pvalue)
        found.append(Pattern(p, max(means) - min(means), name, (min(means), max(means))))
        normal = ndtri(np.clip(column[order], 1e-3, 1.0 - 1e-3))
        r = float(np.corrcoef(normal[:-1], normal[1:])[0, 1])
        # leaving out or fitting a datum makes neighbours' errors differ, never agree: one side is tested
        p = float(stats.norm.sf(r * np.sqrt(len(normal) - 1)))
        found.append(Pattern(p, r, name))
    return found
