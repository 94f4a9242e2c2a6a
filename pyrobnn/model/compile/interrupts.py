"""What a signal's handler raises ends the work at once, whoever catches exceptions on the way.

:func:`limited` and :class:`TimeSpent`, a limit by the same means, serve :mod:`pyrobnn.inference.hmc.stepper` alone.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


class _Raised(BaseException):
    """Carries a handler's exception past every ``except Exception``, of torch's compiler above all."""

    def __init__(self, error: Exception, number: int) -> None:
        super().__init__(error)
        self.error = error
        self.number = number


@contextlib.contextmanager
def raised_by_handlers() -> Iterator[None]:
    """Inside, an exception that a handler of a signal raises (an alarm's, say) cannot be taken for another's.

    Python runs handlers in the main thread alone; elsewhere this does nothing.
    """
    changed: dict[signal.Signals, tuple[Handler, Handler]] = {}
    if threading.current_thread() is threading.main_thread():
        for number in signal.Signals:
            handler = signal.getsignal(number)
            # of one that carries already, a call around this one will take the exception out
            if callable(handler) and not hasattr(handler, "carries"):
                replacement = _carrying(handler)
                changed[number] = handler, replacement
                signal.signal(number, replacement)
    try:
        yield
    except _Raised as carried:
        if carried.number not in changed:
            raise
        raise carried.error from carried.error.__cause__
    finally:
        for number, (handler, replacement) in changed.items():
            # not where the handler has set another
            if signal.getsignal(number) is replacement:
                signal.signal(number, handler)


def _carrying(handler: Handler) -> Handler:
    """The handler, with what it raises carried by :class:`_Raised`."""

    def handle(number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except Exception as error:
            raise _Raised(error, number) from None

    handle.carries = True  # type: ignore[attr-defined]
    return handle


class TimeSpent(BaseException):
    """Ends work whose seconds are spent; whoever catches exceptions on the way does not catch it."""


@contextlib.contextmanager
def limited(seconds: float | None) -> Iterator[None]:
    """Raises TimeSpent after so many seconds, in the main thread; another's alarm stays set."""
    alarm = getattr(signal, "SIGALRM", None)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if seconds is None or alarm is None or not in_main_thread:
        yield
        return
    start = time.monotonic()
    remaining, interval = signal.getitimer(signal.ITIMER_REAL)
    if 0.0 < remaining < seconds:
        yield
        return

    def spent(number: int, frame: FrameType | None) -> None:
        raise TimeSpent

    before = signal.signal(alarm, spent)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(alarm, before)
        if remaining:
            elapsed = time.monotonic() - start
            signal.setitimer(signal.ITIMER_REAL, max(remaining - elapsed, 1e-3), interval)
