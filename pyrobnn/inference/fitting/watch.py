"""`Watch`: the progress bar and the callbacks of a run, and how it ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

from pyrobnn.callbacks import ProgressBar
from pyrobnn.inference.fitting.problem import Callback, Metrics

#: what a bar says of a run until its step is traced; then it says what a compile takes, if there is one
TRACING = "tracing"


def end_of(callback: Callback) -> Callable[[], object]:
    """What a callback wants to be called by when the run is over."""
    return getattr(callback, "end", lambda: None)


class MappedCallback:
    """A callback of the user's that receives what ``change`` makes of the metrics."""

    def __init__(self, callback: Callback, change: Callable[[Metrics], Metrics]):
        self._callback = callback
        self._change = change
        self.end = end_of(callback)

    def __call__(self, step: int, metrics: Metrics) -> bool | None:
        return self._callback(step, self._change(metrics))


def after(before: int, callback: Callback) -> Callback:
    """A callback of the user's that sees the steps of a run as those after ``before`` others, and no end of it."""
    return lambda step, metrics: callback(before + step, metrics)


class Watch:
    """Progress bar, callbacks and interruption of a run: the context of its loop.

    Leaving the context closes the bar, which says why where it is not full. Ctrl-C ends the loop; it is raised again
    unless what there is by then is ``worth_keeping``. ``stopped`` is how the run ended: ``finished`` unless the loop
    says otherwise, ``"interrupt"``, ``"error"``; ``active`` whether anybody listens.
    """

    def __init__(
        self,
        total: int,
        name: str,
        callbacks: Sequence[Callback] = (),
        progress: bool = False,
        *,
        starting: str = "",
        finished: str,
        metrics: tuple[str, ...] | None = None,
        worth_keeping: Callable[[], bool] | None = None,
    ):
        self._callbacks = tuple(callbacks)
        self._worth_keeping = worth_keeping
        self._bar = ProgressBar(total, name, metrics=metrics) if progress else None
        self._starting = starting
        self.active = progress or bool(self._callbacks)
        self.stopped = finished

    def __enter__(self) -> Watch:
        if self._bar is not None:
            self._bar.__enter__()
        self.say(self._starting)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        if kind is not None:
            self.stopped = "interrupt" if interrupted else "error"
        if self._bar is not None:
            self._bar.close(self.stopped)
        for callback in self._callbacks:
            end_of(callback)()
        return interrupted and self._worth_keeping is not None and self._worth_keeping()

    def tell(self, step: int, metrics: Metrics) -> bool:
        """Call every callback and move the bar; True if a callback asks to stop."""
        self.show(step, metrics)
        return self.ask(step, metrics)

    def ask(self, step: int, metrics: Metrics) -> bool:
        """Call every callback; True if any asks to stop."""
        # each is called, whatever the others say
        answers = [callback(step, metrics) for callback in self._callbacks]
        return any(answers)

    def show(self, step: int, metrics: Metrics) -> None:
        """Move the bar alone."""
        if self._bar is not None:
            self._bar(step, metrics)

    def say(self, words: str) -> None:
        """Write before the bar what is done until the next report and is no step: its clock stands still."""
        if self._bar is not None and words:
            self._bar.say(words)

    def restart(self, why: str) -> None:
        """The run begins anew: the bar counts from zero."""
        if self._bar is not None:
            self._bar.restart(why)
            self._bar.say(self._starting)

    def extend(self, total: int, why: str) -> None:
        """Another number of steps than was planned."""
        if self._bar is not None:
            self._bar.extend(total, why)
