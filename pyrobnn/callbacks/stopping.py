"""Stop a fit on a plateau."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from pyrobnn.callbacks.protocol import scalars


class EarlyStopping:
    r"""Stops when a metric has not fallen for a while.

    With m_t the mean of the last ``window`` values, b is lowered to m_t at every step with

    .. math:: m_t < b - \mathrm{min\_delta}

    and the run stops ``patience`` steps after the last such improvement.

    The losses of stochastic methods are noisy, and the least of many noisy values is a lucky one that no later
    value beats: ``window`` averages the noise away before comparing.

    Args:
        patience: steps without improvement before stopping.
        min_delta: a fall by less than this is no improvement.
        metric: name of the metric, of which less is better.
        window: number of values averaged.

    Raises:
        ValueError: a count below 1 or a negative min_delta; when called, a metric that is not reported.

    Example:
        >>> stop = EarlyStopping(patience=3, window=1)
        >>> [stop(step, {"loss": loss}) for step, loss in enumerate([5, 4, 4, 4, 4], start=1)]
        [False, False, False, False, True]
    """

    def __init__(
        self, patience: int = 200, min_delta: float = 0.0, metric: str = "loss", *, window: int = 20
    ) -> None:
        for name, value in (("patience", patience), ("window", window)):
            if value < 1:
                raise ValueError(f"'{name}' must be at least 1, got {value}")
        if not min_delta >= 0:
            raise ValueError(f"'min_delta' must be at least 0, got {min_delta}")
        self.patience = patience
        self.min_delta = min_delta
        self.metric = metric
        self.window = window
        self._values: deque[float] = deque(maxlen=window)
        self._best = math.inf
        self._best_step = self._last_step = 0

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> bool:
        if self.metric not in metrics:
            raise ValueError(
                f"early stopping watches {self.metric!r}, which this method does not report: "
                f"choose one of {', '.join(scalars(metrics)) or 'none'}"
            )
        if step <= self._last_step:
            self._restart()
        self._last_step = step
        self._values.append(float(metrics[self.metric]))
        if len(self._values) < self.window:
            self._best_step = step
            return False
        level = sum(self._values) / self.window
        if level < self._best - self.min_delta:
            self._best, self._best_step = level, step
        return step - self._best_step >= self.patience

    def _restart(self) -> None:
        self._values.clear()
        self._best = math.inf
        self._best_step = self._last_step = 0
