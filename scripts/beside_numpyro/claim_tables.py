"""The table of claim.md from the records."""

from __future__ import annotations

from math import hypot
from pathlib import Path
from statistics import median

from records import Record, read_records

RECORDS = Path(__file__).with_name("records.jsonl")
HEAD = (
    "program",
    "method",
    "largest z of a mean",
    "of what",
    "sd / NumPyro's, median (range)",
    "leapfrogs / NumPyro's",
    "divergences, ours and NumPyro's",
    "CPU s cold, ours and NumPyro's",
    "CPU s warm",
    "draws, model",
)


def text() -> str:
    """What claim.md says by the records: a row for each fit of ours beside NumPyro's."""
    records = read_records(RECORDS)
    peers = {row["program"]: row for row in records if row["method"] == "NumPyro"}
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for row in records:
        if row["method"] != "NumPyro" and row["program"] in peers:
            lines.append(f"| {' | '.join(cells(row, peers[row['program']]))} |")
    return "\n".join(lines)


def cells(ours: Record, peer: Record) -> list[str]:
    """One row of the table."""
    z, where = largest_z(ours, peer)
    ratios = ratios_of_sds(ours, peer)
    leapfrogs = "–"
    divergences = "–"
    if ours["leapfrogs"] is not None and ours["method"] == "NUTS":
        leapfrogs = f"{ours['leapfrogs'] / peer['leapfrogs']:.2f}"
        divergences = f"{ours['divergences']}, {peer['divergences']}"
    return [
        ours["program"],
        ours["method"],
        f"{z:.1f}",
        where,
        f"{median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})",
        leapfrogs,
        divergences,
        f"{ours['cpu_cold']}, {peer['cpu_cold']}",
        f"{ours['cpu_warm']}, {peer['cpu_warm']}",
        f"{ours['draws']}, {ours['model']}",
    ]


def largest_z(ours: Record, peer: Record) -> tuple[float, str]:
    """The largest difference of two means in its Monte-Carlo errors, and of which scalar."""
    values = []
    for name, (mean, _, error, _) in ours["moments"].items():
        peer_mean, _, peer_error, _ = peer["moments"][name]
        values.append((abs(mean - peer_mean) / hypot(error, peer_error), name))
    return max(values)


def ratios_of_sds(ours: Record, peer: Record) -> list[float]:
    """The sd of every scalar over NumPyro's."""
    return [moments[1] / peer["moments"][name][1] for name, moments in ours["moments"].items()]
