"""What an environment gives: how the tests end, the versions, and the times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
#: what the numbers depend on; a Python without one of them has none
LIBRARIES = (
    "torch",
    "pyro-ppl",
    "numpy",
    "scipy",
    "arviz",
    "arviz-stats",
    "matplotlib",
    "scikit-learn",
)
#: CPU seconds of this command are the last number
COMPARE = ("compare", "--quick", "--methods", "nuts", "--data", "gap")


@dataclass(frozen=True)
class Tests:
    """What pytest was asked for, and how its tests ended."""

    asked: list[str]
    passed: int
    skipped: int
    failed: list[str]


def run_tests(names: Sequence[str], workers: str) -> Tests:
    """The tests in this environment; pytest prints as it runs."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            workers,
            "--dist",
            "worksteal",
            f"--junitxml={report}",
        ]
        code = subprocess.run(
            [*command, *names],
            cwd=ROOT,
            env=environment(),
            check=False,
        ).returncode
        if not report.exists():
            raise RuntimeError(f"pytest ended with {code} and wrote no report: {' '.join(command)}")
        return outcomes(names, report)


def outcomes(names: Sequence[str], report: Path) -> Tests:
    """What a JUnit report of pytest says."""
    failed = []
    skipped = 0
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    for case in cases:
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif case.find("skipped") is not None:
            skipped += 1
    return Tests(list(names), len(cases) - len(failed) - skipped, skipped, failed)


def numbers_of(python: str | Path) -> dict[str, Any]:
    """Versions and numbers of an environment, by a process of its interpreter."""
    command = [str(python), str(Path(__file__).with_name("run.py").resolve()), "--numbers"]
    answer = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    measurements: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return measurements


def environment() -> dict[str, str]:
    """This repository's package, on one thread."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that are there."""
    installed = {"python": sys.version.split()[0]}
    for name in LIBRARIES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def numbers() -> dict[str, float]:
    """The times of ``scripts/speed/run.py`` in two turns, and CPU seconds of NUTS of ``pyrobnn compare``."""
    import resource

    import torch
    from speed import relative_time
    from speed.short_fits import laplace_and_predict, nuts, svi

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of fits that are short on purpose
    relative_time.TURNS = 2
    values = {
        **nuts(0),
        **svi(0),
        **laplace_and_predict(0),
    }
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pyrobnn", *COMPARE, "--out", folder]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            command,
            cwd=folder,
            env=environment(),
            check=True,
            stdout=subprocess.DEVNULL,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**values, "compare": round(seconds, 2)}
