"""``pyrobnn report``, ``predict`` and ``judge``: what was saved, judged and used on new rows; predictions of anyone."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyrobnn.cli.terminal import EXIT_STATUS, OneLineParser, check_file, say, warnings_said

if TYPE_CHECKING:
    import pandas as pd
    from xarray import DataTree

    from pyrobnn.diagnostics import Verdict


def report(argv: Sequence[str], command: str) -> int:
    """Judge and write; exit status 0, with ``--strict`` 1 where the answer that it names is a fail or was not sought.

    ``--strict draws`` asks whether the draws are the posterior of their model, ``--strict model`` whether the model
    fits the data, ``--strict all`` (or ``--strict`` alone) both.
    """
    parser = OneLineParser(
        prog="pyrobnn report",
        description="Judge saved DataTrees, also of NumPyro or PyMC, and write a report.",
        epilog=EXIT_STATUS,
    )
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE.nc",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("report.html"),
        help="where to write [report.html]",
    )
    parser.add_argument(
        "--strict",
        nargs="?",
        const="all",
        choices=("draws", "model", "all"),
        help="exit with 1 if this answer of any verdict is a fail, or nothing was checked [all: either]",
    )
    options = parser.parse_args(argv)

    from pyrobnn.diagnostics.verdict import QUESTIONS
    from pyrobnn.posterior.storage import read

    check_file(options.out, "report.html")
    trees = {path.stem: read(path) for path in options.files}
    if len(trees) < len(options.files):
        raise ValueError(
            "two files have the same name: rename one, names label the methods in the report"
        )
    verdicts = judge_saved(trees, options.out, options.out.with_suffix(".json"), {}).values()
    questions = [question for question in QUESTIONS if options.strict in (question, "all")]
    answers = [verdict.answer(question) for question, verdict in product(questions, verdicts)]
    failed = "fail" in answers
    # what nothing was checked of has not passed
    unchecked = any(not any(map(verdict.checked, questions)) for verdict in verdicts)
    return int(bool(questions) and (failed or unchecked))


def judge_saved(
    trees: Mapping[str, DataTree],
    page: Path,
    summary: Path,
    left_out: Mapping[str, str],
) -> dict[str, Verdict]:
    """Judge, write the report and the summary, and only then print."""
    import pandas as pd

    from pyrobnn.report import write_report, write_summary
    from pyrobnn.report.results import COLUMNS, Results
    from pyrobnn.report.sentences import beside_reference

    results = Results.of(trees, left_out=left_out)
    write_summary(results, None, summary)
    write_report(results, page)

    # a method a column: as many numbers as there are fit on a terminal of 80 characters
    rows = [*results.rows, *results.floor]
    titles = {column.key: column.title for column in COLUMNS}
    table = pd.DataFrame({row.label: pd.Series(row.values) for row in rows}, index=[*titles])
    table = table.rename(index=titles)
    say(f"\n{table.dropna(how='all').to_string(float_format='{:.4g}'.format, na_rep='')}\n")
    for sentence in beside_reference(results):
        say(sentence)
    for verdict in results.verdicts.values():
        say(f"{verdict.summary} ({verdict.lines})")
        if verdict.action:
            say(f"    next: {verdict.action}")
    for name, reason in left_out.items():
        say(f"{name}: skipped: {reason}")
    say(f"\nreport: {page}\nsummary: {summary}")
    return results.verdicts


def predict(argv: Sequence[str], command: str) -> int:
    """Predict and write; exit status 0."""
    parser = OneLineParser(
        prog="pyrobnn predict",
        description="Predict new rows with a method that 'fit' or 'compare' has saved. Of numbers: mean, aleatoric and "
        "epistemic sd, sd and quantiles, in the target's units; of classes: the most probable, the probability of each "
        "and both entropies in nats. The column 'outside' names the features in which a row lies beyond the training "
        "data.",
        epilog=EXIT_STATUS,
    )
    parser.add_argument(
        "model",
        type=Path,
        metavar="MODEL.nc",
    )
    parser.add_argument(
        "new",
        type=Path,
        metavar="NEW",
        help="CSV, TSV, Parquet or Excel: columns by name",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="where to write: .csv, .parquet or .zarr [CSV on standard output]",
    )
    options = parser.parse_args(argv)

    from pyrobnn.data.table import read_features
    from pyrobnn.posterior import streaming
    from pyrobnn.studies.saved_runs import columns_of, load_run, outside, prediction_blocks

    if options.out is not None:
        check_file(options.out, "predictions.csv")
        if options.out.suffix in streaming.FORMATS:
            streaming.check_format(options.out)
    posterior, settings = load_run(options.model)
    if posterior.meta["interrupted"]:
        say(
            f"{options.model}: the fit was interrupted, predictions rest on what it had by then",
            sys.stderr,
        )
    with warnings_said():
        x, keep = read_features(options.new, columns_of(settings))
    count = sum(map(bool, outside(x, settings))) if settings.get("ranges") else 0
    if count:
        say(
            f"{count} of {len(x)} rows lie beyond the training data in some feature (column 'outside'): "
            "no check has looked there",
            sys.stderr,
        )
    if not keep.all():
        say(
            f"{int((~keep).sum())} rows have a missing value: their predictions are left empty",
            sys.stderr,
        )
    tables = prediction_blocks(posterior, x, keep, settings)
    if options.out is None:
        for number, table in enumerate(tables):
            say(table.to_csv(index=False, header=not number).rstrip("\n"))
    else:
        blocks = ({name: table[name].to_numpy() for name in table} for table in tables)
        total = streaming.write_blocks(blocks, options.out)
        say(f"{total} predictions of {settings['target']!r}: {options.out}")
    return 0


def judge(argv: Sequence[str], command: str) -> int:
    """Judge and print; exit status 1 where the model fails or nothing could be checked."""
    options = _judge_parser().parse_args(argv)
    kinds = [options.quantiles, options.mean or options.sd, options.draws, options.probabilities]
    if sum(map(bool, kinds)) != 1 or bool(options.mean) != bool(options.sd):
        raise ValueError("give one of --quantiles, --mean with --sd, --draws, --probabilities")
    if options.out is not None:
        check_file(Path(options.out, "report.html"), "")

    from pyrobnn.diagnostics.predictions import judged

    label = Path(options.file).stem
    predictions, rows = _judged_rows(options)
    verdict, evidence = judged(
        predictions,
        rows.pop("y"),
        label=label,
        **rows,
    )
    say("\n".join([verdict.summary, verdict.lines, *map(str, verdict.checks)]))
    if options.out is not None:
        from pyrobnn.report import write_report

        page = Path(options.out, "report.html")
        title = "Do these predictions fit the outcomes?"
        write_report(
            {label: evidence},
            page,
            title=title,
            verdicts={label: verdict},
        )
        page.with_name("verdict.json").write_text(verdict.to_json() + "\n", encoding="utf-8")
        say(f"report: {page}")
    return int(verdict.model == "fail" or not verdict.checked("model"))


def _judge_parser() -> OneLineParser:
    parser = OneLineParser(
        prog="pyrobnn judge",
        description="Judge predictions of rows that were not trained on: are they calibrated, everywhere, and as sharp "
        "as a linear model's? Give one of --quantiles, --mean with --sd, --draws, --probabilities.",
        epilog=EXIT_STATUS,
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        help="CSV, TSV, Parquet or Excel: outcomes and predictions",
    )
    parser.add_argument(
        "--target",
        required=True,
        metavar="COLUMN",
        help="the outcome",
    )
    parser.add_argument(
        "--mean",
        metavar="COLUMN",
        help="mean of a normal",
    )
    parser.add_argument(
        "--sd",
        metavar="COLUMN",
        help="standard deviation of a normal, noise included",
    )
    parser.add_argument(
        "--draws",
        metavar="PREFIX",
        help="how the names of the columns of draws begin",
    )
    parser.add_argument(
        "--train",
        metavar="FILE",
        help="training rows: the target and the features",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="where to write report.html and verdict.json",
    )
    parser.add_argument(
        "--quantiles",
        nargs="+",
        metavar="COLUMN",
        help="columns of quantiles, the level in their name (q05 q50 q975) or behind it (low=0.05)",
    )
    parser.add_argument(
        "--probabilities",
        nargs="+",
        metavar="COLUMN",
        help="of the classes, in their sorted order or named by them (p_cat p_dog)",
    )
    parser.add_argument(
        "--features",
        nargs="+",
        metavar="COLUMN",
        help="inputs, along which errors are looked at",
    )
    return parser


def _judged_rows(options: Namespace) -> tuple[Any, dict[str, Any]]:
    """The predictions, and by the names of `judged`: y, x of the judged rows, y_train, x_train of the training rows."""
    from pyrobnn.data.table import read_frame

    # by the suffix of the argument
    paths = {"": Path(options.file)}
    if options.train:
        paths["_train"] = Path(options.train)
    with warnings_said():
        tables = {suffix: read_frame(path) for suffix, path in paths.items()}
    predictions = _predictions(options, paths[""].name, tables[""])
    rows = dict[str, Any]()
    inputs: dict[str, pd.DataFrame] = {}
    for suffix, table in tables.items():
        file = paths[suffix].name
        outcomes = _gapless_columns(
            file,
            table,
            [options.target],
            text_allowed=True,
        )
        rows[f"y{suffix}"] = outcomes[options.target]
        if options.features:
            inputs[f"x{suffix}"] = _gapless_columns(
                file,
                table,
                options.features,
                text_allowed=True,
            )
    return predictions, rows | _coded_inputs(inputs, options.target)


def _predictions(options: Namespace, where: str, frame: pd.DataFrame) -> Any:
    """The predictions in the columns that are asked for, as `judged` takes them."""
    if options.quantiles:
        return _quantiles(where, frame, options.quantiles)
    if options.mean:
        return _normals(where, frame, options.mean, options.sd)
    if options.draws:
        names = [name for name in frame.columns if name.startswith(options.draws)]
        names = [name for name in names if name != options.target]
        if len(names) < 2:
            raise ValueError(
                f"{where}: {len(names)} columns begin with {options.draws!r}: two are needed"
            )
        return _gapless_columns(where, frame, names).to_numpy().T
    return _gapless_columns(where, frame, options.probabilities)


def _quantiles(where: str, frame: pd.DataFrame, texts: Sequence[str]) -> dict[float, pd.Series]:
    """Columns of quantiles by their levels."""
    levels = dict(map(_level, texts))
    if len(levels) < len(texts):
        raise ValueError(f"--quantiles: two columns have the same level: {', '.join(texts)}")
    return {level: _gapless_columns(where, frame, [name])[name] for level, name in levels.items()}


def _normals(
    where: str,
    frame: pd.DataFrame,
    mean_name: str,
    sd_name: str,
) -> Any:
    """A normal distribution of each row."""
    from scipy.stats import norm

    mean, sd = _gapless_columns(where, frame, [mean_name, sd_name]).to_numpy(dtype=float).T
    if not (sd > 0.0).all():
        raise ValueError(
            f"{where}: {sd_name!r} must be above 0: it is {sd.min():.4g} in row {sd.argmin() + 1}"
        )
    return norm(mean, sd)


def _level(text: str) -> tuple[float, str]:
    """Level and name of a column of quantiles: q05 0.05, q50 0.5, q975 0.975, low=0.1 0.1."""
    name, _, level = text.partition("=")
    digits = re.search(r"(\d*\.\d+|\d\d+)\D*$", level or name)
    if digits is None:
        raise ValueError(f"--quantiles: {text!r} names no level: write {name}=0.05")
    return float(digits[1] if "." in digits[1] else f"0.{digits[1]}"), name


def _gapless_columns(
    where: str,
    frame: pd.DataFrame,
    names: Sequence[str],
    text_allowed: bool = False,
) -> pd.DataFrame:
    """Columns without gaps, as numbers; with ``text_allowed`` a column of text stays as it is."""
    from pyrobnn.data.cells import numbers, only_numbers
    from pyrobnn.data.columns import check_columns, refuse_gaps

    check_columns(where, names, list(frame.columns))
    read = numbers if text_allowed else only_numbers
    values = {name: read(where, frame[name]) for name in names}
    numeric = {name: column for name, column in values.items() if column is not None}
    frame = frame[list(names)].assign(**numeric)
    refuse_gaps(where, frame.isna(), "leave out rows without an outcome or prediction")
    return frame


def _coded_inputs(frames: Mapping[str, pd.DataFrame], target: str) -> dict[str, pd.DataFrame]:
    """The inputs as numbers, categories by their place in the sorted order of all tables."""
    import pandas as pd

    frame = pd.concat(frames) if frames else pd.DataFrame()
    if target in frame:
        raise ValueError(f"--features: {target!r} is the target")
    codes = {
        name: frame[name].astype("category").cat.codes
        for name in frame
        if frame[name].dtype.kind not in "biuf"
    }
    coded = frame.assign(**codes).astype(float)
    return {table: coded.loc[table] for table in frames}
