"""The numbers of a report, each computed once: the comparison table, and that of the baselines."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr

from pyrobnn.core.groups import HELD_OUT, OBSERVED_DATA, PREDICTIONS
from pyrobnn.diagnostics import Verdict
from pyrobnn.diagnostics.baselines import baselines
from pyrobnn.diagnostics.convergence import convergence
from pyrobnn.diagnostics.evidence import Evidence, gather
from pyrobnn.diagnostics.fidelity import fidelity
from pyrobnn.diagnostics.importance import importance
from pyrobnn.diagnostics.judge import judge_all, reference_label
from pyrobnn.diagnostics.points import class_points, is_censored, same_data, widest_gap
from pyrobnn.diagnostics.scores import LEVELS, score, units
from pyrobnn.diagnostics.verdict import said
from pyrobnn.plots.predictive import decomposed


@dataclass(frozen=True)
class Column:
    """One column of the table.

    Args:
        key: name in ``summary.json``.
        title: heading. note: what it is, in a few words, with its unit.
        better: "lower", "higher", "nominal" (coverage), or "" where no value is better than another.
        form: how the page writes it; three significant digits where empty.
    """

    key: str
    title: str
    note: str
    better: str = ""
    form: str = ""


COLUMNS = (
    Column("rmse", "RMSE", "", "lower"),
    Column("rmse_standardized", "RMSE / sd", "mean of outputs", "lower"),
    Column("r2", "R²", "held-out", "higher", "{:.2f}"),
    Column("accuracy", "accuracy", "", "higher", "{:.1%}"),
    Column("log_prob", "log density", "per point ± SE", "higher"),
    Column("crps", "CRPS", "", "lower"),
    Column("crps_standardized", "CRPS / sd", "mean of outputs", "lower"),
    Column("brier", "Brier", "", "lower"),
    Column("ece", "ECE", "", "lower"),
    *(
        Column(f"coverage_{100 * level:.0f}", f"{level:.0%}", "covered", "nominal", "{:.0%}")
        for level in LEVELS
    ),
    Column("aleatoric", "aleatoric", "mean"),
    Column("epistemic", "epistemic", "mean"),
    Column("aleatoric_standardized", "aleatoric / sd", "mean of outputs"),
    Column("epistemic_standardized", "epistemic / sd", "mean of outputs"),
    Column("gap_ratio", "in gap", "epist. ratio", form="× {:.1f}"),
    Column("rhat", "R-hat", "of f, worst", "lower", "{:.3f}"),
    Column("ess", "ESS", "of f, worst", "higher", "{:.0f}"),
    Column("khat", "k-hat", "of p/q", "lower", "{:.2f}"),
    Column("distance", "distance", "of f, reference sd", "lower"),
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


def compare_rows(trees: Mapping[str, xr.DataTree | Evidence]) -> list[Row]:
    """One `Row` per tree: scores, uncertainties, convergence evidence, distance from the reference run, seconds.

    R-hat and ESS are the worst of the function at the probes, and exist for Markov chains only: independent draws of an
    approximation never get an R-hat.
    """
    evidence = {label: Evidence.of(tree) for label, tree in trees.items()}
    reference = reference_label(evidence)
    ranked = same_data(evidence.values())
    return [
        _row(
            label,
            each,
            evidence[reference] if ranked and reference not in (None, label) else None,
            ranked,
        )
        for label, each in evidence.items()
    ]


def _row(label: str, evidence: Evidence, reference: Evidence | None, ranked: bool) -> Row:
    """The numbers of one tree; a source that raises is named in ``lost``, and no other row is affected."""
    errors: dict[str, float] = {}
    points: dict[str, np.ndarray] = {}

    def scores() -> dict[str, float]:
        found = score(evidence).values()
        points.update({each.name: each.points for each in found if each.points is not None})
        errors.update({each.name: each.data_se for each in found if each.data_se is not None})
        return {each.name: each.value for each in found}

    def distance() -> dict[str, float | None]:
        found = None if reference is None else fidelity(evidence, reference).per_point
        return {"distance": None if found is None else float(found["wasserstein"].median())}

    sources: dict[str, Callable[[], Mapping[str, float | None]]] = {
        "scores": scores,
        "R²": lambda: _explained(evidence),
        "uncertainties": lambda: _uncertainties(evidence),
        "gap": lambda: {"gap_ratio": getattr(widest_gap(evidence), "ratio", None)},
        "convergence": lambda: _convergence(evidence),
        "k-hat": lambda: {"khat": getattr(importance(evidence), "k", None)},
        "distance": distance,
        "seconds": lambda: {
            f"{k}_seconds": evidence.seconds(k) for k in ("compile", "fit", "predict")
        },
    }
    values: dict[str, float] = {}
    lost = []
    for what, source in sources.items():
        try:
            with (
                warnings.catch_warnings(action="ignore", category=RuntimeWarning),
                np.errstate(all="ignore"),
            ):
                values |= {name: value for name, value in source().items() if value is not None}
        except Exception as error:
            lost.append(f"{label}: no {what} ({said(error)})")
    finite = {name: float(value) for name, value in values.items() if np.isfinite(value)}
    not_finite = tuple(name for name in values if name not in finite)
    errors = {name: error for name, error in errors.items() if np.isfinite(error)}
    for name in [name for name in points if name.startswith("rmse")]:
        points[name.removesuffix("_standardized").replace("rmse", "r2")] = points[name]
    return Row(label, finite, errors, not_finite, tuple(lost), points, ranked)


def _explained(evidence: Evidence) -> dict[str, float]:
    """Share of the held-out squared error of the training mean that is gone: averaged over outputs, and of each."""
    y, train = (evidence.values(group, "y") for group in (HELD_OUT, OBSERVED_DATA))
    mean = evidence.values(PREDICTIONS, "mean")
    if y is None or train is None or mean is None or len(y) == 0 or is_censored(evidence):
        return {}
    y, train = (each.astype(np.float64).reshape(len(each), -1) for each in (y, train))
    floor = ((y - train.mean(0)) ** 2).sum(0)
    left = ((y - mean.reshape(len(y), -1)) ** 2).sum(0)
    if not (floor > 0).all():
        return {}
    gone = np.round(1.0 - left / floor, 12) + 0.0  # no minus before a zero
    each = (
        {f"r2[{output}]": float(share) for output, share in enumerate(gone)}
        if len(gone) > 1
        else {}
    )
    return {"r2": float(gone.mean()), **each}


def _uncertainties(evidence: Evidence) -> dict[str, float]:
    """Means over the held-out points; of several outputs in units of their spread, and of each."""
    scale = np.ones(1) if class_points(evidence) is not None else units(evidence)
    if scale is None:
        return {}
    pairs = [decomposed(evidence, output) for output in range(len(scale))]
    suffix = "" if len(pairs) == 1 else "_standardized"
    found = {}
    for name, each in zip(("aleatoric", "epistemic"), zip(*pairs, strict=True)):
        if any(values is None for values in each):
            continue
        means = [float(np.mean(values)) for values in each]
        found[f"{name}{suffix}"] = float(np.mean(np.array(means) / scale))
        if suffix:
            found |= {f"{name}[{output}]": mean for output, mean in enumerate(means)}
    return found


def _convergence(evidence: Evidence) -> dict[str, float]:
    """The worst R-hat and ESS of the function; the verdict's may be those of the log density, or of the noise."""
    found = None if evidence.is_iid else convergence(evidence)
    if found is None or found.of_function.sizes["quantity"] == 0:
        return {}
    table = found.of_function
    worst = {
        "rhat": np.fmax.reduce(table["rhat"].values),
        "ess": np.fmin.reduce(np.fmin(table["ess_bulk"].values, table["ess_tail"].values)),
    }
    return {name: float(value) for name, value in worst.items() if not np.isnan(value)}


def best_labels(rows: list[Row], column: Column) -> set[str]:
    """The rows within two standard errors of the best of this column; none where a column has no error to tell by.

    The error is that of the paired difference from the best row, point by point of the held-out data.
    """
    have = {row.label: row for row in rows if column.key in row.values and column.key in row.points}
    if len(have) < 2 or not all(row.ranked for row in rows):
        return set()
    sign = -1.0 if column.better == "higher" and column.key != "r2" else 1.0
    best = min(have.values(), key=lambda row: sign * float(row.points[column.key].mean()))
    theirs = best.points[column.key]
    close = {best.label}
    for label, row in have.items():
        ours = row.points[column.key]
        if ours.shape == theirs.shape and len(ours) > 1:
            difference = sign * (ours - theirs)
            if difference.mean() <= 2.0 * difference.std(ddof=1) / np.sqrt(len(difference)):
                close.add(label)
    return close


@dataclass(frozen=True, eq=False)
class Results:
    """Judged runs with their tables, for the report, the summary and the terminal.

    Args:
        trees: label → evidence, in the caller's order. verdicts: of each label.
        left_out: methods that were asked for and gave no tree → the reason.
    """

    trees: dict[str, Evidence]
    verdicts: dict[str, Verdict]
    left_out: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        trees: Mapping[str, Any],
        verdicts: Mapping | None = None,
        left_out: Mapping | None = None,
    ) -> Results:
        """The results of these trees, diagnosed here where no verdicts are given.

        Raises:
            TypeError: if a tree is not a DataTree.
            ValueError: if there is no tree, or ``verdicts`` lacks a label.
        """
        evidence = gather(trees)
        judged = judge_all(evidence) if verdicts is None else verdicts
        if missing := [label for label in evidence if label not in judged]:
            raise ValueError(f"'verdicts' has none for {missing}; give one of every tree, or None")
        return cls(evidence, {label: judged[label] for label in evidence}, dict(left_out or {}))

    @functools.cached_property
    def reference(self) -> str | None:
        """The run that the others are measured against."""
        return reference_label(self.trees)

    @functools.cached_property
    def rows(self) -> list[Row]:
        """The comparison table."""
        return compare_rows(self.trees)

    @functools.cached_property
    def floor(self) -> list[Row]:
        """What a method has to beat: one `Row` of the same scores per baseline."""
        return compare_rows(baselines(self.trees.values()))
