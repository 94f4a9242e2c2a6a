"""Keep what `make coverage` measured: the share of lines of each part of the package that the fast tests run.

make coverage && python scripts/record_coverage.py     # reads .coverage, rewrites results/coverage.jsonl
"""

from __future__ import annotations

import json
import platform
from collections import Counter
from pathlib import Path

import coverage

from pyrobnn.studies.uci.provenance import commit

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "results" / "coverage.jsonl"


def measured(data: Path) -> dict[str, list[int]]:
    """Part of the package → its lines that count, and those that no test ran.

    Raises:
        SystemExit: there is nothing measured.
    """
    if not data.is_file():
        raise SystemExit(f"{data} does not exist: run make coverage first")
    found = coverage.Coverage(data_file=data, config_file=ROOT / "setup.cfg")
    found.load()
    lines: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    for file in sorted((ROOT / "pyrobnn").rglob("*.py")):
        _, statements, _, missing, _ = found.analysis2(str(file))
        part = file.relative_to(ROOT / "pyrobnn").parts[0].removesuffix(".py")
        lines[part] += len(statements)
        missed[part] += len(missing)
    return {part: [lines[part], missed[part]] for part in sorted(lines) if lines[part]}


def table(records: list[dict]) -> str:
    """The share of each part's lines that the tests run, the least first."""
    (record,) = records
    parts = record["parts"]
    lines = ["| part of the package | lines | run by the fast tests |", "|---|---|---|"]
    for name in sorted(parts, key=lambda part: parts[part][1] / parts[part][0], reverse=True):
        lines.append(_row(f"`{name}`", *parts[name]))
    lines.append(_row("all", *map(sum, zip(*parts.values()))))
    return "\n".join(
        [*lines, "", f"Measured at {record['commit'][:7]} with Python {record['python']}, without a GPU."]
    )


def _row(name: str, lines: int, missed: int) -> str:
    return f"| {name} | {lines:,} | {1 - missed / lines:.1%} |"


def main() -> None:
    """Write the one record there is."""
    record = {
        "commit": commit(),
        "python": platform.python_version(),
        "parts": measured(ROOT / ".coverage"),
    }
    RESULTS.write_text(json.dumps(record) + "\n", encoding="utf-8")
    print(table([record]))


if __name__ == "__main__":
    main()
