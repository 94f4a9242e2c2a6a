"""The UCI regression benchmark: every method on the standard splits, beside the published numbers.

    python scripts/uci/run.py --data-root DIR --data yacht wine --methods map laplace --splits 0-4 --jobs 2
    python scripts/uci/run.py --data-root DIR --budget 3600    # what fits into an hour
    python scripts/uci/run.py --data-root DIR --check 5%       # a random part again; exit code 1 if it differs
    python scripts/uci/run.py --table-only

A data set is one of the usual names, or any folder in the same layout. Each finished fit is one line of the records:
stop the sweep at any moment, and the same command goes on where it was. Hyper-parameters follow one rule per method
(rules.py), from the train part alone; the test part is touched once, after everything is chosen.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from records import Record, Sweep, read_records, share, within_budget  # noqa: E402
from uci.beside_published import FLOOR, claims, published  # noqa: E402
from uci.claim_tables import METRICS, markdown  # noqa: E402
from uci.records_made_again import check  # noqa: E402
from uci.rules import RULES  # noqa: E402
from uci.scored_tasks import DATASETS, key, run_task, tasks  # noqa: E402

RESULTS = HERE / "records.jsonl"
NEEDS = ("dataset", "split", "method", "scores", "cpu_seconds")


def main(argv: list[str] | None = None) -> int:
    """Run the sweep, then print the tables and the claims."""
    options = parse(argv)
    work = []
    if not options.table_only:
        try:
            work = tasks(
                options.data, options.methods or [FLOOR, *RULES], options.splits, options.data_root
            )
        except ValueError as error:
            print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
            return 2
    records = read_records(options.results, NEEDS)
    if options.check:
        chosen = set(map(key, work))
        return check([record for record in records if key(record) in chosen], options)
    failures = sweep(work, records, options)
    show(read_records(options.results, NEEDS), [FLOOR, *RULES])
    return 1 if failures else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data-root", help="directory of the UCI sets (default: the variable PYROBNN_DATA)")
    add(
        "--data",
        nargs="+",
        default=list(DATASETS),
        metavar="SET",
        help="names or folders",
    )
    add("--methods", nargs="+", help="default: all")
    add(
        "--splits",
        type=splits,
        help="such as 0-4 or 0,7 (default: all that a set has)",
    )
    add(
        "--results",
        type=Path,
        default=RESULTS,
        help="the file of the records",
    )
    add(
        "--jobs",
        type=int,
        default=1,
        help="processes on this machine",
    )
    add("--scheduler", help="address of a Dask scheduler, on whose --jobs workers the fits are run")
    add(
        "--budget",
        type=float,
        default=math.inf,
        help="seconds: run what fits into them",
    )
    add(
        "--check",
        type=share,
        help="such as 5%%: make a random part of the records again",
    )
    add(
        "--seed",
        type=int,
        default=0,
        help="of the part that --check draws",
    )
    add(
        "--table-only",
        action="store_true",
        help="print the records, fit nothing",
    )
    return parser.parse_args(argv)


def splits(text: str) -> list[int]:
    """``"0-2,7"`` → [0, 1, 2, 7]."""
    numbers: list[int] = []
    for span in text.split(","):
        start, _, end = span.partition("-")
        end = end or start
        if not (start.isdecimal() and end.isdecimal() and int(start) <= int(end)):
            raise argparse.ArgumentTypeError(f"splits are numbers such as 0-4 or 0,7, got {text!r}")
        numbers.extend(range(int(start), int(end) + 1))
    return numbers


def sweep(work: Sequence[Record], records: Sequence[Record], options: argparse.Namespace) -> int:
    """Run what has no record yet and fits into the budget; the number of failures."""
    if not work:
        return 0
    workers = options.jobs
    if options.scheduler:
        workers = import_module("distributed").Client(options.scheduler).get_executor(pure=False)
    runner = Sweep(options.results, key, workers)
    chosen, left_out, seconds = within_budget(
        runner.pending(work), records, options.budget * options.jobs
    )
    print(f"{len(chosen)} fits, about {seconds / options.jobs:.0f} s", flush=True)
    if left_out:
        print(f"{len(left_out)} fits do not fit into the budget")
    failures = 0
    function = functools.partial(run_task, root=options.data_root)
    try:
        for number, (task, outcome) in enumerate(runner.run(function, chosen), 1):
            name = (
                f"[{number}/{len(chosen)}] {task['dataset']} split {task['split']} {task['method']}"
            )
            if isinstance(outcome, Exception):
                failures += 1
                print(f"{name}: {type(outcome).__name__}: {outcome}", flush=True)
            else:
                scores = outcome["scores"]
                print(
                    f"{name}: log density {scores['log_density']:.3f}, RMSE {scores['rmse']:.4g}, "
                    f"{outcome['cpu_seconds']:.1f} CPU s",
                    flush=True,
                )
    except KeyboardInterrupt:
        print("\ninterrupted: what is finished is kept; the same command goes on from here")
        sys.exit(130)
    return failures


def show(records: Sequence[Record], methods: Sequence[str]) -> None:
    """The tables, then the claims and whether they hold."""
    if not records:
        print("no results yet")
        return
    for metric in METRICS:
        print("\n" + markdown(records, metric, methods, published()))
    for claim in claims(records, published()):
        print(claim)


if __name__ == "__main__":
    sys.exit(main())
