"""Signals of a run: Ctrl-C waits for the end of a step, an alarm ends a compile that takes too long."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any


class DelayedInterrupt:
    """Within :meth:`changing` a Ctrl-C takes effect at the end, a second one at once; then ``cut`` stays."""

    def __init__(self) -> None:
        self.cut = self._waiting = False
        self._before: Any = None

    def __enter__(self) -> DelayedInterrupt:
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(before):
            self._before = before
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.cut and not self._waiting:
            self._waiting = True
        else:
            self._before(number, frame)

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """A change of the state."""
        self.cut = True
        yield
        self.cut = False
        if self._waiting:
            self._waiting = False
            self._before(signal.SIGINT, None)


class TimeSpent(BaseException):
    """Ends a compile whose seconds are spent; whoever catches exceptions on the way does not catch it."""


@contextlib.contextmanager
def limited(until: float | None) -> Iterator[None]:
    """Raises TimeSpent at a time of the monotonic clock, in the main thread; another's alarm goes on."""
    alarm = getattr(signal, "SIGALRM", None)
    if until is None or alarm is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    began = time.monotonic()
    seconds, theirs = max(until - began, 1e-3), signal.getitimer(signal.ITIMER_REAL)
    if 0.0 < theirs[0] < seconds:
        yield
        return

    def spent(number: int, frame: FrameType | None) -> None:
        raise TimeSpent

    before = signal.signal(alarm, spent)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(alarm, before)
        if theirs[0]:
            signal.setitimer(signal.ITIMER_REAL, max(theirs[0] - (time.monotonic() - began), 1e-3), theirs[1])
