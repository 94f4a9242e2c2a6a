"""Write the tables of the claims, of the paper and of the headline page from the records. Numbers are never typed.

python scripts/page.py            # rewrites */claim.md, results/README.md, and tables of README.md and docs
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import deep.claim_tables  # noqa: E402
import verdict.claim_tables  # noqa: E402
from headline import headline  # noqa: E402
from newest.claim_tables import sentence  # noqa: E402
from records import read_records  # noqa: E402
from speed.claim_tables import gradients  # noqa: E402
from svi_against_mcmc.claim_tables import gap_table  # noqa: E402

START = "<!-- table -->"
END = "<!-- end -->"
#: folders with records, whose claim.md has a table of them
CLAIMS = (
    "speed",
    "posteriordb",
    "evidence",
    "svi_against_mcmc",
    "tables",
    "learning",
    "uci",
    "verdict",
    "judge",
    "mnist",
    "newest",
    "deep",
    "beside_numpyro",
)


def main() -> None:
    """Write every page."""
    for claim in CLAIMS:
        tables = importlib.import_module(f"{claim}.claim_tables")
        write(HERE / claim / "claim.md", tables.text())
    write(HERE / "results" / "README.md", headline())
    readme = HERE.parent / "README.md"
    write(readme, gradients_of_four_chains())
    write(readme, sentence(read_records(HERE / "newest" / "records.jsonl")), "<!-- versions -->")
    write(HERE.parent / "docs" / "howto" / "deep-nets.md", deep.claim_tables.text())
    methods = HERE.parent / "docs" / "methods.md"
    write(methods, verdict.claim_tables.guides_text(), "<!-- table: guides -->")
    paper = HERE.parent / "docs" / "paper.md"
    write(paper, gradients_of_four_chains(), "<!-- table: nuts -->")
    write(paper, outcomes_of_posteriordb(), "<!-- table: posteriordb -->")
    write(paper, verdict.claim_tables.text(), "<!-- table: verdict -->")
    gaps = gap_table(read_records(HERE / "svi_against_mcmc" / "records.jsonl"))
    write(paper, gaps, "<!-- table: gaps -->")


def write(path: Path, table: str, start: str = START) -> None:
    """Put a table between the marker ``start`` of a page and the end that follows."""
    before, marker, from_table = path.read_text(encoding="utf-8").partition(start)
    _, end, after = from_table.partition(END)
    if not end or start in after:
        raise ValueError(f"{path} needs one {start} and an {END} behind it")
    path.write_text(f"{before}{marker}\n{table}\n{end}{after}", encoding="utf-8")


def gradients_of_four_chains() -> str:
    """NUTS beside NumPyro and Pyro, by four chains."""
    lines = ["| model | time per gradient / NumPyro's | Pyro's / ours |", "|---|---|---|"]
    rows = [row for row in gradients() if row["chains"] == 4]
    lines += [
        f"| {row['case']} | {row['ours/numpyro']:.2f} | {row['pyro/ours']:.0f} |" for row in rows
    ]
    return "\n".join(lines)


def outcomes_of_posteriordb() -> str:
    """Runs of NUTS on posteriordb by outcome."""
    runs = read_records(HERE / "posteriordb" / "records.jsonl")
    outcomes = [row["outcome"] for row in runs]
    names = {row["name"] for row in runs}
    counts = [len(names), len(runs), *map(outcomes.count, ("right", "warned", "WRONG"))]
    head = "| reference posteriors | runs | right | wrong, and warned of | wrong, and silent |\n|---|---|---|---|---|"
    return f"{head}\n| {' | '.join(map(str, counts))} |"


if __name__ == "__main__":
    main()
