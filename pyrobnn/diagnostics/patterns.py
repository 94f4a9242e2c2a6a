"""Patterns in what the predictive leaves unexplained: by an input, by the order of the rows, or by region."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy import stats
from scipy.special import ndtri

from pyrobnn.core.groups import CONSTANT_DATA, HELD_OUT, PREDICTIONS
from pyrobnn.core.seeding import own_stream
from pyrobnn.diagnostics.calibration import LEVEL, MIN_DATA, held_out_pit, left_out_pit
from pyrobnn.diagnostics.evidence import Evidence, spread, statistic
from pyrobnn.diagnostics.leave_one_out import MAX_DATA
from pyrobnn.diagnostics.points import (
    class_points,
    class_replicates,
    feature_names,
    has_classes,
    pit_of,
    replicates,
)
from pyrobnn.diagnostics.verdict import Found, grade_tested

_MAX_FEATURES = 20
_MAX_CLASSES = 20
_NUM_REGIONS = 4
#: a covariate that every table has
ORDER = "the order of the rows"


class Errors(NamedTuple):
    """PIT values (row, output) of a set of rows, and what they may depend on: name → (row,)."""

    pit: np.ndarray
    covariates: dict[str, np.ndarray]


class Pattern(NamedTuple):
    """What the PIT does along an input: p of no dependence at all, the means' span or the neighbours' correlation."""

    p: float
    effect: float
    name: str


def pattern(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    """Whether the *signed* PIT depends on an input: outcomes above the predictive here and below it there.

    By region, and between neighbours along each input; the size of an error alone (`by_region`) sees neither. Of
    classes each has a PIT of its own, randomised between what it leaves open.
    """
    along = [
        (u, name, v)
        for u, known in errors_of(evidence)
        for name, v in known.items()
        if name != ORDER
    ]
    found = [each for one in along for each in _patterns(*one)]
    if not found:
        return None
    worst = min(found, key=lambda each: each.p)
    return _graded(worst, min(1.0, worst.p * len(found)), evidence.rates, limits)


def order(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    """Whether neighbouring rows depend on each other: a time series, groups, or a drift.

    By the signed PIT's correlation between neighbours and its differences between four stretches of rows, in training
    and held-out data together; not of rows that are sorted by their outcomes or by an input.
    """
    found = [
        _patterns(u, ORDER, known[ORDER]) for u, known in errors_of(evidence) if ORDER in known
    ]
    kinds = [list(each) for each in zip(*found)]  # stretches and neighbours, of each output
    if not kinds:
        return None
    together = [
        float(stats.combine_pvalues([max(each.p, 1e-300) for each in kind]).pvalue)
        for kind in kinds
    ]
    first = int(np.argmin(together))
    strongest = max(kinds[first], key=lambda each: each.effect)
    return _graded(strongest, min(1.0, together[first] * len(together)), evidence.rates, limits)


def _graded(
    worst: Pattern, p: float, rates: tuple[float, float], limits: tuple[float, ...]
) -> Found:
    status = grade_tested(p, worst.effect, rates, limits)
    return Found(status, worst.effect, "", {"where": worst.name, "p": p}, limits[0])


def _patterns(u: np.ndarray, name: str, values: np.ndarray) -> list[Pattern]:
    """Each output's PIT (row, output) along an input: by region, and between neighbours."""
    found: list[Pattern] = []
    for column in u[in_order(values)].T if np.ptp(values) > 0.0 else ():
        if np.ptp(column) == 0.0:
            continue
        means = [float(part.mean()) for part in np.array_split(column, _NUM_REGIONS)]
        normal = ndtri((stats.rankdata(column) - 0.5) / len(column))
        between = (
            sum(part.sum() ** 2 / len(part) for part in np.array_split(normal, _NUM_REGIONS))
            / normal.var()
        )
        found.append(
            Pattern(float(stats.chi2.sf(between, _NUM_REGIONS - 1)), max(means) - min(means), name)
        )
        r = float(np.corrcoef(normal[:-1], normal[1:])[0, 1])
        # leaving out or fitting a datum makes neighbours' errors differ, never agree: one side is tested
        found.append(Pattern(float(stats.norm.sf(r * np.sqrt(len(normal) - 1))), r, name))
    return found


def by_region(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    """Whether errors are as large as predicted everywhere: the mark of constant noise on heteroskedastic data."""
    found = []
    sets = [] if has_classes(evidence) else errors_of(evidence)
    for name in dict.fromkeys(name for _, covariates in sets for name in covariates):
        of_name = [(u, covariates[name]) for u, covariates in sets if name in covariates]
        if all(np.ptp(values) > 0.0 for _, values in of_name):
            regions = (_regions(*one) for one in of_name)
            found.append(
                (
                    _p_trend(of_name),
                    name,
                    max(regions, key=lambda each: np.ptp([c for _, c in each])),
                )
            )
    if not found:
        return None
    # of two that say the same, as an input and a line's mean, the first
    p, name, parts = min(found, key=lambda result: float(f"{result[0]:.6g}"))
    p = min(1.0, p * len(found))
    parts = sorted(parts, key=lambda each: each[1])
    # two regions, where all cover as much
    (low_at, low) = parts[0]
    (high_at, high) = parts[-1]
    ends = [
        f"{float(f'{at.min():.4g}'):g} <= {name} <= {float(f'{at.max():.4g}'):g}"
        for at in (low_at, high_at)
    ]
    numbers = {
        "where": name,
        "p": p,
        "low": low,
        "high": high,
        "low_at": ends[0],
        "high_at": ends[1],
    }
    return Found(
        grade_tested(p, high - low, evidence.rates, limits), high - low, "", numbers, limits[0]
    )


def _p_trend(sets: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """p-value of errors that do not grow along a covariate, or from its middle: Fisher's z added up over the sets."""
    total = np.zeros(2)
    information = 0.0
    for u, values in sets:
        size = np.abs(u - 0.5).mean(axis=1)
        if np.ptp(size) == 0.0:
            continue
        along = (values, np.abs(stats.rankdata(values) - 0.5 * (len(values) + 1)))
        r = np.array(
            [stats.spearmanr(size, each).statistic if np.ptp(each) > 0.0 else 0.0 for each in along]
        )
        # 1.06 / (n − 3) is the variance for ranks
        weight = (len(size) - 3) / 1.06
        total += weight * np.arctanh(np.clip(r, -0.999, 0.999))
        information += weight
    if information == 0.0:
        return 1.0
    return min(
        1.0, len(total) * float(2.0 * stats.norm.sf(np.abs(total).max() / np.sqrt(information)))
    )


def _regions(u: np.ndarray, values: np.ndarray) -> list[tuple[np.ndarray, float]]:
    """The values of a covariate in each of four regions, and how much 90 % intervals cover there."""
    inside = (np.abs(u - 0.5) <= 0.5 * LEVEL).mean(axis=1)
    return [
        (values[part], float(inside[part].mean()))
        for part in np.array_split(in_order(values), _NUM_REGIONS)
    ]


def _errors(
    evidence: Evidence,
    u: np.ndarray,
    y: np.ndarray,
    x: np.ndarray | None,
    moments: Mapping[str, np.ndarray],
) -> Errors:
    """PIT values (row, output) beside the inputs x (row, …), moments of the predictive and the order of the rows.

    The order is left out where rows were sorted by their outcomes y (row, …), of which errors are a part, or by an
    input: what it shows is then what that shows.
    """
    found: dict[str, np.ndarray] = {}
    if x is not None:
        flat = np.asarray(x, dtype=np.float64).reshape(len(x), -1)
        if flat.shape[1] <= _MAX_FEATURES:
            found |= dict(zip(feature_names(evidence, flat.shape[1]), flat.T, strict=True))
    found |= {
        name: merged(np.asarray(values, dtype=np.float64)) for name, values in moments.items()
    }
    found = {name: values for name, values in found.items() if np.isfinite(values).all()}
    first = y.reshape(len(y), -1)[:, 0]
    if np.ptp(first) > 0.0 and not any(_sorted_by(each) for each in (first, *found.values())):
        found[ORDER] = np.arange(len(y), dtype=np.float64)
    return Errors(u, found)


@statistic
def errors_of(evidence: Evidence) -> list[Errors]:
    """The errors of a tree where there are enough, training data first: those left out where they can be."""
    sets = _of_classes(evidence) if has_classes(evidence) else _of_regression(evidence)
    return [each for each in sets if len(each.pit) >= 2 * MIN_DATA]


def _of_regression(evidence: Evidence) -> list[Errors]:
    found = []
    outcomes = replicates(evidence)
    new = held_out_pit(evidence)
    left_out = left_out_pit(evidence)
    if outcomes is not None:
        draws, y = outcomes
        # without leave-one-out the datum is its own judge: a little too lenient, in all regions alike
        points = spread(len(y), MAX_DATA) if left_out is None else left_out[0]
        u = pit_of(draws[:, points], y[points]) if left_out is None else left_out[1]
        x = evidence.values(CONSTANT_DATA, "x")
        moments = {"the predicted mean": draws[:, points, 0].mean(axis=0)}
        found.append(_errors(evidence, u, y[points], None if x is None else x[points], moments))
    outcome = evidence.values(HELD_OUT, "y")
    if new is not None and outcome is not None:
        x = evidence.values(HELD_OUT, "x")
        mean = evidence.values(PREDICTIONS, "mean")
        moments = {} if mean is None else {"the predicted mean": mean.reshape(len(new), -1)[:, 0]}
        if evidence.claim == PREDICTIONS:
            moments = _varying(np.asarray(evidence.values(PREDICTIONS, "y_sample")))
        found.append(_errors(evidence, new, outcome, x, moments))
    return found


def _varying(draws: np.ndarray) -> dict[str, np.ndarray]:
    """Mean and sd of draws (draw, point, output) of the first output, where they vary by more than those of as many do.

    On the moments of the draws that it is ranked among an error depends by chance.
    """
    mean = draws.mean(axis=0)[:, 0]
    sd = draws.std(axis=0)[:, 0]
    size = len(draws)
    noise = 3.0 * float(sd.mean()) / np.sqrt(size)
    found = {"the predicted mean": mean} if mean.std() > noise else {}
    return found | ({"the predicted sd": sd} if sd.std() > noise / np.sqrt(2.0) else {})


def _of_classes(evidence: Evidence) -> list[Errors]:
    """The same of labels: a randomised PIT for each class, and of two classes for one."""
    sets = []
    outcomes = class_replicates(evidence)
    points = class_points(evidence)
    if outcomes is not None:
        draws, labels = outcomes
        every = range(1 + int(max(draws.max(), labels.max())))
        shares = np.stack([(draws == label).mean(axis=0) for label in every], 1)
        sets.append((shares, labels, evidence.values(CONSTANT_DATA, "x")))
    if points is not None:
        sets.append((points.probs, points.y, points.x))
    return [
        _errors(evidence, _class_pit(shares, labels), labels, x, {})
        for shares, labels, x in sets
        if labels.min() >= 0
        and labels.max() < shares.shape[1]
        and 1 < shares.shape[1] <= _MAX_CLASSES
    ]


def _class_pit(probs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """A randomised PIT (row, class) of labels (row,) by probabilities (row, class); of two classes for the second."""
    part = own_stream().random(probs.shape)
    is_class = labels[:, None] == np.arange(probs.shape[1])
    u = np.where(is_class, 1.0 - probs + part * probs, part * (1.0 - probs))
    return u[:, 1:] if probs.shape[1] == 2 else u


def _sorted_by(values: np.ndarray) -> bool:
    """Whether rows stand nearly as if they had been sorted by values (row,), of which many may be the same."""
    if np.ptp(values) == 0.0:
        return False
    found, most = (
        abs(float(stats.spearmanr(np.arange(len(values)), each).statistic))
        for each in (values, np.sort(values))
    )
    return found > 0.9 * most


def in_order(values: np.ndarray) -> np.ndarray:
    """Indices of values (point,) in their order; among ties in one that the rows have no part in."""
    return np.lexsort((own_stream().permutation(len(values)), values))


def merged(values: np.ndarray) -> np.ndarray:
    """Computed values (point,), those that differ by rounding alone made the same: it depends on the place of a row."""
    order = np.argsort(values)
    ascending = values[order]
    new = np.diff(ascending, prepend=-np.inf) > 1e-6 * np.median(np.abs(values))
    found = np.empty_like(values)
    found[order] = ascending[new][np.cumsum(new) - 1]
    return found
