"""One update of a flat vector: Adam inside the compiled graph, or any torch optimiser beside it."""

from __future__ import annotations

import abc
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyrobnn.compile import Compiled, compiled
from pyrobnn.inference.fitting.ranks import Ranks
from pyrobnn.inference.optim.training import OptimizerFactory, Schedule, is_scheduler

#: of Adam
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


#: rows of what is looked up and written at every step: while an update is compiled it is run, on copies, several times
LEAST_ROWS = 4


class Recorder:
    """Losses and tracked scalars of every step (num_steps, 1 + tracked, \\*members), float64, on the device."""

    def __init__(self, start: Tensor, num_steps: int, tracked: Sequence[str]):
        self.names = tuple(tracked)
        shape = (max(num_steps, LEAST_ROWS), 1 + len(self.names), *start.shape[:-1])
        self.rows = torch.zeros(shape, dtype=torch.float64, device=start.device)
        self.grad_norm = torch.zeros(start.shape[:-1], dtype=start.dtype, device=start.device)

    def read(self, stop: int, begin: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        rows = self.rows[begin:stop].cpu()
        return rows[:, 0], {name: rows[:, i + 1] for i, name in enumerate(self.names)}


def clipped(slope: Tensor, clip_norm: float | None) -> tuple[Tensor, Tensor]:
    """Gradients (…, P) of at most ``clip_norm``, and the norms (…) that they had."""
    norm = slope.square().sum(-1, keepdim=True).sqrt()
    if clip_norm is not None:
        slope = slope * (clip_norm / norm.clamp_min(1e-30)).clamp_max(1.0)
    return slope, norm.squeeze(-1)


class Step(abc.ABC):
    """One update; compiled anew for every batch shape."""

    def __init__(
        self,
        gradient: Callable[..., tuple[Tensor, Tensor, Tensor]],
        start: Tensor,
        table: Tensor,
        recorder: Recorder,
        optimizer: str | OptimizerFactory,
        lr: float,
        lr_schedule: Schedule,
        compile: bool,
        name: str,
    ):
        self.gradient, self.table, self.recorder = gradient, table, recorder
        self.theta = start.detach().clone()
        self.mean = torch.zeros_like(self.theta)
        self.step = torch.zeros((), dtype=torch.int64, device=start.device)
        self.compile, self.name, self.lr = compile, name, lr
        self.compile_seconds = 0.0
        self._kernels: dict[tuple, Compiled] = {}
        self._latest: tuple[tuple, Compiled] | None = None
        averaged = table[:, 2].nonzero().flatten().tolist()
        self.average_from, window = (averaged[0] if averaged else 0), len(averaged)
        self.averaging_checks = (
            {self.average_from + window * k // 4 for k in (1, 2, 3)} if window >= 80 else set()
        )
        self.prepare(optimizer, lr, lr_schedule)

    @abc.abstractmethod
    def prepare(self, optimizer: str | OptimizerFactory, lr: float, lr_schedule: Schedule) -> None:
        """Set up what the update keeps between steps."""

    @abc.abstractmethod
    def __call__(self, batch: Sequence[Tensor]) -> None:
        """Make one step."""

    def kernel(self, fn: Callable[..., Any], args: tuple, batch: Sequence[Tensor]) -> Compiled:
        key = tuple([(value.shape, value.stride()) for value in batch])
        if self._latest is not None and self._latest[0] == key:
            return self._latest[1]
        if key not in self._kernels:
            begun = time.perf_counter()
            self._kernels[key] = compiled(fn, *args, *batch, enabled=self.compile, name=self.name)
            self.compile_seconds += time.perf_counter() - begun
        self._latest = key, self._kernels[key]
        return self._latest[1]

    def rate(self) -> float:
        """The learning rate of the latest step."""
        return self.lr * float(self.table[max(int(self.step) - 1, 0), 3])

    def restart_average_if_falling(self) -> None:
        """Begin the mean of the iterates again, where the loss fell by three standard errors since it was begun.

        Iterates from before convergence would shift the mean by more than its noise (Dhaka et al., 2020,
        https://arxiv.org/abs/2009.00666).
        """
        step = int(self.step)
        losses = self.recorder.rows[self.average_from : step, 0].reshape(step - self.average_from, -1)
        before, after = losses.tensor_split(2)
        error = (before.var(0) / len(before) + after.var(0) / len(after)).sqrt()
        if bool((before.mean(0) - after.mean(0) > 3 * error).any()):
            self.average_from = step
            self.table[step:, 2] = 1 / torch.arange(1, len(self.table) - step + 1).to(self.table)

    def final(self) -> Tensor:
        """The averaged iterate if averaging has begun, else the present one."""
        done = int(self.step)
        averaged = done > 0 and bool(self.table[done - 1, 2] > 0)
        return (self.mean if averaged else self.theta).clone()


class AdamStep(Step):
    """Adam, its moments and its schedule inside the compiled graph; the state is written in place."""

    def prepare(self, optimizer: str | OptimizerFactory, lr: float, lr_schedule: Schedule) -> None:
        zeros = torch.zeros_like(self.theta)
        moving = (self.theta, zeros, zeros.clone(), self.mean, self.step)
        self.state = (*moving, self.recorder.rows, self.recorder.grad_norm, self.table)

    def __call__(self, batch: Sequence[Tensor]) -> None:
        self.kernel(self._update, self.state, batch).unchecked(*self.state, *batch)

    def _update(
        self,
        theta: Tensor,
        first: Tensor,
        second: Tensor,
        mean: Tensor,
        step: Tensor,
        record: Tensor,
        grad_norm: Tensor,
        table: Tensor,
        *batch: Tensor,
    ) -> None:
        slope, rows, norm = self.gradient(theta, *batch)
        rate, root, weight, _ = table[step[None]][0].unbind()  # an index tensor: no .item()
        m = BETA1 * first + (1 - BETA1) * slope
        v = BETA2 * second + (1 - BETA2) * slope * slope
        # both bias corrections are tabulated: rate = lr / (1 - b1^t), root = 1 / (1 - b2^t)
        moved = theta - rate * m / ((v * root).sqrt() + EPS)
        mean.copy_(mean + weight * (moved - mean))
        theta.copy_(moved)
        first.copy_(m)
        second.copy_(v)
        record.index_put_((step,), rows)
        grad_norm.copy_(norm)
        step.add_(1)


class TorchStep(Step):
    """Any torch optimiser: the compiled part is loss and gradient."""

    def prepare(self, optimizer: str | OptimizerFactory, lr: float, lr_schedule: Schedule) -> None:
        factory = functools.partial(torch.optim.Adam, lr=lr) if isinstance(optimizer, str) else optimizer
        self.optimizer = factory([self.theta])
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"'optimizer' must return a torch.optim.Optimizer, got {type(self.optimizer).__name__}"
            )
        self.done = 0
        if lr_schedule is None:
            self.scheduler: Any = None
        elif callable(lr_schedule) and is_scheduler(lr_schedule):
            self.scheduler = lr_schedule(self.optimizer)
        else:
            factors = self.table[:, 3].tolist() + [0.0]
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factors.__getitem__)

    def rate(self) -> float:
        """The learning rate of the optimiser's first group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def slope(self, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Gradient, rows of the record and norm of the gradient on a batch."""
        return self.kernel(self.gradient, (self.theta,), batch)(self.theta, *batch)

    def __call__(self, batch: Sequence[Tensor]) -> None:
        self.theta.grad, self.recorder.rows[self.done], norm = self.slope(batch)
        self.recorder.grad_norm.copy_(norm)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        with torch.no_grad():
            self.mean += self.table[self.done, 2] * (self.theta - self.mean)
        self.done += 1
        self.step.fill_(self.done)


class SharedStep(TorchStep):
    """As :class:`TorchStep`, on ranks that share the rows of a batch: its last two tensors, inputs and targets."""

    def __init__(self, ranks: Ranks, clip_norm: float | None, *args: Any):
        self.ranks, self.clip_norm = ranks, clip_norm
        super().__init__(*args)

    def slope(self, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Those of the whole batch, from each rank's of its part."""
        own = (*batch[:-2], *map(self.ranks.part, batch[-2:]))
        found = super().slope(own)[:2]
        slope, rows = self.ranks.mean(found, len(own[-1]), len(batch[-1]))
        slope, norm = clipped(slope, self.clip_norm)
        return slope, rows, norm
