"""The tables of claim.md and of the page on deep nets from the records: one row a method, of each net."""

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
NETS = {"cnn": "A CNN", "resnet18": "ResNet-18"}
#: steps from which a net has been trained, so that its scores say something
ENOUGH_STEPS = 100


def text() -> str:
    """What claim.md says by the records."""
    return table(read_records(Path(__file__).with_name("records.jsonl")))


def table(records: Records) -> str:
    """A table for each net and number of steps, with scores where there were enough of them."""
    tables = []
    for net in NETS:
        of_net = [row for row in records if row["net"] == net]
        tasks = dict.fromkeys((row["num_train"], row["num_steps"]) for row in of_net)
        for task in tasks:
            rows = [row for row in of_net if (row["num_train"], row["num_steps"]) == task]
            tables.append(_of_task(rows))
    return "\n\n".join(tables)


def _of_task(rows: Records) -> str:
    """Means over seeds of what each method of one training cost, and where it was one, of its scores."""
    example = rows[0]
    scored = example["num_steps"] >= ENOUGH_STEPS
    names = ["CPU s", "peak MB", "file MB"]
    if scored:
        names = ["log density", "accuracy", "ECE", "AUROC turned", "AUROC photographs", *names]
    lines = [
        f"{NETS[example['net']]} of {example['weights']:,} weights, {example['num_train']:,} images, trainings of "
        f"{example['num_steps']:,} steps:",
        "",
        f"| | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    for method in METHODS:
        of_method = [row for row in rows if row["method"] == method]
        if of_method:
            cells = [method, *(_scores(of_method) if scored else ()), *_costs(of_method)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _scores(rows: Sequence[Record]) -> list[str]:
    """Means of the scores of predictions."""
    cells = [f"{fmean(row[name] for row in rows):.3f}" for name in ("log_density", "accuracy")]
    cells.append(f"{fmean(row['ece'] for row in rows):.3f}")
    kinds = ("turned", "photographs")
    return cells + [f"{fmean(row['auroc'][kind] for row in rows):.2f}" for kind in kinds]


def _costs(rows: Sequence[Record]) -> list[str]:
    """Mean seconds, the most memory, and the mean size of the file."""
    seconds = fmean(row["cpu_seconds"] for row in rows)
    peak = max(row["peak_mb"] for row in rows)
    return [f"{seconds:.0f}", f"{peak:,}", f"{fmean(row['file_mb'] for row in rows):.1f}"]
