"""The training loop: flat parameters, one compiled update, losses that stay on the device until they are asked for.

MLE, MAP, DeepEnsemble, SVI and SWAG all minimise a function of a flat vector. Loss, gradient, clipping, Adam, iterate
averaging and the record of the losses are one graph (``pyrobnn.model.compile``); the host only hands over the batch.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyrobnn.core.checks import check_type
from pyrobnn.core.findings import Finding
from pyrobnn.core.threads import threads_by_need
from pyrobnn.inference.fitting.batches import Batches
from pyrobnn.inference.fitting.checkpoints import Stage
from pyrobnn.inference.fitting.floats import flushed
from pyrobnn.inference.fitting.problem import Callback, interruption
from pyrobnn.inference.fitting.provenance import Recorded
from pyrobnn.inference.fitting.shares import Shares, across
from pyrobnn.inference.fitting.watch import TRACING, Watch
from pyrobnn.inference.optim.descent import still_falling, unfinished
from pyrobnn.inference.optim.training import Training, learning_rate_factors
from pyrobnn.model.compile import Compiled, compiled

Objective = Callable[..., Any]
#: of Adam
BETA1 = 0.9
BETA2 = 0.999
EPS = 1e-8
#: of a parameter of a row at its first visits: a standard deviation grows by two thirds
_LARGEST_MOVE = 0.5
#: columns of a step's table: weight in the running mean, and factor of the learning rate
_WEIGHT = 2
_FACTOR = 3


@dataclass(frozen=True, eq=False)
class Result:
    r"""What :func:`minimize` found.

    Attributes: ``params``, (P,) or (members, P), the average of the last iterates where one was asked for; ``losses``
        (step,) or (step, members), float64, on the CPU, and ``tracked`` scalars by name, shaped alike; ``num_steps``
        done, of ``asked``; ``stopped``: ``"num_steps"``, ``"callback"`` or ``"interrupt"``; ``grad_norm``, () or
        (members,), of the last gradient; ``timings``, seconds of ``compile`` and ``fit``; ``factors`` (asked,) of the
        learning rate; ``path``, for ``meta``: which of several paths it was, see :mod:`pyrobnn.inference.optim.paths`;
        ``slope``, (params, \*batch) → their gradients and losses, by the code of the step: it asks for no other trace;
        None where gradients were clipped; ``checkpoint``, the file from which the same fit goes on.
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
    path: dict[str, Any] = field(default_factory=dict)
    slope: Callable[..., tuple[Tensor, Tensor]] | None = None
    checkpoint: str | Path | None = None

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended it."""
        return self.stopped == "interrupt"

    def unfinished(
        self,
        losses: Tensor,
        scale: float,
        num_params: int,
    ) -> dict[str, float]:
        """What ``meta`` keeps of how far its end is from a mode; nothing of a run that a callback ended, as asked.

        Args:
            losses: (step,) or (step, members), ``scale`` nats a unit.
        """
        fall = still_falling(losses, self.factors, scale)
        if fall is None or self.stopped == "callback":
            return {}
        return unfinished(fall, num_params, "fall_left")

    def notes(self, method: Recorded) -> list[Finding]:
        """What the user of ``method`` has to know of how it ended."""
        if not self.interrupted:
            return []
        return [interruption(method, self.num_steps, self.asked, "steps", self.checkpoint)]

    def account(
        self,
        method: Recorded,
        num_rows: int,
        num_params: int,
    ) -> dict[str, Any]:
        """What `make_posterior` needs of a run whose loss is per datum."""
        left = self.unfinished(self.losses, num_rows, num_params)
        meta = {
            "num_steps": self.num_steps,
            "stopped": self.stopped,
            **self.path,
        }
        return {
            "timings": self.timings,
            "history": {"loss": self.losses if self.losses.dim() == 1 else self.losses.mean(1)},
            "meta": meta | left,
            "notes": self.notes(method),
            "interrupted": self.interrupted,
        }


def minimize(
    objective: Objective,
    start: Tensor,
    batches: Iterator[Sequence[Tensor]] | None,
    training: Training,
    *,
    leading: Callable[[int], tuple[Tensor, ...]] | None = None,
    observe: Callable[[int, Callable[[], Tensor]], None] | None = None,
    stage: Stage | None = None,
    slopes: bool = False,
    tracked: Sequence[str] = (),
    callbacks: Sequence[Callback] = (),
    snapshot: Callable[[Tensor], Any] | None = None,
    progress: bool = False,
    name: str = "the objective",
    explain: Callable[[Tensor], str] | None = None,
    num_paths: int = 1,
    rates: Tensor | None = None,
    of_rows: Tensor | None = None,
) -> Result:
    r"""Minimise ``objective(theta, *batch)`` over a flat vector, or over several at once.

    .. math:: \theta_{t+1} = \theta_t - \eta_t \, \mathrm{Adam}(\nabla L(\theta_t; b_t))

    Args:
        objective: ``(theta (P,), *batch) -> loss ()``; of members trained together ``(theta (members, P), *batch) ->
            losses (members,)``, with gradients, clipping and moments per member; with ``tracked`` it returns
            ``(loss, tensor (len(tracked), …))``. Random draws come from torch's state.
        start: initial parameters (P,) or (members, P); left as they are.
        batches: endless iterator of tensor tuples; None for no arguments. Of those that are a rank's share the loss is
            the mean over the ranks, which all take the same steps.
        training: steps, rate and optimiser.
        leading: from the number of a step, counted from zero, to arguments before those of its batch.
        observe: called as ``observe(step, iterate)`` at every look, before the callbacks; ``iterate()`` are the present
            parameters.
        stage: where a checkpoint has this loop; with the batches among its companions.
        slopes: the objective returns the gradient and the record, (1, members) of losses.
        tracked: names of the further scalars that the objective returns.
        callbacks: ``callback(step, metrics)`` with loss, lr, grad_norm, ``tracked`` and ``snapshot``; True stops.
        snapshot: what ``metrics["snapshot"]()`` makes of the present parameters.
        progress: show a bar.
        name: what is minimised, for messages.
        explain: says of parameters why the loss is not finite there; empty where it does not know.
        num_paths: of so many members in a row only the best counts: the loss that callbacks are told is the mean of
            the smallest of each, and the others may diverge.
        rates: factors (members,) of the learning rate of each member; of Adam alone.
        of_rows: which parameters (P,) belong to a row of the data: a step of Adam moves those of its batch alone.

    Raises:
        FloatingPointError: a loss that is not finite; names the step, the loss and the remedy.
        KeyboardInterrupt: Ctrl-C before the first update, or when the losses are not finite; later it ends the run.

    Reference: `Adam (Kingma & Ba, 2015) <https://arxiv.org/abs/1412.6980>`_.

    Example:
        >>> result = minimize(lambda theta: (theta - 3).square().sum(), torch.zeros(2), None, Training(500, lr=0.1))
        >>> result.params.round().tolist()
        [3.0, 3.0]
    """
    num_steps = training.num_steps
    shares = batches.shares if isinstance(batches, Batches) else None
    task = _Task(
        _Gradient(objective, training.optimizer.clip_norm, slopes, shares),
        start,
        training,
        len(tracked),
        name,
    )
    stepper = _stepper(task, of_rows)
    if rates is not None:
        stepper.vary(rates)
    record = _Record(stepper, tracked, num_paths)
    watch = Watch(
        num_steps,
        name,
        callbacks,
        progress,
        starting=TRACING,
        finished="num_steps",
        metrics=("loss",),
        worth_keeping=record.worth_keeping,
    )
    stepper.announce = watch.say
    inputs = _Inputs(batches, leading)
    reason = partial(_reason, explain, stepper)
    started = time.perf_counter()
    stage = stage or Stage()
    stage.resume(stepper)
    step = int(stepper.step)
    with watch, flushed(), threads_by_need(), stage:
        while step < num_steps and watch.stopped != "callback":
            looked = step
            end = min(step - step % training.look_every + training.look_every, num_steps)
            with torch.no_grad():
                while step < end:
                    with stage.changing():
                        stepper(inputs.of_step(step))
                        step += 1
                        if step in stepper.averaging_checks:
                            stepper.restart_average_if_falling()
                        if step == end and observe is not None:
                            observe(step, stepper.final)
                    if step < end:
                        stage.keep()
            _check_finite(record.losses(looked, step), looked, training, name, reason, num_paths)
            stops = watch.active and watch.tell(step, record.metrics(step, snapshot))
            if shares is not None:
                shares.check_state(stepper.theta)
                stops = shares.ranks.from_first(stops)
            if stops:
                watch.stopped = "callback"
            stage.keep()
    step = int(stepper.step)
    elapsed = time.perf_counter() - started
    return Result(
        params=stepper.final(),
        losses=record.losses(0, step),
        num_steps=step,
        stopped=watch.stopped,
        grad_norm=stepper.grad_norm.cpu(),
        timings={"compile": stepper.compile_seconds, "fit": elapsed - stepper.compile_seconds},
        asked=num_steps,
        tracked=record.scalars(0, step),
        factors=stepper.table[:num_steps, _FACTOR].cpu(),
        slope=stepper.slope if training.optimizer.clip_norm is None else None,
        checkpoint=stage.path,
    )


class _Inputs(NamedTuple):
    """The arguments of every step: what depends on its number, and a batch."""

    batches: Iterator[Sequence[Tensor]] | None
    leading: Callable[[int], tuple[Tensor, ...]] | None

    def of_step(self, step: int) -> tuple[Tensor, ...]:
        """Those of the step of this number, whose batch is the next one."""
        batch = () if self.batches is None else next(self.batches)
        return (*batch,) if self.leading is None else (*self.leading(step), *batch)


@dataclass(frozen=True, eq=False)
class _Record:
    """What the steps of a run have left behind: losses, ``tracked`` scalars, and whether they are worth keeping."""

    stepper: _Step
    tracked: Sequence[str]
    num_paths: int

    def losses(self, begin: int, end: int) -> Tensor:
        """Of these steps, (step, \\*members), float64."""
        return self.stepper.records[begin:end, 0].cpu()

    def scalars(self, begin: int, end: int) -> dict[str, Tensor]:
        """The tracked scalars of these steps by name, each (step, \\*members)."""
        rows = self.stepper.records[begin:end].cpu()
        return {scalar: rows[:, i + 1] for i, scalar in enumerate(self.tracked)}

    def metrics(self, step: int, snapshot: Callable[[Tensor], Any] | None) -> dict[str, Any]:
        """What callbacks are told after so many steps: means over the members, each on its best path."""
        losses = self.losses(step - 1, step)[0].reshape(-1, self.num_paths)
        best = losses.nan_to_num(nan=math.inf).min(1).values
        report: dict[str, Any] = {
            "loss": float(best.mean()),
            "lr": self.stepper.rate(),
            "grad_norm": float(self.stepper.grad_norm.mean()),
        }
        for scalar, values in self.scalars(step - 1, step).items():
            report[scalar] = float(values.mean())
        if snapshot is not None:
            report["snapshot"] = lambda: snapshot(self.stepper.final())
        return report

    def worth_keeping(self) -> bool:
        """Whether there are steps, and every member has a path whose losses are all finite."""
        num_done = int(self.stepper.step)
        return num_done > 0 and bool(_any_finite(self.losses(0, num_done), self.num_paths).all())


@dataclass(frozen=True, eq=False)
class _Gradient:
    """What a step asks of the objective: gradient (…, P), record (1 + tracked, …), norm of the gradient (…).

    Members don't interact.

    Attributes: ``objective``, with ``slopes`` where it returns the gradient itself; ``clip_norm``; ``shares`` of which
        the mean over ranks is taken, outside of compiled code.
    """

    objective: Objective
    clip_norm: float | None
    slopes: bool
    shares: Shares | None

    def __call__(self, theta: Tensor, *batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.clipped(*self.of_rows(theta, *batch))

    def of_rows(self, theta: Tensor, *batch: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient (…, P) and rows of the record, float64 (1 + tracked, …), of a batch alone."""
        if self.slopes:
            slope, rows = self.objective(theta, *batch)
            return slope, rows
        slope, rows = torch.func.grad(self._total, has_aux=True)(theta, *batch)
        return slope, rows

    def _total(self, theta: Tensor, *batch: Tensor) -> tuple[Tensor, Tensor]:
        outcome = self.objective(theta, *batch)
        loss, extra = outcome if isinstance(outcome, tuple) else (outcome, None)
        rows = loss[None] if extra is None else torch.cat([loss[None], extra.to(loss.dtype)])
        return loss.sum(), rows.double()

    def clipped(self, slope: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient no longer than it may be, the record, and the norm (…) that the gradient had."""
        norm = torch.linalg.vector_norm(
            slope,
            dim=-1,
            keepdim=True,
        )
        if self.clip_norm is not None:
            slope = slope * (self.clip_norm / norm.clamp_min(1e-30)).clamp_max(1.0)
        return slope, rows, norm.squeeze(-1)


def _stepper(task: _Task, of_rows: Tensor | None) -> _Step:
    """What takes the steps of a task, of which parameters ``of_rows`` (P,) move at the visits of their rows."""
    if task.training.optimizer.kind != "adam":
        return _TorchStep(task)
    return _AdamStep(task) if of_rows is None else _RowAdamStep(task, of_rows)


def _reason(explain: Callable[[Tensor], str] | None, stepper: _Step) -> str:
    return "" if explain is None else explain(stepper.final())


def _any_finite(losses: Tensor, num_paths: int) -> Tensor:
    """Of losses (step, \\*members), whether one of each ``num_paths`` members in a row is finite."""
    finite = torch.isfinite(losses)
    return finite if num_paths == 1 else finite.unflatten(1, (-1, num_paths)).any(2)


def _check_finite(
    losses: Tensor,
    before: int,
    training: Training,
    name: str,
    reason: Callable[[], str],
    num_paths: int = 1,
) -> None:
    """Stop a run whose losses (step, \\*members) after ``before`` steps are not finite on any path of a member."""
    if bool(_any_finite(losses, num_paths).all()):
        return
    row, *member = (~torch.isfinite(losses)).nonzero()[0].tolist()
    whose = f" of member {member[0]}" if member else ""
    before_it = f" (it was {float(losses[(row - 1, *member)]):.4g} before)" if row else ""
    remedy = f"use a smaller lr than {training.lr:g}, or Optimizer(clip_norm=…)"
    if before + row == 0:  # the loss of the first step is that of the start
        remedy = (
            "the start itself has no finite density: look for a wrong scale in the program, for data far outside of "
            "the model's units (standardize them), or, after init=, for weights that the prior's support leaves out"
        )
    remedy = reason() or remedy
    value = float(losses[(row, *member)])
    raise FloatingPointError(
        f"the loss of {name}{whose} is {value} at step {before + row + 1}{before_it}: {remedy}"
    )


class _StepState(TypedDict):
    """What a checkpoint has of the updates: the moments are Adam's, the optimizer's state that of any other.

    ``visits``: of parameters of rows.
    """

    step: int
    theta: Tensor
    mean: Tensor
    records: Tensor
    grad_norm: Tensor
    average_from: int
    weights: Tensor
    moments: NotRequired[list[Tensor]]
    visits: NotRequired[Tensor]
    optimizer: NotRequired[dict[str, Any]]


class _Task(NamedTuple):
    """What steps are made for: a gradient, where they start, how, and how many scalars are tracked beside the loss."""

    gradient: _Gradient
    start: Tensor
    training: Training
    num_tracked: int
    name: str


class _Step:
    """One update, compiled anew for every batch shape, and its record.

    Attributes: ``records`` (≥ num_steps, 1 + tracked, \\*members), loss and tracked scalars of every step, float64;
        ``grad_norm`` (\\*members,) of the last gradient; ``table`` (≥ num_steps, 4), float64: lr / (1 - b1^t),
        1 / (1 - b2^t), weight in the running mean, factor of the rate.
    """

    #: rows that a compiled update is handed: it is the same code for any number of steps
    block = 1024

    def __init__(self, task: _Task):
        start = task.start
        training = task.training
        self.gradient = task.gradient
        self.training = training
        self.name = task.name
        self.theta = start.detach().clone()
        self.mean = torch.zeros_like(self.theta)
        self.step = torch.zeros(
            (),
            dtype=torch.int64,
            device=start.device,
        )
        members = start.shape[:-1]
        num_steps = training.num_steps
        padding = -num_steps % self.block
        self.records = torch.zeros(
            num_steps + padding,
            1 + task.num_tracked,
            *members,
            dtype=torch.float64,
            device=start.device,
        )
        self.grad_norm = torch.zeros(
            members,
            dtype=start.dtype,
            device=start.device,
        )
        window = round((training.optimizer.average or 0.0) * num_steps)
        self.average_from = num_steps - window
        self.averaging_checks = (
            {self.average_from + window * k // 4 for k in (1, 2, 3)} if window >= 80 else set()
        )
        t = torch.arange(
            1,
            num_steps + 1,
            dtype=torch.float64,
        )
        factor = learning_rate_factors(num_steps, training.optimizer.schedule)
        begin = self.average_from
        weight = torch.where(t > begin, 1 / (t - begin).clamp_min(1), torch.zeros_like(t))
        table = torch.stack(
            [training.lr * factor / (1 - BETA1**t), 1 / (1 - BETA2**t), weight, factor], 1
        )
        self.table = pad(table, (0, 0, 0, padding), value=1.0).to(start.device)
        self.compile_seconds = 0.0
        # says what is done now and is no step
        self.announce: Callable[[str], None] = lambda words: None
        self._kernels: dict[tuple, Compiled] = {}

    def __call__(self, batch: Sequence[Tensor]) -> None:
        """Make one step."""
        raise NotImplementedError

    def state(self) -> _StepState:
        """Parameters, their mean, and the record of the steps that are done."""
        done = int(self.step)
        return {
            "step": done,
            "theta": self.theta,
            "mean": self.mean,
            "records": self.records[:done],
            "grad_norm": self.grad_norm,
            "average_from": self.average_from,
            "weights": self.table[:, _WEIGHT],
        }

    def restore(self, state: _StepState) -> None:
        """Go on from a state, in the memory that there is."""
        with torch.no_grad():
            self.step.fill_(state["step"])
            self.theta.copy_(state["theta"])
            self.mean.copy_(state["mean"])
            self.records[: state["step"]] = state["records"]
            self.grad_norm.copy_(state["grad_norm"])
            self.table[:, _WEIGHT] = state["weights"]
        self.average_from = state["average_from"]

    def vary(self, rates: Tensor) -> None:
        """Give every member its factor (members,) of the rate; of an optimizer with one rate for all nothing."""

    def slope(self, points: Tensor, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Gradients and losses at points shaped as the parameters, by the code of the step."""
        raise NotImplementedError

    def gradient_at(self, theta: Tensor, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """What :class:`_Gradient` gives, by compiled code."""
        shares = self.gradient.shares
        if shares is None:
            return self.kernel(self.gradient, (theta,), batch)(theta, *batch)
        of_rows = self.kernel(self.gradient.of_rows, (theta,), batch)
        return self.gradient.clipped(*across(shares, of_rows)(theta, *batch))

    def kernel(
        self,
        fn: Callable[..., Any],
        args: tuple,
        batch: Sequence[Tensor],
    ) -> Compiled:
        key = tuple([(value.shape, value.stride()) for value in batch])
        if key not in self._kernels:
            self.announce(TRACING)
            calls = self.training.num_steps
            # the forecast of a compile is that of the updates
            if self.training.compile is False:
                calls += self.training.num_later
            self._kernels[key] = compiled(
                fn,
                *args,
                *batch,
                enabled=self.training.compile,
                calls=calls,
                name=self.name,
                say=self.announce,
            )
            self.compile_seconds += self._kernels[key].seconds
        return self._kernels[key]

    def rate(self) -> float:
        """The learning rate of the latest step."""
        return self.training.lr * float(self.table[max(int(self.step) - 1, 0), _FACTOR])

    def restart_average_if_falling(self) -> None:
        """Begin the mean of the iterates again, where the loss fell by three standard errors since it was begun.

        Iterates from before convergence would shift the mean by more than its noise (Dhaka et al., 2020,
        https://arxiv.org/abs/2009.00666).
        """
        step = int(self.step)
        losses = self.records[self.average_from : step, 0].reshape(step - self.average_from, -1)
        before, after = losses.tensor_split(2)
        error = (before.var(0) / len(before) + after.var(0) / len(after)).sqrt()
        if bool((before.mean(0) - after.mean(0) > 3 * error).any()):
            self.average_from = step
            self.table[step:, _WEIGHT] = 1 / torch.arange(1, len(self.table) - step + 1).to(
                self.table
            )

    def final(self) -> Tensor:
        """The averaged iterate if averaging has begun, else the present one."""
        done = int(self.step)
        averaging = done > 0 and bool(self.table[done - 1, _WEIGHT] > 0)
        return (self.mean if averaging else self.theta).clone()


class _AdamStep(_Step):
    """Adam, its moments and its schedule inside the compiled graph; the state is written in place."""

    def __init__(self, task: _Task):
        super().__init__(task)
        zeros = torch.zeros_like(self.theta)
        self.moments = zeros, zeros.clone()
        self.vectors: tuple[Tensor, ...] = (
            self.theta,
            *self.moments,
            self.mean,
            self.step,
            self.grad_norm,
        )
        # of the rate, one for each member; empty where all have the same
        self.member_rates: tuple[Tensor, ...] = ()
        pairs = zip(
            self.records.split(self.block),
            self.table.split(self.block),
            strict=True,
        )
        # the block of every step
        self.blocks: Iterator[tuple[Tensor, Tensor]] = itertools.chain.from_iterable(
            itertools.repeat(pair, self.block) for pair in pairs
        )

    def __call__(self, batch: Sequence[Tensor]) -> None:
        state = (*self.vectors, *next(self.blocks))
        if self.gradient.shares is not None:
            self._move(state, *self.gradient_at(self.theta, batch), self.member_rates)
            return
        inputs = (*self.member_rates, *batch)
        self.kernel(self._update, state, inputs).unchecked(*state, *inputs)

    def state(self) -> _StepState:
        return {**super().state(), "moments": list(self.moments)}

    def restore(self, state: _StepState) -> None:
        super().restore(state)
        for moment, saved in zip(self.moments, state["moments"], strict=True):
            moment.copy_(saved)
        self.blocks = itertools.islice(self.blocks, state["step"], None)

    def vary(self, rates: Tensor) -> None:
        self.member_rates = (rates.to(self.theta)[:, None],)

    def slope(self, points: Tensor, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        # a first step of no length: the moments that it leaves are those of the gradient
        others = [torch.zeros_like(value) for value in self.vectors[1:]]
        record, table = (
            torch.zeros_like(whole[: self.block]) for whole in (self.records, self.table)
        )
        state = (points.clone(), *others, record, table)
        inputs = (*self.member_rates, *batch)
        with torch.no_grad():
            self.kernel(self._update, state, inputs).unchecked(*state, *inputs)
        return others[0] / (1 - BETA1), record[0, 0]

    def _update(self, *state: Tensor) -> None:
        theta, *_ = state
        begin = len(self.vectors) + 2
        batch = begin + len(self.member_rates)
        self._move(
            state[:begin],
            *self.gradient(theta, *state[batch:]),
            state[begin:batch],
        )

    def _move(
        self,
        state: tuple[Tensor, ...],
        slope: Tensor,
        rows: Tensor,
        norm: Tensor,
        member_rates: tuple[Tensor, ...],
    ) -> None:
        """Write Adam's step by this gradient into the state."""
        theta, _, _, mean, step, grad_norm, *_, record, table = state
        row = step % self.block
        # by an index tensor: no .item()
        rates = table[row[None]][0].to(theta.dtype)
        way = self._way(state, slope, rates)
        theta.sub_(member_rates[0] * way if member_rates else way)
        if self.training.optimizer.average:
            mean.add_(rates[_WEIGHT] * (theta - mean))
        record.index_put_((row,), rows)
        grad_norm.copy_(norm)
        step.add_(1)

    def _way(
        self,
        state: tuple[Tensor, ...],
        slope: Tensor,
        rates: Tensor,
    ) -> Tensor:
        """What the parameters are less by after this gradient; the moments are written into the state."""
        _, first_moment, second_moment, *_ = state
        rate, unbias, _, _ = rates.unbind()
        first_moment.mul_(BETA1).add_((1 - BETA1) * slope)
        second_moment.mul_(BETA2).add_((1 - BETA2) * slope * slope)
        # both bias corrections are tabulated: rate = lr / (1 - b1^t), unbias = 1 / (1 - b2^t)
        return rate * first_moment / ((second_moment * unbias).sqrt() + EPS)


class _RowAdamStep(_AdamStep):
    r"""Adam, where the parameters of a row of the data count the steps whose batch has that row: its visits.

    .. math:: \phi_n = \phi_{n-1} - \min\Big( \eta \sqrt{T / n}, \tfrac12 \Big) \frac{g_n}{\sqrt{v_n}}, \quad
        v_n = \frac{1 - \beta_2}{1 - \beta_2^n} \sum_{k \le n} \beta_2^{n-k} g_k^2

    at its visit n, T steps altogether: as far at its last visit as Adam moves it. Adam itself, to which most steps
    bring a gradient of zero, goes on moving a row after its visit and forgets the size of its gradients until the next.
    They have no momentum, whose steps would be whole epochs apart.

    Attributes: ``visits`` (P,), those of each parameter of a row; zero of the others.
    """

    def __init__(self, task: _Task, of_rows: Tensor) -> None:
        super().__init__(task)
        self.visits = torch.zeros_like(self.theta)
        self.vectors = (*self.vectors, self.visits, of_rows)

    def state(self) -> _StepState:
        return {**super().state(), "visits": self.visits}

    def restore(self, state: _StepState) -> None:
        super().restore(state)
        # an older checkpoint has none
        if "visits" in state:
            self.visits.copy_(state["visits"])

    def _way(
        self,
        state: tuple[Tensor, ...],
        slope: Tensor,
        rates: Tensor,
    ) -> Tensor:
        second_moment = state[2]
        visits, of_rows = state[6:8]
        moment_before = second_moment.clone()
        way = super()._way(state, slope, rates)
        # what is not in the batch has a gradient of zero: it stays, and so does its moment
        visited = slope != 0
        visits.add_((of_rows & visited).to(visits.dtype))
        second_moment.copy_(torch.where(of_rows & ~visited, moment_before, second_moment))
        count = visits.clamp_min(1.0)
        size = (second_moment / -torch.expm1(count * math.log(BETA2))).sqrt() + EPS
        rate = self.training.lr * (self.training.num_steps / count).sqrt()
        of_row = rate.clamp_max(_LARGEST_MOVE) * rates[_FACTOR] * slope / size
        return torch.where(of_rows, of_row, way)


class _TorchStep(_Step):
    """Any torch optimiser: the compiled part is loss and gradient."""

    def __init__(self, task: _Task):
        super().__init__(task)
        self.optimizer = self.training.optimizer.kind([self.theta])
        check_type(
            "optimizer", self.optimizer, torch.optim.Optimizer, "what makes a torch.optim.Optimizer"
        )
        factors = self.table[:, _FACTOR].tolist() + [1.0]
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factors.__getitem__)

    def slope(self, points: Tensor, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        gradients, rows, _ = self.kernel(self.gradient, (self.theta,), batch)(points, *batch)
        return gradients, rows[0]

    def state(self) -> _StepState:
        return {**super().state(), "optimizer": self.optimizer.state_dict()}

    def restore(self, state: _StepState) -> None:
        super().restore(state)
        self.optimizer.load_state_dict(dict(state["optimizer"]))
        self.scheduler.last_epoch = state["step"]

    def rate(self) -> float:
        """The learning rate of the optimiser's first group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def __call__(self, batch: Sequence[Tensor]) -> None:
        done = int(self.step)
        self.theta.grad, self.records[done], norm = self.gradient_at(self.theta, batch)
        self.grad_norm.copy_(norm)
        self.optimizer.step()
        self.scheduler.step()
        with torch.no_grad():
            self.mean += self.table[done, _WEIGHT] * (self.theta - self.mean)
        self.step.fill_(done + 1)
