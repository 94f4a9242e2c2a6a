"""The tables of claim.md from the records: means over seeds, a table a part."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, stdev

from learning.active_learning import END
from records import Record, read_records


def text() -> str:
    """What claim.md says by the records."""
    return table(read_records(Path(__file__).with_name("records.jsonl")))


def table(records: Sequence[Record]) -> str:
    """A table of each part: means over seeds, with standard errors."""
    lines = list[str]()
    for name in ("optimise", "active", "step"):
        rows = [row for row in records if row["part"] == name]
        cells: dict[tuple[str, str], list[dict[str, float]]] = {}
        for row in sorted(rows, key=lambda row: row["problem"]):
            cells.setdefault((row["problem"], row["method"]), []).append(_numbers(row))
        if not cells:
            continue
        labels = list(_numbers(rows[0]))
        lines += ["", f"| {name} | | seeds | {' | '.join(labels)} |"]
        lines.append("|---" * (3 + len(labels)) + "|")
        for key, runs in cells.items():
            means = []
            for label in labels:
                means.append(_mean_of([float(run[label]) for run in runs]))
            lines.append(f"| {' | '.join([*key, str(len(runs)), *means])} |")
    return "\n".join(lines[1:])


def _numbers(row: Record) -> dict[str, float]:
    """What the tables show of a record."""
    if row["part"] == "optimise":
        regrets = {f"regret after {num}": row["regret"][num - 1] for num in (30, 60)}
        return regrets | {"CPU s": row["cpu_seconds"]}
    if row["part"] == "active":
        scores = {}
        for name, num in itertools.product(("rmse", "log_density"), (60, END)):
            scores[f"{name}, {num} rows"] = row[name][row["rows"].index(num)]
        return scores | {"CPU s": row["cpu_seconds"]}
    compiled = row["seconds_of_steps"][10:]
    return {
        "first ten, CPU s": sum(row["seconds_of_steps"][:10]),
        "then median": median(compiled),
        "largest": max(compiled),
        "gradients": median(row["gradients"]),
    }


def _mean_of(values: list[float]) -> str:
    """The mean, with its standard error where there are several values."""
    error = f" ± {stdev(values) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
    return f"{fmean(values):.2f}{error}"
