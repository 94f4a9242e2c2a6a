"""Jobs that a second process does before they are needed here, such as compiling for the next fit.

It is no worker of ``multiprocessing``: those import the program's main module, which a script may not be ready for, and
are waited for when the program ends.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from threading import Condition, Thread
from typing import IO, cast

from pyrobnn.core.workers import num_cores

#: what the second process runs
_PROGRAM = "from pyrobnn.core.ahead import do_jobs; do_jobs()"
#: the answers to it
_GO = b"go\n"
_LEAVE_OUT = b"leave out\n"
#: seconds that a job under way is waited for, at most: a compile takes less, and a longer one is no gain
_LONGEST_WAIT = 30.0


class Ahead:
    """What this process knows of the second one: :meth:`wait_for` a job before doing here what it was to prepare."""

    def __init__(self) -> None:
        self._change = Condition()
        self._underway: str | None = None
        self._needed: set[str] = set()

    def wait_for(self, name: str) -> None:
        """Return once the job is not under way, or takes too long. If it has not been begun by now it never is."""
        with self._change:
            self._needed.add(name)
            self._change.wait_for(lambda: self._underway != name, _LONGEST_WAIT)

    def serve(self, jobs: bytes, process: subprocess.Popen[bytes]) -> None:
        """Hand over the pickled jobs, and answer until the process ends whether each is still to be done."""
        answers = cast(IO[bytes], process.stdin)
        questions = cast(IO[bytes], process.stdout)
        with contextlib.suppress(OSError):  # it was ended
            answers.write(jobs)
            answers.flush()
            for name in questions:
                answers.write(self._answer(name.decode().rstrip("\n")))
                answers.flush()
        self._answer(None)

    def _answer(self, name: str | None) -> bytes:
        """The answer to a process that is about to begin a job, and so is through with the one before."""
        with self._change:
            begins = name not in self._needed
            self._underway = name if begins else None
            self._change.notify_all()
        return _GO if begins else _LEAVE_OUT


@contextlib.contextmanager
def done_ahead(jobs: Mapping[str, Callable[[], None]]) -> Iterator[Ahead]:
    """Inside, a second process does the jobs in their order; it ends with the context.

    Nothing is done ahead where there is a single core, or what cannot be pickled; whatever a job raises is lost.
    """
    ahead = Ahead()
    pickled = _pickled(jobs) if jobs and num_cores() > 1 else None
    if pickled is None:
        yield ahead
        return
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for this process
    )
    server = Thread(target=ahead.serve, args=(pickled, process), daemon=True)
    server.start()
    try:
        yield ahead
    finally:
        process.kill()
        server.join()
        process.communicate()


def _pickled(jobs: Mapping[str, Callable[[], None]]) -> bytes | None:
    try:
        return pickle.dumps(dict(jobs))
    except Exception:  # whatever an object of a user's class may raise
        return None


def do_jobs() -> None:
    """Read pickled jobs, and do each that the process at the other end still wants; what the second process runs."""
    answers = sys.stdin.buffer
    questions = _output_alone()
    jobs: dict[str, Callable[[], None]] = pickle.load(answers)
    for name, job in jobs.items():
        questions.write(f"{name}\n".encode())
        questions.flush()
        answer = answers.readline()
        if not answer:  # the other process has ended
            return
        if answer == _GO:
            with warnings.catch_warnings(action="ignore"), contextlib.suppress(Exception):
                job()


def _output_alone() -> IO[bytes]:
    """The standard output of this process, which nothing else writes to from now on."""
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return output
