"""``pyrobnn compare``: several methods on one data set, judged, with a report."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyrobnn import data
from pyrobnn.checks import Refused, check_device
from pyrobnn.cli.config import Config, read
from pyrobnn.cli.file import write_config
from pyrobnn.cli.say import say, warnings_said

if TYPE_CHECKING:
    from xarray import DataTree

    from pyrobnn.studies.study import Study

INTERRUPTED = 130


def run(argv: Sequence[str], command: str, left_out: Mapping[str, str] | None = None) -> int:
    """Fit, judge, write; exit status 0, 1 where a method was left out, 130 where Ctrl-C stopped it.

    Args:
        argv: the words behind the command.
        command: the command line, for the page.
        left_out: what the page is to say is left out on purpose, and why: no reason for a status of 1.
    """
    config = read(argv, "compare")
    if config.study.print_config:
        say(write_config(config.plain).rstrip("\n"))
        return 0
    out = Path(config.study.out)
    labels = {label: label for label in config.methods}
    trees, failed, stopped = fit_all(study_of(config), config, labels, out, command)
    if stopped:
        missing = (label for label in labels if label not in (*trees, *failed))
        failed |= dict.fromkeys(missing, "stopped before it was done")
        say(
            f"\nstopped: {len(trees)} of {len(labels)} methods are finished or cut short, and kept; the same command "
            "with --resume goes on",
            sys.stderr,
        )
    if trees := {label: trees[label] for label in labels if label in trees}:
        from pyrobnn.cli.judged import write

        (out / "config.yaml").write_text(write_config(config.plain), encoding="utf-8")
        try:
            write(trees, out / "report.html", out / "summary.json", {**(left_out or {}), **failed})
        except KeyboardInterrupt:
            files = " ".join(str(out / f"{name}.nc") for name in trees)
            say(f"\nstopped; the draws are kept, judge them with: pyrobnn report {files}", sys.stderr)
            return INTERRUPTED
    if stopped:
        return INTERRUPTED
    return 1 if failed else 0


def study_of(config: Config) -> Study:
    """The data and the model that are asked for, told in a line."""
    from pyrobnn.studies.study import QUICK_ROWS, describe, make_study, some_rows

    asked = config.study
    for note in config.notes:
        say(note, sys.stderr)
    check_device(asked.device)
    dataset = _data(asked)
    study = make_study(
        some_rows(dataset, QUICK_ROWS, asked.seed) if asked.quick else dataset,
        hidden=asked.hidden,
        activation=asked.activation,
        prior_scale=asked.prior_scale,
        noise=asked.noise,
        response=asked.response,
        exposure=asked.exposure,
        event=asked.event,
        bounds=asked.bounds,
        test_fraction=asked.test_fraction,
        seed=asked.seed,
    )
    say(describe(study))
    return study


def fit_all(
    study: Study, config: Config, labels: Mapping[str, str], out: Path, command: str
) -> tuple[dict[str, DataTree], dict[str, str], bool]:
    """The trees of the methods that were fitted, why others were not, and whether Ctrl-C stopped it.

    Args:
        study, config: what is asked for.
        labels: name in ``config`` → name of the file in ``out``.
        out: the folder.
        command: the command line, for the trees.
    """
    from xarray import DataTree

    from pyrobnn.diagnostics import Evidence
    from pyrobnn.diagnostics.verdict import said
    from pyrobnn.studies.compare import run_study

    trees: dict[str, DataTree] = {}
    left_out: dict[str, str] = {}
    stopped = False
    asked = config.study
    try:
        for name, found in run_study(
            study,
            {labels[label]: each for label, each in config.methods.items()},
            out,
            device=asked.device,
            seed=asked.seed,
            progress=not asked.no_progress,
            announce=say,
            attributes={
                labels[label]: {"command": command, "config": json.dumps(config.of(label))}
                for label in labels
            },
            resume=asked.resume,
            checkpoint=Path(asked.checkpoint) if asked.get("checkpoint") else None,
            tracker=asked.tracker,
            live=asked.live,
        ):
            if isinstance(found, DataTree):
                trees[name] = found
                stopped = bool(Evidence(found).number("interrupted", 0.0))
            else:
                left_out[name] = str(found) if isinstance(found, Refused) else said(found)
    except KeyboardInterrupt:
        stopped = True
    if asked.tracker is not None:
        from pyrobnn.studies.tracking import LOOK

        say(f"watch: {LOOK[asked.tracker].format(out=out)}")
    return trees, left_out, stopped


def _data(asked: Any) -> data.Dataset:
    """The data set, with what was read into a table of the user's."""
    task = asked.task
    if task is None and asked.target is not None and asked.response != "gaussian":
        # the response says what the target is
        task = "classification" if asked.response == "ordinal" else "regression"
    with warnings_said():
        dataset = data.load(
            asked.data,
            asked.target,
            task=task,
            features=asked.features,
            drop=asked.drop,
            missing=asked.missing,
            seed=asked.seed,
        )
    if dataset.columns is not None and task is None:
        from pyrobnn.data.table import guessed

        say(f"{guessed(dataset)} (--task says otherwise)")
    return dataset
