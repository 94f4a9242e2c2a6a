"""Held-out rows, scored while a method runs."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyrobnn.checks import as_tensor, check_count

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Validation:
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
        self.x, self.y = as_tensor("x", x), as_tensor("y", y)
        if self.x.dim() == 0 or self.y.dim() == 0 or len(self.x) != len(self.y) or len(self.x) == 0:
            raise ValueError(
                f"held-out x has shape {tuple(self.x.shape)} and y {tuple(self.y.shape)}: they must have as many rows, "
                "and one at least"
            )
        self.every, self.num_draws = check_count("every", every), check_count("num_draws", num_draws)
        self.history: dict[str, list[float]] = {}
        self._last = 0

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> None:
        if step <= self._last or not self.history:
            self.history, self._due = {"step": [], "val_loss": [], "val_error": []}, 0
        self._last = step
        if step >= self._due:
            self._due = step - step % self.every + self.every
            self._evaluate(step, metrics)
        if isinstance(metrics, MutableMapping):
            metrics.update({name: self.history[name][-1] for name in ("val_loss", "val_error")})

    @torch.no_grad()
    def _evaluate(self, step: int, metrics: Mapping[str, Any]) -> None:
        take = metrics.get("snapshot")
        if not callable(take):
            raise ValueError(
                "this method reports no 'snapshot' while it runs, which held-out rows are scored by"
            )
        prediction = take().predict(self.x, num_draws=self.num_draws)
        y = self.y.to(prediction.f.device)
        self.history["step"].append(step)
        self.history["val_loss"].append(-float(prediction.log_prob(y).mean()))
        if prediction.task == "gaussian":
            error = float((prediction.mean.double() - y.reshape(len(y), -1)).square().mean().sqrt())
        elif prediction.task == "categorical":
            error = float((prediction.probs.argmax(-1) != y).double().mean())
        else:
            error = float(((prediction.probs > 0.5) != (y.reshape(len(y), -1) > 0.5)).double().mean())
        self.history["val_error"].append(error)
        if "loss" in metrics:
            self.history.setdefault("loss", []).append(float(metrics["loss"]))

    def figure(self) -> Figure:
        """The two curves over the steps.

        Raises:
            ValueError: nothing has been evaluated.
        """
        if not self.history:
            raise ValueError("there is no curve yet: pass this callback to fit")
        from pyrobnn.plots.style import panels, style

        with style():
            figure, axes = panels(2, size=(3.5, 2.6))
            for axis, name, label in zip(
                axes.flat,
                ("val_loss", "val_error"),
                ("−log density of held-out rows, nats a row", "their error"),
            ):
                axis.plot(self.history["step"], self.history[name])
                axis.set(xlabel="step", ylabel=label)
        return figure
