"""The comparison table: one row of numbers per method, the same for the page and for summary.json."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import xarray as xr
from scipy import stats

from pyrobnn.diagnostics import Verdict
from pyrobnn.diagnostics import reading as tree_reading
from pyrobnn.diagnostics.convergence import FUNCTION, convergence
from pyrobnn.diagnostics.scores import LEVELS, score, training_sd
from pyrobnn.diagnostics.verdict import said
from pyrobnn.plots.reading import class_points, regression_points, widest_gap

MAX_POINTS = 200


@dataclass(frozen=True)
class Column:
    """One column of the table.

    Args:
        key: name in ``summary.json``.
        title: heading. note: what it is, in a few words, with its unit.
        better: "lower", "higher", "nominal" (coverage), or "" where no value is better than another.
    """

    key: str
    title: str
    note: str
    better: str = ""


COLUMNS = (
    Column("rmse", "RMSE", "", "lower"),
    Column("rmse_standardized", "RMSE / sd", "mean of outputs", "lower"),
    Column("accuracy", "accuracy", "", "higher"),
    Column("log_prob", "log density", "per point ± SE", "higher"),
    Column("crps", "CRPS", "", "lower"),
    Column("crps_standardized", "CRPS / sd", "mean of outputs", "lower"),
    Column("brier", "Brier", "", "lower"),
    Column("ece", "ECE", "", "lower"),
    *(Column(f"coverage_{100 * level:.0f}", f"{level:.0%}", "covered", "nominal") for level in LEVELS),
    Column("aleatoric", "aleatoric", "mean"),
    Column("epistemic", "epistemic", "mean"),
    Column("aleatoric_standardized", "aleatoric / sd", "mean of outputs"),
    Column("epistemic_standardized", "epistemic / sd", "mean of outputs"),
    Column("gap_ratio", "in gap", "epist. ratio"),
    Column("rhat", "R-hat", "of f, worst", "lower"),
    Column("ess", "ESS", "of f, worst", "higher"),
    Column("khat", "k-hat", "of p/q", "lower"),
    Column("wasserstein", "distance", "from NUTS", "lower"),
    Column("wasserstein_standardized", "distance / sd", "from NUTS", "lower"),
    Column("compile_seconds", "compile", "s"),
    Column("fit_seconds", "fit", "s"),
    Column("predict_seconds", "predict", "s"),
)


@dataclass(frozen=True)
class Row:
    """The numbers of one method; a key that is missing does not apply to it or could not be had.

    Args:
        label: the caller's name of the run.
        values: column key → number.
        errors: column key → standard error over the held-out data.
        not_finite: column keys whose number came out NaN or infinite.
        lost: what could not be computed, each with the reason, in a sentence.
    """

    label: str
    values: dict[str, float]
    errors: dict[str, float]
    not_finite: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


def reference_label(trees: Mapping[str, xr.DataTree]) -> str | None:
    """The run that the others are measured against: the first NUTS run, else none."""
    for label, tree in trees.items():
        if not tree_reading.is_iid(tree) and tree_reading.method(tree).upper() == "NUTS":
            return label
    return None


def compare_rows(trees: Mapping[str, xr.DataTree], verdicts: Mapping[str, Verdict]) -> list[Row]:
    """One `Row` per tree: scores, uncertainties, convergence evidence, distance from the NUTS run, seconds.

    R-hat and ESS are the worst of the function at the probes, and exist for Markov chains only: independent draws of an
    approximation never get an R-hat.
    """
    reference = reference_label(trees)
    judges = None if reference is None else trees[reference]
    return [
        _row(label, tree, verdicts.get(label), None if label == reference else judges)
        for label, tree in trees.items()
    ]


def _row(label: str, tree: xr.DataTree, verdict: Verdict | None, reference: xr.DataTree | None) -> Row:
    """The numbers of one tree; what raises is left out and said, so that no tree loses the others' row."""
    errors: dict[str, float] = {}

    def scores() -> dict[str, float]:
        found = score(tree).scores
        errors.update({each.name: each.data_se for each in found if each.data_se is not None})
        return {each.name: each.value for each in found}

    sources: dict[str, Callable[[], dict[str, float]]] = {
        "scores": scores,
        "uncertainties": lambda: _uncertainties(tree),
        "gap": lambda: _gap(tree),
        "evidence": lambda: {} if verdict is None else _evidence(tree, verdict),
        "distance": lambda: {} if reference is None else _distance(tree, reference),
        "seconds": lambda: _seconds(tree),
    }
    values: dict[str, float] = {}
    lost = []
    for what, source in sources.items():
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore", RuntimeWarning)
                values |= source()
        except Exception as error:
            lost.append(f"{label}: no {what} ({said(error)})")
    finite = {name: float(value) for name, value in values.items() if np.isfinite(value)}
    not_finite = tuple(name for name in values if name not in finite)
    return Row(label, finite, {k: v for k, v in errors.items() if np.isfinite(v)}, not_finite, tuple(lost))


def _gap(tree: xr.DataTree) -> dict[str, float]:
    gap = widest_gap(tree)
    return {} if gap is None or gap.ratio is None else {"gap_ratio": gap.ratio}


def _distance(tree: xr.DataTree, reference: xr.DataTree) -> dict[str, float]:
    distance = predictive_distance(tree, reference)
    name = "wasserstein" if _num_outputs(tree) == 1 else "wasserstein_standardized"
    return {} if distance is None else {name: distance}


def _num_outputs(tree: xr.DataTree) -> int:
    for group in ("predictions_constant_data", "observed_data"):
        y = tree_reading.values_of(tree, group, "y")
        if y is not None and y.ndim > 0:
            return y.size // len(y)
    return 1


def _units(tree: xr.DataTree) -> np.ndarray | None:
    """What values of each output are divided by before they are averaged over outputs; None where it is unknown."""
    num_outputs = _num_outputs(tree)
    return np.ones(1) if num_outputs == 1 else training_sd(tree, num_outputs)


def _seconds(tree: xr.DataTree) -> dict[str, float]:
    found = {stage: tree_reading.seconds(tree, stage) for stage in ("compile", "fit", "predict")}
    return {f"{stage}_seconds": seconds for stage, seconds in found.items() if seconds is not None}


def _uncertainties(tree: xr.DataTree) -> dict[str, float]:
    labelled, units = class_points(tree), _units(tree)
    if labelled is not None:
        pairs, units, suffix = [(labelled.aleatoric, labelled.epistemic)], np.ones(1), ""
    elif units is None or regression_points(tree) is None:
        return {}
    else:
        outputs = [regression_points(tree, output) for output in range(len(units))]
        pairs = [(points.aleatoric_sd, points.epistemic_sd) for points in outputs]
        suffix = "" if len(units) == 1 else "_standardized"
    return {
        f"{name}{suffix}": float(np.mean([np.mean(v) / unit for v, unit in zip(each, units, strict=True)]))
        for name, each in zip(("aleatoric", "epistemic"), zip(*pairs, strict=True), strict=True)
        if all(v is not None for v in each)
    }


def _evidence(tree: xr.DataTree, verdict: Verdict) -> dict[str, float]:
    if tree_reading.is_iid(tree):
        checks = (check for check in verdict.checks if check.name == "khat")
        return {check.name: check.value for check in checks if check.value is not None}
    # the verdict's worst value may be that of the log density, or of the noise: here it is the function's
    found = convergence(tree)
    if found is None:
        return {}
    table = found.table
    table = table.isel(quantity=[str(name).startswith(FUNCTION) for name in table["quantity"].values])
    if table.sizes["quantity"] == 0:
        return {}
    rhat = table["rhat"].values
    ess = np.fmin(table["ess_bulk"].values, table["ess_tail"].values)
    known = {} if np.isnan(rhat).all() else {"rhat": float(np.nanmax(rhat))}
    return known if np.isnan(ess).all() else known | {"ess": float(np.nanmin(ess))}


def predictive_distance(tree: xr.DataTree, reference: xr.DataTree) -> float | None:
    r"""Mean 1-Wasserstein distance between two predictive distributions at the held-out points.

    .. math:: W_1 = \tfrac1n \sum_i \int |F_i(y) - F_i^{\mathrm{ref}}(y)| \, dy

    in the outcome's units, over at most 200 points; of several outputs the mean of each one's distance in standard
    deviations of its training targets. None unless both trees predict the same points. With S draws it has a floor of
    about sd/√S.
    """
    outcomes = [tree_reading.values_of(each, "predictions_constant_data", "y") for each in (tree, reference)]
    if outcomes[0] is None or outcomes[1] is None or outcomes[0].shape != outcomes[1].shape:
        return None
    if not np.array_equal(*outcomes):
        return None
    units = _units(tree)
    if units is None:
        return None
    distances = []
    for output, unit in enumerate(units):
        points = [regression_points(each, output) for each in (tree, reference)]
        if any(each is None or not each.held_out or each.sample is None for each in points):
            return None
        ours, theirs = (each.sample for each in points)
        index = np.linspace(0, ours.shape[1] - 1, min(ours.shape[1], MAX_POINTS)).round().astype(int)
        each = [stats.wasserstein_distance(ours[:, i], theirs[:, i]) for i in np.unique(index)]
        distances.append(np.mean(each) / unit)
    return float(np.mean(distances))


def paired_difference(tree: xr.DataTree, best: xr.DataTree) -> tuple[float, float] | None:
    """Mean difference of held-out log density per point, tree − best, and its standard error over the points."""
    pair = [tree_reading.values_of(each, "predictions", "log_prob") for each in (tree, best)]
    if pair[0] is None or pair[1] is None or pair[0].shape != pair[1].shape or pair[0].size < 2:
        return None
    difference = np.ravel(pair[0] - pair[1])
    if not np.isfinite(difference).all():
        return None
    return float(difference.mean()), float(difference.std(ddof=1) / np.sqrt(difference.size))


def best_labels(rows: list[Row], column: Column) -> set[str]:
    """The methods whose value is best in this column; none where a column has no best or a single value."""
    have = {row.label: row.values[column.key] for row in rows if column.key in row.values}
    if (
        column.better not in ("lower", "higher", "nominal")
        or len(have) < 2
        or column.key in ("rhat", "ess", "khat")
    ):
        return set()
    if column.better == "nominal":
        level = float(column.key.rsplit("_", 1)[1]) / 100
        have = {label: abs(value - level) for label, value in have.items()}
    best = max(have.values()) if column.better == "higher" else min(have.values())
    return {label for label, value in have.items() if value == best}
