"""``pyrobnn compare`` and ``pyrobnn fit``: methods run on one data set, saved and judged."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from pyrobnn import data
from pyrobnn.cli.options import OPTIONS, Config, read
from pyrobnn.cli.terminal import INTERRUPTED, check_file, say, warnings_said
from pyrobnn.core.checks import Refused, check_device

if TYPE_CHECKING:
    from xarray import DataTree

    from pyrobnn.studies.study import Study


def compare(argv: Sequence[str], command: str) -> int:
    """Fit, judge, write; exit status 0, 1 where a method was left out, 130 where Ctrl-C stopped it.

    Args:
        argv: the words behind the command.
        command: the command line, for the page.
    """
    config = read(argv, "compare")
    out = Path(config.study.out)
    trees, failed, stopped = _run(config, {label: label for label in config.methods}, out, command)
    if stopped:
        missing = (label for label in config.methods if label not in (*trees, *failed))
        failed |= dict.fromkeys(missing, "stopped before it was done")
        finished = f"{len(trees)} of {len(config.methods)} methods are finished"
        say(f"\nstopped: {finished}; the same command with --resume goes on", sys.stderr)
    if trees := {label: trees[label] for label in config.methods if label in trees}:
        from pyrobnn.cli import saved

        (out / "config.yaml").write_text(f"{config}\n", encoding="utf-8")
        saved.judge_saved(trees, out / "report.html", out / "summary.json", failed)
    return INTERRUPTED if stopped else int(bool(failed))


def fit(argv: Sequence[str], command: str) -> int:
    """Fit, save, judge; exit status 0, 1 where the method refused or failed, 130 where Ctrl-C stopped it."""
    config = read(argv, "fit")
    asked = config.study
    out = Path(asked.out)
    if asked.data is None:
        raise ValueError("name the data: pyrobnn fit FILE.csv --target COLUMN (see pyrobnn fit --help)")
    if out.suffix != ".nc":
        raise ValueError(f"--out {str(out)!r} must be a file FILE.nc: use {str(out.with_suffix('.nc'))!r}")
    check_file(out, "model.nc")
    (label,) = config.methods
    trees, left_out, stopped = _run(config, {label: out.stem}, out.parent, command)
    for tree in trees.values():
        from pyrobnn.diagnostics import diagnose

        verdict = diagnose(tree)
        say(f"\n{verdict.summary} ({verdict.lines})\n\nsaved: {out}")
        say(f"predict: pyrobnn predict {quote(str(out))} NEW.csv\nreport: pyrobnn report {quote(str(out))}")
    for reason in left_out.values():
        say(f"pyrobnn: nothing was saved: {reason}", sys.stderr)
    if stopped:
        kept = out.with_suffix(".checkpoint")
        goes_on = "with --resume goes on" if kept.exists() else "starts anew: no checkpoint was written yet"
        say(f"stopped; the same command {goes_on}", sys.stderr)
        return INTERRUPTED
    return int(bool(left_out))


def _run(
    config: Config, labels: Mapping[str, str], out: Path, command: str
) -> tuple[dict[str, DataTree], dict[str, str], bool]:
    """The trees by the names of their files, why others are left out, and whether Ctrl-C stopped it."""
    from xarray import DataTree

    from pyrobnn.diagnostics.verdict import said
    from pyrobnn.studies.compare import run_study

    asked, trees, left_out, stopped = config.study, {}, {}, False
    configs = {name: json.dumps(config.of(label)) for label, name in labels.items()}
    marks = {name: {"command": command, "config": written} for name, written in configs.items()}
    runs = run_study(
        _study_of(asked),
        {name: config.methods[label] for label, name in labels.items()},
        out,
        device=asked.device,
        seed=asked.seed,
        progress=not asked.no_progress,
        announce=say,
        attributes=marks,
        resume=asked.resume,
    )
    try:
        for name, found in runs:
            if isinstance(found, DataTree):
                trees[name] = found
                stopped = float(found.attrs.get("interrupted", 0)) > 0
            else:
                left_out[name] = str(found) if isinstance(found, Refused) else said(found)
    except KeyboardInterrupt:
        stopped = True
    return trees, left_out, stopped


def _study_of(asked: Any) -> Study:
    """The data and the model that are asked for, with a line on what was read."""
    from pyrobnn.studies.study import QUICK_ROWS, describe, make_study, some_rows

    check_device(asked.device)
    task = asked.task
    if task is None and asked.target is not None and asked.response != "gaussian":
        # the response says what the target is
        task = "classification" if asked.response == "ordinal" else "regression"
    options = {name: asked[name] for name in ("features", "drop", "missing", "seed")}
    with warnings_said():
        dataset = data.load(asked.data, asked.target, task=task, **options)
    if dataset.columns is not None and task is None:
        say(f"{dataset.task} of {dataset.target_name!r} by its values (--task says otherwise)")
    if asked.quick:
        dataset = some_rows(dataset, QUICK_ROWS, asked.seed)
    options = {name: asked[name] for name in OPTIONS["the model"]}
    study = make_study(dataset, test_fraction=asked.test_fraction, seed=asked.seed, **options)
    say(describe(study))
    return study
