"""The progress bar of a fit."""

from __future__ import annotations

import sys
import time
import warnings
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from tqdm import TqdmWarning

from pyrobnn.callbacks.protocol import scalars

#: what a bar that is not full says, by the word for the reason in ``meta["stopped"]``
_ENDINGS = {
    "plateau": "stopped early: the loss no longer falls",
    "callback": "stopped early by a callback",
    "until_ess": "stopped early: enough effective draws",
    "converged": "stopped early: converged",
    "max_seconds": "stopped early: max_seconds are spent",
    "interrupt": "interrupted",
    "error": "ended by an error",
}


#: tqdm's own layout without its estimate, which counts the seconds of the compiler as if every step took them
_LAYOUT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
#: reports that the rate is taken from
_REPORTS = 50


def duration(seconds: float) -> str:
    """A time in words, as exactly as one waits for it.

    Example:
        >>> duration(0.2), duration(47), duration(100), duration(1600), duration(10_000)
        ('1 s', '47 s', '100 s', '27 min', '2.8 h')
    """
    if seconds < 120:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class ProgressBar:
    """A progress bar in the terminal or the notebook, with the latest value of every scalar metric.

    In a notebook it is a widget where ipywidgets is installed and text where it is not. The time that is left is
    estimated from the second report on: what came before the first, compiling above all, is not counted.

    Args:
        total: number of steps, or None when unknown (a counter without an end).
        description: text before the bar.
        metrics: names of the metrics shown; None shows every scalar.

    Raises:
        ValueError: a total below 1.

    Example:
        >>> with ProgressBar(total=10, description="svi", metrics=("loss",)) as bar:
        ...     for step in range(1, 11):
        ...         stop = bar(step, {"loss": 1.0 / step})
        >>> bar.step
        10
    """

    def __init__(
        self,
        total: int | None = None,
        description: str = "",
        *,
        metrics: tuple[str, ...] | None = None,
    ) -> None:
        if total is not None and total < 1:
            raise ValueError(f"'total' must be at least 1 or None, got {total}")
        self.total = total
        self.description = description
        self.metrics = metrics
        self.step = 0
        self._bar: Any = None
        self._reports: deque[tuple[float, int]] = deque(maxlen=_REPORTS)

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self._bar is None or step <= self.step:
            self._open()
        self._bar.set_postfix(
            {name: f"{value:.4g}" for name, value in scalars(metrics, self.metrics).items()}, refresh=False
        )
        self._describe(*([] if step == self.total else [str(metrics.get("phase", "")), self._left(step)]))
        self._bar.update(step - self.step)
        self.step = step
        if step == self.total:
            self.close()

    def say(self, words: str) -> None:
        """Write before the bar what is done until the next report, at once."""
        if self._bar is None:
            self._open()
        self._describe(words)
        self._bar.refresh()

    def extend(self, total: int, why: str) -> None:
        """Another number of steps than was planned, said in a line of its own."""
        self.total = self._bar.total = total
        self._bar.write(f"{self.description}: {why}", file=sys.stderr)

    def close(self, why: str = "") -> None:
        """Leave the bar as it stands; a run that ends before ``total`` needs this (or a ``with`` block).

        Args:
            why: why it ends before ``total``, written behind the bar: a text, or the word in ``meta["stopped"]``.
        """
        if self._bar is not None:
            self._describe()
            if why and self.step != self.total:
                self._bar.set_postfix_str(_ENDINGS.get(why, why))
            self._bar.close()
            self._bar = None

    def __enter__(self) -> ProgressBar:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        self.close("" if kind is None else "interrupt" if interrupted else "error")

    def _open(self) -> None:
        self.close()
        with warnings.catch_warnings():
            # a notebook without ipywidgets: tqdm falls back to text, which needs no warning
            warnings.simplefilter("ignore", TqdmWarning)
            from tqdm.auto import tqdm
        layout = {} if self.total is None else {"bar_format": _LAYOUT}
        self._bar = tqdm(total=self.total, desc=self.description or None, dynamic_ncols=True, **layout)
        self.step = 0
        self._reports.clear()

    def _describe(self, *words: str) -> None:
        said = [", ".join(each for each in words if each)]
        self._bar.set_description(
            ": ".join(each for each in (self.description, *said) if each), refresh=False
        )

    def _left(self, step: int) -> str:
        """How long the rest will take, at the rate of the latest reports."""
        self._reports.append((time.monotonic(), step))
        (began, first), (now, _) = self._reports[0], self._reports[-1]
        if self.total is None or not first < step < self.total:
            return ""
        return f"about {duration((now - began) / (step - first) * (self.total - step))} left"
