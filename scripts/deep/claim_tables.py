"""The table of claim.md from the records: one row a method, of each net."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from records import Record, Records, read_records

#: in the order of the table
METHODS = [
    "torch loop",
    "temperature scaling",
    "posthoc",
    "MAP",
    "ensemble of 5",
    "SWAG",
    "MC dropout",
    "SVI, mean field",
    "last-layer Laplace",
    "last-layer Laplace, loop's net",
    "laplace-torch, last layer",
    "Kronecker Laplace",
    "Kronecker Laplace, loop's net",
    "laplace-torch, Kronecker",
]
NETS = {"cnn": "CNN", "resnet18": "ResNet-18"}


def text() -> str:
    """What claim.md says by the records."""
    return table(read_records(Path(__file__).with_name("records.jsonl")))


def table(records: Records) -> str:
    """Means over seeds of scores and costs, of each net and method."""
    lines = [
        "| net | weights | | seeds | log density | accuracy | ECE | AUROC turned | AUROC photographs | CPU s | "
        "peak MB | file MB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for net, name in NETS.items():
        for method in METHODS:
            rows = [row for row in records if (row["net"], row["method"]) == (net, method)]
            if rows:
                lines.append(_line(name, method, rows))
    return "\n".join(lines)


def _line(net: str, method: str, rows: Sequence[Record]) -> str:
    turned = fmean(row["auroc"]["turned"] for row in rows)
    photographs = fmean(row["auroc"]["photographs"] for row in rows)
    seconds = fmean(row["cpu_seconds"] for row in rows)
    peak = max(row["peak_mb"] for row in rows)
    cells = [net, f"{rows[0]['weights']:,}", method, str(len(rows))]
    cells += [f"{fmean(row[name] for row in rows):.3f}" for name in ("log_density", "accuracy")]
    cells += [f"{fmean(row['ece'] for row in rows):.3f}", f"{turned:.2f}", f"{photographs:.2f}"]
    cells += [f"{seconds:.0f}", f"{peak:,}", f"{fmean(row['file_mb'] for row in rows):.1f}"]
    return f"| {' | '.join(cells)} |"
