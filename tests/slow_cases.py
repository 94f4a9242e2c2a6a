"""Which cases of a test run with the slow ones, by the CPU seconds that each took.

    make test ARGS="--cpu-seconds seconds.jsonl"
    python tests/slow_cases.py slow.jsonl seconds.jsonl

The second writes ``tests/slow_cases.txt``, which ``conftest.py`` reads. Of a case in several files the last counts;
one in none of them, as those that were slow before, is run always again.

Of a test with several cases every run has all that take less than a third of a second, and of the others as many as
take a second together, at least one: which ones, the hash of their names draws, so that the cases of one law are others
than those of the next. Pages of the docs and examples of docstrings are no cases of one law: all of them run.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

LIST = Path(__file__).with_suffix(".txt")
#: the folder whose cases are texts
TEXTS = "tests/docs/"
#: CPU seconds of a case that is always run, and of the longer cases of one test that are
SHORT = 0.3
BUDGET = 1.0


def slow_cases(seconds: dict[str, float]) -> list[str]:
    """Those of the cases, by name with their CPU seconds, that run with the slow tests."""
    cases_of = defaultdict(list)
    for name in sorted(seconds):
        cases_of[name.partition("[")[0]].append(name)
    slow = []
    for cases in cases_of.values():
        if len(cases) == 1 or cases[0].startswith(TEXTS):
            continue
        total = 0.0
        for name in sorted(cases, key=_drawn):
            if seconds[name] < SHORT:
                continue
            if total and total + seconds[name] > BUDGET:
                slow.append(name)
            else:
                total += seconds[name]
    return sorted(slow)


def _drawn(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def listed() -> frozenset[str]:
    """The cases that are listed."""
    return frozenset(LIST.read_text().splitlines())


def main(paths: Sequence[str]) -> None:
    seconds = {}
    for path in paths:
        lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
        seconds |= {line["case"]: line["seconds"] for line in lines}
    slow = slow_cases(seconds)
    LIST.write_text("".join(f"{name}\n" for name in slow))


if __name__ == "__main__":
    main(sys.argv[1:])
