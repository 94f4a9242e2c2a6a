"""What the threads of a process share, and how each has it to itself, or as if it had.

Torch's random generator, Pyro's handlers, flags and parameter store, compiled code that writes into one memory: these
belong to the process. Whoever changes them does so inside :func:`process_state`, one thread at a time. Predictions
need none of them and run side by side.

How many threads torch computes on is a number of each thread, but ``torch.set_num_threads`` changes that of the process
too, with which later threads begin: :func:`one_thread` and :func:`threads_by_need` leave it alone. Several threads
wait for each other at every product of small matrices; where another program uses one of the cores, for milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import TracebackType
from typing import NamedTuple

import torch


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


# -- threads of torch --------------------------------------------------------------------------------------------------


class _Loop(NamedTuple):
    """A loop under way in this thread: torch's threads outside of it, and whether it has had a large step."""

    num_threads: int
    has_large_steps: bool = False


#: the innermost; None outside of loops
_loop: ContextVar[_Loop | None] = ContextVar("_loop", default=None)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch computes in this thread alone; other threads compute on as many as before."""
    before = torch.get_num_threads()
    try:
        _compute_on(1)
        yield
    finally:
        _compute_on(before)


@contextlib.contextmanager
def threads_by_need() -> Iterator[None]:
    """A loop whose small steps torch computes in this thread alone, see :func:`enter_small_step`."""
    before = torch.get_num_threads()
    outer = _loop.get()
    token = _loop.set(_Loop(before if outer is None else outer.num_threads))
    try:
        yield
    finally:
        _loop.reset(token)
        _compute_on(before)


@contextlib.contextmanager
def threads_outside() -> Iterator[None]:
    """Inside, torch computes on the threads that there are outside of the loop under way."""
    before = torch.get_num_threads()
    loop = _loop.get()
    try:
        if loop is not None:
            _compute_on(loop.num_threads)
        yield
    finally:
        _compute_on(before)


def enter_small_step() -> None:
    """From here to the end of the loop under way one thread computes; outside of loops nothing changes."""
    loop = _loop.get()
    if loop is not None and not loop.has_large_steps:
        _compute_on(1)


def enter_large_step() -> None:
    """From here to the end of the loop under way all threads compute: it does not change its mind again."""
    loop = _loop.get()
    if loop is not None and not loop.has_large_steps:
        _loop.set(loop._replace(has_large_steps=True))
        _compute_on(loop.num_threads)


def _compute_on(num_threads: int) -> None:
    """Let torch compute on so many threads in this one; those that begin later have the number that they would have."""
    if torch.get_num_threads() == num_threads:
        return
    of_later_threads: list[int] = []
    _in_new_thread(lambda: of_later_threads.append(torch.get_num_threads()))
    torch.set_num_threads(num_threads)
    _in_new_thread(lambda: torch.set_num_threads(*of_later_threads))


def _in_new_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
