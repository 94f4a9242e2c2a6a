"""Records of measurements: one JSON object a line, appended as soon as it is made; what is there is not run again."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median
from typing import Any

import joblib
from filelock import FileLock

Record = Mapping[str, Any]
Records = Sequence[Record]


def append_record(path: str | Path, record: Record) -> None:
    """Append one line of JSON in a single write, and wait until it is on the disk.

    A line torn by an earlier crash is closed first, so that it spoils no other; one torn by a full disk is taken back.
    """
    line = (
        json.dumps(
            record,
            allow_nan=False,
            sort_keys=True,
        )
        + "\n"
    ).encode()
    with open(path, "ab+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(-1, os.SEEK_END)
            line = (b"" if file.read(1) == b"\n" else b"\n") + line
        if file.write(line) != len(line):
            file.truncate(size)
            raise OSError(f"could not write the whole line to {path}: is the disk full?")
        os.fsync(file.fileno())


def read_records(path: str | Path, needs: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The records of a file in order, with a warning of lines that are torn or lack an entry of ``needs``."""
    if not Path(path).is_file():
        return []
    records = []
    skipped = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            record = None
        if isinstance(record, dict) and all(name in record for name in needs):
            records.append(record)
        else:
            skipped.append(number)
    if skipped:
        warnings.warn(
            f"{path}: lines {skipped[:8]} are torn or incomplete and were skipped", stacklevel=2
        )
    return records


def share(text: str) -> float:
    """``"5%"`` → 0.05; an option's type."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    if match is None or not 0 < float(match[1]) <= 100:
        raise argparse.ArgumentTypeError(f"a share is a percentage such as 5%, got {text!r}")
    return float(match[1]) / 100


def _expected_seconds(task: Record, records: Sequence[Record]) -> float:
    """CPU seconds of a task by earlier records: the median of its method on its data, else the most of its method."""
    of_method = [record for record in records if record["method"] == task["method"]]
    exact = [record["cpu_seconds"] for record in of_method if record["dataset"] == task["dataset"]]
    if exact:
        return median(exact)
    return max((record["cpu_seconds"] for record in of_method), default=60.0)


def within_budget(
    tasks: Sequence[Record], records: Sequence[Record], budget: float
) -> tuple[list[Record], list[Record], float]:
    """The tasks, in order, that fit into ``budget`` CPU seconds; those that do not; the seconds of the first."""
    runs = []
    left_out = []
    spent = 0.0
    for task in tasks:
        seconds = _expected_seconds(task, records)
        if spent + seconds > budget:
            left_out.append(task)
        else:
            runs.append(task)
            spent += seconds
    return runs, left_out, spent


def measured(task: Record, work: Callable[[], Record], **facts: str | float) -> dict[str, Any]:
    """The record of a piece of work: the task, what it gave, what it cost, and where it was made."""
    started = time.perf_counter()
    cpu = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = work()
    return {
        **task,
        **results,
        **facts,
        "seconds": round(time.perf_counter() - started, 3),
        "cpu_seconds": round(time.process_time() - cpu, 3),
        "peak_mb": peak_mb(),
        "commit": commit(),
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def peak_mb(children: bool = False) -> int | None:
    """The most memory that this process (or one of its children) has held so far, in MB; None on Windows."""
    try:
        import resource
    except ImportError:
        return None
    who = resource.RUSAGE_CHILDREN if children else resource.RUSAGE_SELF
    units_in_mb = 2**20 if sys.platform == "darwin" else 2**10
    return round(resource.getrusage(who).ru_maxrss / units_in_mb)


@cache
def commit() -> str | None:
    """The commit of this checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        answer = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


@cache
def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    names = ("torch", "pyro-ppl", "tyxe", "pyrobnn")
    return {"python": platform.python_version()} | {name: version(name) for name in names}


@dataclass(frozen=True)
class Sweep:
    """Run a function on every task whose ``key`` no record in the file has yet.

    ``jobs``: so many processes of one thread, or an executor, such as that of a cluster's client.
    """

    path: str | Path
    key: Callable[[Record], Hashable]
    jobs: int | Executor = 1

    def pending(self, tasks: Sequence[Record]) -> list[Record]:
        """The tasks, in their order and once each, that have no record yet."""
        done = {self.key(record) for record in read_records(self.path)}
        return list({self.key(task): task for task in tasks if self.key(task) not in done}.values())

    def run(
        self, function: Callable[[Record], Record], tasks: Sequence[Record]
    ) -> Iterator[tuple[Record, Record | Exception]]:
        """Run what is pending; yield (task, record) as each finishes, after its line is on the disk.

        A task that raises is yielded with its exception and leaves no line: the next sweep tries it again.
        """
        Path(self.path).parent.mkdir(parents=True, exist_ok=True)
        # the lock is gone with the process
        with FileLock(
            f"{self.path}.lock",
            timeout=0,
            thread_local=False,
        ):
            pending = self.pending(tasks)
            if isinstance(self.jobs, int):
                outcomes = self._here(self.jobs, function, pending)
            else:
                outcomes = _on_workers(self.jobs, function, pending)
            for task, outcome in outcomes:
                if not isinstance(outcome, Exception):
                    append_record(self.path, outcome)
                yield task, outcome

    def _here(
        self,
        jobs: int,
        function: Callable[[Record], Record],
        tasks: Sequence[Record],
    ) -> Iterator[tuple[Record, Record | Exception]]:
        if jobs == 1:
            yield from (_attempt(function, task) for task in tasks)
            return
        calls = (joblib.delayed(_attempt)(function, task) for task in tasks)
        with joblib.parallel_config(
            backend="loky",
            n_jobs=jobs,
            inner_max_num_threads=1,
        ):
            parallel = joblib.Parallel(
                return_as="generator_unordered",
                batch_size=1,
                pre_dispatch="all",
            )
            yield from parallel(calls)


def _on_workers(
    workers: Executor,
    function: Callable[[Record], Record],
    tasks: Sequence[Record],
) -> Iterator[tuple[Record, Record | Exception]]:
    """Each task with its record, or why there is none, as it is finished; a worker that dies loses its own."""
    futures = {workers.submit(_attempt, function, task): task for task in tasks}
    for future in as_completed(futures):
        try:
            yield future.result()
        except Exception as error:  # the worker died
            yield futures[future], error


def _attempt(
    function: Callable[[Record], Record], task: Record
) -> tuple[Record, Record | Exception]:
    try:
        return task, function(task)
    except Exception as error:  # one failed fit must not end a sweep of hours
        return task, error


def mean_and_error(values: Sequence[float], overlap: float = 0.0) -> tuple[float, float]:
    """Mean over splits and its standard error, NaN for fewer than three.

    sd √(1/n + overlap), for splits share most of their training rows (Nadeau & Bengio, 2003).
    """
    mean = fmean(values)
    if len(values) < 3:
        return mean, math.nan
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance * (1 / len(values) + overlap))
