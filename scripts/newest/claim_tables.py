"""The table of claim.md and the sentence of README.md from the records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from newest.environments import COMPARE
from records import Record, read_records
from speed.numbers_of_speed import NUMBERS

RECORDS = Path(__file__).with_name("records.jsonl")


def text() -> str:
    """What claim.md says by the records."""
    return table(read_records(RECORDS))


def table(records: Sequence[Record]) -> str:
    """Versions and tests, a row a record, the newest first; then the times of the last record in both environments."""
    lines = [
        "| run | Python | torch | NumPy | ArviZ | matplotlib | scikit-learn | tests | passed, failed |"
    ]
    lines.append("|---" * 9 + "|")
    for record in reversed(records):
        installed = record["newest"]["versions"]
        tests = record["tests"]
        names = ("python", "torch", "numpy", "arviz-stats", "matplotlib", "scikit-learn")
        cells = [
            record["finished_at"][:10],
            *(installed[name] for name in names),
            " ".join(tests["asked"]),
        ]
        lines.append(f"| {' | '.join(cells)} | {tests['passed']}, {len(tests['failed'])} |")
    newest = records[-1]
    labels = _labelled(newest)
    head = [f"torch {newest[side]['versions']['torch']} ({side})" for side in ("newest", "pinned")]
    lines += ["", f"| | {head[0]} | {head[1]} | ratio |", "|---|---|---|---|"]
    for label, new, old in labels:
        lines.append(f"| {label} | {new:.3g} | {old:.3g} | {new / old:.2f} |")
    if "note" in newest:
        lines += ["", newest["note"]]
    return "\n".join(lines)


def _labelled(record: Record) -> list[tuple[str, float, float]]:
    """Label, newest and pinned value of every time."""
    times = ("nuts gradient", "svi step", "laplace fit", "predict")
    labels = {name: NUMBERS[name].label for name in times}
    labels["compare"] = f"`pyrobnn {' '.join(COMPARE)}`, CPU seconds"
    new = record["newest"]["numbers"]
    old = record["pinned"]["numbers"]
    return [
        (label, new[name], old[name])
        for name, label in labels.items()
        if name in new and name in old
    ]


def sentence(records: Sequence[Record]) -> str:
    """The versions that were run last, in one sentence."""
    record = records[-1]
    texts = []
    for side in ("pinned", "newest"):
        installed = record[side]["versions"]
        texts.append(
            f"torch {installed['torch'].split('+')[0]}, NumPy {installed['numpy']} ({side})"
        )
    return f"Run with {texts[0]} and {texts[1]}: [what passed, how fast](scripts/newest/claim.md)."
