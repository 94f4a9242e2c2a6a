"""Patterns in what the predictive leaves unexplained: by an input, by the order of the rows, or by region."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from scipy import stats
from scipy.special import ndtri

from pyrobnn import metrics
from pyrobnn.core.groups import CONSTANT_DATA, HELD_OUT, PREDICTIONS
from pyrobnn.diagnostics.calibration import (
    LEVEL,
    MIN_DATA,
    RATES,
    held_out_pit,
    left_out_pit,
)
from pyrobnn.diagnostics.evidence import Evidence, spread, statistic
from pyrobnn.diagnostics.leave_one_out import MAX_DATA
from pyrobnn.diagnostics.points import class_points, class_replicates, feature_names, has_classes, replicates
from pyrobnn.diagnostics.verdict import Found, grade_tested

_MAX_FEATURES, _MAX_CLASSES = 20, 20
_NUM_REGIONS = 4
#: a covariate that every table has, and its rank correlation with the outcomes above which it is one of them
ORDER, _SORTED = "the order of the rows", 0.9
#: share of their size by which numbers computed for two rows alike may differ
_ROUNDING = 1e-6


class Pattern(NamedTuple):
    """What the PIT of one output does along one input.

    Args:
        p: of no dependence at all. effect: the means' span or the neighbours' correlation.
        name: the input.
    """

    p: float
    effect: float
    name: str


def pattern(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    """Whether the *signed* PIT depends on an input: outcomes above the predictive here and below it there.

    By region, and between neighbours along each input; the size of an error alone (`by_region`) sees neither. Of
    classes each has a PIT of its own, randomised between what it leaves open.
    """
    found = [
        each
        for u, covariates in regions_of(evidence)
        if len(u) >= 2 * MIN_DATA
        for name, values in covariates.items()
        if name != ORDER
        for each in _patterns(u, name, values)
    ]
    if not found:
        return None
    worst = min(found, key=lambda each: each.p)
    return _graded(worst, min(1.0, worst.p * len(found)), limits)


def order(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    """Whether rows that stand beside one another depend on one another: a time series, groups, or a drift.

    By the signed PIT's correlation between neighbours and its differences between four stretches of rows, in training
    and held-out data together; not of rows that are sorted by their outcomes or by an input.
    """
    sets = [
        _patterns(u, ORDER, covariates[ORDER])
        for u, covariates in regions_of(evidence)
        if len(u) >= 2 * MIN_DATA and ORDER in covariates
    ]
    kinds = [list(found) for found in zip(*sets)]  # stretches and neighbours, of each output
    if not kinds:
        return None
    together = [float(stats.combine_pvalues([max(each.p, 1e-300) for each in kind]).pvalue) for kind in kinds]
    first = int(np.argmin(together))
    strongest = max(kinds[first], key=lambda each: each.effect)
    return _graded(strongest, min(1.0, together[first] * len(together)), limits)


def _graded(worst: Pattern, p: float, limits: tuple[float, ...]) -> Found:
    status = grade_tested(p, worst.effect, RATES, limits)
    return Found(status, worst.effect, "", {"where": worst.name, "p": p}, limits[0])


def _patterns(u: np.ndarray, name: str, values: np.ndarray) -> list[Pattern]:
    """Each output's PIT (point, output) along an input: by region, and between neighbours."""
    if np.ptp(values) == 0.0:
        return []
    along, found = in_order(values), []
    for column in u.T:
        if np.ptp(column) == 0.0:
            continue
        parts = np.array_split(column[along], _NUM_REGIONS)
        means = [float(part.mean()) for part in parts]
        found.append(Pattern(float(stats.kruskal(*parts).pvalue), max(means) - min(means), name))
        normal = ndtri(np.clip(column[along], 1e-3, 1.0 - 1e-3))
        r = float(np.corrcoef(normal[:-1], normal[1:])[0, 1])
        # leaving out or fitting a datum makes neighbours' errors differ, never agree: one side is tested
        p = float(stats.norm.sf(r * np.sqrt(len(normal) - 1)))
        found.append(Pattern(p, r, name))
    return found


def by_region(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    """Whether errors are as large as predicted everywhere: the mark of constant noise on heteroskedastic data."""
    if has_classes(evidence):
        return None
    sets = [(u, covariates) for u, covariates in regions_of(evidence) if len(u) >= 2 * MIN_DATA]
    found = []
    for name in dict.fromkeys(name for _, covariates in sets for name in covariates):
        of_name = [(u, covariates[name]) for u, covariates in sets if name in covariates]
        if all(np.ptp(values) > 0.0 for _, values in of_name):
            each = (_regions(*one) for one in of_name)
            parts = max(each, key=lambda parts: np.ptp([coverage for _, coverage in parts]))
            found.append((_p_trend(of_name), name, parts))
    if not found:
        return None
    # of two that say the same, as an input and a line's mean, the first
    p, name, parts = min(found, key=lambda result: float(f"{result[0]:.6g}"))
    p = min(1.0, p * len(found))
    covered = [coverage for _, coverage in parts]
    low, high = int(np.argmin(covered)), int(np.argmax(covered))
    gap = covered[high] - covered[low]
    ends = [f"{parts[i][0].min():.4g} <= {name} <= {parts[i][0].max():.4g}" for i in (low, high)]
    numbers = {"where": name, "p": p, "low": covered[low], "high": covered[high]}
    numbers |= {"low_at": ends[0], "high_at": ends[1]}
    return Found(grade_tested(p, gap, RATES, limits), gap, "", numbers, limits[0])


def _p_trend(sets: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """p-value of errors that do not grow along a covariate, or from its middle: Fisher's z added up over the sets."""
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
    inside = (np.abs(u - 0.5) <= 0.5 * LEVEL).mean(axis=1)
    parts = np.array_split(in_order(values), _NUM_REGIONS)
    return [(values[part], float(inside[part].mean())) for part in parts]


@statistic
def regions_of(evidence: Evidence) -> list[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """PIT values, training data first, with what they may depend on: each feature, the mean, the order of rows."""
    if has_classes(evidence):
        return _of_classes(evidence)
    found = []
    outcomes, held_out, left_out = replicates(evidence), held_out_pit(evidence), left_out_pit(evidence)
    if outcomes is not None:
        draws, y = outcomes
        if left_out is None:
            # without leave-one-out the datum is its own judge: a little too lenient, in all regions alike
            points = spread(len(y), MAX_DATA)
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


def _of_classes(evidence: Evidence) -> list[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """The same of labels: a randomised PIT for each class, and of two classes for one."""
    sets = []
    outcomes, points = class_replicates(evidence), class_points(evidence)
    if outcomes is not None:
        draws, labels = outcomes
        every = range(1 + int(max(draws.max(), labels.max())))
        shares = np.stack([(draws == label).mean(axis=0) for label in every], 1)
        sets.append((shares, labels, evidence.values(CONSTANT_DATA, "x")))
    if points is not None:
        sets.append((points.probs, points.y, points.x))
    found = []
    for shares, labels, x in sets:
        if labels.min() < 0 or not 1 < shares.shape[1] <= _MAX_CLASSES or labels.max() >= shares.shape[1]:
            continue
        is_class = labels[:, None] == np.arange(shares.shape[1])
        part = np.random.default_rng(0).random(shares.shape)
        u = np.where(is_class, 1.0 - shares + part * shares, part * (1.0 - shares))
        covariates = _covariates(evidence, x, None)
        found.append((u[:, 1:] if shares.shape[1] == 2 else u, covariates | order_of(labels, covariates)))
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


def order_of(y: np.ndarray | None, covariates: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The order of the rows, unless they were sorted by their outcomes (row, …), of which errors are a part.

    Nor where they were sorted by a covariate: what the order shows is then what that shows.
    """
    if y is None:
        return {}
    first = y.reshape(len(y), -1)[:, 0]
    if np.ptp(first) == 0.0 or any(_sorted_by(each) for each in (first, *covariates.values())):
        return {}
    return {ORDER: np.arange(len(y), dtype=np.float64)}


def _sorted_by(values: np.ndarray) -> bool:
    """Whether rows stand nearly as if they had been sorted by values (row,), of which many may be the same."""
    if np.ptp(values) == 0.0:
        return False
    order = np.arange(len(values))
    found, most = (abs(float(stats.spearmanr(order, each).statistic)) for each in (values, np.sort(values)))
    return found > _SORTED * most


def in_order(values: np.ndarray) -> np.ndarray:
    """Indices of values (point,) in their order; among ties in one that the rows have no part in."""
    return np.lexsort((np.random.default_rng(0).permutation(len(values)), values))


def merged(values: np.ndarray) -> np.ndarray:
    """Computed values (point,), those that differ by rounding alone made the same: it depends on the place of a row."""
    order = np.argsort(values)
    ascending = values[order]
    new = np.diff(ascending, prepend=-np.inf) > _ROUNDING * np.median(np.abs(values))
    found = np.empty_like(values)
    found[order] = ascending[new][np.cumsum(new) - 1]
    return found
