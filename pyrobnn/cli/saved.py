"""``pyrobnn report`` and ``pyrobnn predict``: what was saved, judged, and used on new rows."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pyrobnn.cli.terminal import EXIT_STATUS, OneLineParser, check_file, say, warnings_said

if TYPE_CHECKING:
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
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="where to write [report.html]")
    words = "exit with 1 if this answer of any verdict is a fail, or nothing was checked [all: either]"
    parser.add_argument("--strict", nargs="?", const="all", choices=("draws", "model", "all"), help=words)
    asked = parser.parse_args(argv)

    from pyrobnn.diagnostics.verdict import QUESTIONS
    from pyrobnn.posterior.storage import read

    check_file(asked.out, "report.html")
    trees = {path.stem: read(path) for path in asked.files}
    if len(trees) < len(asked.files):
        raise ValueError("two files have the same name: rename one, names label the methods in the report")
    verdicts = judge(trees, asked.out, asked.out.with_suffix(".json"), {}).values()
    questions = [question for question in QUESTIONS if asked.strict in (question, "all")]
    failed = any(verdict.answer(question) == "fail" for verdict in verdicts for question in questions)
    # what nothing was checked of has not passed
    unchecked = any(not any(map(verdict.checked, questions)) for verdict in verdicts)
    return int(bool(questions) and (failed or unchecked))


def judge(
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
    table = pd.DataFrame({row.label: {c.title: row.values.get(c.key) for c in COLUMNS} for row in rows})
    say(f"\n{table.dropna(how='all').to_string(float_format='{:.4g}'.format, na_rep='')}\n")
    for verdict in results.verdicts.values():
        say(f"{verdict.summary} ({verdict.lines})")
    for name, reason in left_out.items():
        say(f"{name}: left out: {reason}")
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
    parser.add_argument("new", type=Path, metavar="NEW", help="CSV, TSV, Parquet or Excel: columns by name")
    parser.add_argument("--out", type=Path, metavar="FILE.csv", help="where to write [standard output]")
    asked = parser.parse_args(argv)

    from pyrobnn.data.table import read_features
    from pyrobnn.studies.study import columns_of, load_run, outside, prediction_table

    if asked.out is not None:
        check_file(asked.out, "predictions.csv")
    posterior, settings = load_run(asked.model)
    if len(settings["shape"]) > 1:
        raise ValueError(
            f"{str(asked.model)!r} was fitted to images, which are no table: use Posterior.load(path, model)"
        )
    if posterior.meta["interrupted"]:
        say(f"{asked.model}: the fit was interrupted, predictions rest on what it had by then", sys.stderr)
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
        say(f"{int((~keep).sum())} rows have a missing value: their predictions are left empty", sys.stderr)
        table = table.set_index(keep.nonzero()[0]).reindex(range(len(keep)))
    written = table.to_csv(index=False)
    if asked.out is None:
        say(written.rstrip("\n"))
    else:
        asked.out.write_text(written, encoding="utf-8")
        say(f"{len(table)} predictions of {settings['target']!r}: {asked.out}")
    return 0
