"""The tables of claim.md from the records: every method on every set, published numbers below."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

from records import Record, mean_and_error, read_records
from uci.beside_published import FLOOR, claims, overlaps, published, values_of
from uci.rules import RULES

HERE = Path(__file__).parent
SMALL_SETS = ("boston", "concrete", "energy", "wine", "yacht")
LARGE_SETS = ("kin8nm", "naval", "power")
METRICS = {
    "log_density": "test log density (nats a point; higher is better)",
    "rmse": "test RMSE (units of the target)",
    "crps": "test CRPS (units of the target)",
    "coverage": "coverage of the 95 % interval",
    "cpu_seconds": "CPU seconds a split (choice of hyper-parameters included)",
}


def text() -> str:
    """What claim.md says by the records: the small sets, the large ones by methods that finish, and the claims."""
    records = read_records(HERE / "records.jsonl")
    texts = []
    for names in (SMALL_SETS, LARGE_SETS):
        of_sets = [record for record in records if record["dataset"] in names]
        methods = _methods_of_all(of_sets, names)
        of_methods = [record for record in of_sets if record["method"] in methods]
        for metric in ("log_density", "rmse", "cpu_seconds"):
            texts.append(markdown(of_methods, metric, methods, published()))
    texts.append("\n".join(f"- {claim}" for claim in claims(records, published())))
    return "\n\n".join(texts)


def _methods_of_all(records: Sequence[Record], names: Sequence[str]) -> list[str]:
    """The methods that have a record of each of the data sets, so that every cell is filled."""
    ran = {(record["method"], record["dataset"]) for record in records}
    return [
        method for method in (FLOOR, *RULES) if ran.issuperset(itertools.product([method], names))
    ]


def markdown(
    records: Sequence[Record],
    metric: str,
    methods: Sequence[str],
    table: Record,
) -> str:
    """A row per method and a column per data set, mean ± standard error [splits]; published rows below."""
    values = values_of(records, metric)
    shares = overlaps(records)
    names = sorted(values)
    lines = [f"| {METRICS[metric]} [splits] | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for method in methods:
        texts = []
        for name in names:
            splits = values[name].get(method)
            texts.append(_text(list(splits.values()), shares[name]) if splits else "")
        if any(texts):
            lines.append(f"| {method} | {' | '.join(texts)} |")
    for column in table["columns"]:
        published_values = [column.get(metric, {}).get(name) for name in names]
        if any(published_values):
            texts = [_published_text(pair) for pair in published_values]
            lines.append(f"| {_label_of(column)} | {' | '.join(texts)} |")
    return "\n".join(lines)


def _label_of(column: Record) -> str:
    """The label of a published method, with what sets its protocol apart from ours."""
    facts = [column["label"]]
    if column["spread"] != "se":
        facts.append("± sd")
    if column["splits"] != "standard":
        facts.append("own splits")
    if column["noise"] != "homoskedastic":
        facts.append("heteroskedastic")
    return f"*{', '.join(facts)}*"


def _published_text(pair: Sequence[float | None] | None) -> str:
    """A published value and its spread, either of which may be missing."""
    if pair is None:
        return ""
    value, spread = pair[:2]
    return f"{value:g}" if spread is None else f"{value:g} ± {spread:g}"


def _text(values: Sequence[float], overlap: float) -> str:
    mean, error = mean_and_error(values, overlap)
    if 0 < abs(mean) < 0.01:
        digits = 1 - math.floor(math.log10(abs(mean)))
    else:
        digits = 3 if abs(mean) < 100 else 0
    spread = f" ± {error:.{digits}f}" if math.isfinite(error) else ""
    return f"{mean:.{digits}f}{spread} [{len(values)}]"
