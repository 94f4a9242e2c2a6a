"""``pyrobnn predict``: new rows predicted with a method that ``fit`` or ``compare`` has saved."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pyrobnn.cli import EXIT_STATUS
from pyrobnn.cli.say import OneLineParser, check_file, say, warnings_said


def run(argv: Sequence[str], command: str) -> int:
    """Predict and write; exit status 0."""
    parser = OneLineParser(
        prog="pyrobnn predict",
        description="Predict new rows with a method that 'fit' or 'compare' has saved. Of numbers: mean, aleatoric and "
        "epistemic sd, sd and quantiles, in the target's units; of classes: the most probable, the probability of each "
        "and both entropies in nats. The column 'outside' names the features in which a row lies beyond the training "
        "data.",
        epilog=f"{EXIT_STATUS[0].upper()}{EXIT_STATUS[1:]}.",
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
    beyond = outside(x, settings)
    if beyond is not None:
        table["outside"] = beyond
        if count := sum(map(bool, beyond)):
            say(
                f"{count} of {len(beyond)} rows lie beyond the training data in some feature (column 'outside'): "
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
