"""The tables of claim.md from the records: how right draws, planted faults and real fits were judged."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import median

from records import Records, read_records

ANSWERS = ("pass", "warn", "fail", "not checked")
CLASSES = ("right", "between", "wrong")


def text() -> str:
    """Planted faults, then verdicts on real fits, and how near these are to the posterior."""
    rows = read_records(Path(__file__).with_name("real.jsonl"))
    return "\n\n".join([planted(), answers_by_class(rows), distances(rows)])


def planted() -> str:
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


def answers_by_class(rows: Records) -> str:
    """Verdicts on real fits, by how near these are to the posterior."""
    counts = Counter((row["verdict"], row["class"]) for row in rows)
    lines = ["| real fits | right | between | wrong |", "|---|---|---|---|"]
    for answer in ANSWERS:
        cells = [str(counts[answer, kind]) for kind in CLASSES]
        lines.append(f"| {answer} | {' | '.join(cells)} |")
    return "\n".join(lines)


def distances(rows: Records) -> str:
    """Of each method, medians over the problems of its distance from the posterior."""
    lines = ["| method | ratio of sds | shift in sds | right | wrong |", "|---|---|---|---|---|"]
    for method in dict.fromkeys(row["method"] for row in rows):
        fits = [row for row in rows if row["method"] == method]
        kinds = Counter(row["class"] for row in fits)
        ratio = median(row["ratio"] for row in fits)
        shift = median(row["shift"] for row in fits)
        share = f"{kinds['right']} of {len(fits)} | {kinds['wrong']} of {len(fits)}"
        lines.append(f"| {method} | {ratio:.2f} | {shift:.2f} | {share} |")
    return "\n".join(lines)


#: what a fit of guides.jsonl is called in its table
GUIDE_FITS = {
    "default": "at its defaults",
    "from_nuts": "begun at a draw of NUTS",
    "known_noise": "its noise known, that of NUTS",
}


def guides_text() -> str:
    """How far normal guides are from NUTS on the real fits, and mean-field by its start and with its noise known."""
    folder = Path(__file__).parent
    fits = read_records(folder / "real.jsonl")
    mean_field = _medians(fits, "svi")
    full_rank = _medians(fits, "svi_full_rank")
    sentence = (
        "In the median over the problems the mean of the function is off by "
        f"{mean_field['shift']:.2f} of NUTS's sd ({full_rank['shift']:.2f} by full rank), and its sd is "
        f"{mean_field['ratio']:.2f} times that of NUTS ({full_rank['ratio']:.2f})."
    )
    return f"{sentence}\n\n{guides_table(read_records(folder / 'guides.jsonl'))}"


def _medians(rows: Records, method: str) -> dict[str, float]:
    """Of a method's distances from NUTS, over the problems."""
    fits = [row for row in rows if row["method"] == method]
    return {name: median(row[name] for row in fits) for name in ("shift", "ratio")}


def guides_table(rows: Records) -> str:
    """ELBO, noise and distance from NUTS of mean-field fits, by where they begin and with the noise known."""
    lines = [
        "| problem | mean-field | ELBO | noise (NUTS) | ratio of sds | shift in sds |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            row["problem"],
            GUIDE_FITS[row["fit"]],
            f"{row['elbo']:.1f} ± {row['elbo_error']:.1f}",
            f"{row['noise']:.2f} ({row['true_noise']:.2f})",
            f"{row['ratio']:.2f}",
            f"{row['shift']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
