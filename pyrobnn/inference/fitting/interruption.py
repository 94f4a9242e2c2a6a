"""Ctrl-C in a run that changes its state in place."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType


class DelayedInterrupt:
    """The context of a loop: within :meth:`changing` a Ctrl-C takes effect at the end.

    A second one takes effect at once; then ``changing_now`` stays true: the state is half changed.
    """

    def __init__(self) -> None:
        self.changing_now = False
        self._waiting = False
        # SIGINT's handler outside; None while it is not replaced
        self._before: Callable[[int, FrameType | None], object] | None = None

    def __enter__(self) -> DelayedInterrupt:
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(before):
            self._before = before
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.changing_now and not self._waiting:
            self._waiting = True
        elif self._before is not None:
            self._before(number, frame)

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """A change of the state."""
        # no finally: an exception leaves it true on purpose
        self.changing_now = True
        yield
        self.changing_now = False
        if self._waiting and self._before is not None:
            self._waiting = False
            self._before(signal.SIGINT, None)
