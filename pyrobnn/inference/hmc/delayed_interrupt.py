"""Ctrl-C that waits until a state which is written in place is whole again."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def delayed_interrupt() -> Iterator[None]:
    """A Ctrl-C inside takes effect at the end of the block, a second one at once; in the main thread."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    seen = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        if seen:
            before(number, frame)
        seen = True

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if seen:
        before(signal.SIGINT, None)
