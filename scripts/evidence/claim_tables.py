"""The tables of claim.md from the records: log evidence by each way, and which activation each way prefers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from evidence.known_cases import CASES, DATA
from records import read_records

Record = Mapping[str, Any]
#: case and way → the log evidence of each seed
Evidence = Mapping[tuple[str, str], list[float]]
WAYS = ("SMC", "Laplace", "SVI")


def text() -> str:
    """What claim.md says by the records."""
    return table(read_records(Path(__file__).with_name("records.jsonl")))


def table(records: Sequence[Record]) -> str:
    """Each case, by each way: the mean over seeds, and the sd where there are several; then tanh over ReLU."""
    evidence: dict[tuple[str, str], list[float]] = {}
    for record in records:
        evidence.setdefault((record["case"], record["way"]), []).append(record["log_evidence"])
    return "\n".join([*_lines_of_cases(records, evidence), "", *_lines_of_ranking(evidence)])


def _lines_of_cases(records: Sequence[Record], evidence: Evidence) -> list[str]:
    """A row a case that SMC has run on, the ways beside the exact value."""
    lines = [
        "| model | exact | SMC, mean of seeds (sd; its own error) | Laplace | SVI, a lower bound | CPU s of SMC |",
        "|---|---|---|---|---|---|",
    ]
    for name in CASES:
        runs = [record for record in records if (record["case"], record["way"]) == (name, "SMC")]
        if not runs:
            continue
        exact = runs[0]["exact"]
        cells = [
            "" if exact is None else f"{exact:.2f}",
            _smc_cell(runs),
            _mean_of(evidence.get((name, "Laplace"))),
            _mean_of(evidence.get((name, "SVI"))),
            f"{fmean(run['cpu_seconds'] for run in runs):.0f}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _lines_of_ranking(evidence: Evidence) -> list[str]:
    """A row a set of data: by how much each way prefers tanh to ReLU."""
    lines = [
        "tanh over ReLU, nats:",
        "",
        "| data | SMC | Laplace | SVI |",
        "|---|---|---|---|",
    ]
    for data in DATA:
        tanh = [evidence.get((f"tanh on {data}", way)) for way in WAYS]
        relu = [evidence.get((f"relu on {data}", way)) for way in WAYS]
        if all(tanh) and all(relu):
            gaps = [f"{fmean(a) - fmean(b):+.2f}" for a, b in zip(tanh, relu, strict=True)]
            lines.append(f"| {data} | {' | '.join(gaps)} |")
    return lines


def _smc_cell(runs: Sequence[Record]) -> str:
    """The mean over seeds, with the sd where there are several, and the largest of SMC's own errors."""
    evidence = [run["log_evidence"] for run in runs]
    spread = f"{stdev(evidence):.2f}; " if len(runs) > 1 else ""
    return f"{fmean(evidence):.2f} ({spread}{max(run['error'] for run in runs):.2f})"


def _mean_of(values: list[float] | None) -> str:
    """The mean over seeds, nothing where there are none."""
    return f"{fmean(values):.2f}" if values else ""
