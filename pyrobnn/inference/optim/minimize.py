"""The training loop: flat parameters, one compiled update, losses that stay on the device until they are asked for.

MLE, MAP, DeepEnsemble, SVI and SWAG all minimise a function of a flat vector. Loss, gradient, clipping, Adam, iterate
averaging and the record of the losses are one graph (see :mod:`pyrobnn.compile`); the host only hands over the batch.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyrobnn.inference.fitting.problem import Callback, interruption
from pyrobnn.inference.fitting.ranks import ranks
from pyrobnn.inference.fitting.watch import COMPILING, Watch
from pyrobnn.inference.optim.training import Training, is_scheduler, learning_rate_factors
from pyrobnn.inference.optim.update import (
    BETA1,
    BETA2,
    LEAST_ROWS,
    AdamStep,
    Recorder,
    SharedStep,
    Step,
    TorchStep,
    clipped,
)
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
        stopped: ``"num_steps"``, ``"plateau"``, ``"callback"`` or ``"interrupt"``.
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
        training: optimiser, steps, rate and when to stop; ``batches`` are made by the caller.
        tracked: names of the further scalars that the objective returns.
        callbacks: ``callback(step, metrics)`` with loss, lr, grad_norm, ``tracked`` and ``snapshot``; True stops.
        snapshot: what ``metrics["snapshot"]()`` makes of the present parameters.
        progress: show a bar.
        name: what is minimised, for messages.

    Raises:
        FloatingPointError: a loss that is not finite; names the step, the loss and the remedy.
        KeyboardInterrupt: Ctrl-C before the first update, or when the losses are not finite; later it ends the run,
            and ``stopped`` says so.

    Caveat: the plateau rule compares noisy means: a ``patience`` of a few epochs averages the noise of mini-batches.

    Reference: `Adam (Kingma & Ba, 2015) <https://arxiv.org/abs/1412.6980>`_.

    Example:
        >>> result = minimize(lambda theta: (theta - 3).square().sum(), torch.zeros(2), None, Training(500, lr=0.1))
        >>> result.params.round().tolist()
        [3.0, 3.0]
    """
    num_steps, lr, lr_schedule = training.num_steps, training.lr, training.lr_schedule
    batches = itertools.repeat(()) if batches is None else iter(batches)
    table = _coefficients(training, start.device)
    recorder = Recorder(start, num_steps, tracked)
    functional = training.optimizer == "adam" and not is_scheduler(lr_schedule)
    kind: Callable[..., Step] = AdamStep if functional else TorchStep
    clip_norm = training.clip_norm
    if (shared := ranks()) is not None:  # the norm that counts is that of the mean of all ranks
        kind, clip_norm = functools.partial(SharedStep, shared, clip_norm), None
    gradient = _gradient(objective, bool(tracked), clip_norm)
    stepper = kind(
        gradient, start, table, recorder, training.optimizer, lr, lr_schedule, training.compile, name
    )
    losses = _Losses(recorder, stepper, snapshot, training, name)
    watch = Watch(
        num_steps, name, callbacks, progress, starting=COMPILING if training.compile else "", finished="num_steps",
        metrics=("loss",), worth_keeping=losses.worth_keeping,
    )  # fmt: skip
    return _run(stepper, batches, losses, watch, num_steps, training.log_every)


def _run(
    stepper: Step, batches: Iterator, losses: _Losses, watch: Watch, num_steps: int, log_every: int
) -> Result:
    started, step = time.perf_counter(), 0
    with watch:
        while step < num_steps:
            block = min(log_every - step % log_every, num_steps - step)
            with torch.no_grad():
                for batch in itertools.islice(batches, block):
                    stepper(batch)
                    step += 1
                    if step in stepper.averaging_checks:
                        stepper.restart_average_if_falling()
            losses.check(step)
            if watch.active and watch.tell(step, losses.metrics(step)):
                watch.stopped = "callback"
                break
            if losses.flat(step):
                watch.stopped = "plateau"
                break
    step = int(stepper.step)
    elapsed = time.perf_counter() - started
    history, tracked = losses.recorder.read(step)
    timings = {"compile": stepper.compile_seconds, "fit": elapsed - stepper.compile_seconds}
    return Result(
        stepper.final(), history, step, watch.stopped, losses.recorder.grad_norm.cpu(), timings, num_steps, tracked,
        stepper.table[:, 3].cpu(),
    )  # fmt: skip


def _gradient(objective: Objective, has_tracked: bool, clip_norm: float | None) -> Callable[..., tuple]:
    """(theta, *batch) -> gradient, rows (1 + tracked, …) and gradient norm; members don't interact."""

    def total(theta: Tensor, *batch: Tensor) -> tuple[Tensor, Tensor]:
        loss, extra = objective(theta, *batch) if has_tracked else (objective(theta, *batch), None)
        rows = loss[None] if extra is None else torch.cat([loss[None], extra.to(loss.dtype)])
        return loss.sum(), rows.double()

    def gradient(theta: Tensor, *batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        slope, rows = torch.func.grad(total, has_aux=True)(theta, *batch)
        slope, norm = clipped(slope, clip_norm)
        return slope, rows, norm

    return gradient


class _Losses:
    """The losses so far, as the host reads them between blocks of steps."""

    def __init__(
        self,
        recorder: Recorder,
        stepper: Step,
        snapshot: Callable[[Tensor], Any] | None,
        training: Training,
        name: str,
    ):
        self.recorder, self.stepper, self.snapshot = recorder, stepper, snapshot
        self.training, self.name = training, name
        self.seen = 0

    def worth_keeping(self) -> bool:
        """Whether an interrupted run has made a step, and all its losses are finite."""
        step = int(self.stepper.step)
        return step > 0 and bool(torch.isfinite(self.recorder.read(step)[0]).all())

    def check(self, step: int) -> None:
        """Stop a run with a loss that is not finite."""
        losses, _ = self.recorder.read(step, self.seen)
        if not bool(torch.isfinite(losses).all()):
            self._diverged(losses)
        self.seen = step

    def metrics(self, step: int) -> dict[str, Any]:
        """What callbacks are told after ``step`` updates."""
        losses, tracked = self.recorder.read(step, step - 1)
        metrics: dict[str, Any] = {"loss": float(losses[-1].mean()), "lr": self.stepper.rate()}
        metrics["grad_norm"] = float(self.recorder.grad_norm.mean())
        metrics |= {name: float(values[-1].mean()) for name, values in tracked.items()}
        if (snapshot := self.snapshot) is not None:
            metrics["snapshot"] = lambda: snapshot(self.stepper.final())
        return metrics

    def flat(self, step: int) -> bool:
        """Whether the plateau rule stops the run after ``step`` updates."""
        patience = self.training.patience
        if patience is None or step < 2 * patience:
            return False
        losses, _ = self.recorder.read(step, step - 2 * patience)
        before, after = losses.split(patience)
        return bool((after.mean(0) >= before.mean(0) - self.training.min_delta).all())

    def _diverged(self, losses: Tensor) -> None:
        row, *member = (~torch.isfinite(losses)).nonzero()[0].tolist()
        whose = f" of member {member[0]}" if member else ""
        before = f" (it was {float(losses[(row - 1, *member)]):.4g} before)" if row else ""
        remedy = f"use a smaller lr than {self.training.lr:g}, or clip_norm"
        if self.seen + row == 0:  # the loss of the first step is that of the start
            remedy = (
                "the start itself has no finite density: look for data far outside of the model's units (standardize "
                "them), or, where the start was passed as init=, for weights that the prior's support leaves out"
            )
        value, step = float(losses[(row, *member)]), self.seen + row + 1
        raise FloatingPointError(
            f"the loss of {self.name}{whose} is {value} at step {step}{before}: {remedy}"
        )


def _coefficients(training: Training, device: torch.device) -> Tensor:
    """Per step, float64 (num_steps, 4): lr / (1 - b1^t), 1 / (1 - b2^t), weight in the running mean, lr factor.

    It has some rows at least, for the steps that are made of copies while the update is compiled.
    """
    num_steps = training.num_steps
    t = torch.arange(1, num_steps + 1, dtype=torch.float64)
    factor = learning_rate_factors(num_steps, training.lr_schedule)
    begin = num_steps - round(training.average * num_steps)
    weight = torch.where(t > begin, 1 / (t - begin).clamp_min(1), torch.zeros_like(t))
    table = [training.lr * factor / (1 - BETA1**t), 1 / (1 - BETA2**t), weight, factor]
    return pad(torch.stack(table, 1), (0, 0, 0, max(0, LEAST_ROWS - num_steps))).to(device)
