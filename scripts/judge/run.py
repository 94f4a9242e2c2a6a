"""How often `pb.judge` fails right predictions and passes planted faults, beside the best test; regressors of packages.

    python scripts/judge/run.py                               # right predictions and faults
    python scripts/judge/run.py --tables airfoil.csv kin.csv  # five regressors; the last column is the target

A line of records a fault, form and number of rows, or a regressor on a table; what is there is not run again. The best
test is the likelihood ratio of the fault itself, at the judge's own rate of warnings: it knows what to look for.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sklearn import preprocessing
from sklearn.datasets import load_diabetes

import pyrobnn as pb

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from judge.package_regressors import REGRESSORS  # noqa: E402
from judge.planted_classes import CLASSES, classes  # noqa: E402
from judge.planted_regression import COPIED, SHAPES, WIDTHS, regression  # noqa: E402
from records import append_record, read_records  # noqa: E402

#: rows of a case; cases of right predictions and of each fault, by their rows
SIZES = (100, 500, 5000)
HEALTHY = {100: 120, 500: 120, 5000: 18}
SICK = {100: 24, 500: 24, 5000: 6}


def main() -> None:
    """Judge planted faults, or regressors on the tables that are named."""
    parser = argparse.ArgumentParser(description="Whether pb.judge is right.")
    parser.add_argument(
        "--out",
        type=Path,
        default=HERE / "records.jsonl",
    )
    parser.add_argument(
        "--tables",
        type=Path,
        nargs="+",
    )
    options = parser.parse_args()
    if options.tables:
        regressors(options.out, options.tables)
    else:
        study(options.out)


def study(path: Path) -> None:
    """Every fault at every size."""
    done = {(row["kind"], row["fault"], row["n"]) for row in read_records(path) if "n" in row}
    faults = {"regression": (*WIDTHS, *SHAPES, COPIED), "classes": tuple(CLASSES)}
    for n, kind in itertools.product(SIZES, faults):
        for fault in faults[kind]:
            if (kind, fault, n) in done:
                continue
            for form, cases in judged(kind, fault, n).items():
                row = {
                    "kind": kind,
                    "fault": fault,
                    "n": n,
                    "form": form,
                } | counted(cases)
                append_record(path, row | {"power": float(np.mean([power for _, power in cases]))})
                print(row, flush=True)


def judged(kind: str, fault: str, n: int) -> dict[str, list[tuple[pb.Verdict, float]]]:
    """By form of the predictions, the verdict of each seed and the power of the best test."""
    verdicts: dict[str, list[tuple[pb.Verdict, float]]] = {}
    make = classes if kind == "classes" else regression
    for seed in range((HEALTHY if fault == "right" else SICK)[n]):
        case = make(fault, n, np.random.default_rng([n, seed, *fault.encode()]))
        form, predictions = list(case.forms.items())[seed % len(case.forms)]
        verdict = pb.judge(predictions, case.y, **case.known)
        verdicts.setdefault(form, []).append((verdict, case.power))
    return verdicts


def counted(cases: list[tuple[pb.Verdict, float]]) -> dict[str, dict[str, int]]:
    """How often each check spoke, and how many verdicts passed, warned and failed."""
    checks: Counter[str] = Counter()
    for verdict, _ in cases:
        checks.update(names_of_speaking(verdict))
    statuses = Counter(verdict.model for verdict, _ in cases)
    return {"found_by": dict(checks), "counts": dict(statuses)}


def names_of_speaking(verdict: pb.Verdict) -> list[str]:
    """The checks that failed, then those that warned."""
    return [check.name for check in (*verdict.failed, *verdict.warned)]


def regressors(path: Path, files: Sequence[Path]) -> None:
    """Every regressor on every table."""
    done = {(row["table"], row["regressor"]) for row in read_records(path) if "table" in row}
    tables = {"diabetes": np.column_stack(load_diabetes(return_X_y=True))}
    for file in files:
        options: dict[str, Any] = {"delimiter": ",", "skiprows": 1} if file.suffix == ".csv" else {}
        tables[file.stem if options else file.parent.name] = np.loadtxt(file, **options)
    for name, regressor in itertools.product(tables, REGRESSORS):
        if (name, regressor) not in done:
            row = {"table": name, "regressor": regressor} | judged_on(tables[name], regressor)
            append_record(path, row)


def judged_on(table: np.ndarray, regressor: str) -> dict[str, Any]:
    """A regressor judged on a third of a table, standardised; of a large one the first 1,200 rows of a shuffle."""
    rows = np.random.default_rng(0).permutation(table)[:1200]
    x = preprocessing.scale(rows[:, :-1])
    y = rows[:, -1]
    cut = len(rows) * 2 // 3
    predictions = REGRESSORS[regressor](x[:cut], y[:cut], x[cut:])
    verdict = pb.judge(
        predictions,
        y[cut:],
        x=x[cut:],
        x_train=x[:cut],
        y_train=y[:cut],
    )
    ratio = next(check.value for check in verdict.checks if check.name == "baseline")
    return {
        "model": verdict.model,
        "rows": len(y) - cut,
        "ratio": ratio,
        "seen": names_of_speaking(verdict),
    }


if __name__ == "__main__":
    main()
