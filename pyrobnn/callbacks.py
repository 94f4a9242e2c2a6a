"""What to do while a method runs: show progress, log to TensorBoard, draw the predictive, stop on a plateau.

A callback is any function ``callback(step, metrics) -> bool | None``. ``step`` counts the finished steps from 1,
``metrics`` maps names to what the method reports at this step (``"loss"`` for the gradient methods), and True asks
the method to stop; what it has reached by then is kept. Under ``"snapshot"`` a method may put a function
without arguments that returns the current :class:`~pyrobnn.Posterior`; it costs something only when called.

A callback that has served one fit may serve the next: a step that is not larger than the last starts it anew.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from tqdm import TqdmWarning

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Callback", "EarlyStopping", "LivePlot", "ProgressBar", "TensorBoardLogger"]


class Callback(Protocol):
    """Called after a step; True stops the run."""

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> bool | None: ...


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
            {name: f"{value:.4g}" for name, value in _scalars(metrics, self.metrics).items()}, refresh=False
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


class TensorBoardLogger:
    """Writes every scalar metric to TensorBoard's event files; no account and no server are needed.

    Look at them with ``tensorboard --logdir LOG_DIR``. Needs the extra ``tracking``.

    Args:
        log_dir: directory of this run; made when missing.

    Raises:
        ImportError: TensorBoard is not installed.
    """

    def __init__(self, log_dir: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "TensorBoardLogger needs TensorBoard: install it with  pip install 'pyrobnn[tracking]'"
            ) from error
        self.log_dir = Path(log_dir)
        self._writer = SummaryWriter(str(log_dir))

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in _scalars(metrics).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is buffered and close the file; a ``with`` block does so by itself."""
        self._writer.close()

    def __enter__(self) -> TensorBoardLogger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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
                f"choose one of {', '.join(_scalars(metrics)) or 'none'}"
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


class LivePlot:
    """Redraws the predictive bands of a regression on one input while a method runs.

    The mean, the mean ± 1.96 epistemic standard deviations (doubt about the function) and ± 1.96 total ones (noise
    included), over the data. In a notebook the figure updates in place; elsewhere it is kept in ``figure``
    and can be saved from there. It reads ``metrics["snapshot"]``.

    Args:
        x: inputs of the data (N, 1), in the units the model is fitted in.
        y: targets (N,) or (N, output), in the same units.
        every: steps between two drawings; each costs a prediction at ``num_grid`` points.
        output: which output is drawn.
        num_grid: points of the grid, which reaches a quarter of the data's range beyond it.

    Attributes:
        figure: the latest drawing, None before the first.

    Raises:
        ValueError: inputs of more than one dimension, or counts below 1; when called, a method that takes no
            snapshots.
    """

    def __init__(
        self, x: Tensor, y: Tensor, *, every: int = 100, output: int = 0, num_grid: int = 200
    ) -> None:
        if x.ndim != 2 or x.shape[1] != 1:
            raise ValueError(f"a live plot needs inputs (N, 1), got x with shape {tuple(x.shape)}")
        if len(x) != len(y):
            raise ValueError(f"x has {len(x)} rows and y has {len(y)}: they must be the same points")
        for name, value in (("every", every), ("num_grid", num_grid)):
            if value < 1:
                raise ValueError(f"'{name}' must be at least 1, got {value}")
        self.x, self.y = x.detach(), y.detach().reshape(len(y), -1)
        if not 0 <= output < self.y.shape[1]:
            raise ValueError(f"'output' must lie in 0 … {self.y.shape[1] - 1}, got {output}")
        self.every = every
        self.output = output
        low, high = float(self.x.min()), float(self.x.max())
        margin = (high - low) / 4
        grid = torch.linspace(low - margin, high + margin, num_grid, dtype=x.dtype, device=x.device)
        self.grid = grid.unsqueeze(-1)
        self.figure: Figure | None = None
        self._display = None

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> None:
        if step % self.every:
            return
        snapshot = metrics.get("snapshot")
        if not callable(snapshot):
            raise ValueError(
                "this method reports no 'snapshot' while it runs: a live plot needs one (SVI does)"
            )
        with torch.no_grad():
            prediction = snapshot().predict(self.grid)
            mean, epistemic, total = (
                values[:, self.output].cpu().double()
                for values in (prediction.mean, prediction.epistemic_var.sqrt(), prediction.var.sqrt())
            )
        from pyrobnn.plots.style import panels, style

        with style():
            self.figure, axes = panels(1, size=(5.5, 3.5))
            self._draw(axes[0, 0], mean, epistemic, total, step)
            self._show()

    def _draw(self, axes: Axes, mean: Tensor, epistemic: Tensor, total: Tensor, step: int) -> None:
        from pyrobnn.plots.style import ALEATORIC, EPISTEMIC, INK, MUTED

        grid = self.grid[:, 0].cpu()
        for sd, colour, label in ((total, ALEATORIC, "with noise"), (epistemic, EPISTEMIC, "function")):
            low, high = mean - 1.96 * sd, mean + 1.96 * sd
            axes.fill_between(grid, low, high, color=colour, alpha=0.35, lw=0, label=f"95 % {label}")
        axes.plot(grid, mean, color=INK, label="mean")
        axes.plot(self.x[:, 0].cpu(), self.y[:, self.output].cpu(), ".", color=MUTED, ms=3, label="data")
        axes.set(title=f"step {step}", xlabel="x", ylabel="y")
        axes.legend(loc="best")

    def _show(self) -> None:
        if not _in_notebook():
            return
        from IPython.display import display

        if self._display is None:
            self._display = display(self.figure, display_id=True)
        else:
            self._display.update(self.figure)


def _scalars(metrics: Mapping[str, Any], names: tuple[str, ...] | None = None) -> dict[str, float]:
    """The metrics that are single numbers (no truth values), among ``names`` when given."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if (names is None or name in names)
        and (
            (isinstance(value, (int, float)) and not isinstance(value, bool))
            or (isinstance(value, Tensor) and value.ndim == 0 and value.dtype != torch.bool)
        )
    }


def _in_notebook() -> bool:
    """Whether a Jupyter kernel runs this process; IPython is never imported to find out."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and shell.__class__.__name__ == "ZMQInteractiveShell"
