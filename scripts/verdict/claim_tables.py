"""The table of claim.md from the records: how right draws and planted faults were judged."""

from __future__ import annotations

from pathlib import Path

from records import Records, read_records


def text() -> str:
    """Status by kind of case."""
    lines = ["| cases | pass | warn | fail |", "|---|---|---|---|"]
    for name, rows in verdicts().items():
        statuses = [row["status"] for row in rows]
        counts = map(statuses.count, ("pass", "warn", "fail"))
        lines.append(f"| {name} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def verdicts() -> dict[str, Records]:
    """The cases of the verdict's study, right draws and planted faults."""
    rows = read_records(Path(__file__).with_name("records.jsonl"))
    worse = {"pass": 0, "warn": 1, "fail": 2}
    sick = [row for row in rows if not row["healthy"]]
    return {
        "right draws": [row for row in rows if row["healthy"]],
        "planted faults": sick,
        "planted faults, with `pb.audit`": [
            row
            | {
                "status": max(
                    row["status"],
                    row["audit"],
                    key=worse.__getitem__,
                )
            }
            for row in sick
        ],
    }
