"""The numbers of a report, each computed once: the comparison table, and that of the baselines."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import xarray as xr

from pyrobnn.core.groups import HELD_OUT, OBSERVED_DATA, PREDICTIONS
from pyrobnn.diagnostics import Verdict
from pyrobnn.diagnostics.baselines import baselines
from pyrobnn.diagnostics.class_points import class_points
from pyrobnn.diagnostics.convergence import convergence
from pyrobnn.diagnostics.evidence import Evidence, gather
from pyrobnn.diagnostics.fidelity import distances, fidelity
from pyrobnn.diagnostics.gap import widest_gap
from pyrobnn.diagnostics.importance import importance
from pyrobnn.diagnostics.judge import judge_all, reference_label
from pyrobnn.diagnostics.points import is_censored, same_data
from pyrobnn.diagnostics.scores import LEVELS, Score, score, units
from pyrobnn.diagnostics.verdict import said
from pyrobnn.plots.predictive import decomposed


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
        trees: Mapping[str, xr.DataTree | Evidence],
        verdicts: Mapping[str, Verdict] | None = None,
        left_out: Mapping[str, str] | None = None,
    ) -> Results:
        """The results of these trees, diagnosed here where no verdicts are given.

        Raises:
            TypeError: if a tree is not a DataTree.
            ValueError: if there is no tree, or ``verdicts`` lacks a label.
        """
        evidence = gather(trees)
        judged = judge_all(evidence) if verdicts is None else verdicts
        missing = [label for label in evidence if label not in judged]
        if missing:
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
        """What a method has to beat: the scores of the baselines, a `Row` each, as of methods."""
        return compare_rows(baselines(self.trees.values()))


@dataclass(frozen=True, eq=False)
class Row:
    """A row of the comparison table (not of the table of checks): the numbers of one method.

    A key that is missing does not apply to it or could not be had.

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
    points: Mapping[str, np.ndarray] = field(
        default_factory=dict,
        repr=False,
        compare=False,
    )
    ranked: bool = True


def compare_rows(trees: Mapping[str, xr.DataTree | Evidence]) -> list[Row]:
    """One `Row` per tree: scores, uncertainties, convergence evidence, distance from the reference run, seconds.

    R-hat and ESS are the worst of the function at the probes, and exist for Markov chains only: independent draws of an
    approximation never get an R-hat.
    """
    evidence = {label: Evidence.of(tree) for label, tree in trees.items()}
    reference = reference_label(evidence)
    ranked = same_data(evidence.values())
    reference_run = evidence[reference] if ranked and reference is not None else None
    rows = []
    for label, run in evidence.items():
        rows.append(_row(label, run, None if label == reference else reference_run, ranked))
    return rows


#: computes numbers by column key, None where one does not apply
_Source = Callable[[], Mapping[str, float | None]]


def _row(
    label: str,
    evidence: Evidence,
    reference: Evidence | None,
    ranked: bool,
) -> Row:
    """The numbers of one tree; a source that raises is named in ``lost``, and no other row is affected."""
    # filled when the source `scores` is asked: errors and points are read from it below
    scores_by_name: dict[str, Score] = {}

    def scores() -> dict[str, float]:
        scores_by_name.update(score(evidence))
        return {name: entry.value for name, entry in scores_by_name.items()}

    values: dict[str, float] = {}
    lost = []
    sources: dict[str, _Source] = {"scores": scores, **_sources(evidence, reference)}
    for name, source in sources.items():
        try:
            values |= _computed(source)
        except Exception as error:
            lost.append(f"{label}: no {name} ({said(error)})")
    finite = {key: float(value) for key, value in values.items() if np.isfinite(value)}
    not_finite = tuple(key for key in values if key not in finite)
    return Row(
        label=label,
        values=finite,
        errors=_finite_errors(scores_by_name),
        not_finite=not_finite,
        lost=tuple(lost),
        points=_points(scores_by_name),
        ranked=ranked,
    )


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
    Column(
        "gap_ratio",
        "in gap",
        "epist. ratio",
        form="× {:.1f}",
    ),
    Column("rhat", "R-hat", "of f, worst", "lower", "{:.3f}"),
    Column("ess", "ESS", "of f, worst", "higher", "{:.0f}"),
    Column("khat", "k-hat", "of p/q", "lower", "{:.2f}"),
    Column("distance", "distance", "of f, reference sd", "lower"),
    Column("shift", "shift", "of f, reference sd, worst region", "lower"),
    Column("sd_ratio", "sd ratio", "of f to reference, worst region", form="{:.2f}"),
    Column("compile_seconds", "compile", "s"),
    Column("fit_seconds", "fit", "s + compiling"),
    Column("refine_seconds", "refined in", "s of the fit's"),
    Column("predict_seconds", "predict", "s"),
)


def _sources(evidence: Evidence, reference: Evidence | None) -> dict[str, _Source]:
    """What computes the numbers of a tree that are no scores, by the name under which one that fails is reported."""

    def seconds() -> dict[str, float | None]:
        return {
            f"{k}_seconds": evidence.seconds(k) for k in ("compile", "fit", "refine", "predict")
        }

    return {
        "R²": lambda: _explained(evidence),
        "uncertainties": lambda: _uncertainties(evidence),
        "gap": lambda: {"gap_ratio": getattr(widest_gap(evidence), "ratio", None)},
        "convergence": lambda: _convergence(evidence),
        "k-hat": lambda: {"khat": getattr(importance(evidence), "k", None)},
        "distance": lambda: _distance(evidence, reference),
        "seconds": seconds,
    }


def _computed(source: _Source) -> dict[str, float]:
    """The numbers of a source that apply, without warnings of those that are not finite."""
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        with np.errstate(all="ignore"):
            numbers = source()
    return {key: value for key, value in numbers.items() if value is not None}


def _finite_errors(scores_by_name: Mapping[str, Score]) -> dict[str, float]:
    errors = {name: entry.data_se for name, entry in scores_by_name.items()}
    known = {name: error for name, error in errors.items() if error is not None}
    return {name: error for name, error in known.items() if np.isfinite(error)}


def _points(scores_by_name: Mapping[str, Score]) -> dict[str, np.ndarray]:
    """What the scores are means of; R² goes by the squared errors of the RMSE."""
    points = {
        name: entry.points for name, entry in scores_by_name.items() if entry.points is not None
    }
    for name in [name for name in points if name.startswith("rmse")]:
        points[name.removesuffix("_standardized").replace("rmse", "r2")] = points[name]
    return points


def _distance(evidence: Evidence, reference: Evidence | None) -> dict[str, float | None]:
    """How far the function lies from the reference's, in the median of the test inputs, and of those in each region.

    A shift counts in sds of the reference. ``shift`` and ``sd_ratio`` are those of the region where they are worst.
    """
    per_point = None if reference is None else fidelity(evidence, reference).per_point
    if reference is None or per_point is None:
        return {"distance": None}
    values: dict[str, float | None] = {"distance": float(per_point["wasserstein"].median())}
    by_region = distances(evidence, reference)
    if by_region:
        values["shift"] = max(distance.shift for distance in by_region.values())
        values["sd_ratio"] = max(
            (distance.sd_ratio for distance in by_region.values()),
            key=lambda ratio: abs(np.log(max(ratio, 1e-12))),
        )
    for region, distance in by_region.items():
        values[f"shift[{region}]"] = distance.shift
        values[f"sd_ratio[{region}]"] = distance.sd_ratio
    return values


def _explained(evidence: Evidence) -> dict[str, float]:
    """Share of the held-out squared error of the training mean that is gone: averaged over outputs, and of each."""
    y = evidence.values(HELD_OUT, "y")
    train = evidence.values(OBSERVED_DATA, "y")
    mean = evidence.values(PREDICTIONS, "mean")
    if y is None or train is None or mean is None or len(y) == 0 or is_censored(evidence):
        return {}
    y = _columns(y)
    total = ((y - _columns(train).mean(0)) ** 2).sum(0)
    remaining = ((y - _columns(mean)) ** 2).sum(0)
    if not (total > 0).all():
        return {}
    # digits that rounding alone makes are dropped; + 0.0 makes −0 a zero
    shares = np.round(1.0 - remaining / total, 12) + 0.0
    explained = {"r2": float(shares.mean())}
    if len(shares) > 1:
        explained |= {f"r2[{output}]": float(share) for output, share in enumerate(shares)}
    return explained


def _columns(values: np.ndarray) -> np.ndarray:
    """As float64 (point, output)."""
    return values.astype(np.float64).reshape(len(values), -1)


def _uncertainties(evidence: Evidence) -> dict[str, float]:
    """Means over the held-out points; of several outputs in units of their spread, and of each."""
    scale = np.ones(1) if class_points(evidence) is not None else units(evidence)
    if scale is None:
        return {}
    several = len(scale) > 1
    uncertainties = {}
    for name, means in _mean_uncertainties(evidence, len(scale)).items():
        uncertainties[f"{name}_standardized" if several else name] = float((means / scale).mean())
        if several:
            labelled = {f"{name}[{output}]": float(mean) for output, mean in enumerate(means)}
            uncertainties |= labelled
    return uncertainties


def _mean_uncertainties(evidence: Evidence, num_outputs: int) -> dict[str, np.ndarray]:
    """Kind → its mean over the points, of each output; without a kind that some output lacks."""
    by_output = [decomposed(evidence, output) for output in range(num_outputs)]
    means = {}
    for name, values in zip(("aleatoric", "epistemic"), zip(*by_output, strict=True), strict=True):
        known = [np.mean(points) for points in values if points is not None]
        if len(known) == num_outputs:
            means[name] = np.array(known)
    return means


def _convergence(evidence: Evidence) -> dict[str, float]:
    """The worst R-hat and ESS of the function; the verdict's may be those of the log density, or of the noise."""
    if evidence.is_iid:
        return {}
    chains = convergence(evidence)
    if chains is None or chains.of_function.sizes["quantity"] == 0:
        return {}
    table = chains.of_function
    worst = {
        "rhat": np.fmax.reduce(table["rhat"].values),
        "ess": np.fmin.reduce(np.fmin(table["ess_bulk"].values, table["ess_tail"].values)),
    }
    return {name: float(value) for name, value in worst.items() if not np.isnan(value)}


def best_labels(rows: list[Row], column: Column) -> set[str]:
    """The rows within two standard errors of the best of this column; none where a column has no error to tell by.

    The error is that of the paired difference from the best row, point by point of the held-out data.
    """
    losses = _losses(rows, column)
    if len(losses) < 2 or not all(row.ranked for row in rows):
        return set()
    best = min(losses, key=lambda label: float(losses[label].mean()))
    close = {label for label in losses if _is_close(losses[label], losses[best])}
    return close | {best}


def _losses(rows: list[Row], column: Column) -> dict[str, np.ndarray]:
    """Label → what the row's number is the mean of, (point,), with its sign such that less is better."""
    # R² goes by squared errors (`_points`), of which less is better
    sign = -1.0 if column.better == "higher" and column.key != "r2" else 1.0
    rows = [row for row in rows if column.key in row.values and column.key in row.points]
    return {row.label: sign * row.points[column.key] for row in rows}


def _is_close(losses: np.ndarray, best: np.ndarray) -> bool:
    """Whether losses (point,) exceed the best's by no more than two standard errors of the paired difference."""
    if losses.shape != best.shape or len(losses) < 2:
        return False
    difference = losses - best
    return difference.mean() <= 2.0 * difference.std(ddof=1) / np.sqrt(len(difference))
