"""From records to tables: mean ± standard error over splits, beside what was published."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

METRICS = {
    "log_density": "test log density (nats a point; higher is better)",
    "rmse": "test RMSE (units of the target)",
    "crps": "test CRPS (units of the target)",
    "coverage": "coverage of the 95 % interval",
    "seconds": "seconds a split (wall clock, choice of hyper-parameters included)",
    "cpu_seconds": "CPU seconds a split (choice of hyper-parameters included)",
}
#: splits of which a standard error is told
FEWEST = 3
_DIGITS = {"log_density": 3, "rmse": 3, "crps": 3, "coverage": 3, "seconds": 1, "cpu_seconds": 1}


class Cell(NamedTuple):
    r"""A mean over splits and its standard error (NaN for one or two splits, whose spread says nothing of that of all).

    .. math:: sd\,\sqrt{1/n + n_{test}/n_{train}}

    since the splits share most of their training rows: sd / √n takes them for independent and is too small. Where the
    sizes are not known it is sd / √n.

    Reference: Inference for the Generalization Error (Nadeau & Bengio, 2003).
    """

    mean: float
    error: float
    num_splits: int


#: data set → method → split → value
Values = dict[str, dict[str, dict[int, float]]]


def values_of(records: Sequence[Mapping[str, Any]], metric: str) -> Values:
    """One metric of every record; of repeated work the last counts."""
    found: Values = {}
    for record in records:
        value = record["scores"].get(metric, record.get(metric))
        splits = found.setdefault(record["dataset"], {}).setdefault(record["method"], {})
        splits[record["split"]] = float(value)
    return found


def summarize(records: Sequence[Mapping[str, Any]], metric: str) -> dict[str, dict[str, Cell]]:
    """Mean and standard error of a metric, data set → method → :class:`Cell`.

    Raises:
        ValueError: an unknown metric.
    """
    if metric not in METRICS:
        raise ValueError(f"unknown metric {metric!r}: choose from {', '.join(METRICS)}")
    shares = overlaps(records)
    return {
        dataset: {method: cell(list(splits.values()), shares[dataset]) for method, splits in methods.items()}
        for dataset, methods in values_of(records, metric).items()
    }


def overlaps(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Test rows over training rows, by data set; 0 where the records do not tell them."""
    found: dict[str, float] = {}
    for record in records:
        found.setdefault(record["dataset"], record.get("num_test", 0) / record.get("num_train", 1))
    return found


def cell(values: Sequence[float], overlap: float = 0.0) -> Cell:
    """Mean and standard error of the values of several splits; ``overlap`` is test rows over training rows."""
    numbers = np.asarray(values, dtype=float)
    shrunk = math.sqrt(1 / len(numbers) + overlap)
    error = float(numbers.std(ddof=1)) * shrunk if len(numbers) >= FEWEST else math.nan
    return Cell(float(numbers.mean()), error, len(numbers))


def difference(values: Values, dataset: str, method: str, other: str, overlap: float = 0.0) -> Cell | None:
    """Mean of method − other over the splits both have (paired: its error is that of the difference)."""
    one, two = values[dataset].get(method, {}), values[dataset].get(other, {})
    shared = sorted(one.keys() & two.keys())
    return cell([one[split] - two[split] for split in shared], overlap) if shared else None


def _told(value: Cell) -> str:
    digits = _digits(value.mean, 3)
    if math.isfinite(value.error):
        return f"{value.mean:.{digits}f} ± {value.error:.{digits}f}"
    return f"{value.mean:.{digits}f} ({_splits(value)})"


def _digits(value: float, digits: int) -> int:
    """Decimals, more than ``digits`` where two of them would say nothing otherwise: naval's RMSE is 0.0004."""
    small = 0 < abs(value) < 10.0 ** (1 - digits)
    return 1 - math.floor(math.log10(abs(value))) if small else digits


def smallest_difference(records: Sequence[Mapping[str, Any]], metric: str) -> dict[str, float]:
    """By data set: two standard errors of the paired difference of two methods, the median over all pairs.

    Two methods that are closer cannot be told apart by this table.
    """
    values, shares, found = values_of(records, metric), overlaps(records), {}
    for dataset, methods in values.items():
        pairs = [
            difference(values, dataset, one, two, shares[dataset])
            for one, two in itertools.combinations(methods, 2)
        ]
        errors = [pair.error for pair in pairs if pair is not None and math.isfinite(pair.error)]
        if errors:
            found[dataset] = 2 * float(np.median(errors))
    return found


def markdown(
    records: Sequence[Mapping[str, Any]],
    metric: str,
    methods: Sequence[str],
    datasets: Sequence[str],
    published: Mapping[str, Any] | None = None,
    marks: Mapping[tuple[str, str], str] | None = None,
) -> str:
    """A table, a row per method and a column per data set; published rows below, with their own kind of spread.

    A cell of fewer splits than the title's says how many; ``marks``, by data set and method, are put behind cells.
    """
    digits = _DIGITS[metric]
    summary = summarize(records, metric)
    full = max((c.num_splits for row in summary.values() for c in row.values()), default=0)
    title = f"{METRICS[metric]}, {full} split{'s' * (full != 1)}"
    lines = [f"| {title} | {' | '.join(datasets)} |", "|---|" + "---|" * len(datasets)]
    for method in methods:
        cells = [summary.get(dataset, {}).get(method) for dataset in datasets]
        if any(cells):
            texts = [
                _text(c, digits, full) + ((marks or {}).get((dataset, method), "") if c else "")
                for c, dataset in zip(cells, datasets, strict=True)
            ]
            lines.append(f"| {method} | {' | '.join(texts)} |")
    for column in (published or {"columns": []})["columns"]:
        entries = [column.get(metric, {}).get(dataset) for dataset in datasets]
        if any(entries):
            spread = "" if column["spread"] == "se" else " (± sd)"
            own = "" if column["splits"] == "standard" else ", own splits"
            noise = "" if column["noise"] == "homoskedastic" else ", heteroskedastic"
            label = f"*{column['label']}{spread}{noise}{own}*"
            lines.append(f"| {label} | {' | '.join(_published(e) for e in entries)} |")
    least = smallest_difference(records, metric)
    told = [f"{name} {least[name]:.{_digits(least[name], digits)}f}" for name in datasets if name in least]
    if told:
        lines += [
            "",
            f"Two methods that differ by less cannot be told apart (two standard errors): {', '.join(told)}.",
        ]
    return "\n".join(lines)


def _text(value: Cell | None, digits: int, full: int) -> str:
    if value is None:
        return ""
    digits = _digits(value.mean, digits)
    text = f"{value.mean:.{digits}f}"
    if math.isfinite(value.error):
        text += f" ± {value.error:.{digits}f}"
    return text if value.num_splits == full else f"{text} ({_splits(value)})"


def _splits(value: Cell) -> str:
    return f"{value.num_splits} split{'s' * (value.num_splits > 1)}"


def _published(entry: Sequence[float] | None) -> str:
    if entry is None:
        return ""
    return f"{entry[0]:g}" + (f" ± {entry[1]:g}" if entry[1] is not None else "")


def read_published(path: str | Path) -> dict[str, Any]:
    """The table of published numbers.

    Raises:
        ValueError: a file in another format.
    """
    table = json.loads(Path(path).read_text(encoding="utf-8"))
    needed = {"id", "label", "citation", "noise", "splits", "spread", "rmse", "log_density"}
    if not isinstance(table, dict) or any(needed - column.keys() for column in table.get("columns", [{}])):
        raise ValueError(
            f"{path} is not a table of published results: each column needs {', '.join(sorted(needed))}"
        )
    return table


@dataclass(frozen=True)
class Target:
    """Something that a method should do, the numbers it is judged by, and whether it does (None: too few splits)."""

    dataset: str
    method: str
    claim: str
    evidence: str
    met: bool | None


def compare_with_published(
    records: Sequence[Mapping[str, Any]], published: Mapping[str, Any], *, floor: str = "linear"
) -> list[Target]:
    """The claims of the benchmark, judged.

    Every method beats the linear floor by more than 5 standard errors (paired over splits, log density and RMSE);
    mean-field SVI is no worse than the published Pyro column; MC dropout is no worse than its published columns by more
    than 2 standard errors (ours and theirs combined); the best method is no worse than the best published log density
    with homoskedastic noise on the same splits. One split or two judge none of them: they may be easy or hard ones.
    """
    columns = {column["id"]: column for column in published["columns"]}
    density, rmse, shares = values_of(records, "log_density"), values_of(records, "rmse"), overlaps(records)
    targets: list[Target] = []
    for dataset, methods in density.items():
        overlap = shares[dataset]
        means = {method: cell(list(splits.values()), overlap) for method, splits in methods.items()}
        for method in methods:
            if method != floor and floor in methods:
                targets.append(_beats_floor(density, rmse, dataset, method, floor, overlap))
        for method in ("svi-rt", "svi-lrt"):
            if method in methods and dataset in columns["pyro_svi"]["rmse"]:
                targets.append(_no_worse(density, rmse, columns["pyro_svi"], dataset, method, overlap))
        for column in ("mc_dropout_2016", "mc_dropout_2018"):
            if "mc-dropout" in methods and dataset in columns[column]["rmse"]:
                theirs = columns[column]
                targets.append(_no_worse(density, rmse, theirs, dataset, "mc-dropout", overlap, errors=2.0))
        peers = {
            column["label"]: column["log_density"][dataset][0]
            for column in columns.values()
            if dataset in column["log_density"]
            and column["noise"] == "homoskedastic"
            and column["splits"] == "standard"
            and column["id"] != "linear"
        }
        if not peers:  # nothing was published on these splits
            continue
        several = [method for method in means if method != floor and means[method].num_splits >= FEWEST]
        best = max(several or means, key=lambda method: means[method].mean)
        peer = max(peers, key=peers.__getitem__)
        targets.append(
            Target(
                dataset,
                best,
                "the best method reaches the best published log density with homoskedastic noise",
                f"{best} {_told(means[best])}, {peer} {peers[peer]:.3f}",
                means[best].mean >= peers[peer] if several else None,
            )
        )
    return targets


def _beats_floor(
    density: Values, rmse: Values, dataset: str, method: str, floor: str, overlap: float
) -> Target:
    gains, told = [], []
    for values, name, sign in ((density, "log density", 1.0), (rmse, "RMSE", -1.0)):
        gap = difference(values, dataset, method, floor, overlap)
        if gap is None:
            told.append(f"{name} on no split of both")
        elif gap.num_splits >= FEWEST:
            gain = sign * gap.mean
            gains.append(gain / gap.error if gap.error else math.copysign(math.inf, gain))
            told.append(f"{name} by {gains[-1]:.1f} standard errors")
            one, two = (values[dataset][each] for each in (method, floor))
            told[-1] += _without_the_worst(
                {k: sign * (one[k] - two[k]) for k in one.keys() & two.keys()}, overlap
            )
        else:
            told.append(f"{name} by {sign * gap.mean:.2g} on {_splits(gap)}")
    claim = f"{method} beats the linear floor by more than 5 standard errors"
    return Target(dataset, method, claim, ", ".join(told), min(gains) > 5 if len(gains) == 2 else None)


def _without_the_worst(gains: Mapping[int, float], overlap: float) -> str:
    """Where 5 standard errors are missed for a single split: which, and the number without it. No verdict changes."""
    worst = min(gains, key=gains.__getitem__)
    every, rest = (cell([v for k, v in gains.items() if k not in left], overlap) for left in ((), (worst,)))
    if every.mean > 5 * every.error or not rest.mean > 5 * rest.error or rest.num_splits < 4:
        return ""
    return f" (by {rest.mean / rest.error:.1f} without split {worst})"


def _no_worse(
    density: Values,
    rmse: Values,
    column: Mapping[str, Any],
    dataset: str,
    method: str,
    overlap: float,
    errors: float = 0.0,
) -> Target:
    found: list[bool] = []
    parts, few = [], False
    for values, name, sign in ((density, "log_density", 1.0), (rmse, "rmse", -1.0)):
        ours, theirs = cell(list(values[dataset][method].values()), overlap), column[name][dataset]
        spread = theirs[1] if column["spread"] == "se" else theirs[1] / math.sqrt(20)
        few |= ours.num_splits < FEWEST
        slack = errors * math.hypot(ours.error, spread)
        found.append(sign * (ours.mean - theirs[0]) >= -slack)
        digits = _digits(theirs[0], 3)
        parts.append(f"{name} {_told(ours)} against {theirs[0]:.{digits}f} ± {spread:.{digits}f}")
    allowance = f" within {errors:g} standard errors" if errors else ""
    return Target(
        dataset,
        method,
        f"{method} is at least {column['label']}{allowance}",
        "; ".join(parts),
        None if few else all(found),
    )
