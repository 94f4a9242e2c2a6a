"""Saved trees judged: the page, the summary and the table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from pyrobnn.cli.say import say
from pyrobnn.diagnostics import Evidence, Verdict
from pyrobnn.diagnostics.judge import judge_all
from pyrobnn.report import write_report, write_summary
from pyrobnn.report.baselines import baselines
from pyrobnn.report.comparison import COLUMNS, Row, baseline_rows, compare_rows

if TYPE_CHECKING:
    from xarray import DataTree


def write(
    trees: Mapping[str, DataTree], report: Path, summary: Path, left_out: Mapping[str, str]
) -> dict[str, Verdict]:
    """Judge, write both files, and only then print."""
    evidence = {label: Evidence(tree) for label, tree in trees.items()}
    verdicts = judge_all(evidence)
    write_summary(evidence, verdicts, summary, left_out=left_out)
    write_report(evidence, report, verdicts=verdicts, left_out=left_out)
    say(f"\n{_table(compare_rows(evidence, verdicts))}\n")
    # apart from the methods: beside them they would not fit on a terminal of 80 characters
    floor = baseline_rows(baselines(evidence.values()))
    if floor:
        say(f"to be beaten\n{_table(floor)}\n")
    for verdict in verdicts.values():
        say(f"{verdict.summary} ({verdict.lines})")
    for name, reason in left_out.items():
        say(f"{name}: left out: {reason}")
    say(f"\nreport: {report}\nsummary: {summary}")
    return verdicts


def _table(rows: list[Row]) -> str:
    columns = [column for column in COLUMNS if any(column.key in row.values for row in rows)]
    cells = {
        column.title: [f"{row.values[column.key]:.4g}" if column.key in row.values else "" for row in rows]
        for column in columns
    }
    frame = pd.DataFrame(cells, index=[row.label for row in rows])
    # one method a column: as many numbers as there are fit on a terminal of 80 characters
    return frame.T.to_string()
