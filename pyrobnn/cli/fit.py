"""``pyrobnn fit``: one method on one table, saved with all that predicting new rows needs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from pyrobnn.cli.compare import INTERRUPTED, fit_all, study_of
from pyrobnn.cli.config import read
from pyrobnn.cli.file import write_config
from pyrobnn.cli.say import check_file, say
from pyrobnn.inference.method import check_use


def run(argv: Sequence[str], command: str) -> int:
    """Fit, save, judge; exit status 0, 1 where the method refused or failed, 130 where Ctrl-C stopped it."""
    config = read(argv, "fit")
    if config.study.print_config:
        say(write_config(config.plain).rstrip("\n"))
        return 0
    out = Path(config.study.out)
    if config.study.data is None:
        raise ValueError("name the data: pyrobnn fit FILE.csv --target COLUMN (see pyrobnn fit --help)")
    if out.suffix != ".nc":
        raise ValueError(f"--out {str(out)!r} must be a file FILE.nc: use {str(out.with_suffix('.nc'))!r}")
    check_file(out, "model.nc")
    ((label, (method, _)),) = config.methods.items()
    if config.study.checkpoint is not None:
        check_use(method, "checkpoint")
    trees, left_out, stopped = fit_all(study_of(config), config, {label: out.stem}, out.parent, command)
    if trees:
        from pyrobnn.diagnostics import diagnose

        verdict = diagnose(trees[out.stem])
        say(f"\n{verdict.summary} ({verdict.lines})\n\nsaved: {out}")
        say(f"predict: pyrobnn predict {quote(str(out))} NEW.csv\nreport: pyrobnn report {quote(str(out))}")
    for reason in left_out.values():
        say(f"pyrobnn: nothing was saved: {reason}", sys.stderr)
    if stopped:
        kept = Path(config.study.checkpoint or out.with_suffix(".checkpoint"))
        goes_on = "with --resume goes on" if kept.exists() else "starts anew: no checkpoint was written yet"
        say(f"stopped; the same command {goes_on}", sys.stderr)
        return INTERRUPTED
    return 1 if left_out else 0
