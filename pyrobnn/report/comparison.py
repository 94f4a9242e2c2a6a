"""The comparison table: one row of numbers per method, the same for the page and for summary.json."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import xarray as xr

from pyrobnn.diagnostics import Verdict
from pyrobnn.diagnostics.convergence import convergence
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.fidelity import predictive_distance
from pyrobnn.diagnostics.judge import reference_label
from pyrobnn.diagnostics.points import (
    class_points,
    is_censored,
    regression_points,
    same_data,
    widest_gap,
)
from pyrobnn.diagnostics.scores import LEVELS, num_outputs, score, units
from pyrobnn.diagnostics.verdict import said
from pyrobnn.groups import HELD_OUT, OBSERVED_DATA, PREDICTIONS


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
    Column("r2", "R²", "held-out", "higher"),
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
    Column("predictive_distance", "distance", "from NUTS", "lower"),
    Column("predictive_distance_standardized", "distance / sd", "from NUTS", "lower"),
    Column("compile_seconds", "compile", "s"),
    Column("fit_seconds", "fit", "s"),
    Column("predict_seconds", "predict", "s"),
)


@dataclass(frozen=True, eq=False)
class Row:
    """The numbers of one method; a key that is missing does not apply to it or could not be had.

    Args:
        label: the caller's name of the run.
        values: column key → number.
        errors: column key → standard error over the held-out data.
        not_finite: column keys whose number came out NaN or infinite.
        lost: what could not be computed, each with the reason, in a sentence.
        points: column key → what the number is the mean of, (point,), for paired differences.
        ranked: whether all runs are of one data set, so that a number of one is better or worse than another's.
    """

    label: str
    values: dict[str, float]
    errors: dict[str, float]
    not_finite: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    points: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)
    ranked: bool = True


def compare_rows(trees: Mapping[str, xr.DataTree | Evidence], verdicts: Mapping[str, Verdict]) -> list[Row]:
    """One `Row` per tree: scores, uncertainties, convergence evidence, distance from the NUTS run, seconds.

    R-hat and ESS are the worst of the function at the probes, and exist for Markov chains only: independent draws of an
    approximation never get an R-hat.
    """
    evidence = {label: Evidence.of(tree) for label, tree in trees.items()}
    reference, ranked = reference_label(evidence), same_data(evidence.values())
    judges = None if reference is None or not ranked else evidence[reference]
    rows = [
        _row(label, each, verdicts.get(label), None if label == reference else judges)
        for label, each in evidence.items()
    ]
    return [replace(row, ranked=ranked) for row in rows]


def baseline_rows(floor: Mapping[str, Evidence]) -> list[Row]:
    """One `Row` of the same scores per baseline (`pyrobnn.report.baselines`)."""
    return [_row(label, each, None, None) for label, each in floor.items()]


def of_output(row: Row, output: int) -> Row:
    """The numbers of one output of several, in its own unit, under the keys that a single output has."""
    end = f"[{output}]"

    def cut(found: Mapping[str, Any]) -> dict[str, Any]:
        return {key.removesuffix(end): value for key, value in found.items() if key.endswith(end)}

    not_finite = tuple(cut(dict.fromkeys(row.not_finite)))
    return replace(
        row, values=cut(row.values), errors=cut(row.errors), points=cut(row.points), not_finite=not_finite
    )


def _row(label: str, evidence: Evidence, verdict: Verdict | None, reference: Evidence | None) -> Row:
    """The numbers of one tree; what raises is left out and said, so that no tree loses the others' row."""
    errors: dict[str, float] = {}
    points: dict[str, np.ndarray] = {}

    def scores() -> dict[str, float]:
        found = score(evidence).scores
        points.update({each.name: each.points for each in found if each.points is not None})
        errors.update({each.name: each.data_se for each in found if each.data_se is not None})
        return {each.name: each.value for each in found}

    sources: dict[str, Callable[[], dict[str, float]]] = {
        "scores": scores,
        "R²": lambda: _explained(evidence),
        "uncertainties": lambda: _uncertainties(evidence),
        "gap": lambda: _gap(evidence),
        "evidence": lambda: {} if verdict is None else _evidence(evidence, verdict),
        "distance": lambda: {} if reference is None else _distance(evidence, reference),
        "seconds": lambda: _seconds(evidence),
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
    errors = {name: error for name, error in errors.items() if np.isfinite(error)}
    for name in [name for name in points if name.startswith("rmse")]:
        points[name.removesuffix("_standardized").replace("rmse", "r2")] = points[name]
    return Row(label, finite, errors, not_finite, tuple(lost), points)


def _explained(evidence: Evidence) -> dict[str, float]:
    """Share of the held-out squared error of the training mean that is gone: averaged over outputs, and of each."""
    y, train, mean = (
        evidence.values(*each) for each in ((HELD_OUT, "y"), (OBSERVED_DATA, "y"), (PREDICTIONS, "mean"))
    )
    if y is None or train is None or mean is None or len(y) == 0 or is_censored(evidence):
        return {}
    y, train = (each.astype(np.float64).reshape(len(each), -1) for each in (y, train))
    floor = ((y - train.mean(0)) ** 2).sum(0)
    left = ((y - mean.reshape(len(y), -1)) ** 2).sum(0)
    if not (floor > 0).all():
        return {}
    gone = 1.0 - left / floor
    each = {f"r2[{output}]": float(share) for output, share in enumerate(gone)} if len(gone) > 1 else {}
    return {"r2": float(gone.mean()), **each}


def _gap(evidence: Evidence) -> dict[str, float]:
    gap = widest_gap(evidence)
    return {} if gap is None or gap.ratio is None else {"gap_ratio": gap.ratio}


def _distance(evidence: Evidence, reference: Evidence) -> dict[str, float]:
    distance = predictive_distance(evidence, reference)
    name = "predictive_distance" + ("" if num_outputs(evidence) == 1 else "_standardized")
    return {} if distance is None else {name: distance}


def _seconds(evidence: Evidence) -> dict[str, float]:
    found = {stage: evidence.seconds(stage) for stage in ("compile", "fit", "predict")}
    return {f"{stage}_seconds": seconds for stage, seconds in found.items() if seconds is not None}


def _uncertainties(evidence: Evidence) -> dict[str, float]:
    labelled, scale = class_points(evidence), units(evidence)
    if labelled is not None:
        pairs, scale, suffix = [(labelled.aleatoric, labelled.epistemic)], np.ones(1), ""
    elif scale is None or regression_points(evidence) is None:
        return {}
    else:
        outputs = [regression_points(evidence, output) for output in range(len(scale))]
        pairs = [(points.aleatoric_sd, points.epistemic_sd) for points in outputs if points is not None]
        suffix = "" if len(scale) == 1 else "_standardized"
    found = {}
    for name, each in zip(("aleatoric", "epistemic"), zip(*pairs, strict=True), strict=True):
        if any(v is None for v in each):
            continue
        means = [float(np.mean(v)) for v in each]
        found[f"{name}{suffix}"] = float(np.mean([v / unit for v, unit in zip(means, scale, strict=True)]))
        if suffix:
            found |= {f"{name}[{output}]": mean for output, mean in enumerate(means)}
    return found


def _evidence(evidence: Evidence, verdict: Verdict) -> dict[str, float]:
    if evidence.is_iid:
        checks = (check for check in verdict.checks if check.name == "khat")
        return {check.name: check.value for check in checks if check.value is not None}
    # the verdict's worst value may be that of the log density, or of the noise: here it is the function's
    found = convergence(evidence)
    if found is None:
        return {}
    table = found.of_function
    if table.sizes["quantity"] == 0:
        return {}
    rhat = table["rhat"].values
    ess = np.fmin(table["ess_bulk"].values, table["ess_tail"].values)
    known = {} if np.isnan(rhat).all() else {"rhat": float(np.nanmax(rhat))}
    return known if np.isnan(ess).all() else known | {"ess": float(np.nanmin(ess))}


def best_labels(rows: list[Row], column: Column) -> set[str]:
    """The rows within two standard errors of the best of this column; none where a column has no error to tell by.

    The error is that of the paired difference from the best row, point by point of the held-out data.
    """
    have = {row.label: row for row in rows if column.key in row.values and column.key in row.points}
    if len(have) < 2 or not all(row.ranked for row in rows):
        return set()
    sign = -1.0 if column.better == "higher" and column.key != "r2" else 1.0
    best = min(have.values(), key=lambda row: sign * float(row.points[column.key].mean()))
    return {label for label, row in have.items() if _is_close(row, best, column.key, sign)}


def _is_close(row: Row, best: Row, key: str, sign: float) -> bool:
    ours, theirs = row.points[key], best.points[key]
    if ours.shape != theirs.shape or len(ours) < 2:
        return row is best
    difference = sign * (ours - theirs)
    return bool(difference.mean() <= 2.0 * difference.std(ddof=1) / np.sqrt(len(difference)))
