"""A sweep over many independent fits that can be killed at any moment: one file, one line for each finished fit."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import joblib
from filelock import FileLock, Timeout

from pyrobnn.checks import check_count
from pyrobnn.inference.distributed import dask_client

Record = Mapping[str, Any]


def append_record(path: str | Path, record: Record) -> None:
    """Append one line of JSON in a single write, and wait until it is on the disk.

    A line torn by an earlier crash of the machine is closed first, so that it spoils no other.

    Raises:
        OSError: the disk is full: the line is taken back.
    """
    line = (json.dumps(record, allow_nan=False, sort_keys=True) + "\n").encode()
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
    """The records of a results file in order; no file is no records.

    Args:
        path: the results file.
        needs: entries without which a record is left out.

    Warns:
        UserWarning: lines that are left out, by number: torn ones, and records that lack what they need.
    """
    if not Path(path).is_file():
        return []
    records, left = [], []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            record = None
        if not isinstance(record, dict):
            left.append(f"line {number} is no JSON object (half a line?)")
        elif lacking := [name for name in needs if name not in record]:
            left.append(f"line {number} has no {', '.join(map(repr, lacking))}")
        else:
            records.append(record)
    if left:
        more = f" and {len(left) - 4} more" * (len(left) > 4)
        warnings.warn(f"{path}: {'; '.join(left[:4])}{more}: left out", stacklevel=2)
    return records


@dataclass(frozen=True)
class Sweep:
    """Run a function on every task whose record is not in the results file yet.

    Args:
        path: the results file (JSON lines). Only one sweep may write to it at a time.
        key: what identifies the task of a record: records and tasks of one key are the same work.
        jobs: processes on this machine, one torch thread each; 1 runs in this process.
        scheduler: address of a Dask scheduler (``"tcp://host:8786"``); its workers run the tasks instead.

    Raises:
        TypeError, ValueError: naming the option.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sweep = Sweep(Path(folder) / "squares.jsonl", key=lambda record: record["n"])
        ...     tasks = [{"n": n} for n in range(3)]
        ...     square = lambda task: {**task, "square": task["n"] ** 2}
        ...     first, second = len(list(sweep.run(square, tasks))), len(list(sweep.run(square, tasks)))
        >>> first, second
        (3, 0)
    """

    path: str | Path
    key: Callable[[Record], Hashable]
    jobs: int = 1
    scheduler: str | None = None

    def __post_init__(self) -> None:
        check_count("jobs", self.jobs)
        if self.scheduler is not None and not isinstance(self.scheduler, str):
            raise TypeError(f"'scheduler' must be an address like 'tcp://host:8786', got {self.scheduler!r}")

    def pending(self, tasks: Sequence[Record]) -> list[Record]:
        """The tasks, in their order and once each, that have no record yet."""
        seen = {self.key(record) for record in self._own(read_records(self.path))}
        waiting = []
        for task in tasks:
            if self.key(task) not in seen:
                seen.add(self.key(task))
                waiting.append(task)
        return waiting

    def run(
        self, function: Callable[[Record], Record], tasks: Sequence[Record]
    ) -> Iterator[tuple[Record, Record | Exception]]:
        """Run what is pending; yield (task, record) as each finishes, after its line is on the disk.

        A task that raises is yielded with its exception and leaves no line: the next sweep tries it again. Closing the
        iterator, or an interrupt, keeps every finished line.

        Raises:
            RuntimeError: another sweep is writing to this file.
            ImportError: a scheduler without ``pip install pyrobnn[cluster]``.
        """
        Path(self.path).parent.mkdir(parents=True, exist_ok=True)
        with self._lock():
            pending = self.pending(tasks)
            for task, outcome in self._outcomes(function, pending):
                if not isinstance(outcome, Exception):
                    append_record(self.path, outcome)
                yield task, outcome

    def _outcomes(
        self, function: Callable[[Record], Record], tasks: Sequence[Record]
    ) -> Iterable[tuple[Record, Record | Exception]]:
        if self.scheduler is None and self.jobs == 1:
            return (_attempt(function, task) for task in tasks)
        return self._parallel(function, tasks)

    def _parallel(
        self, function: Callable[[Record], Record], tasks: Sequence[Record]
    ) -> Iterator[tuple[Record, Record | Exception]]:
        calls = (joblib.delayed(_attempt)(function, task) for task in tasks)
        with contextlib.ExitStack() as stack:
            if self.scheduler is None:
                stack.enter_context(
                    joblib.parallel_config(backend="loky", n_jobs=self.jobs, inner_max_num_threads=1)
                )
            else:
                stack.enter_context(dask_client(self.scheduler))
                stack.enter_context(joblib.parallel_config(backend="dask"))
            # one task at a time: fits take seconds, and what is handed out at once is finished at once
            yield from joblib.Parallel(return_as="generator_unordered", batch_size=1, pre_dispatch="all")(
                calls
            )

    def _own(self, records: Iterable[Record]) -> Iterator[Record]:
        """Records this sweep's key understands."""
        for record in records:
            with contextlib.suppress(KeyError):
                self.key(record)
                yield record

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        # of the operating system, and so gone with the process, however that ends; the file beside may stay
        lock = FileLock(f"{self.path}.lock", timeout=0, thread_local=False)
        try:
            held = lock.acquire()
        except Timeout as error:
            raise RuntimeError(
                f"another sweep is writing to {self.path}: wait for it, or give another file"
            ) from error
        with held:
            yield


def _attempt(function: Callable[[Record], Record], task: Record) -> tuple[Record, Record | Exception]:
    try:
        return task, function(task)
    except Exception as error:  # one failed fit must not end a sweep of hours
        return task, error
