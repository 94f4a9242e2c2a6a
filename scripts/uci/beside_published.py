"""The records beside the linear floor and the published numbers: which method is better, by how much."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from records import Record, mean_and_error

FLOOR = "linear"
#: splits from which a standard error is given, and the standard errors by which a method beats the linear model
FEWEST = 3
CLEARLY = 5.0
#: data set → method → split → value
Values = dict[str, dict[str, dict[int, float]]]


def published() -> dict[str, Any]:
    """The published numbers, with their sources."""
    return json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))


def values_of(records: Sequence[Record], metric: str) -> Values:
    """One metric of every record; of repeated work the last counts."""
    values_of_sets: Values = {}
    for record in records:
        value = record["scores"].get(metric, record.get(metric))
        splits = values_of_sets.setdefault(record["dataset"], {}).setdefault(record["method"], {})
        splits[record["split"]] = float(value)
    return values_of_sets


def overlaps(records: Sequence[Record]) -> dict[str, float]:
    """Test rows over training rows, by data set."""
    return {
        record["dataset"]: record.get("num_test", 0) / record.get("num_train", 1)
        for record in records
    }


def beats_floor(records: Sequence[Record]) -> dict[tuple[str, str], tuple[float, bool]]:
    """Standard errors by which each method is better than the linear model, paired over splits, and whether enough.

    The smaller of the gains in log density and in RMSE counts; cells of fewer than three splits are not judged.
    """
    shares = overlaps(records)
    margins = {}
    density = values_of(records, "log_density")
    rmse = values_of(records, "rmse")
    for name, methods in density.items():
        for method in methods:
            if method == FLOOR or FLOOR not in methods:
                continue
            gains = [
                _gain(density[name][method], density[name][FLOOR], 1.0, shares[name]),
                _gain(rmse[name][method], rmse[name][FLOOR], -1.0, shares[name]),
            ]
            if math.isfinite(min(gains)) or not any(map(math.isnan, gains)):
                margins[name, method] = min(gains), min(gains) > CLEARLY
    return margins


def _gain(
    method: Mapping[int, float],
    floor: Mapping[int, float],
    sign: float,
    overlap: float,
) -> float:
    """The mean gain over the splits that both have, in its standard errors; ``sign`` is 1 where more is better."""
    shared = sorted(method.keys() & floor.keys())
    mean, error = mean_and_error([sign * (method[k] - floor[k]) for k in shared], overlap)
    return mean / error if error else math.copysign(math.inf, mean)


def best_published(records: Sequence[Record], table: Record) -> dict[str, tuple[str, float, float]]:
    """By data set: our best method, its log density, and the best published one of one noise on the same splits."""
    comparable = _comparable_densities(table)
    comparisons = {}
    for name, methods in values_of(records, "log_density").items():
        peers = [densities[name][0] for densities in comparable if name in densities]
        means = _means_over_splits(methods)
        if peers and means:
            best = max(means, key=means.__getitem__)
            comparisons[name] = best, means[best], max(peers)
    return comparisons


def _comparable_densities(table: Record) -> list[dict[str, Sequence[float]]]:
    """Log densities by data set of each published method of one noise on the standard splits, but the linear model."""
    protocol = {"noise": "homoskedastic", "splits": "standard"}
    columns = [column for column in table["columns"] if protocol.items() <= column.items()]
    return [column["log_density"] for column in columns if column["id"] != FLOOR]


def _means_over_splits(methods: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """The mean of each method with enough splits, but the linear model."""
    return {
        method: mean_and_error(list(splits.values()))[0]
        for method, splits in methods.items()
        if len(splits) >= FEWEST and method != FLOOR
    }


def claims(records: Sequence[Record], table: Record) -> list[str]:
    """What should hold, and whether it does."""
    floor = beats_floor(records)
    clear = sum(enough for _, enough in floor.values())
    lines = [
        f"{clear} of {len(floor)} cells beat the linear model by more than {CLEARLY:g} standard errors"
    ]
    for name, (best, ours, theirs) in sorted(best_published(records, table).items()):
        met = "met    " if ours >= theirs else "NOT MET"
        lines.append(f"{met} {name}: {best} {ours:.3f}, best published {theirs:.3f}")
    for column in table["columns"]:
        lines.append(f"{column['label']}: {column['citation']} {column['url']}")
    return lines
