"""``pyrobnn compare`` and ``pyrobnn fit``: methods run on one data set, saved and judged; ``pyrobnn doctor``."""

from __future__ import annotations

import json
import platform
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from jsonargparse import Namespace

from pyrobnn import __version__, data
from pyrobnn.cli.options import OPTIONS, Config, read
from pyrobnn.cli.terminal import (
    INTERRUPTED,
    OneLineParser,
    check_file,
    one_line,
    say,
    warnings_said,
)
from pyrobnn.core.checks import Refused, check_device

if TYPE_CHECKING:
    from xarray import DataTree

    from pyrobnn.studies.study import Study


def compare(argv: Sequence[str], command: str) -> int:
    """Fit, judge, write; exit status 0, 1 where a method was skipped, 130 where Ctrl-C stopped it.

    Args:
        argv: the words behind the command.
        command: the command line, for the page.
    """
    config = read(argv, "compare")
    out = Path(config.study.out)
    trees, skipped, stopped = _run(config, {label: label for label in config.methods}, out, command)
    if stopped:
        missing = (label for label in config.methods if label not in (*trees, *skipped))
        skipped |= dict.fromkeys(missing, "stopped before it was done")
        whole = sum(not float(tree.attrs.get("interrupted", 0)) for tree in trees.values())
        count = len(config.methods)
        say(
            f"\nstopped with {whole} of {count} methods in hand; the same command with --resume goes on",
            sys.stderr,
        )
    from pyrobnn.studies.compare import REFINED

    # the first run of exact chains is the reference of all others
    names = [*config.methods, *(label + REFINED for label in config.methods)]
    trees = {name: trees[name] for name in names if name in trees}
    if trees:
        from pyrobnn.cli import saved

        (out / "config.yaml").write_text(f"{config}\n", encoding="utf-8")
        saved.judge_saved(trees, out / "report.html", out / "summary.json", skipped)
    return INTERRUPTED if stopped else int(bool(skipped))


def fit(argv: Sequence[str], command: str) -> int:
    """Fit, save, judge; exit status 0, 1 where the method refused or failed, 130 where Ctrl-C stopped it."""
    config = read(argv, "fit")
    options = config.study
    out = Path(options.out)
    if options.data is None:
        raise ValueError(
            "name the data: pyrobnn fit FILE.csv --target COLUMN (see pyrobnn fit --help)"
        )
    if out.suffix != ".nc":
        raise ValueError(
            f"--out {str(out)!r} must be a file FILE.nc: use {str(out.with_suffix('.nc'))!r}"
        )
    check_file(out, "model.nc")
    (label,) = config.methods
    trees, skipped, stopped = _run(config, {label: out.stem}, out.parent, command)
    from pyrobnn.diagnostics import diagnose

    for tree in trees.values():
        verdict = diagnose(tree)
        say(f"\n{verdict.summary} ({verdict.lines})\n\nsaved: {out}")
        say(
            f"predict: pyrobnn predict {quote(str(out))} NEW.csv\nreport: pyrobnn report {quote(str(out))}"
        )
    for reason in skipped.values():
        say(f"pyrobnn: nothing was saved: {reason}", sys.stderr)
    if stopped:
        if out.with_suffix(".checkpoint").exists():
            ending = "with --resume goes on"
        elif trees:
            ending = "starts anew"
        else:
            ending = "starts anew: no checkpoint was written yet"
        say(f"stopped; the same command {ending}", sys.stderr)
        return INTERRUPTED
    return int(bool(skipped))


def _run(
    config: Config,
    file_names: Mapping[str, str],
    out: Path,
    command: str,
) -> tuple[dict[str, DataTree], dict[str, str], bool]:
    """Run the methods: the trees and why others were skipped, by file name, and whether Ctrl-C stopped the run."""
    from xarray import DataTree

    from pyrobnn.diagnostics.verdict import said
    from pyrobnn.studies.compare import run_study

    options = config.study
    trees = {}
    skipped = {}
    stopped = False
    attributes = {
        name: {"command": command, "config": json.dumps(config.of(label))}
        for label, name in file_names.items()
    }
    runs = run_study(
        _study_of(options),
        {name: config.methods[label] for label, name in file_names.items()},
        out,
        device=options.device,
        seed=options.seed,
        progress=not options.no_progress,
        announce=say,
        attributes=attributes,
        resume=options.resume,
        refine=options.refine,
        workers=options.workers,
    )
    try:
        for name, result in runs:
            if isinstance(result, DataTree):
                trees[name] = result
                stopped = float(result.attrs.get("interrupted", 0)) > 0
            else:
                skipped[name] = str(result) if isinstance(result, Refused) else said(result)
    except KeyboardInterrupt:
        stopped = True
    return trees, skipped, stopped


def _study_of(options: Namespace) -> Study:
    """The data and the model that are asked for, with a line on what was read."""
    from pyrobnn.studies.study import QUICK_ROWS, describe, make_study, some_rows

    check_device(options.device)
    task = options.task
    if task is None and options.target is not None and options.response != "gaussian":
        # the response says what the target is
        task = "classification" if options.response == "ordinal" else "regression"
    reading = {name: options[name] for name in ("features", "drop", "missing", "seed")}
    with warnings_said():
        dataset = data.load(
            options.data,
            options.target,
            task=task,
            **reading,
        )
    if dataset.columns is not None and task is None:
        say(f"{dataset.task} of {dataset.target_name!r} by its values (--task says otherwise)")
    if options.quick:
        dataset = some_rows(dataset, QUICK_ROWS, options.seed)
    # the title is a key of `OPTIONS`
    modelling = {name: options[name] for name in OPTIONS["the model"]}
    fraction = options.test_fraction
    study = make_study(
        dataset,
        test_fraction=fraction,
        seed=options.seed,
        **modelling,
    )
    say(describe(study))
    return study


PACKAGES = ("torch", "pyro-ppl", "numpy", "arviz-stats", "scikit-learn")


def doctor(argv: Sequence[str], command: str) -> int:
    """Print what is installed and whether a fit runs; exit status 0, or 1 where the fit failed."""
    OneLineParser(
        prog="pyrobnn doctor", description="Versions, compiler, device and a short fit."
    ).parse_args(argv)

    import torch

    from pyrobnn import BNN, MAP, data, likelihoods, networks, priors
    from pyrobnn.core.private import lacks_compiler
    from pyrobnn.inference.fitting.problem import version_of

    say(f"python    {platform.python_version()}, {platform.platform()}")
    versions = [f"{name} {version_of(name)}" for name in PACKAGES]
    say(f"packages  {', '.join([f'pyrobnn {__version__}', *versions])}")
    none = "none: every fit runs, several times slower (apt install g++, or xcode-select --install)"
    say(f"compiler  {none if lacks_compiler() else 'found'}")
    cuda = f"cuda ({torch.cuda.get_device_name()}), " if torch.cuda.is_available() else ""
    say(f"device    {cuda}cpu ({torch.get_num_threads()} threads)")
    points = data.gap()
    model = BNN(
        networks.mlp(1, (8,), seed=0), priors.FanInNormal(), likelihoods.HomoskedasticGaussian(0.3)
    )
    began = time.perf_counter()
    try:
        with warnings.catch_warnings(
            record=True,
            action="always",
            category=UserWarning,
        ) as caught:
            fitted = MAP(num_steps=500, compile=True).fit(
                model,
                points.x,
                points.y,
                seed=0,
            )
            error = (fitted.predict(points.x).mean - points.y).square().mean().sqrt()
    except Exception as failure:  # whatever is broken here is what is asked for
        say(f"fit       failed: {type(failure).__name__}: {one_line(failure)}")
        return 1
    say(
        f"fit       MAP in {time.perf_counter() - began:.1f} s, compiling included, RMSE {error:.2f} (noise 0.4)"
    )
    # printed only after the line of the fit
    for text in dict.fromkeys(str(warning.message) for warning in caught):
        say(f"warning   {text}")
    return 0
