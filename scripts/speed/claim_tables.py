"""The tables of claim.md from the records: NUTS beside its peers, and the changes since an earlier commit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from records import read_records
from speed.numbers_of_speed import NUMBERS, Record

HERE = Path(__file__).parent


def text() -> str:
    """What claim.md says by the records."""
    lines = [
        "| model | chains | pyrobnn, µs | NumPyro, µs | ratio | Pyro / pyrobnn |",
        "|---|---|---|---|---|---|",
    ]
    for row in gradients():
        ours = row.get("ours_us", row.get("machine_us"))
        lines.append(
            f"| {row['case']} | {row['chains']} | {ours:.1f} | {row['numpyro_us']:.1f} | "
            f"{row['ours/numpyro']:.2f} | {row['pyro/ours']:.0f} |"
        )
    return "\n".join([*lines, "", table(read_records(HERE / "records.jsonl"))])


def gradients() -> list[Record]:
    """The last comparison of each model and number of chains with both peers."""
    latest = {}
    for row in read_records(HERE / "nuts.jsonl"):
        if {"ours/numpyro", "pyro/ours"} <= row.keys():
            latest[row["case"], row["chains"]] = row
    return list(latest.values())


def table(records: Sequence[Record]) -> str:
    """A row a comparison, the newest first: factors or differences of the numbers, ± their standard errors."""
    lines = [f"| commit | beside | {' | '.join(number.label for number in NUMBERS.values())} |"]
    lines += ["|---" * (2 + len(NUMBERS)) + "|"]
    for record in reversed(records):
        cells = []
        for name, number in NUMBERS.items():
            change, error = number.change(record["old"][name], record["new"][name])
            factor = math.exp(change)
            if number.kind == "factor":
                cells.append(f"× {factor:.2f} ± {factor * error:.2f}")
            else:
                cells.append(f"{change:+.3f} ± {error:.3f}")
        lines.append(f"| {record['commit']} | {record['against']} | {' | '.join(cells)} |")
    return "\n".join(lines)
