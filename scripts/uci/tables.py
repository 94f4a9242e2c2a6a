"""From the records of the UCI sets to tables and claims, beside what was published."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from records import mean_and_error

METRICS = {
    "log_density": "test log density (nats a point; higher is better)",
    "rmse": "test RMSE (units of the target)",
    "crps": "test CRPS (units of the target)",
    "coverage": "coverage of the 95 % interval",
    "cpu_seconds": "CPU seconds a split (choice of hyper-parameters included)",
}
FLOOR = "linear"
#: splits from which a standard error is given, and the standard errors by which a method beats the linear model
FEWEST, CLEARLY = 3, 5.0

Record = Mapping[str, Any]
#: data set → method → split → value
Values = dict[str, dict[str, dict[int, float]]]


def published() -> dict[str, Any]:
    """The published numbers, with their sources."""
    return json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))


def values_of(records: Sequence[Record], metric: str) -> Values:
    """One metric of every record; of repeated work the last counts."""
    found: Values = {}
    for record in records:
        value = record["scores"].get(metric, record.get(metric))
        splits = found.setdefault(record["dataset"], {}).setdefault(record["method"], {})
        splits[record["split"]] = float(value)
    return found


def overlaps(records: Sequence[Record]) -> dict[str, float]:
    """Test rows over training rows, by data set."""
    return {record["dataset"]: record.get("num_test", 0) / record.get("num_train", 1) for record in records}


def markdown(records: Sequence[Record], metric: str, methods: Sequence[str], table: Mapping[str, Any]) -> str:
    """A row per method and a column per data set, mean ± standard error [splits]; published rows below."""
    values, shares = values_of(records, metric), overlaps(records)
    names = sorted(values)
    lines = [f"| {METRICS[metric]} [splits] | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for method in methods:
        cells = [values[name].get(method) for name in names]
        texts = [
            _text(list(cell.values()), shares[name]) if cell else ""
            for name, cell in zip(names, cells, strict=True)
        ]
        lines += [f"| {method} | {' | '.join(texts)} |"] if any(texts) else []
    for column in table["columns"]:
        entries = [column.get(metric, {}).get(name) for name in names]
        if any(entries):
            facts = ["± sd"] * (column["spread"] != "se") + ["own splits"] * (column["splits"] != "standard")
            facts += ["heteroskedastic"] * (column["noise"] != "homoskedastic")
            label = f"*{column['label']}{', '.join(['', *facts])}*"
            shown = [
                "" if e is None else f"{e[0]:g}" + ("" if e[1] is None else f" ± {e[1]:g}") for e in entries
            ]
            lines.append(f"| {label} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _text(values: Sequence[float], overlap: float) -> str:
    mean, error = mean_and_error(values, overlap)
    digits = 1 - math.floor(math.log10(abs(mean))) if 0 < abs(mean) < 0.01 else 3 if abs(mean) < 100 else 0
    spread = f" ± {error:.{digits}f}" if math.isfinite(error) else ""
    return f"{mean:.{digits}f}{spread} [{len(values)}]"


def beats_floor(records: Sequence[Record]) -> dict[tuple[str, str], tuple[float, bool]]:
    """Standard errors by which each method is better than the linear model, paired over splits, and whether enough.

    The smaller of the gains in log density and in RMSE counts; cells of fewer than three splits are not judged.
    """
    shares, found = overlaps(records), {}
    density, rmse = values_of(records, "log_density"), values_of(records, "rmse")
    for name, methods in density.items():
        for method in methods:
            if method == FLOOR or FLOOR not in methods:
                continue
            gains = []
            for values, sign in ((density, 1.0), (rmse, -1.0)):
                one, two = values[name][method], values[name][FLOOR]
                shared = sorted(one.keys() & two.keys())
                mean, error = mean_and_error([sign * (one[k] - two[k]) for k in shared], shares[name])
                gains.append(mean / error if error else math.copysign(math.inf, mean))
            if math.isfinite(min(gains)) or not any(map(math.isnan, gains)):
                found[name, method] = min(gains), min(gains) > CLEARLY
    return found


def best_published(
    records: Sequence[Record], table: Mapping[str, Any]
) -> dict[str, tuple[str, float, float]]:
    """By data set: our best method, its log density, and the best published one of one noise on the same splits."""
    density, found = values_of(records, "log_density"), {}
    for name, methods in density.items():
        peers = [
            column["log_density"][name][0]
            for column in table["columns"]
            if name in column["log_density"]
            and (column["noise"], column["splits"]) == ("homoskedastic", "standard")
            and column["id"] != FLOOR
        ]
        means = {
            m: mean_and_error(list(s.values()))[0]
            for m, s in methods.items()
            if len(s) >= FEWEST and m != FLOOR
        }
        if peers and means:
            best = max(means, key=means.__getitem__)
            found[name] = best, means[best], max(peers)
    return found


def claims(records: Sequence[Record], table: Mapping[str, Any]) -> list[str]:
    """What should hold, and whether it does."""
    floor = beats_floor(records)
    clear = sum(enough for _, enough in floor.values())
    lines = [f"{clear} of {len(floor)} cells beat the linear model by more than {CLEARLY:g} standard errors"]
    lines += [
        f"{'met    ' if ours >= theirs else 'NOT MET'} {name}: {best} {ours:.3f}, best published {theirs:.3f}"
        for name, (best, ours, theirs) in sorted(best_published(records, table).items())
    ]
    return [
        *lines,
        *(f"{column['label']}: {column['citation']} {column['url']}" for column in table["columns"]),
    ]
