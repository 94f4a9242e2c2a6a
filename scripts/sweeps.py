"""The command line and the loop of the studies that keep one record a fit: what is pending runs."""

from __future__ import annotations

import argparse
import hashlib
import inspect
import math
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark_uci import duration, run, splits

Task = Mapping[str, Any]
#: what the mark of a row says
OLDER = "‡ measured with today's settings and earlier code (any line that the method's numbers may depend on)"


def parser(
    doc: str,
    results: Path,
    data: Sequence[str],
    methods: Sequence[str],
    num_splits: int,
    *,
    folders: bool = False,
):
    """The options of a study: data, methods, splits, and where its records are.

    ``folders``: whether any folder in the layout of the UCI sets is data too; the study looks whether it is there.
    """
    # before torch is loaded: the nets are small, and parallelism is across fits
    os.environ["OMP_NUM_THREADS"] = "1"
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    others = ", or a folder in the layout of the UCI sets" if folders else ""
    found.add_argument(
        "--data",
        nargs="+",
        choices=None if folders else list(data),
        default=list(data),
        metavar="SET",
        help=", ".join(data) + others,
    )
    found.add_argument("--methods", nargs="+", choices=methods, default=list(methods))
    default = list(range(num_splits))
    found.add_argument(
        "--splits", type=splits, default=default, help=f"such as 0-4 (default: 0-{num_splits - 1})"
    )
    found.add_argument("--results", default=results, help="the results file")
    found.add_argument("--jobs", type=int, default=1, help="processes on this machine")
    found.add_argument(
        "--budget", type=duration, default=math.inf, help="such as 90m or 1h: run what fits into it"
    )
    found.set_defaults(shipped=results)
    found.add_argument("--table-only", action="store_true", help="print what there is, fit nothing")
    return found


def sweep(
    options: argparse.Namespace,
    run_task: Callable[[Task], Task],
    key: Callable[[Task], Hashable],
    tasks: Sequence[Task],
) -> int:
    """Say what is pending and what it costs, run what fits into the budget; the number of fits that failed."""
    if options.table_only:
        return 0
    from pyrobnn.studies.uci import Sweep

    found = Sweep(options.results, key, jobs=options.jobs)
    return run(
        found,
        run_task,
        tasks,
        options.budget,
        options.shipped,
        lambda record: f"{record['seconds']:.1f} s (CPU {record['cpu_seconds']:.1f} s)",
    )


def not_run(data: Sequence[str], methods: Sequence[str], have: set[tuple[str, str]]) -> list[str]:
    """Lines below a table: by set, the methods of which today's settings have no record."""
    lacking = {name: [method for method in methods if (name, method) not in have] for name in data}
    told = [
        f"{name}: {'every method' if len(without) == len(methods) else ', '.join(without)}"
        for name, without in lacking.items()
        if without
    ]
    return ["", f"Not run by today's settings: {'; '.join(told)}."] if told else []


def with_own(code: str, *functions: Callable) -> str:
    """Eight letters that change with ``code``, letters of the package, and with any line of a script's functions."""
    text = code + "".join(inspect.getsource(inspect.unwrap(function)) for function in functions)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def mark(rows: Sequence[Mapping[str, Any]], code: str) -> str:
    """What is put behind the name of a row of a table: OLDER's mark if a record of it was made by other code."""
    return "" if all(row["code"] == code for row in rows) else " ‡"


def told(lines: Sequence[str]) -> list[str]:
    """What is said below a table of these lines: OLDER, if a row has its mark."""
    return ["", OLDER] if any(" ‡ |" in line for line in lines) else []
