"""What a sweep will cost, told before it starts, and what of it fits into a time; and records made a second time."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

#: bytes of one line of the results file, where there is none to measure
LINE = 1500
UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
#: how far a record made again may lie from the first: rounding differs between machines, and chains amplify it
MOST_NATS, MOST_RMSE = 0.05, 0.05

Record = Mapping[str, Any]


def duration(text: str) -> float:
    """Seconds of ``"90s"``, ``"30m"``, ``"1.5h"``, ``"2d"``.

    Raises:
        ValueError: anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d)", text.strip())
    if match is None or float(match[1]) == 0:
        raise ValueError(f"a time is a number with s, m, h or d, such as 90m or 1.5h, got {text!r}")
    return float(match[1]) * UNITS[match[2]]


def share(text: str) -> float:
    """``"5%"`` → 0.05.

    Raises:
        ValueError: not a percentage in (0, 100].
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    if match is None or not 0 < float(match[1]) <= 100:
        raise ValueError(f"a share is a percentage such as 5%, got {text!r}")
    return float(match[1]) / 100


@dataclass(frozen=True)
class Plan:
    """Tasks that are to run and those that a budget leaves out, with what is known of their cost.

    ``seconds`` is CPU time over all tasks that run, by earlier records of the same method; ``guessed`` counts the tasks
    of a data set or a method that no record is of. ``peak_mb`` is of one process, None where nothing tells it.
    """

    tasks: list[Record]
    left_out: list[Record]
    seconds: float
    guessed: int
    peak_mb: float | None
    disk_bytes: float

    def describe(self, jobs: int, what: str = "fits") -> str:
        """One or two sentences for the terminal; ``what`` the tasks are."""
        text = "nothing to run"
        if self.tasks:
            memory = "memory not measured" if self.peak_mb is None else f"{self.peak_mb:,.0f} MB a process"
            text = (
                f"about {_spell(self.seconds / jobs)} with {jobs} process{'es' * (jobs > 1)}, {memory}, "
                f"{self.disk_bytes / 1e6:.1f} MB of disk"
            )
        if self.guessed:
            text += f"; {self.guessed} of them were never timed, and their time is a guess"
        if self.left_out:
            names = sorted({f"{set_of(task)} {task['method']}" for task in self.left_out})
            shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            text += f"\nleft out for the budget: {len(self.left_out)} {what}, of {shown}"
        return text


def plan(pending: Sequence[Record], records: Sequence[Record], budget: float, jobs: int = 1) -> Plan:
    """The pending tasks in their order until ``budget`` seconds (inf for all) of ``jobs`` processes are spent."""
    cost, runs, left, spent, guessed = Cost(records), [], [], 0.0, 0
    for task in pending:
        seconds, known = cost(task)
        if spent + seconds > budget * jobs:
            left.append(task)
            continue
        runs.append(task)
        spent, guessed = spent + seconds, guessed + (not known)
    peaks = [record["peak_mb"] for record in records if record.get("peak_mb") is not None]
    return Plan(runs, left, spent, guessed, max(peaks, default=None), LINE * len(runs))


def set_of(task: Record) -> str:
    """The data set of a task or a record, which some studies call data."""
    return task["dataset"] if "dataset" in task else task["data"]


class Cost:
    """CPU seconds of a task: the median of its method on its data; else of its method; else of everything."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.exact: dict[Any, list[float]] = {}
        self.method: dict[Any, list[float]] = {}
        for record in records:
            seconds = record["cpu_seconds"]
            self.exact.setdefault((set_of(record), record["method"]), []).append(seconds)
            self.method.setdefault(record["method"], []).append(seconds)

    def __call__(self, task: Record) -> tuple[float, bool]:
        if found := self.exact.get((set_of(task), task["method"])):
            return median(found), True
        if found := self.method.get(task["method"]):
            return max(found), False  # a set that nobody timed may be larger than all
        return fmean(map(fmean, self.method.values())) if self.method else 60.0, False


def _spell(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{math.ceil(seconds)} s"


def sample(records: Sequence[Record], part: float, seed: int) -> list[Record]:
    """A random ``part`` of the records, one at least."""
    count = max(1, round(part * len(records)))
    return random.Random(seed).sample(list(records), min(count, len(records)))


def largest(record: Record, again: Record) -> tuple[float, float]:
    """Nats a point by which a record made again is better, and by what share its RMSE is larger."""
    old, new = record["scores"], again["scores"]
    ratio = new["rmse"] / old["rmse"] if old["rmse"] else math.inf
    return new["log_density"] - old["log_density"], ratio - 1


def differences(record: Record, again: Record) -> list[str]:
    """In words, what of a record made again lies beyond the tolerance."""
    found, (old, new) = [], (record["scores"], again["scores"])
    nats, share = largest(record, again)
    if not abs(nats) <= MOST_NATS:
        found.append(
            f"log density {new['log_density']:.3f} for {old['log_density']:.3f} ({nats:+.3f} nats a point)"
        )
    if not abs(share) <= MOST_RMSE:
        found.append(f"RMSE {new['rmse']:.4g} for {old['rmse']:.4g}")
    return found
