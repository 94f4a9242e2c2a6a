"""What to do while a method runs: show progress, draw, stop.

A callback is any function ``callback(step, metrics) -> bool | None``. ``step`` counts the finished steps from 1,
``metrics`` maps names to what the method reports at this step (``"loss"`` for the gradient methods), and True asks
the method to stop; what it has reached by then is kept. Under ``"snapshot"`` a method puts a function
without arguments that returns the current :class:`~pyrobnn.Posterior`; it costs something only when called. A tracker
is such a function too: ``lambda step, metrics: wandb.log(pb.callbacks.scalars(metrics), step=step)``.

A method calls ``end()`` of a callback that has it when the run is over, however it ends; :class:`ProgressBar` has
``close()`` instead, which is yours to call. A callback that has served one fit may serve the next: a step that is not
larger than the last starts it anew.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from io import BytesIO
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor
from tqdm import TqdmWarning

from pyrobnn.core.checks import as_tensor, check_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: what a method reports: numbers, words, and a function that returns the current posterior
_Metrics = Mapping[str, Tensor | float | str | Callable[[], Any]]

__all__ = ["EarlyStopping", "LiveFigure", "ProgressBar", "scalars"]

#: the end of a bar that is not full, by the word for the reason in ``meta["stopped"]``
_ENDINGS = {
    "callback": "stopped early by a callback",
    "converged": "stopped early: converged",
    "max_seconds": "stopped early: max_seconds are spent",
    "interrupt": "interrupted",
    "error": "ended by an error",
}

#: weight of the latest interval in the rate: transitions of a sampler differ tenfold in length
_SMOOTHING = 0.1


def scalars(metrics: _Metrics, names: tuple[str, ...] | None = None) -> dict[str, float]:
    """The metrics that are single numbers (no truth values), among ``names`` when given: what a tracker takes.

    Example:
        >>> import torch
        >>> scalars({"loss": torch.tensor(0.5), "phase": "warm-up"})
        {'loss': 0.5}
    """
    chosen_names = metrics.keys() if names is None else metrics.keys() & names
    numbers = {}
    for name, value in metrics.items():
        if isinstance(value, Tensor) and value.ndim == 0:
            value = value.item()
        if name in chosen_names and type(value) in (int, float):
            numbers[name] = float(cast(float, value))
    return numbers


class ProgressBar:
    """A progress bar in the terminal or the notebook, with the latest value of every scalar metric.

    Its clock starts at the first report, and stands still while something is done that is no step (:meth:`say`), such
    as a compile: the rate, and the time left, are those of the steps.

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
        self.total = None if total is None else check_count("total", total)
        self.description = description
        self.metrics = metrics
        self.step = 0
        self._bar: Any = None
        # whether time has passed since the last report that was not spent on steps
        self._clock_paused = True

    def __call__(self, step: int, metrics: _Metrics) -> None:
        if self._bar is None or step <= self.step:
            self._open()
        shown = {name: f"{value:.4g}" for name, value in scalars(metrics, self.metrics).items()}
        self._bar.set_postfix(shown, refresh=False)
        self._describe("" if step == self.total else str(metrics.get("phase", "")))
        self._advance(step - self.step)
        self.step = step
        if step == self.total:
            self.close()

    def say(self, words: str) -> None:
        """Describe before the bar, at once, what is done until the next report and is no step."""
        if self._bar is None:
            self._open()
        self._clock_paused = True
        self._describe(words)
        self._bar.refresh()

    def restart(self, why: str) -> None:
        """Count from zero again, with the reason in a line of its own. Only while the bar is open."""
        self._bar.write(f"{self.description}: {why}", file=sys.stderr)
        self._bar.n = self._bar.initial = self._bar.last_print_n = self.step = 0
        self._clock_paused = True

    def extend(self, total: int, why: str) -> None:
        """Change the number of steps, with the reason in a line of its own. Only while the bar is open."""
        self.total = total
        self._bar.total = self.total
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

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        elif issubclass(kind, KeyboardInterrupt):
            self.close("interrupt")
        else:
            self.close("error")

    def _open(self) -> None:
        self.close()
        # a notebook without ipywidgets: tqdm writes text
        with warnings.catch_warnings(action="ignore", category=TqdmWarning):
            from tqdm.auto import tqdm
        self._bar = tqdm(
            total=self.total,
            desc=self.description or None,
            dynamic_ncols=True,
            smoothing=_SMOOTHING,
        )
        self.step = 0
        self._clock_paused = True

    def _describe(self, words: str = "") -> None:
        self._bar.set_description(": ".join(filter(None, (self.description, words))), refresh=False)

    def _advance(self, num_steps: int) -> None:
        """Move the bar by ``num_steps`` steps, and its clock with it; steps that were not timed count for no rate."""
        if not self._clock_paused:
            self._bar.update(num_steps)
            return
        self._clock_paused = False
        if hasattr(self._bar, "unpause"):  # of a bar that has a clock
            self._bar.unpause()
        # tqdm's rate is (n - initial) / time: raising both leaves it as it was
        self._bar.update(num_steps)
        self._bar.initial = getattr(self._bar, "initial", 0) + num_steps
        self._bar.last_print_n = self._bar.n
        self._bar.refresh()


#: the colours of what more data removes, of noise that stays, and of data
_EPISTEMIC = "#0072b2"
_ALEATORIC = "#e69f00"
_INK = "#1c2128"
#: half the width of a normal's 95 % interval, in sds
_NORMAL_95 = 1.96


class LiveFigure:
    """A figure that follows a fit: the curve of the loss and, at given inputs, the predictive bands so far.

    In a notebook the figure stands below the cell and is drawn anew there; elsewhere ``figure`` alone is, to be saved
    or shown by whoever has it. The last state is drawn when the fit ends.

    Args:
        every: steps between two drawings; each costs about a tenth of a second, and a prediction where there are bands.
        metric: name of the metric of the curve: NUTS reports no ``"loss"``, but ``"step_size"`` and others.
        probe: inputs (N, 1) at which the bands are drawn: mean and 95 % of the function in blue, with noise in sand.
        data: points (x, y), of (N, 1) each, drawn with the bands; without ``probe`` the bands reach a quarter of their
            range beyond them.

    Attributes:
        figure: the ``matplotlib`` figure, None before the first report.

    Raises:
        ValueError: a count below 1, inputs of several columns; when called, a metric that is not reported, or bands of
            classes.

    Example:
        >>> live = LiveFigure(every=10)
        >>> for step in range(10, 50, 10):
        ...     stop = live(step, {"loss": 1.0 / step})
        >>> live.figure.axes[0].get_ylabel()
        'loss'
    """

    def __init__(
        self,
        every: int = 100,
        metric: str = "loss",
        *,
        probe: Tensor | None = None,
        data: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.every = check_count("every", every)
        self.metric = metric
        self.data = None
        if data is not None:
            self.data = _column("data", data[0]), _column("data", data[1])
        self.probe = None
        if probe is not None:
            self.probe = _column("probe", probe).sort(0).values
        elif self.data is not None:
            self.probe = _around(self.data[0])
        self.figure: Figure | None = None
        self._handle: Any = None
        self._snapshot: Any = None
        self._start()

    def __call__(self, step: int, metrics: _Metrics) -> None:
        if self.metric not in metrics:
            raise ValueError(
                f"the figure follows {self.metric!r}, which this method does not report: choose one of "
                f"{', '.join(scalars(metrics)) or 'none'}"
            )
        if self._steps and step <= self._steps[-1]:  # steps begin again: a new run
            self._start()
        self._steps.append(step)
        self._values.append(float(cast(float, metrics[self.metric])))
        self._snapshot = metrics.get("snapshot")
        if step >= self._last_drawn_step + self.every:
            self._draw()

    def end(self) -> None:
        """The fit is over: draw what came after the latest drawing."""
        if self._steps and self._last_drawn_step < self._steps[-1]:
            self._draw()
        # it holds the state of the fit
        self._snapshot = None
        # another fit may be run by another cell
        self._handle = None

    def _start(self) -> None:
        """Forget what another run has reported."""
        self._steps: list[int] = []
        self._values: list[float] = []
        self._snapshot = None
        self._last_drawn_step = 0

    def _draw(self) -> None:
        from matplotlib.figure import Figure

        with_bands = self.probe is not None and self._snapshot is not None
        num_panels = 2 if with_bands else 1
        if self.figure is None:
            self.figure = Figure(figsize=(3.6 * num_panels, 2.7), layout="constrained")
        self.figure.clear()
        panels = self.figure.subplots(
            1,
            num_panels,
            squeeze=False,
        )[0]
        self._draw_curve(panels[0])
        if with_bands:
            self._draw_bands(panels[1])
        self._last_drawn_step = self._steps[-1]
        self._show()

    def _draw_curve(self, ax: Axes) -> None:
        ax.plot(
            self._steps,
            self._values,
            color=_EPISTEMIC,
            lw=1.2,
        )
        # the first tenth may be far above what there is to see
        later = [value for value in self._values[len(self._values) // 10 :] if math.isfinite(value)]
        if later and min(later) < max(later):
            margin = 0.05 * (max(later) - min(later))
            ax.set_ylim(min(later) - margin, max(later) + margin)
        ax.set(
            xlabel="step",
            ylabel=self.metric,
            title=f"step {self._steps[-1]}",
        )

    def _draw_bands(self, ax: Axes) -> None:
        prediction = self._snapshot().predict(self.probe)
        if prediction.task in ("categorical", "bernoulli", "ordinal"):
            raise ValueError(
                "the bands are those of numbers, and these are classes: leave out 'probe' and 'data'"
            )
        x = cast(Tensor, self.probe)[:, 0].cpu()
        mean = prediction.mean[:, 0].cpu()
        widths = {
            "95 % with noise": (prediction.var, _ALEATORIC),
            "95 % of the function": (prediction.epistemic_var, _EPISTEMIC),
        }
        for label, (var, color) in widths.items():
            half = _NORMAL_95 * var[:, 0].sqrt().cpu()
            ax.fill_between(
                x,
                mean - half,
                mean + half,
                color=color,
                alpha=0.35,
                lw=0,
                label=label,
            )
        ax.plot(
            x,
            mean,
            color=_EPISTEMIC,
            lw=1.2,
            label="mean",
        )
        if self.data is not None:
            ax.plot(
                *(values[:, 0].cpu() for values in self.data),
                ".",
                color=_INK,
                ms=3,
                alpha=0.5,
                label="data",
            )
        ax.set(xlabel="x", ylabel="y")
        ax.legend(fontsize=7)

    def _show(self) -> None:
        """Put the figure into the notebook, in the place of the one before."""
        picture = _notebook_picture(cast("Figure", self.figure))
        if picture is None:
            return
        if self._handle is None:
            from IPython.display import display

            self._handle = display(picture, display_id=True)
        else:
            self._handle.update(picture)


def _column(name: str, values: Tensor) -> Tensor:
    """Numbers (N,) or (N, 1) as (N, 1)."""
    column = as_tensor(name, values)
    column = column.unsqueeze(-1) if column.dim() == 1 else column
    if column.dim() != 2 or column.shape[1] != 1:
        raise ValueError(
            f"{name!r} must be (N, 1), one input and one output, got {tuple(values.shape)}"
        )
    return column


def _around(x: Tensor) -> Tensor:
    """Inputs (200, 1) that reach a quarter of the range of ``x`` beyond it."""
    low = float(x.min())
    high = float(x.max())
    margin = 0.25 * (high - low)
    return torch.linspace(low - margin, high + margin, 200).to(x).unsqueeze(-1)


def _notebook_picture(figure: Figure) -> Any:
    """The figure as a picture that a notebook shows; None outside of one."""
    try:
        from IPython.core.getipython import get_ipython
        from IPython.display import Image
    except ImportError:
        return None
    if get_ipython() is None:
        return None
    file = BytesIO()
    # twice the pixels at which it is shown, as inline figures of a sharp screen
    figure.savefig(file, format="png", dpi=220)
    return Image(data=file.getvalue(), retina=True)


class EarlyStopping:
    r"""Stops when a metric has not fallen for a while.

    With m_t the mean of the last ``window`` values, b is lowered to m_t at every step with

    .. math:: m_t < b - \mathrm{min\_delta}

    and the run stops ``patience`` steps after the last such improvement. The least of many noisy values is a lucky one,
    which no later value beats; hence the mean.

    Args:
        patience: steps without improvement before stopping.
        min_delta: a fall by less than this is not an improvement.
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
        self,
        patience: int = 200,
        min_delta: float = 0.0,
        metric: str = "loss",
        *,
        window: int = 20,
    ) -> None:
        self.patience = check_count("patience", patience)
        self.window = check_count("window", window)
        if not min_delta >= 0:
            raise ValueError(f"'min_delta' must be at least 0, got {min_delta}")
        self.min_delta = min_delta
        self.metric = metric
        # so that the first report begins a run
        self._last_step = sys.maxsize

    def __call__(self, step: int, metrics: _Metrics) -> bool:
        if self.metric not in metrics:
            raise ValueError(
                f"early stopping watches {self.metric!r}, which this method does not report: "
                f"choose one of {', '.join(scalars(metrics)) or 'none'}"
            )
        if step <= self._last_step:  # steps begin again: a new run
            self._values: deque[float] = deque(maxlen=self.window)
            self._best = math.inf
            self._best_step = 0
        self._last_step = step
        self._values.append(float(cast(float, metrics[self.metric])))
        mean = sum(self._values) / len(self._values)
        if len(self._values) < self.window:
            # patience counts from the first full window
            self._best_step = step
        elif mean < self._best - self.min_delta:
            self._best = mean
            self._best_step = step
        return step - self._best_step >= self.patience
