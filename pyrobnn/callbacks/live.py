"""The predictive of a regression, redrawn while a method runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyrobnn.callbacks.trackers import Tracker, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL.Image import Image


class LivePlot:
    """Redraws the predictive bands of a regression on one input while a method runs.

    The mean, the mean ± 1.96 epistemic standard deviations (doubt about the function) and ± 1.96 total ones (noise
    included), over the data. In a notebook the figure updates in place; elsewhere it is kept in ``figure``
    and can be saved from there. It reads ``metrics["snapshot"]``.


    Args:
        x: inputs of the data (N, 1), in the units the model is fitted in.
        y: targets (N,) or (N, output), in the same units.
        every: steps between two drawings, at the least; each costs a prediction at ``num_grid`` points.
        output: which output is drawn.
        num_grid: points of the grid, which reaches a quarter of the data's range beyond it.
        num_draws: draws of each chain that are used.
        gif: file that the drawings are written to, as frames, when the fit ends.
        trackers: that each drawing goes to, under the name ``"predictive"``.

    Attributes:
        figure: the latest drawing, None before the first.

    Raises:
        TypeError: a tracker that takes no figures.
        ValueError: inputs of more than one dimension, counts below 1, or a file that is no .gif; when called, a method
            that takes no snapshots.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        *,
        every: int = 100,
        output: int = 0,
        num_grid: int = 200,
        num_draws: int = 100,
        gif: str | Path | None = None,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        if x.ndim != 2 or x.shape[1] != 1:
            raise ValueError(f"a live plot needs inputs (N, 1), got x with shape {tuple(x.shape)}")
        if len(x) != len(y):
            raise ValueError(f"x has {len(x)} rows and y has {len(y)}: they must be the same points")
        for name, value in (("every", every), ("num_grid", num_grid), ("num_draws", num_draws)):
            if value < 1:
                raise ValueError(f"'{name}' must be at least 1, got {value}")
        if gif is not None and Path(gif).suffix.lower() != ".gif":
            raise ValueError(f"'gif' must be the name of a .gif file, got {str(gif)!r}")
        for tracker in trackers:
            if not isinstance(tracker, Tracker):
                raise TypeError(
                    f"{type(tracker).__name__} is no tracker: it has no log_figure(name, figure, step)"
                )
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
        self.num_draws, self.trackers = num_draws, tuple(trackers)
        self.gif = None if gif is None else Path(gif)
        self._display = None
        self._last, self._due = 0, every
        self._frames: list[Image] = []

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> None:
        if step <= self._last:
            self._due, self._frames = self.every, []
        self._last = step
        # methods report when they look up, not at every step
        if step < self._due:
            return
        self._due = step - step % self.every + self.every
        snapshot = metrics.get("snapshot")
        if not callable(snapshot):
            raise ValueError("this method reports no 'snapshot' while it runs, which a live plot needs")
        with torch.no_grad():
            prediction = snapshot().predict(self.grid, num_draws=self.num_draws)
            mean, epistemic, total = (
                values[:, self.output].cpu().double()
                for values in (prediction.mean, prediction.epistemic_var.sqrt(), prediction.var.sqrt())
            )
        from pyrobnn.plots.style import panels, style

        with style():
            self.figure, axes = panels(1, size=(5.5, 3.5))
            self._draw(axes[0, 0], mean, epistemic, total, step)
            self._show()
            if self.gif is not None:
                self._frames.append(picture(self.figure).quantize())
        for tracker in self.trackers:
            tracker.log_figure("predictive", self.figure, step)

    def end(self) -> None:
        """Write the animation, at the end of a fit, however it ends."""
        if self.gif is not None and self._frames:
            self.save_gif(self.gif)

    def save_gif(self, path: str | Path, *, seconds: float = 0.4) -> Path:
        """Write the drawings so far as frames of an animation, the last held for longer.

        Args:
            path: of the file.
            seconds: each frame is shown.

        Raises:
            ValueError: there is none, because nothing was drawn or no ``gif`` was asked for.
        """
        if not self._frames:
            raise ValueError("there are no frames: pass gif='…' to LivePlot, and the live plot to fit")
        first, *others = self._frames
        durations = [round(1000 * seconds)] * len(others) + [round(4000 * seconds)]
        first.save(path, save_all=True, append_images=others, duration=durations, loop=0)
        return Path(path)

    def _draw(self, axes: Axes, mean: Tensor, epistemic: Tensor, total: Tensor, step: int) -> None:
        from pyrobnn.plots.style import INK, MUTED, bands

        grid = self.grid[:, 0].cpu()
        bands(axes, grid, mean, epistemic, total)
        axes.plot(grid, mean, color=INK, label="mean")
        axes.plot(self.x[:, 0].cpu(), self.y[:, self.output].cpu(), ".", color=MUTED, ms=3, label="data")
        axes.set(title=f"step {step}", xlabel="x", ylabel="y")
        axes.figure.legend(loc="outside lower center", ncols=4)

    def _show(self) -> None:
        if not _in_notebook():
            return
        from IPython.display import display

        if self._display is None:
            self._display = display(self.figure, display_id=True)
        else:
            self._display.update(self.figure)


def _in_notebook() -> bool:
    """Whether a Jupyter kernel runs this process; IPython is never imported to find out."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and shell.__class__.__name__ == "ZMQInteractiveShell"
