"""One update of a flat vector: Adam inside the compiled graph, or any torch optimiser beside it."""

from __future__ import annotations

import abc
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyrobnn.compile import Compiled, compiled
from pyrobnn.inference.fitting.ranks import Ranks
from pyrobnn.inference.optim.training import Training, is_scheduler, learning_rate_factors

#: of Adam
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
#: rows of what is looked up and written at every step: while an update is compiled it is run, on copies, several times
LEAST_ROWS = 4

#: (theta, \*batch) → gradient (…, P), rows of the record (1 + tracked, …), norm of the gradient (…)
Gradient = Callable[..., tuple[Tensor, Tensor, Tensor]]


def clipped(slope: Tensor, clip_norm: float | None) -> tuple[Tensor, Tensor]:
    """Gradients (…, P) of at most ``clip_norm``, and the norms (…) that they had."""
    norm = slope.square().sum(-1, keepdim=True).sqrt()
    if clip_norm is not None:
        slope = slope * (clip_norm / norm.clamp_min(1e-30)).clamp_max(1.0)
    return slope, norm.squeeze(-1)


class Step(abc.ABC):
    """One update, compiled anew for every batch shape, and its record.

    Attributes: ``rows`` (num_steps, 1 + tracked, \\*members), loss and tracked scalars of every step, float64;
        ``grad_norm`` (\\*members,) of the last gradient; ``table`` (num_steps, 4), float64: lr / (1 - b1^t),
        1 / (1 - b2^t), weight in the running mean, factor of the rate.
    """

    def __init__(self, gradient: Gradient, start: Tensor, num_tracked: int, training: Training, name: str):
        self.gradient, self.training, self.name = gradient, training, name
        self.theta = start.detach().clone()
        self.mean = torch.zeros_like(self.theta)
        self.step = torch.zeros((), dtype=torch.int64, device=start.device)
        members, num_steps = start.shape[:-1], training.num_steps
        shape = (max(num_steps, LEAST_ROWS), 1 + num_tracked, *members)
        self.rows = torch.zeros(shape, dtype=torch.float64, device=start.device)
        self.grad_norm = torch.zeros(members, dtype=start.dtype, device=start.device)
        window = round((training.optimizer.average or 0.0) * num_steps)
        self.average_from = num_steps - window
        checks = {self.average_from + window * k // 4 for k in (1, 2, 3)}
        self.averaging_checks = checks if window >= 80 else set()
        t = torch.arange(1, num_steps + 1, dtype=torch.float64)
        factor = learning_rate_factors(num_steps, training.optimizer.schedule)
        begin = self.average_from
        weight = torch.where(t > begin, 1 / (t - begin).clamp_min(1), torch.zeros_like(t))
        table = torch.stack([training.lr * factor / (1 - BETA1**t), 1 / (1 - BETA2**t), weight, factor], 1)
        self.table = pad(table, (0, 0, 0, max(0, LEAST_ROWS - num_steps))).to(start.device)
        self.compile_seconds = 0.0
        self._kernels: dict[tuple, Compiled] = {}
        self._latest: tuple[tuple, Compiled] | None = None

    @abc.abstractmethod
    def __call__(self, batch: Sequence[Tensor]) -> None:
        """Make one step."""

    def kernel(self, fn: Callable[..., Any], args: tuple, batch: Sequence[Tensor]) -> Compiled:
        key = tuple([(value.shape, value.stride()) for value in batch])
        if self._latest is not None and self._latest[0] == key:
            return self._latest[1]
        if key not in self._kernels:
            begun = time.perf_counter()
            enabled = self.training.compile
            self._kernels[key] = compiled(fn, *args, *batch, enabled=enabled, name=self.name)
            self.compile_seconds += time.perf_counter() - begun
        self._latest = key, self._kernels[key]
        return self._latest[1]

    def rate(self) -> float:
        """The learning rate of the latest step."""
        return self.training.lr * float(self.table[max(int(self.step) - 1, 0), 3])

    def restart_average_if_falling(self) -> None:
        """Begin the mean of the iterates again, where the loss fell by three standard errors since it was begun.

        Iterates from before convergence would shift the mean by more than its noise (Dhaka et al., 2020,
        https://arxiv.org/abs/2009.00666).
        """
        step = int(self.step)
        losses = self.rows[self.average_from : step, 0].reshape(step - self.average_from, -1)
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

    def __init__(self, *args: Any):
        super().__init__(*args)
        zeros = torch.zeros_like(self.theta)
        moving = (self.theta, zeros, zeros.clone(), self.mean, self.step)
        self.state = (*moving, self.rows, self.grad_norm, self.table)

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

    def __init__(self, *args: Any):
        super().__init__(*args)
        kind, schedule = self.training.optimizer.kind, self.training.optimizer.schedule
        factory = functools.partial(torch.optim.Adam, lr=self.training.lr) if isinstance(kind, str) else kind
        self.optimizer = factory([self.theta])
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"'optimizer' must return a torch.optim.Optimizer, got {type(self.optimizer).__name__}"
            )
        self.scheduler: Any = None
        if callable(schedule) and is_scheduler(schedule):
            self.scheduler = schedule(self.optimizer)
        elif schedule is not None:
            factors = self.table[:, 3].tolist() + [0.0]
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factors.__getitem__)
        self.done = 0

    def rate(self) -> float:
        """The learning rate of the optimiser's first group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def slope(self, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """What the gradient function gives on a batch."""
        return self.kernel(self.gradient, (self.theta,), batch)(self.theta, *batch)

    def __call__(self, batch: Sequence[Tensor]) -> None:
        self.theta.grad, self.rows[self.done], norm = self.slope(batch)
        self.grad_norm.copy_(norm)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        with torch.no_grad():
            self.mean += self.table[self.done, 2] * (self.theta - self.mean)
        self.done += 1
        self.step.fill_(self.done)


class SharedStep(TorchStep):
    """As :class:`TorchStep`, on ranks that share the rows of a batch: its last two tensors, inputs and targets."""

    def __init__(self, ranks: Ranks, *args: Any):
        self.ranks = ranks
        super().__init__(*args)

    def slope(self, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Those of the whole batch, from each rank's of its part."""
        own = (*batch[:-2], *map(self.ranks.part, batch[-2:]))
        found = super().slope(own)[:2]
        slope, rows = self.ranks.mean(found, len(own[-1]), len(batch[-1]))
        slope, norm = clipped(slope, self.training.optimizer.clip_norm)
        return slope, rows, norm
