"""The command line: ``pyrobnn compare`` runs methods, ``report`` judges what was saved, ``predict`` uses it."""

from __future__ import annotations

import argparse
import contextlib
import io
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from pyrobnn import __version__, data
from pyrobnn.checks import Refused, check_choice, check_device
from pyrobnn.inference.method import METHODS

# a command imports what it needs: help and the version answer at once
if TYPE_CHECKING:
    from xarray import DataTree

    from pyrobnn.diagnostics import Evidence, Verdict

USAGE_ERROR, INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; exit status 0 done, 1 a method or verdict failed, 2 bad input, 130 stopped."""
    arguments = _parser().parse_args(argv)
    arguments.command = shlex.join(["pyrobnn", *(sys.argv[1:] if argv is None else argv)])
    with _printable():
        try:
            return arguments.run(arguments)
        except (ValueError, TypeError, OSError, ImportError) as error:
            _say(f"pyrobnn: {' '.join(str(error).split())}", sys.stderr)
            return USAGE_ERROR
        except KeyboardInterrupt:
            _say("\nstopped", sys.stderr)
            return INTERRUPTED


@contextlib.contextmanager
def _printable() -> Iterator[None]:
    """Characters that a terminal does not have are written as escapes meanwhile, instead of ending the run."""
    streams = [each for each in (sys.stdout, sys.stderr) if isinstance(each, io.TextIOWrapper)]
    errors = [each.errors for each in streams]
    try:
        for stream in streams:
            stream.reconfigure(errors="backslashreplace")
        yield
    finally:
        for stream, before in zip(streams, errors):
            stream.reconfigure(errors=before)


def _say(text: str, stream: TextIO | None = None) -> None:
    """Print; a reader that has gone (``| head``, a closed terminal) must not cost the results."""
    with contextlib.suppress(OSError):
        print(text, file=stream, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pyrobnn", description="Bayesian neural networks, compared and judged."
    )
    parser.add_argument("--version", action="version", version=f"pyrobnn {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    compare = commands.add_parser("compare", help="run methods on a data set and write a report")
    compare.add_argument(
        "--data",
        default="gap",
        metavar="NAME|FILE",
        help=f"{', '.join(data.names())}, or a table: CSV, TSV, Parquet or Excel [gap, a sine that was "
        "not measured in the middle]",
    )
    compare.add_argument("--target", metavar="COL", help="target column of the file")
    compare.add_argument("--features", nargs="+", metavar="COL", help="columns to predict from [all others]")
    compare.add_argument("--drop", nargs="+", default=[], metavar="COL", help="columns to leave out")
    compare.add_argument(
        "--task", choices=("regression", "classification"), help="what the target is [read from its values]"
    )
    compare.add_argument(
        "--missing",
        choices=("refuse", "drop", "impute"),
        default="refuse",
        help="where a value is missing: refuse, drop the row, or impute and mark it [refuse]",
    )
    compare.add_argument(
        "--methods",
        nargs="+",
        default=[name for name, known in METHODS.items() if known.standard],
        metavar="M",
        help=", ".join(METHODS),
    )
    compare.add_argument(
        "--out", type=Path, default=Path("results"), metavar="DIR", help="where to write [results]"
    )
    compare.add_argument("--device", metavar="cpu|cuda", help="where to compute [cpu]")
    compare.add_argument("--seed", type=int, default=0)
    compare.add_argument(
        "--quick", action="store_true", help="fewer steps and draws, 500 rows at most: a minute"
    )
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
    report.add_argument(
        "--strict", action="store_true", help="exit with 1 if any verdict is a fail, or nothing was checked"
    )
    report.set_defaults(run=_report)
    predict = commands.add_parser("predict", help="predict new rows with a method that compare has saved")
    predict.add_argument("model", type=Path, metavar="RUN/METHOD.nc")
    predict.add_argument("new", type=Path, metavar="NEW", help="CSV, TSV, Parquet or Excel: columns by name")
    predict.add_argument("--out", type=Path, metavar="FILE.csv", help="where to write [standard output]")
    predict.set_defaults(run=_predict)
    return parser


def _compare(arguments: argparse.Namespace) -> int:
    from xarray import DataTree

    from pyrobnn.diagnostics import Evidence
    from pyrobnn.diagnostics.verdict import said
    from pyrobnn.studies.compare import run_study
    from pyrobnn.studies.study import QUICK_ROWS, describe, make_study, some_rows

    for name in arguments.methods:
        check_choice("methods", name, tuple(METHODS))
    check_device(arguments.device)
    dataset = _data(arguments)
    study = make_study(
        some_rows(dataset, QUICK_ROWS, arguments.seed) if arguments.quick else dataset,
        hidden=arguments.hidden,
        activation=arguments.activation,
        prior_scale=arguments.prior_scale,
        noise=arguments.noise,
        test_fraction=arguments.test_fraction,
        seed=arguments.seed,
    )
    _say(describe(study))
    methods = tuple(dict.fromkeys(arguments.methods))
    trees: dict[str, DataTree] = {}
    left_out: dict[str, str] = {}
    stopped = False
    try:
        for name, found in run_study(
            study,
            methods,
            arguments.out,
            quick=arguments.quick,
            compile=not arguments.no_compile,
            device=arguments.device,
            seed=arguments.seed,
            progress=not arguments.no_progress,
            announce=_say,
            command=arguments.command,
        ):
            if isinstance(found, DataTree):
                trees[name] = found
                stopped = bool(Evidence(found).number("interrupted", 0.0))
            else:
                left_out[name] = str(found) if isinstance(found, Refused) else said(found)
    except KeyboardInterrupt:
        stopped = True
    if stopped:
        left_out |= dict.fromkeys(
            (m for m in methods if m not in (*trees, *left_out)), "stopped before it was done"
        )
        _say(
            f"\nstopped: {len(trees)} of {len(methods)} methods are finished or cut short, and kept",
            sys.stderr,
        )
    if trees := {name: trees[name] for name in methods if name in trees}:
        try:
            _write(trees, arguments.out / "report.html", arguments.out / "summary.json", left_out)
        except KeyboardInterrupt:
            files = " ".join(str(arguments.out / f"{name}.nc") for name in trees)
            _say(f"\nstopped; the draws are kept, judge them with: pyrobnn report {files}", sys.stderr)
            return INTERRUPTED
    if stopped:
        return INTERRUPTED
    return 1 if left_out else 0


def _data(arguments: argparse.Namespace) -> data.Dataset:
    """The data set, with what was read into a table of the user's."""
    with _warnings_said():
        dataset = data.load(
            arguments.data,
            arguments.target,
            task=arguments.task,
            features=arguments.features,
            drop=arguments.drop,
            missing=arguments.missing,
            seed=arguments.seed,
        )
    if dataset.columns is not None and arguments.task is None:
        from pyrobnn.data.table import guessed

        _say(f"{guessed(dataset)} (--task says otherwise)")
    return dataset


@contextlib.contextmanager
def _warnings_said() -> Iterator[None]:
    """Warnings of what is done inside as lines of their own, on the standard error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for text in dict.fromkeys(str(warning.message) for warning in caught):
        _say(text, sys.stderr)


def _report(arguments: argparse.Namespace) -> int:
    from pyrobnn.posterior.storage import read

    _check_file(arguments.out, "report.html")
    trees = {path.stem: read(path) for path in arguments.files}
    if len(trees) < len(arguments.files):
        raise ValueError("two files have the same name: rename one, names label the methods in the report")
    verdicts = _write(trees, arguments.out, arguments.out.with_suffix(".json"), {})
    # what nothing was checked of has not passed: a script that relies on the exit status must not take it for well
    failed = [label for label, verdict in verdicts.items() if verdict.status == "fail" or not verdict.passed]
    return 1 if arguments.strict and failed else 0


def _check_file(out: Path, example: str) -> None:
    """What is written to a file needs a file's name, and a folder that can be written to.

    Raises:
        ValueError: it is a folder, or the folder it is in cannot be written to.
    """
    from pyrobnn.posterior.storage import check_writable

    if out.is_dir():
        raise ValueError(f"--out {str(out)!r} is a folder: name a file in it, {str(out / example)!r}")
    check_writable(out.parent)


def _predict(arguments: argparse.Namespace) -> int:
    from pyrobnn.data.table import read_features
    from pyrobnn.studies.study import columns_of, load_run, prediction_table

    if arguments.out is not None:
        _check_file(arguments.out, "predictions.csv")
    posterior, settings = load_run(arguments.model)
    if len(settings["shape"]) > 1:
        raise ValueError(
            f"{str(arguments.model)!r} was fitted to images, which are no table: use Posterior.load(path, model)"
        )
    if posterior.meta["interrupted"]:
        _say(
            f"{arguments.model}: the fit was interrupted, predictions rest on what it had by then", sys.stderr
        )
    with _warnings_said():
        x, keep = read_features(arguments.new, columns_of(settings))
    table = prediction_table(posterior, x, settings)
    if not keep.all():
        _say(f"{int((~keep).sum())} rows have a missing value: their predictions are left empty", sys.stderr)
        table = table.set_index(keep.nonzero()[0]).reindex(range(len(keep)))
    written = table.to_csv(index=False)
    if arguments.out is None:
        _say(written.rstrip("\n"))
    else:
        arguments.out.write_text(written, encoding="utf-8")
        _say(f"{len(table)} predictions of {settings['target']!r}: {arguments.out}")
    return 0


def _write(
    trees: Mapping[str, DataTree], report: Path, summary: Path, left_out: Mapping[str, str]
) -> dict[str, Verdict]:
    """Judge, write both files, and only then print."""
    from pyrobnn.diagnostics import Evidence
    from pyrobnn.diagnostics.judge import judge_all
    from pyrobnn.report import write_report, write_summary

    evidence = {label: Evidence(tree) for label, tree in trees.items()}
    verdicts = judge_all(evidence)
    write_summary(evidence, verdicts, summary, left_out=left_out)
    write_report(evidence, report, verdicts=verdicts, left_out=left_out)
    _say(f"\n{_table(evidence, verdicts)}\n")
    for verdict in verdicts.values():
        _say(f"{verdict.summary} ({verdict.lines})")
    for name, reason in left_out.items():
        _say(f"{name}: left out — {reason}")
    _say(f"\nreport: {report}\nsummary: {summary}")
    return verdicts


def _table(trees: Mapping[str, Evidence], verdicts: Mapping[str, Verdict]) -> str:
    import pandas as pd

    from pyrobnn.report.comparison import COLUMNS, compare_rows

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
