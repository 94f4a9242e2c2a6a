"""The training loop: flat parameters, one compiled update, losses that stay on the device until they are asked for.

MLE, MAP, DeepEnsemble, SVI and SWAG all minimise a function of a flat vector. Loss, gradient, clipping, Adam, iterate
averaging and the record of the losses are one graph (see :mod:`pyrobnn.compile`); the host only hands over the batch.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyrobnn.inference.fitting.problem import Callback, interruption
from pyrobnn.inference.fitting.ranks import ranks
from pyrobnn.inference.fitting.watch import COMPILING, Watch
from pyrobnn.inference.optim.training import Training, is_scheduler
from pyrobnn.inference.optim.unfinished import falling
from pyrobnn.inference.optim.update import AdamStep, Gradient, SharedStep, Step, TorchStep, clipped
from pyrobnn.wording.findings import Finding

Objective = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Result:
    """What :func:`minimize` found.

    Attributes:
        params: the final parameters (P,) or (members, P); the average of the last iterates where one was asked for.
        losses: (step,) or (step, members), float64, on the CPU; all finite.
        tracked: further scalars of the objective by name, each shaped like ``losses``.
        num_steps: updates done, of ``asked``.
        stopped: ``"num_steps"``, ``"callback"`` or ``"interrupt"``.
        grad_norm: norm of the last gradient, () or (members,).
        timings: seconds of ``compile`` and ``fit``.
        factors: of the learning rate at every step asked for, (asked,).
    """

    params: Tensor
    losses: Tensor
    num_steps: int
    stopped: str
    grad_norm: Tensor
    timings: dict[str, float]
    asked: int
    tracked: dict[str, Tensor] = field(default_factory=dict)
    factors: Tensor = field(default_factory=lambda: torch.ones(0))

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended it."""
        return self.stopped == "interrupt"

    def notes(self, method: Any) -> list[Finding]:
        """What the user of ``method`` has to know of how it ended."""
        return [interruption(method, self.num_steps, self.asked, "steps")] if self.interrupted else []

    def account(self, method: Any, num_rows: int, num_params: int) -> dict[str, Any]:
        """What `make_posterior` is told of a run whose loss is per datum."""
        meta = {"num_steps": self.num_steps, "stopped": self.stopped}
        return {
            "timings": self.timings,
            "history": {"loss": self.losses if self.losses.dim() == 1 else self.losses.mean(1)},
            "meta": meta | falling(self, self.losses, num_rows, num_params),
            "notes": self.notes(method),
            "interrupted": self.interrupted,
        }


def minimize(
    objective: Objective,
    start: Tensor,
    batches: Iterable[Sequence[Tensor]] | None,
    training: Training,
    *,
    tracked: Sequence[str] = (),
    callbacks: Sequence[Callback] = (),
    snapshot: Callable[[Tensor], Any] | None = None,
    progress: bool = False,
    name: str = "the objective",
) -> Result:
    r"""Minimise ``objective(theta, *batch)`` over a flat vector, or over several at once.

    .. math:: \theta_{t+1} = \theta_t - \eta_t \, \mathrm{Adam}(\nabla L(\theta_t; b_t))

    Args:
        objective: ``(theta (P,), *batch) -> loss ()``; for members trained together
            ``(theta (members, P), *batch) -> losses (members,)``; gradients, clipping and moments are per member.
            With ``tracked`` it returns ``(loss, tensor (len(tracked), …))``. Random draws come from torch's state.
        start: initial parameters (P,) or (members, P); left as they are.
        batches: endless iterator of tensor tuples, whole data as ``itertools.repeat((x, y))``; None for no arguments.
            Where ranks share the rows (:mod:`pyrobnn.inference.fitting.ranks`) the last two tensors are x and y.
        training: steps, rate and optimiser.
        tracked: names of the further scalars that the objective returns.
        callbacks: ``callback(step, metrics)`` with loss, lr, grad_norm, ``tracked`` and ``snapshot``; True stops.
        snapshot: what ``metrics["snapshot"]()`` makes of the present parameters.
        progress: show a bar.
        name: what is minimised, for messages.

    Raises:
        FloatingPointError: a loss that is not finite; names the step, the loss and the remedy.
        KeyboardInterrupt: Ctrl-C before the first update, or when the losses are not finite; later it ends the run,
            and ``stopped`` says so.

    Reference: `Adam (Kingma & Ba, 2015) <https://arxiv.org/abs/1412.6980>`_.

    Example:
        >>> result = minimize(lambda theta: (theta - 3).square().sum(), torch.zeros(2), None, Training(500, lr=0.1))
        >>> result.params.round().tolist()
        [3.0, 3.0]
    """
    optimizer, num_steps = training.optimizer, training.num_steps
    kind: Callable[..., Step] = TorchStep
    if optimizer.kind == "adam" and not is_scheduler(optimizer.schedule):
        kind = AdamStep
    clip_norm = optimizer.clip_norm
    if (shared := ranks()) is not None:  # the norm that counts is that of the mean of all ranks
        kind, clip_norm = functools.partial(SharedStep, shared), None
    stepper = kind(_gradient(objective, clip_norm), start, len(tracked), training, name)

    def record(begin: int, end: int) -> tuple[Tensor, dict[str, Tensor]]:
        rows = stepper.rows[begin:end].cpu()
        return rows[:, 0], {one: rows[:, i + 1] for i, one in enumerate(tracked)}

    def metrics() -> dict[str, Any]:
        losses, others = record(step - 1, step)
        told: dict[str, Any] = {"loss": float(losses[-1].mean()), "lr": stepper.rate()}
        told["grad_norm"] = float(stepper.grad_norm.mean())
        told |= {one: float(values[-1].mean()) for one, values in others.items()}
        if snapshot is not None:
            told["snapshot"] = lambda: snapshot(stepper.final())
        return told

    def worth_keeping() -> bool:
        done = int(stepper.step)
        return done > 0 and bool(torch.isfinite(record(0, done)[0]).all())

    watch = Watch(
        num_steps,
        name,
        callbacks,
        progress,
        starting=COMPILING if training.compile else "",
        finished="num_steps",
        metrics=("loss",),
        worth_keeping=worth_keeping,
    )
    steps = itertools.repeat(()) if batches is None else iter(batches)
    started, step, looked = time.perf_counter(), 0, 0
    with watch:
        while step < num_steps and watch.stopped != "callback":
            with torch.no_grad():
                for batch in itertools.islice(steps, min(training.look_every, num_steps - step)):
                    stepper(batch)
                    step += 1
                    if step in stepper.averaging_checks:
                        stepper.restart_average_if_falling()
            _check_finite(record(looked, step)[0], looked, training, name)
            looked = step
            if watch.active and watch.tell(step, metrics()):
                watch.stopped = "callback"
    step = int(stepper.step)
    elapsed = time.perf_counter() - started
    losses, others = record(0, step)
    timings = {"compile": stepper.compile_seconds, "fit": elapsed - stepper.compile_seconds}
    return Result(
        stepper.final(),
        losses,
        step,
        watch.stopped,
        stepper.grad_norm.cpu(),
        timings,
        num_steps,
        others,
        stepper.table[:, 3].cpu(),
    )


def _gradient(objective: Objective, clip_norm: float | None) -> Gradient:
    """What a step asks of the objective; members don't interact."""

    def total(theta: Tensor, *batch: Tensor) -> tuple[Tensor, Tensor]:
        found = objective(theta, *batch)
        loss, extra = found if isinstance(found, tuple) else (found, None)
        rows = loss[None] if extra is None else torch.cat([loss[None], extra.to(loss.dtype)])
        return loss.sum(), rows.double()

    def gradient(theta: Tensor, *batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        slope, rows = torch.func.grad(total, has_aux=True)(theta, *batch)
        slope, norm = clipped(slope, clip_norm)
        return slope, rows, norm

    return gradient


def _check_finite(losses: Tensor, before: int, training: Training, name: str) -> None:
    """Stop a run of which the losses (step, \\*members) after ``before`` steps are not all finite."""
    if bool(torch.isfinite(losses).all()):
        return
    row, *member = (~torch.isfinite(losses)).nonzero()[0].tolist()
    whose = f" of member {member[0]}" if member else ""
    last = f" (it was {float(losses[(row - 1, *member)]):.4g} before)" if row else ""
    remedy = f"use a smaller lr than {training.lr:g}, or Optimizer(clip_norm=…)"
    if before + row == 0:  # the loss of the first step is that of the start
        remedy = (
            "the start itself has no finite density: look for data far outside of the model's units (standardize "
            "them), or, where the start was passed as init=, for weights that the prior's support leaves out"
        )
    value = float(losses[(row, *member)])
    raise FloatingPointError(
        f"the loss of {name}{whose} is {value} at step {before + row + 1}{last}: {remedy}"
    )
