"""What the threads of a process share, and how each has it to itself, or as if it had.

Torch's random generator, Pyro's handlers, flags and parameter store, compiled code that writes into one memory: these
belong to the process. Whoever changes them does so inside :func:`process_state`, one thread at a time. Predictions
need none of them and run side by side.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from types import TracebackType


class Turn(contextlib.ContextDecorator):
    """A context that one thread is in at a time, and may enter again: a lock that no forked process finds taken."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process = os.getpid()

    def __enter__(self) -> None:
        if self._process != os.getpid():
            self._renew()
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lock.release()

    def _renew(self) -> None:
        """In a forked process: the thread that held the lock lives on in the parent alone, unless it is this one."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock = threading.RLock()
        self._process = os.getpid()


_PROCESS_STATE = Turn()


def process_state() -> Turn:
    """The context of whatever changes, or depends on, state that belongs to the whole process.

    A thread that is in it may enter again: a callback of a fit may fit and predict.
    """
    return _PROCESS_STATE


class Shared:
    """A context of the process that threads are in together: the first makes the change, the last takes it back.

    Args:
        make: returns the context; it may be left by another thread than the one that entered it.
    """

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._inside = 0
        self._change: contextlib.AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._change is None:
                change = self._make()
                change.__enter__()
                self._change = change
            self._inside += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._change is not None:
                change = self._change
                self._change = None
                change.__exit__(None, None, None)
