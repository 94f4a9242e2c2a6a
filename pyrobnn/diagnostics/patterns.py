"""Patterns in what the predictive leaves unexplained: by an input, by the order of the rows, or by region."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats
from scipy.special import ndtri

from pyrobnn.core.groups import CONSTANT_DATA, HELD_OUT, OBSERVED_DATA, PREDICTIONS
from pyrobnn.core.seeding import own_stream
from pyrobnn.diagnostics.class_points import class_points, class_replicates
from pyrobnn.diagnostics.evidence import Evidence, spread, statistic
from pyrobnn.diagnostics.grades import Found, Limits, grade_tested
from pyrobnn.diagnostics.labels import feature_names
from pyrobnn.diagnostics.leave_one_out import left_out_mean, left_out_pit
from pyrobnn.diagnostics.limits import LEVEL, MAX_DATA, MIN_DATA
from pyrobnn.diagnostics.own_latents import OwnLatents, own_latents
from pyrobnn.diagnostics.points import held_out_pit
from pyrobnn.diagnostics.prediction_metrics import pit_of

_MAX_FEATURES = 20
_MAX_CLASSES = 20
_NUM_REGIONS = 4
#: a covariate that every table has
ORDER = "the order of the rows"


#: of the distance between means that have seen their data and those that have not, the spread of the latter from which
#: on it is the model's and not the data's
_LEAST_SPREAD = 0.2


class Errors(NamedTuple):
    """PIT values (row, output) of a set of rows, and what they may depend on: name → (row,).

    ``first_output`` is the number of their first column: of two classes only the second has a PIT. ``own`` are
    latent values of single data that have seen themselves: these are nearer to their predictions than new data, the
    nearer the more they say of themselves.
    """

    pit: np.ndarray
    covariates: dict[str, np.ndarray]
    first_output: int = 0
    own: OwnLatents | None = None


class Pattern(NamedTuple):
    """What the PIT does along an input: p of no dependence at all, the means' span or the neighbours' correlation.

    ``kind`` is ``"regions"`` or ``"neighbours"``; ``output`` the number of the output, or of the class.
    """

    p: float
    effect: float
    name: str
    kind: str
    output: int


def pattern(evidence: Evidence, limits: Limits) -> Found | None:
    """Asks whether outcomes lie above their predictions in one region of an input and below them in another.

    Then the model misses a pattern. The measure is the signed PIT, the probability that was predicted for values
    below the outcome, by region and between neighbours along each input; the size of errors alone
    (`coverage_by_region`) shows neither. Each class has a PIT of its own, drawn at random within what a label leaves
    open.
    """
    patterns = [
        found
        for errors in errors_of(evidence)
        for name in errors.covariates
        if name != ORDER
        for found in _patterns(errors, name)
    ]
    if not patterns:
        return _unanswered(errors_of(evidence))
    worst = min(patterns, key=lambda candidate: candidate.p)
    return _graded(worst, min(1.0, worst.p * len(patterns)), evidence.rates, limits)


def order(evidence: Evidence, limits: Limits) -> Found | None:
    """Asks whether errors of neighbouring rows depend on each other: a time series, groups of rows, or a drift.

    The measures are the correlation of the signed PIT between neighbours and its differences between four stretches
    of rows, in training and held-out data together. Rows that are sorted by outcome or by an input are not judged.
    """
    # stretches and neighbours, of each output: a set of rows may lack an output, or not vary in it
    same: dict[tuple[int, str], list[Pattern]] = {}
    for errors in errors_of(evidence):
        if ORDER in errors.covariates:
            for candidate in _patterns(errors, ORDER):
                same.setdefault((candidate.output, candidate.kind), []).append(candidate)
    if not same:
        return None
    by_kind = list(same.values())
    p_values = [_combined_p(patterns) for patterns in by_kind]
    least = int(np.argmin(p_values))
    strongest = max(by_kind[least], key=lambda candidate: candidate.effect)
    p = min(1.0, p_values[least] * len(p_values))
    return _graded(strongest, p, evidence.rates, limits)


def _unanswered(sets: Sequence[Errors]) -> Found | None:
    """Why errors were not compared along anything, where it is that each datum has a latent value of its own."""
    for errors in sets:
        if errors.own is not None:
            return Found("info", None, "own_latents", errors.own._asdict())
    return None


def _combined_p(patterns: Sequence[Pattern]) -> float:
    """One p-value of the same pattern in several sets of rows, by Fisher's method."""
    return float(stats.combine_pvalues([max(candidate.p, 1e-300) for candidate in patterns]).pvalue)


def _graded(
    worst: Pattern,
    p: float,
    rates: tuple[float, float],
    limits: Limits,
) -> Found:
    status = grade_tested(p, worst.effect, rates, limits)
    return Found(status, worst.effect, "", {"where": worst.name, "p": p}, limits[0])


def _patterns(errors: Errors, name: str) -> list[Pattern]:
    """The PIT of each output that varies along an input of this name: by region, and between neighbours."""
    values = errors.covariates[name]
    if np.ptp(values) == 0.0:
        return []
    patterns: list[Pattern] = []
    columns = errors.pit[in_order(values)].T
    for output, column in enumerate(columns, errors.first_output):
        if np.ptp(column) == 0.0:
            continue
        means = [float(region.mean()) for region in np.array_split(column, _NUM_REGIONS)]
        normal = ndtri((stats.rankdata(column) - 0.5) / len(column))
        sums = [region.sum() ** 2 / len(region) for region in np.array_split(normal, _NUM_REGIONS)]
        p_regions = float(stats.chi2.sf(sum(sums) / normal.var(), _NUM_REGIONS - 1))
        span = max(means) - min(means)
        patterns.append(Pattern(p_regions, span, name, "regions", output))
        r = float(np.corrcoef(normal[:-1], normal[1:])[0, 1])
        # leaving out or fitting a datum makes neighbours' errors differ, never agree: one side is tested
        p_neighbours = float(stats.norm.sf(r * np.sqrt(len(normal) - 1)))
        patterns.append(Pattern(p_neighbours, r, name, "neighbours", output))
    return patterns


class Regional(NamedTuple):
    """What 90 % intervals cover along a covariate: p of no trend; of each region its values and its coverage."""

    p: float
    name: str
    regions: list[tuple[np.ndarray, float]]


def by_region(evidence: Evidence, limits: Limits) -> Found | None:
    """Asks whether errors are as large as predicted in every region of the inputs.

    A model of constant noise fails it on heteroskedastic data.
    """
    sets = [] if evidence.has_classes else errors_of(evidence)
    results = _regional_results([errors for errors in sets if errors.own is None])
    if not results:
        return _unanswered(sets)
    # of two that say the same, as an input and a line's mean, the first
    worst = min(results, key=lambda result: float(f"{result.p:.6g}"))
    p = min(1.0, worst.p * len(results))
    # two regions, where all cover as much
    by_coverage = sorted(worst.regions, key=lambda region: region[1])
    low_values, low = by_coverage[0]
    high_values, high = by_coverage[-1]
    numbers = {
        "where": worst.name,
        "p": p,
        "low": low,
        "high": high,
        "low_at": _range_in_words(low_values, worst.name),
        "high_at": _range_in_words(high_values, worst.name),
    }
    status = grade_tested(p, high - low, evidence.rates, limits)
    return Found(status, high - low, "", numbers, limits[0])


def _regional_results(sets: Sequence[Errors]) -> list[Regional]:
    """What intervals cover along every covariate that varies in all sets of rows which have it."""
    names = itertools.chain.from_iterable(errors.covariates for errors in sets)
    results = []
    for name in dict.fromkeys(names):
        pairs = [
            (errors.pit, errors.covariates[name]) for errors in sets if name in errors.covariates
        ]
        if all(np.ptp(values) > 0.0 for _, values in pairs):
            results.append(Regional(_p_trend(pairs), name, _most_uneven_regions(pairs)))
    return results


def _most_uneven_regions(
    errors: Sequence[tuple[np.ndarray, np.ndarray]],
) -> list[tuple[np.ndarray, float]]:
    """The regions of the set of rows in which coverage differs most."""
    by_set = [_regions(u, values) for u, values in errors]
    return max(by_set, key=lambda regions: np.ptp([coverage for _, coverage in regions]))


def _range_in_words(values: np.ndarray, name: str) -> str:
    low = float(f"{values.min():.4g}")
    high = float(f"{values.max():.4g}")
    return f"{low:g} <= {name} <= {high:g}"


def _p_trend(sets: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """p-value of errors that do not grow along a covariate, or from its middle: Fisher's z added up over the sets."""
    total = np.zeros(2)
    information = 0.0
    for u, values in sets:
        size = np.abs(u - 0.5).mean(axis=1)
        if np.ptp(size) == 0.0:
            continue
        from_middle = np.abs(stats.rankdata(values) - 0.5 * (len(values) + 1))
        r = np.array([_rank_correlation(size, values), _rank_correlation(size, from_middle)])
        # 1.06 / (n − 3) is the variance for ranks
        weight = (len(size) - 3) / 1.06
        total += weight * np.arctanh(np.clip(r, -0.999, 0.999))
        information += weight
    if information == 0.0:
        return 1.0
    z = np.abs(total).max() / np.sqrt(information)
    return min(1.0, len(total) * float(2.0 * stats.norm.sf(z)))


def _rank_correlation(sizes: np.ndarray, values: np.ndarray) -> float:
    """Spearman's; 0 along what is constant."""
    return float(stats.spearmanr(sizes, values).statistic) if np.ptp(values) > 0.0 else 0.0


def _regions(u: np.ndarray, values: np.ndarray) -> list[tuple[np.ndarray, float]]:
    """The values of a covariate in each of four regions, and how much 90 % intervals cover there."""
    inside = (np.abs(u - 0.5) <= 0.5 * LEVEL).mean(axis=1)
    return [
        (values[rows], float(inside[rows].mean()))
        for rows in np.array_split(in_order(values), _NUM_REGIONS)
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
    covariates: dict[str, np.ndarray] = {}
    if x is not None:
        flat = np.asarray(x, dtype=np.float64).reshape(len(x), -1)
        if flat.shape[1] <= _MAX_FEATURES:
            covariates |= dict(
                zip(
                    feature_names(evidence, flat.shape[1]),
                    flat.T,
                    strict=True,
                )
            )
    for name, values in moments.items():
        covariates[name] = merged(np.asarray(values, dtype=np.float64))
    covariates = {name: values for name, values in covariates.items() if np.isfinite(values).all()}
    outcome = y.reshape(len(y), -1)[:, 0]
    is_sorted = any(_sorted_by(values) for values in (outcome, *covariates.values()))
    if np.ptp(outcome) > 0.0 and not is_sorted:
        covariates[ORDER] = np.arange(len(y), dtype=np.float64)
    return Errors(u, covariates)


@statistic
def errors_of(evidence: Evidence) -> list[Errors]:
    """The errors of a tree where there are enough, training data first: those left out where they can be."""
    if evidence.has_classes:
        sets = _of_classes(evidence)
    else:
        sets = list(itertools.chain.from_iterable(map(_of_regression, evidence.by_outcome)))
    return [errors for errors in sets if len(errors.pit) >= 2 * MIN_DATA]


def _of_regression(evidence: Evidence) -> list[Errors]:
    """Errors of numbers: training rows, values of a joint event, then held-out."""
    sets = (_of_training(evidence), _of_steps(evidence), _of_held_out(evidence))
    return [errors for errors in sets if errors is not None]


def _of_training(evidence: Evidence) -> Errors | None:
    """Errors of the training rows, of the predictions without each row where these can be had."""
    outcomes = evidence.replicates()
    if outcomes is None:
        return None
    draws, y = outcomes
    left_out = left_out_pit(evidence)
    own = own_latents(evidence, len(y))
    if left_out is None:
        # the datum is its own judge: a little too lenient, in all regions alike
        points = spread(len(y), MAX_DATA)
        u = pit_of(draws[:, points], y[points])
    else:
        points, u = left_out
    x = _inputs_of(evidence, len(y))
    moments = {"the predicted mean": draws[:, points, 0].mean(axis=0)}
    if own is not None:
        unseen = None if left_out is None else left_out_mean(evidence)
        moments = _own_moments(moments, unseen)
    errors = _errors(evidence, u, y[points], None if x is None else x[points], moments)
    return errors._replace(own=own if left_out is None else None)


def _of_steps(evidence: Evidence) -> Errors | None:
    """Errors of each value of a joint event, given those before it."""
    if evidence.one_step is None:
        return None
    u, mean = evidence.one_step
    y = np.asarray(evidence.values(OBSERVED_DATA, evidence.outcome or "")).reshape(-1, 1)
    x = _inputs_of(evidence, len(u))
    return _errors(evidence, u, y, x, {"the predicted mean": mean})


def _of_held_out(evidence: Evidence) -> Errors | None:
    """Errors of held-out rows."""
    u = held_out_pit(evidence)
    outcome = evidence.values(HELD_OUT, "y")
    if u is None or outcome is None:
        return None
    x = evidence.values(HELD_OUT, "x")
    return _errors(evidence, u, outcome, x, _held_out_moments(evidence, len(u)))


def _own_moments(
    moments: Mapping[str, np.ndarray], unseen: np.ndarray | None
) -> dict[str, np.ndarray]:
    """Predicted means (datum,) that have not seen their data in the place of those that have, or none.

    Of data with latent values of their own a mean that has seen its datum lies on the same side of the others as that
    datum does. One that has not lies a little on the other side, which shows where the means are nearly the same
    otherwise.
    """
    if unseen is None:
        return {}
    ((name, mean),) = moments.items()
    if unseen.std() < _LEAST_SPREAD * (mean - unseen).std():
        return {}
    return {name: unseen}


def _inputs_of(evidence: Evidence, num_rows: int) -> np.ndarray | None:
    """The training inputs, if there is a row of them for each of the errors."""
    x = evidence.values(CONSTANT_DATA, "x")
    counted = evidence.counted
    if x is not None and counted is not None and counted.shape == (len(x),):
        x = x[counted]
    return x if x is not None and len(x) == num_rows else None


def _held_out_moments(evidence: Evidence, count: int) -> dict[str, np.ndarray]:
    """Moments of the held-out predictions, along which errors may depend."""
    if evidence.claim == PREDICTIONS:
        return _varying(np.asarray(evidence.values(PREDICTIONS, "y_sample")))
    mean = evidence.values(PREDICTIONS, "mean")
    return {} if mean is None else {"the predicted mean": mean.reshape(count, -1)[:, 0]}


def _varying(draws: np.ndarray) -> dict[str, np.ndarray]:
    """Mean and sd of draws (draw, point, output) of the first output, where they vary by more than those of as many do.

    On the moments of the draws that it is ranked among an error depends by chance.
    """
    mean = draws.mean(axis=0)[:, 0]
    sd = draws.std(axis=0)[:, 0]
    size = len(draws)
    noise = 3.0 * float(sd.mean()) / np.sqrt(size)
    moments = {}
    if mean.std() > noise:
        moments["the predicted mean"] = mean
    if sd.std() > noise / np.sqrt(2.0):
        moments["the predicted sd"] = sd
    return moments


def _of_classes(evidence: Evidence) -> list[Errors]:
    """Errors of labels, as `_of_regression`: a randomised PIT for each class, of two classes for the second."""
    sets = []
    outcomes = class_replicates(evidence)
    points = class_points(evidence)
    if outcomes is not None:
        draws, labels = outcomes
        num_classes = 1 + int(max(draws.max(), labels.max()))
        shares = np.stack([(draws == label).mean(axis=0) for label in range(num_classes)], 1)
        sets.append((shares, labels, evidence.values(CONSTANT_DATA, "x")))
    if points is not None:
        sets.append((points.probs, points.y, points.x))
    errors = []
    for shares, labels, x in sets:
        num_classes = shares.shape[1]
        are_classes = labels.min() >= 0 and labels.max() < num_classes
        if are_classes and 1 < num_classes <= _MAX_CLASSES:
            of_classes = _errors(evidence, _class_pit(shares, labels), labels, x, {})
            errors.append(of_classes._replace(first_output=int(num_classes == 2)))
    return errors


def _class_pit(probs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """A randomised PIT (row, class) of labels (row,) by probabilities (row, class); of two classes for the second."""
    place = own_stream().random(probs.shape)
    is_class = labels[:, None] == np.arange(probs.shape[1])
    u = np.where(is_class, 1.0 - probs + place * probs, place * (1.0 - probs))
    return u[:, 1:] if probs.shape[1] == 2 else u


def _sorted_by(values: np.ndarray) -> bool:
    """Whether rows stand nearly as if they had been sorted by values (row,), of which many may be the same."""
    if np.ptp(values) == 0.0:
        return False
    rows = np.arange(len(values))
    as_they_stand = abs(_rank_correlation(rows, values))
    once_sorted = abs(_rank_correlation(rows, np.sort(values)))
    return as_they_stand > 0.9 * once_sorted


def in_order(values: np.ndarray) -> np.ndarray:
    """Indices of values (point,) in their order; among ties in one that the rows have no part in."""
    return np.lexsort((own_stream().permutation(len(values)), values))


def merged(values: np.ndarray) -> np.ndarray:
    """Computed values (point,), those that differ by rounding alone made the same: it depends on the place of a row."""
    by_value = np.argsort(values)
    ascending = values[by_value]
    new = np.diff(ascending, prepend=-np.inf) > 1e-6 * np.median(np.abs(values))
    result = np.empty_like(values)
    result[by_value] = ascending[new][np.cumsum(new) - 1]
    return result
