"""Callbacks that look at the posterior that there is so far: the predictive as a picture, and held-out rows scored."""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyrobnn.callbacks.trackers import Tracker, rendered
from pyrobnn.core.checks import as_tensor, check_count

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

    from pyrobnn.posterior.prediction import Prediction


class _Looks:
    """When to look: methods report when they look up, not at every step, and a smaller step begins a new run."""

    def __init__(self, x: Tensor, y: Tensor, every: int, num_draws: int) -> None:
        self.x, self.y = as_tensor("x", x).detach(), as_tensor("y", y).detach()
        if self.x.dim() == 0 or self.y.dim() == 0 or len(self.x) != len(self.y) or len(self.x) == 0:
            raise ValueError(
                f"x has shape {tuple(self.x.shape)} and y {tuple(self.y.shape)}: they must have as many rows, "
                "and one at least"
            )
        self.every, self.num_draws = check_count("every", every), check_count("num_draws", num_draws)
        self._last = self._due = sys.maxsize

    def _begins(self, step: int, first: int) -> bool:
        """Whether a new run begins, whose first look is due at the step ``first``."""
        begins, self._last = step <= self._last, step
        if begins:
            self._due = first
        return begins

    def _is_due(self, step: int) -> bool:
        if step < self._due:
            return False
        self._due = step - step % self.every + self.every
        return True

    def _predict(self, x: Tensor, metrics: Mapping[str, Any]) -> Prediction:
        snapshot = metrics.get("snapshot")
        if not callable(snapshot):
            raise ValueError(
                f"this method reports no 'snapshot' while it runs, which {type(self).__name__} needs"
            )
        with torch.no_grad():
            prediction: Prediction = snapshot().predict(x, num_draws=self.num_draws)
        return prediction


class LivePlot(_Looks):
    """Redraws the predictive bands of a regression on one input while a method runs.

    The mean, the mean ± 1.96 epistemic standard deviations (doubt about the function) and ± 1.96 total ones (noise
    included), over the data. In a notebook the figure updates in place; elsewhere it is kept in ``figure``.

    Args:
        x: inputs of the data (N, 1), in the units the model is fitted in.
        y: targets (N,) or (N, output), in the same units.
        every: steps between two drawings, at the least; each costs a prediction at 200 points, which reach a
            quarter of the data's range beyond it.
        output: which output is drawn.
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
        num_draws: int = 100,
        gif: str | Path | None = None,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        super().__init__(x, y, every, num_draws)
        if self.x.ndim != 2 or self.x.shape[1] != 1:
            raise ValueError(f"a live plot needs inputs (N, 1), got x with shape {tuple(self.x.shape)}")
        if gif is not None and Path(gif).suffix.lower() != ".gif":
            raise ValueError(f"'gif' must be the name of a .gif file, got {str(gif)!r}")
        if wrong := [type(each).__name__ for each in trackers if not isinstance(each, Tracker)]:
            raise TypeError(f"{wrong[0]} is no tracker: it has no log_figure(name, figure, step)")
        self.y = self.y.reshape(len(self.y), -1)
        if not 0 <= output < self.y.shape[1]:
            raise ValueError(f"'output' must lie in 0 … {self.y.shape[1] - 1}, got {output}")
        self.output, self.trackers = output, tuple(trackers)
        low, high = float(self.x.min()), float(self.x.max())
        margin = (high - low) / 4
        self.grid = torch.linspace(low - margin, high + margin, 200).to(self.x)[:, None]
        self.gif = None if gif is None else Path(gif)
        self.figure: Figure | None = None
        self._display: Any = None
        self._frames: list[Image] = []

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self._begins(step, self.every):
            self._frames = []
        if not self._is_due(step):
            return
        self.figure = self._drawn(self._predict(self.grid, metrics), step)
        if self.gif is not None:
            self._frames.append(rendered(self.figure).quantize())
        if self._display is not None:
            self._display.update(self.figure)
        elif _in_notebook():
            from IPython.display import display

            self._display = display(self.figure, display_id=True)
        for tracker in self.trackers:
            tracker.log_figure("predictive", self.figure, step)

    def end(self) -> None:
        """Write the animation, at the end of a fit, however it ends."""
        if self.gif is not None and self._frames:
            first, *others = self._frames
            shown = [400] * len(others) + [1600]  # milliseconds; the last is held for longer
            first.save(self.gif, save_all=True, append_images=others, duration=shown, loop=0)

    def _drawn(self, prediction: Prediction, step: int) -> Figure:
        from pyrobnn.plots.style import INK, MUTED, bands, panels, style

        mean, epistemic, total = (
            values[:, self.output].cpu().double()
            for values in (prediction.mean, prediction.epistemic_var.sqrt(), prediction.var.sqrt())
        )
        grid = self.grid[:, 0].cpu()
        with style():
            figure, axes = panels(1, size=(5.5, 3.5))
            ax = axes[0, 0]
            bands(ax, grid, mean, epistemic, total)
            ax.plot(grid, mean, color=INK, label="mean")
            ax.plot(self.x[:, 0].cpu(), self.y[:, self.output].cpu(), ".", color=MUTED, ms=3, label="data")
            ax.set(title=f"step {step}", xlabel="x", ylabel="y")
            figure.legend(loc="outside lower center", ncols=4)
        return figure


class Validation(_Looks):
    r"""Scores held-out rows by the posterior that there is so far: the curve that says when a fit begins to overfit.

    .. math:: \mathrm{val\_loss} = -\frac{1}{M} \sum_{m=1}^M \log p(y_m \mid x_m, \text{the posterior so far})

    Callbacks after it in the list see ``val_loss`` and ``val_error`` among the metrics: a tracker draws them, and
    ``EarlyStopping(metric="val_loss")`` stops on them. Between two evaluations they keep their value.

    Args:
        x, y: held-out rows, in the units of the data.
        every: steps between two evaluations; each costs a prediction of the rows.
        num_draws: draws of each chain that are used.

    Attributes:
        history: ``"step"``, ``"val_loss"`` (nats a row), ``"val_error"`` (root mean squared error in the units of y, or
            the share of wrong labels) and ``"loss"`` where the method reports one: lists of one length.

    Raises:
        ValueError: no rows, x and y of different length, a count below 1; when called, a method without snapshots.

    Caveat: rows that decide when to stop are no longer held out: score the result on others.

    Example:
        >>> import torch, pyrobnn as pb
        >>> x = torch.linspace(-1, 1, 30)[:, None]
        >>> model = pb.BNN(torch.nn.Linear(1, 1), pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.1))
        >>> held_out = pb.callbacks.Validation(x[::3], 2 * x[::3], every=50)
        >>> _ = pb.MAP(num_steps=200, compile=False).fit(model, x, 2 * x, callbacks=[held_out])
        >>> held_out.history["val_error"][-1] < held_out.history["val_error"][0]
        True
    """

    def __init__(self, x: Tensor, y: Tensor, *, every: int = 100, num_draws: int = 50) -> None:
        super().__init__(x, y, every, num_draws)
        self.history: dict[str, list[float]] = {}

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self._begins(step, 0):
            self.history = {}
        if self._is_due(step):
            self._evaluate(step, metrics)
        if isinstance(metrics, MutableMapping):
            metrics.update({name: self.history[name][-1] for name in ("val_loss", "val_error")})

    def _evaluate(self, step: int, metrics: Mapping[str, Any]) -> None:
        prediction = self._predict(self.x, metrics)
        y = self.y.to(prediction.f.device)
        column = y.reshape(len(y), -1)
        if prediction.task == "gaussian":
            error = (prediction.mean.double() - column).square().mean().sqrt()
        elif prediction.task == "categorical":
            error = (prediction.probs.argmax(-1) != y).double().mean()
        else:
            error = ((prediction.probs > 0.5) != (column > 0.5)).double().mean()
        found: dict[str, Any] = {"step": step, "val_loss": -prediction.log_prob(y).mean(), "val_error": error}
        if "loss" in metrics:
            found["loss"] = metrics["loss"]
        for name, value in found.items():
            self.history.setdefault(name, []).append(float(value))

    def figure(self) -> Figure:
        """The two curves over the steps.

        Raises:
            ValueError: nothing has been evaluated.
        """
        if not self.history:
            raise ValueError("there is no curve yet: pass this callback to fit")
        from pyrobnn.plots.style import panels, style

        labels = {"val_loss": "−log density of held-out rows, nats a row", "val_error": "their error"}
        with style():
            figure, axes = panels(2, size=(3.5, 2.6))
            for axis, (name, label) in zip(axes.flat, labels.items(), strict=True):
                axis.plot(self.history["step"], self.history[name])
                axis.set(xlabel="step", ylabel=label)
        return figure


def _in_notebook() -> bool:
    """Whether a Jupyter kernel runs this process; IPython is never imported to find out."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and shell.__class__.__name__ == "ZMQInteractiveShell"
