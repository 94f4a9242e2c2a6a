"""The tables of claim.md from the records: whether chains converge, and the uncertainty in the gap."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from records import Record, read_records
from svi_against_mcmc.study_cases import DATA, NOISES


def text() -> str:
    """What claim.md says by the records."""
    records = read_records(Path(__file__).with_name("records.jsonl"))
    return f"{chain_table(records)}\n\n{gap_table(records)}"


def chain_table(records: Sequence[Record]) -> str:
    """NUTS on the study's points: whether it has converged, what it cost, and what its verdict says."""
    lines = [
        "| data | noise | R-hat of f | ESS of f | draws | leapfrogs a draw | cut at depth | divergences | CPU s "
        "| gap ratio | verdict | its reasons |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows = [r for r in records if r["part"] == "chains"]
    for r in sorted(rows, key=lambda r: (r["data"], r["noise"])):
        checks = [check.rsplit(" ", 1) for check in r["not passed"] if "fit_warnings" not in check]
        reasons = ", ".join(f"`{name}`" for name, status in checks if status in ("warn", "fail"))
        ratio = "" if r["gap_ratio"] is None else f"{r['gap_ratio']:.1f}"
        lines.append(
            f"| {r['data']} | {r['noise']} | {r['rhat_function']:.3f} | {r['ess_function']:.0f} | {r['draws']} "
            f"| {r['leapfrogs']:.0f} | {r['cut']:.1%} | {r['divergences']} | {r['cpu seconds']:.0f} | {ratio} "
            f"| {r['status']} | {reasons} |"
        )
    return "\n".join(lines)


def gap_table(records: Sequence[Record]) -> str:
    """Epistemic sd in the widest gap over that at the data, NUTS beside SVI: means over fresh data and their errors."""
    lines = [
        "| data | noise | data sets | gap / data, NUTS | gap / data, SVI | NUTS / SVI, in the gap "
        "| NUTS / SVI, at the data | largest R-hat of f |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows = [record for record in records if record["part"] == "gaps"]
    for name, noise in itertools.product(DATA, NOISES):
        pairs = _pairs([r for r in rows if (r["data"], r["noise"]) == (name, noise)])
        if len(pairs) < 2:
            continue
        cells = " | ".join(map(_mean_and_error, _ratios(pairs)))
        worst = max(nuts["rhat_function"] for nuts, _ in pairs)
        lines.append(f"| {name} | {noise} | {len(pairs)} | {cells} | {worst:.3f} |")
    return "\n".join(lines)


def _ratios(pairs: Sequence[tuple[Record, Record]]) -> tuple[list[float], ...]:
    """Of each pair the sd in the gap over that at the data by NUTS and by SVI; NUTS' over SVI's, there and here."""
    of_nuts = [nuts["gap_ratio"] for nuts, _ in pairs]
    of_svi = [svi["gap_ratio"] for _, svi in pairs]
    at_data = [nuts["sd at data"] / svi["sd at data"] for nuts, svi in pairs]
    in_gap = [ratio * nuts / svi for ratio, nuts, svi in zip(at_data, of_nuts, of_svi, strict=True)]
    return of_nuts, of_svi, in_gap, at_data


def _pairs(rows: Sequence[Record]) -> list[tuple[Record, Record]]:
    """The records of NUTS and of SVI on the same draw of the data."""
    of_nuts = {row["seed"]: row for row in rows if row["method"] == "nuts"}
    of_svi = {row["seed"]: row for row in rows if row["method"] == "svi"}
    return [(of_nuts[seed], of_svi[seed]) for seed in of_nuts if seed in of_svi]


def _mean_and_error(values: Sequence[float]) -> str:
    return f"{fmean(values):.2f} ± {stdev(values) / len(values) ** 0.5:.2f}"
