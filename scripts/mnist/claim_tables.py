"""The table of claim.md from the records: means over seeds, of each data set and number of softmaxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from records import Records, read_records

#: the accuracies that the study reports, in percent
REPORTED = {"start": 96.39, "SWAG": 95.46}


def text() -> str:
    """What claim.md says by the records."""
    return table(read_records(Path(__file__).with_name("records.jsonl")))


def table(records: Records) -> str:
    """Scores of the start and of SWAG, beside what the study reports of MNIST with two softmaxes."""
    lines = [
        "| data | softmaxes | | seeds | accuracy, % | NLL | ECE | study's accuracy, % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    cells = sorted({(row["data"], row["softmaxes"]) for row in records})
    for data, softmaxes in cells:
        rows = [row for row in records if (row["data"], row["softmaxes"]) == (data, softmaxes)]
        for name in rows[0]["scores"]:
            scores = [row["scores"][name] for row in rows]
            reported = ""
            if data == "mnist" and softmaxes == "two softmaxes" and name in REPORTED:
                reported = f"{REPORTED[name]:.2f}"
            lines.append(
                f"| {data} | {softmaxes} | {name} | {len(rows)} | {_mean(scores, 'accuracy'):.2f} | "
                f"{_mean(scores, 'nll'):.3f} | {_mean(scores, 'ece'):.3f} | {reported} |"
            )
    return "\n".join(lines)


def _mean(scores: Sequence[Mapping[str, float]], name: str) -> float:
    """The mean over seeds of the score of this name."""
    return fmean(by_name[name] for by_name in scores)
