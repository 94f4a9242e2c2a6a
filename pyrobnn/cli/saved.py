"""``pyrobnn report``, ``predict`` and ``judge``: what was saved, judged and used on new rows; predictions of anyone."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
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
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.nc")
    parser.add_argument(
        "--out", type=Path, default=Path("report.html"), help="where to write [report.html]"
    )
    words = (
        "exit with 1 if this answer of any verdict is a fail, or nothing was checked [all: either]"
    )
    parser.add_argument(
        "--strict", nargs="?", const="all", choices=("draws", "model", "all"), help=words
    )
    asked = parser.parse_args(argv)

    from pyrobnn.diagnostics.verdict import QUESTIONS
    from pyrobnn.posterior.storage import read

    check_file(asked.out, "report.html")
    trees = {path.stem: read(path) for path in asked.files}
    if len(trees) < len(asked.files):
        raise ValueError(
            "two files have the same name: rename one, names label the methods in the report"
        )
    verdicts = judge_saved(trees, asked.out, asked.out.with_suffix(".json"), {}).values()
    questions = [question for question in QUESTIONS if asked.strict in (question, "all")]
    failed = any(
        verdict.answer(question) == "fail" for verdict in verdicts for question in questions
    )
    # what nothing was checked of has not passed
    unchecked = any(not any(map(verdict.checked, questions)) for verdict in verdicts)
    return int(bool(questions) and (failed or unchecked))


def judge_saved(
    trees: Mapping[str, DataTree], page: Path, summary: Path, left_out: Mapping[str, str]
) -> dict[str, Verdict]:
    """Judge, write the report and the summary, and only then print."""
    import pandas as pd

    from pyrobnn.report import write_report, write_summary
    from pyrobnn.report.results import COLUMNS, Results

    results = Results.of(trees, left_out=left_out)
    write_summary(results, None, summary)
    write_report(results, page)

    # a method a column: as many numbers as there are fit on a terminal of 80 characters
    rows = [*results.rows, *results.floor]
    table = pd.DataFrame(
        {row.label: {c.title: row.values.get(c.key) for c in COLUMNS} for row in rows}
    )
    say(f"\n{table.dropna(how='all').to_string(float_format='{:.4g}'.format, na_rep='')}\n")
    for verdict in results.verdicts.values():
        say(f"{verdict.summary} ({verdict.lines})")
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
    parser.add_argument("model", type=Path, metavar="MODEL.nc")
    parser.add_argument(
        "new", type=Path, metavar="NEW", help="CSV, TSV, Parquet or Excel: columns by name"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE.csv", help="where to write [standard output]"
    )
    asked = parser.parse_args(argv)

    from pyrobnn.data.table import read_features
    from pyrobnn.studies.study import columns_of, load_run, outside, prediction_table

    if asked.out is not None:
        check_file(asked.out, "predictions.csv")
    posterior, settings = load_run(asked.model)
    if posterior.meta["interrupted"]:
        say(
            f"{asked.model}: the fit was interrupted, predictions rest on what it had by then",
            sys.stderr,
        )
    with warnings_said():
        x, keep = read_features(asked.new, columns_of(settings))
    table = prediction_table(posterior, x, settings)
    if settings.get("ranges"):
        table["outside"] = outside(x, settings)
        if count := int(table["outside"].astype(bool).sum()):
            say(
                f"{count} of {len(table)} rows lie beyond the training data in some feature (column 'outside'): "
                "no check has looked there",
                sys.stderr,
            )
    if not keep.all():
        say(
            f"{int((~keep).sum())} rows have a missing value: their predictions are left empty",
            sys.stderr,
        )
        table = table.set_index(keep.nonzero()[0]).reindex(range(len(keep)))
    written = table.to_csv(index=False)
    if asked.out is None:
        say(written.rstrip("\n"))
    else:
        asked.out.write_text(written, encoding="utf-8")
        say(f"{len(table)} predictions of {settings['target']!r}: {asked.out}")
    return 0


def judge(argv: Sequence[str], command: str) -> int:
    """Judge and print; exit status 1 where the model fails or nothing could be checked."""
    parser = OneLineParser(
        prog="pyrobnn judge",
        description="Judge predictions of rows that were not trained on: are they calibrated, everywhere, and as sharp "
        "as a linear model's? Give one of --quantiles, --mean with --sd, --draws, --probabilities.",
        epilog=EXIT_STATUS,
    )
    parser.add_argument(
        "file", metavar="FILE", help="CSV, TSV, Parquet or Excel: outcomes and predictions"
    )
    parser.add_argument("--target", required=True, metavar="COLUMN", help="the outcome")
    parser.add_argument("--mean", metavar="COLUMN", help="mean of a normal")
    parser.add_argument(
        "--sd", metavar="COLUMN", help="standard deviation of a normal, noise included"
    )
    parser.add_argument(
        "--draws", metavar="PREFIX", help="how the names of the columns of draws begin"
    )
    parser.add_argument(
        "--train", metavar="FILE", help="training rows: the target and the features"
    )
    parser.add_argument("--out", metavar="DIR", help="where to write report.html and verdict.json")
    words = "columns of quantiles, the level in their name (q05 q50 q975) or behind it (low=0.05)"
    parser.add_argument("--quantiles", nargs="+", metavar="COLUMN", help=words)
    words = "of the classes, in their sorted order or named by them (p_cat p_dog)"
    parser.add_argument("--probabilities", nargs="+", metavar="COLUMN", help=words)
    parser.add_argument(
        "--features", nargs="+", metavar="COLUMN", help="inputs, along which errors are looked at"
    )
    asked = parser.parse_args(argv)
    ways = [asked.quantiles, asked.mean or asked.sd, asked.draws, asked.probabilities]
    if sum(map(bool, ways)) != 1 or bool(asked.mean) != bool(asked.sd):
        raise ValueError("give one of --quantiles, --mean with --sd, --draws, --probabilities")
    if asked.out is not None:
        check_file(Path(asked.out, "report.html"), "")

    from pyrobnn.data.table import read_frame
    from pyrobnn.diagnostics.predictions import judged

    paths = {name: Path(path) for name, path in (("", asked.file), ("_train", asked.train)) if path}
    with warnings_said():
        tables = {name: read_frame(path) for name, path in paths.items()}
    label = paths[""].stem
    predictions = _predictions(asked, paths[""].name, tables[""])
    given = dict[str, Any]()
    inputs = dict[str, Any]()
    for name, table in tables.items():
        given[f"y{name}"] = _columns(paths[name].name, table, [asked.target], words=True)[
            asked.target
        ]
        if asked.features:
            inputs[f"x{name}"] = _columns(paths[name].name, table, asked.features, words=True)
    verdict, evidence = judged(
        predictions, given.pop("y"), label=label, **given, **_numbers(inputs, asked.target)
    )
    say("\n".join([verdict.summary, verdict.lines, *map(str, verdict.checks)]))
    if asked.out is not None:
        from pyrobnn.report import write_report

        page = Path(asked.out, "report.html")
        title = "Do these predictions fit the outcomes?"
        write_report({label: evidence}, page, title=title, verdicts={label: verdict})
        page.with_name("verdict.json").write_text(verdict.to_json() + "\n", encoding="utf-8")
        say(f"report: {page}")
    return int(verdict.model == "fail" or not verdict.checked("model"))


def _predictions(asked: Any, where: str, frame: pd.DataFrame) -> Any:
    """The predictions in the columns that are asked for, as `judged` takes them."""
    from scipy.stats import norm

    if asked.quantiles:
        levels = dict(map(_level, asked.quantiles))
        if len(levels) < len(asked.quantiles):
            raise ValueError(
                f"--quantiles: two columns have the same level: {', '.join(asked.quantiles)}"
            )
        return {level: _columns(where, frame, [name])[name] for level, name in levels.items()}
    if asked.mean:
        mean, sd = _columns(where, frame, [asked.mean, asked.sd]).to_numpy(dtype=float).T
        if not (sd > 0.0).all():
            raise ValueError(
                f"{where}: {asked.sd!r} must be above 0: it is {sd.min():.4g} in row {sd.argmin() + 1}"
            )
        return norm(mean, sd)
    if asked.draws:
        names = [
            name for name in frame.columns if name.startswith(asked.draws) and name != asked.target
        ]
        if len(names) < 2:
            raise ValueError(
                f"{where}: {len(names)} columns begin with {asked.draws!r}: two are needed"
            )
        return _columns(where, frame, names).to_numpy().T
    return _columns(where, frame, asked.probabilities)


def _level(given: str) -> tuple[float, str]:
    """Level and name of a column of quantiles: q05 0.05, q50 0.5, q975 0.975, low=0.1 0.1."""
    name, _, said = given.partition("=")
    digits = re.search(r"(\d*\.\d+|\d\d+)\D*$", said or name)
    if digits is None:
        raise ValueError(f"--quantiles: {given!r} names no level: write {name}=0.05")
    return float(digits[1] if "." in digits[1] else f"0.{digits[1]}"), name


def _columns(
    where: str, frame: pd.DataFrame, names: Sequence[str], words: bool = False
) -> pd.DataFrame:
    """Columns without gaps, as numbers; with ``words`` a column of text stays as it is."""
    from pyrobnn.data.columns import check_columns, numbers, only_numbers, refuse_gaps

    check_columns(where, names, list(frame.columns))
    read = numbers if words else only_numbers
    frame = frame[list(names)].assign(
        **{n: v for n in names if (v := read(where, frame[n])) is not None}
    )
    refuse_gaps(where, frame.isna(), "leave out rows without an outcome or prediction")
    return frame


def _numbers(frames: Mapping[str, pd.DataFrame], target: str) -> dict[str, pd.DataFrame]:
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
    return {name: frame.assign(**codes).astype(float).loc[name] for name in frames}
