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
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from newest.claim_tables import table  # noqa: E402
from newest.environments import ROOT, numbers, numbers_of, run_tests, versions  # noqa: E402
from records import append_record, commit  # noqa: E402

RESULTS = HERE / "records.jsonl"


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


if __name__ == "__main__":
    sys.exit(main())
