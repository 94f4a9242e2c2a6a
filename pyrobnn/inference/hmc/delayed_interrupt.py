"""Ctrl-C that waits until a state which is written in place is whole again."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


class DelayedInterrupt:
    """The context of a run whose state changes in place; in the main thread, elsewhere it does nothing.

    Within :meth:`changing` a Ctrl-C takes effect at the end, a second one at once.

    Attributes: ``cut``, whether an exception has cut a change in two.
    """

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
