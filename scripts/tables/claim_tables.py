"""The tables of claim.md from the records: the rule, the regressor beside CatBoost, and small tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from records import Record, Records, read_records

from tables.held_out_split import TABLES

HERE = Path(__file__).parent
FORMS = {
    "crps": ".4g",
    "rmse": ".4g",
    "coverage_90": ".1%",
    "cpu": ".0f",
}
SMALL = {
    "rmse": ".3f",
    "nll": ".2f",
    "nll_mixture": ".2f",
    "coverage_90": ".1%",
    "cpu_seconds": ".0f",
}


def text() -> str:
    """What claim.md says by the records."""
    return "\n\n".join(
        [
            table(read_records(HERE / "records.jsonl")),
            beside_boosting(read_records(HERE / "boosting.jsonl")),
            small_table(read_records(HERE / "small.jsonl")),
        ]
    )


def table(records: Sequence[Record]) -> str:
    """Markdown: the published rows, then ours, of each the rule that was run last."""
    published = json.loads((HERE / "published.json").read_text(encoding="utf-8"))["rows"]
    lines = [
        "| table | method | RMSE | NLL (mixture) | 90 % covers | R-hat of f, median (max) | least ESS | s (CPU s) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    measured = [record for record in records if record["part"] == "test"]
    for name in TABLES:
        lines += [_line_of(row) for row in published if row["table"] == name]
        of_table = [record for record in measured if record["table"] == name]
        lines += [_line_of(_over_seeds(runs)) for runs in _runs_of_last_rules(of_table)]
    return "\n".join(lines)


def _runs_of_last_rules(records: Sequence[Record]) -> list[Records]:
    """The runs of each method by the rule that was run last."""
    latest = {record["method"]: record["rule"] for record in records}
    runs = []
    for method, rule in latest.items():
        key = {"method": method, "rule": rule}
        runs.append([record for record in records if key.items() <= record.items()])
    return runs


def _over_seeds(records: Sequence[Record]) -> dict[str, Any]:
    """Means over runs that differ by their seed and threads; the worst of what says whether the chains agree."""
    means = ("rmse", "nll", "nll_mixture", "coverage_90", "rhat", "seconds", "cpu_seconds")
    folds = dict.fromkeys(means, fmean) | {"rhat_max": max, "ess_min": min}
    row = dict(records[-1])
    for key, fold in folds.items():
        row[key] = fold([record[key] for record in records])
    if len(records) > 1:
        row["method"] += f", mean of {len(records)} seeds"
    return row


def _line_of(row: Record) -> str:
    """Markdown of one row; a published one, which has no part, has fewer numbers and is in italics."""
    nll = f"{row['nll']:.4f}" if "nll" in row else ""
    cells = " |  | "
    cpu = "on 10 cores"
    method = f"*{row['method']}*"
    if "part" in row:
        cells = f"{row['coverage_90']:.1%} | {row['rhat']:.2f} ({row['rhat_max']:.2f}) | {row['ess_min']:.0f}"
        nll = f"{nll} ({row['nll_mixture']:.4f})"
        cpu = f"({row['cpu_seconds']:.0f})"
        method = row["method"]
    return f"| {row['table']} | {method} | {row['rmse']:.4f} | {nll} | {cells} | {row['seconds']:.0f} {cpu} |"


def beside_boosting(records: Sequence[Record]) -> str:
    """Markdown: a row a table, BNNRegressor() first and CatBoost second."""
    lines = [
        "| table | rows | CRPS | ratio | RMSE | 90 % covers | CPU s |",
        "|---|---|---|---|---|---|---|",
    ]
    for ours, cat in zip(records[::2], records[1::2]):
        cells = [f"{ours[key]:{form}}, {cat[key]:{form}}" for key, form in FORMS.items()]
        cells.insert(1, f"{ours['crps'] / cat['crps']:.2f}")
        lines.append(f"| {ours['table']} | {ours['rows']:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def small_table(records: Sequence[Record]) -> str:
    """Markdown: a row a table, method and time limit."""
    lines = [
        "| table | method | RMSE | NLL | NLL of the mixture | mean ± 1.64 sd covers | CPU s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(
        records, key=lambda row: (row["table"], row["method"], row["max_seconds"] or 0)
    ):
        limit = row["max_seconds"] and f", {row['max_seconds']:.0f} s: took {row['seconds']:.0f}"
        cells = []
        for key, form in SMALL.items():
            cells.append(format(row[key], form) if key in row else "")
        lines.append(f"| {row['table']} | {row['method']}{limit or ''} | {' | '.join(cells)} |")
    return "\n".join(lines)
