"""The tests and the short numbers of speed on the newest versions of everything, beside the pinned ones.

    make newest                                  # a fresh environment without constraints.txt, then this script
    make newest ARGS="tests/compile tests/hmc"   # these tests alone; the record names them
    .venv-newest/bin/python scripts/newest/run.py --pinned .venv/bin/python

The interpreter that runs this script is the newest environment; ``--pinned`` is that of ``constraints.txt``. The
times are those of ``scripts/speed/run.py``, shorter, one environment after the other. Each run appends one record;
``python scripts/page.py`` writes the table of claim.md and the sentence of README.md from them. Ends with 1 where a
test failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent))

from records import append_record, commit  # noqa: E402

RESULTS = HERE / "records.jsonl"
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
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Tests:
    """What pytest was asked for, and how its tests ended."""

    asked: list[str]
    passed: int
    skipped: int
    failed: list[str]


def main(argv: list[str] | None = None) -> int:
    """Run the tests and both environments' numbers, and append the record; 1 where a test failed."""
    options = parse(argv)
    if options.numbers:
        print(json.dumps({"versions": versions(), "numbers": numbers()}))
        return 0
    # a shell that starts a command in the background has Ctrl-C ignored, also by the tests of Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tests = run_tests(options.tests, options.workers)
    newest = numbers_of(sys.executable)
    pinned = numbers_of(options.pinned)
    record = {
        "tests": asdict(tests),
        "newest": newest,
        "pinned": pinned,
        "commit": commit() or "?",
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    append_record(options.results, record)
    print(table([record]))
    for name in tests.failed:
        print("failed:", name)
    return 1 if tests.failed else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "tests",
        nargs="*",
        default=["tests"],
        help="files or folders of tests, relative to the repository",
    )
    add(
        "--pinned",
        type=Path,
        default=ROOT / ".venv" / "bin" / "python",
        help="Python of the pinned environment",
    )
    add(
        "--workers",
        default="auto",
        help="of pytest-xdist",
    )
    add(
        "--results",
        type=Path,
        default=RESULTS,
        help="the file of the records",
    )
    add(
        "--numbers",
        action="store_true",
        help="print the numbers of this environment alone, as JSON",
    )
    options = parser.parse_args(argv)
    if not options.numbers and not options.pinned.exists():
        parser.error(
            f"--pinned: {options.pinned} does not exist: 'make newest' makes it, or name a Python"
        )
    return options


# -- measuring -------------------------------------------------------------------------------------------------------


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
    command = [str(python), str(Path(__file__).resolve()), "--numbers"]
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
    from speed import run as speed

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of fits that are short on purpose
    speed.TURNS = 2
    values = {
        **speed.nuts(0),
        **speed.svi(0),
        **speed.laplace_and_predict(0),
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


# -- pages -----------------------------------------------------------------------------------------------------------


def table(records: Sequence[Record]) -> str:
    """Versions and tests, a row a record, the newest first; then the times of the last record in both environments."""
    lines = [
        "| run | Python | torch | NumPy | ArviZ | matplotlib | scikit-learn | tests | passed, failed |"
    ]
    lines.append("|---" * 9 + "|")
    for record in reversed(records):
        installed = record["newest"]["versions"]
        tests = record["tests"]
        names = ("python", "torch", "numpy", "arviz-stats", "matplotlib", "scikit-learn")
        cells = [
            record["finished_at"][:10],
            *(installed[name] for name in names),
            " ".join(tests["asked"]),
        ]
        lines.append(f"| {' | '.join(cells)} | {tests['passed']}, {len(tests['failed'])} |")
    newest = records[-1]
    labels = labelled(newest)
    head = [f"torch {newest[side]['versions']['torch']} ({side})" for side in ("newest", "pinned")]
    lines += ["", f"| | {head[0]} | {head[1]} | ratio |", "|---|---|---|---|"]
    for label, new, old in labels:
        lines.append(f"| {label} | {new:.3g} | {old:.3g} | {new / old:.2f} |")
    if "note" in newest:
        lines += ["", newest["note"]]
    return "\n".join(lines)


def labelled(record: Record) -> list[tuple[str, float, float]]:
    """Label, newest and pinned value of every time."""
    from speed.run import NUMBERS

    times = ("nuts gradient", "svi step", "laplace fit", "predict")
    labels = {name: NUMBERS[name].label for name in times}
    labels["compare"] = f"`pyrobnn {' '.join(COMPARE)}`, CPU seconds"
    new = record["newest"]["numbers"]
    old = record["pinned"]["numbers"]
    return [
        (label, new[name], old[name])
        for name, label in labels.items()
        if name in new and name in old
    ]


def sentence(records: Sequence[Record]) -> str:
    """The versions that were run last, in one sentence."""
    record = records[-1]
    texts = []
    for side in ("pinned", "newest"):
        installed = record[side]["versions"]
        texts.append(
            f"torch {installed['torch'].split('+')[0]}, NumPy {installed['numpy']} ({side})"
        )
    return f"Run with {texts[0]} and {texts[1]}: [what passed, how fast](scripts/newest/claim.md)."


if __name__ == "__main__":
    sys.exit(main())
