"""The tables of claim.md from the records: planted faults by number of rows, and regressors of packages on tables."""

from __future__ import annotations

from pathlib import Path

from records import Records, read_records


def text() -> str:
    """What passes by fault and number of rows, beside the best test's misses; and regressors of packages on tables."""
    rows = read_records(Path(__file__).with_name("records.jsonl"))
    faults = _faults_by_size([row for row in rows if "n" in row])
    packages = _regressors_by_table([row for row in rows if "table" in row])
    return "\n".join([*faults, "", *packages])


def _faults_by_size(cases: Records) -> list[str]:
    """Of right predictions those that do not pass, of each fault those that do, by number of rows."""
    sizes = sorted({row["n"] for row in cases})
    lines = [
        f"| planted | {' | '.join(f'{n:,} rows' for n in sizes)} |",
        "|---" * (1 + len(sizes)) + "|",
    ]
    for kind, fault in dict.fromkeys((row["kind"], row["fault"]) for row in cases):
        of_fault = [row for row in cases if (row["kind"], row["fault"]) == (kind, fault)]
        cells = []
        for n in sizes:
            of_size = [row for row in of_fault if row["n"] == n]
            cells.append(_judged(of_size, right=fault == "right"))
        lines.append(f"| {kind}: {fault} | {' | '.join(cells)} |")
    return lines


def _judged(rows: Records, right: bool) -> str:
    """Of right predictions how many warn or fail; of a fault how many pass, and what the best test would miss."""
    passed, warned, failed = _counts(rows)
    total = passed + warned + failed
    if right:
        return f"{warned} of {total} warn, {failed} fail"
    missed = 1.0 - sum(row["power"] * sum(row["counts"].values()) for row in rows) / total
    return f"{passed} of {total} pass ({missed:.1%})"


def _counts(rows: Records) -> tuple[int, int, int]:
    """How many predictions passed, warned and failed, over all rows."""
    passed = sum(row["counts"].get("pass", 0) for row in rows)
    warned = sum(row["counts"].get("warn", 0) for row in rows)
    failed = sum(row["counts"].get("fail", 0) for row in rows)
    return passed, warned, failed


def _regressors_by_table(rows: Records) -> list[str]:
    """A row per regressor and a column per table: status, the checks that spoke, and the ratio to the baseline."""
    names = list(dict.fromkeys(row["table"] for row in rows))
    lines = [f"| regressor | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for regressor in dict.fromkeys(row["regressor"] for row in rows):
        of_table = {row["table"]: row for row in rows if row["regressor"] == regressor}
        cells = []
        for name in names:
            row = of_table[name]
            reasons = f": {', '.join(row['seen'])}" if row["seen"] else ""
            cells.append(f"**{row['model']}**{reasons} ({row['ratio']:.2f})")
        lines.append(f"| {regressor} | {' | '.join(cells)} |")
    return lines
