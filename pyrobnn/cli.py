"""The command line: ``pyrobnn compare`` runs methods on data, ``pyrobnn report`` judges what was saved."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from xarray import DataTree

from pyrobnn import data
from pyrobnn.checks import check_choice, check_device
from pyrobnn.compare import DEFAULT_METHODS, METHODS, describe, make_study, run_study
from pyrobnn.diagnostics import Verdict, diagnose
from pyrobnn.report import write_report, write_summary
from pyrobnn.report.comparison import COLUMNS, compare_rows, reference_label
from pyrobnn.storage import read

USAGE_ERROR, INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; exit status 0 done, 1 a method or verdict failed, 2 bad input, 130 stopped."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except (ValueError, TypeError, FileNotFoundError, ImportError) as error:
        print(f"pyrobnn: {' '.join(str(error).split())}", file=sys.stderr)
        return USAGE_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pyrobnn", description="Bayesian neural networks, compared and judged."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    compare = commands.add_parser("compare", help="run methods on a data set and write a report")
    compare.add_argument(
        "--data",
        default="diabetes",
        metavar="NAME|FILE.csv",
        help=f"{', '.join(data.names())}, or a CSV file",
    )
    compare.add_argument("--target", metavar="COL", help="target column of the CSV file")
    compare.add_argument(
        "--methods", nargs="+", default=DEFAULT_METHODS, metavar="M", help=", ".join(METHODS)
    )
    compare.add_argument(
        "--out", type=Path, default=Path("results"), metavar="DIR", help="where to write [results]"
    )
    compare.add_argument("--device", metavar="cpu|cuda", help="where to compute [cpu]")
    compare.add_argument("--seed", type=int, default=0)
    compare.add_argument("--quick", action="store_true", help="fewer steps and draws: under a minute")
    compare.add_argument(
        "--hidden", type=int, nargs="+", default=[50], metavar="N", help="widths of hidden layers [50]"
    )
    compare.add_argument("--activation", default="tanh", help="[tanh]")
    compare.add_argument(
        "--prior-scale", type=float, default=1.0, help="scale of the fan-in normal prior [1]"
    )
    compare.add_argument(
        "--noise", default="inferred", help="inferred, learned, heteroskedastic, or a number"
    )
    compare.add_argument("--test-fraction", type=float, default=0.1, help="share held out [0.1]")
    compare.add_argument(
        "--no-compile", action="store_true", help="run without a compiler: same numbers, slower"
    )
    compare.add_argument("--no-progress", action="store_true", help="no progress bars")
    compare.set_defaults(run=_compare)
    report = commands.add_parser("report", help="judge saved DataTrees (also of NumPyro or PyMC)")
    report.add_argument("files", nargs="+", type=Path, metavar="FILE.nc")
    report.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE.html")
    report.add_argument("--strict", action="store_true", help="exit with 1 if any verdict is a fail")
    report.set_defaults(run=_report)
    return parser


def _compare(arguments: argparse.Namespace) -> int:
    for name in arguments.methods:
        check_choice("methods", name, tuple(METHODS))
    check_device(arguments.device)
    dataset = data.load(arguments.data, arguments.target, seed=arguments.seed)
    study = make_study(
        dataset,
        hidden=arguments.hidden,
        activation=arguments.activation,
        prior_scale=arguments.prior_scale,
        noise=arguments.noise,
        test_fraction=arguments.test_fraction,
        seed=arguments.seed,
    )
    print(describe(study))
    trees: dict[str, DataTree] = {}
    stopped = False
    try:
        finished = run_study(
            study,
            tuple(dict.fromkeys(arguments.methods)),
            arguments.out,
            quick=arguments.quick,
            compile=not arguments.no_compile,
            device=arguments.device,
            seed=arguments.seed,
            progress=not arguments.no_progress,
            announce=print,
        )
        for name, tree in finished:
            trees[name] = tree
    except KeyboardInterrupt:
        stopped = True
        print(
            f"\nstopped: {len(trees)} of {len(arguments.methods)} methods are finished and kept",
            file=sys.stderr,
        )
    if not trees:
        return INTERRUPTED if stopped else 1
    _write(trees, arguments.out / "report.html", arguments.out / "summary.json")
    if stopped:
        return INTERRUPTED
    return 0 if len(trees) == len(set(arguments.methods)) else 1


def _report(arguments: argparse.Namespace) -> int:
    trees = {path.stem: read(path) for path in arguments.files}
    if len(trees) < len(arguments.files):
        raise ValueError("two files have the same name: rename one, names label the methods in the report")
    verdicts = _write(trees, arguments.out, arguments.out.with_suffix(".json"))
    failed = [label for label, verdict in verdicts.items() if verdict.status == "fail"]
    return 1 if arguments.strict and failed else 0


def _write(trees: Mapping[str, DataTree], report: Path, summary: Path) -> dict[str, Verdict]:
    reference = reference_label(trees)
    verdicts = {
        label: diagnose(tree, reference=trees[reference] if reference not in (None, label) else None)
        for label, tree in trees.items()
    }
    print()
    print(_table(trees, verdicts))
    print()
    for verdict in verdicts.values():
        print(verdict.summary)
    write_summary(trees, verdicts, summary)
    print(f"\nreport: {write_report(trees, report, verdicts=verdicts)}\nsummary: {summary}")
    return verdicts


def _table(trees: Mapping[str, DataTree], verdicts: Mapping[str, Verdict]) -> str:
    rows = compare_rows(trees, verdicts)
    columns = [column for column in COLUMNS if any(column.key in row.values for row in rows)]
    cells = {
        column.title: [f"{row.values[column.key]:.4g}" if column.key in row.values else "" for row in rows]
        for column in columns
    }
    frame = pd.DataFrame(cells, index=[row.label for row in rows])
    # one method a column: as many numbers as there are fit on a terminal of 80 characters
    return frame.T.to_string()


if __name__ == "__main__":
    sys.exit(main())
