"""How a search by gradient steps is run: optimiser, rate and its schedule, steps, batches, when to stop."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from pyrobnn.core.checks import check_count, check_number

OptimizerFactory = Callable[..., torch.optim.Optimizer]
Schedule = str | Callable[..., Any] | None
SCHEDULES = ("cosine", "hold_cosine", "one_cycle")


@dataclass(frozen=True)
class Training:
    """The options of a search by gradient steps, checked: what every trained method has of them.

    Args:
        num_steps: largest number of updates.
        lr: peak learning rate.
        optimizer: ``"adam"`` (inside the compiled graph) or a factory ``[theta] -> torch.optim.Optimizer``, whose own
            learning rate counts.
        lr_schedule: None, ``"cosine"`` (to zero), ``"hold_cosine"`` (the same after a constant half), ``"one_cycle"``,
            a function step → factor, or a torch ``LRScheduler`` class or ``functools.partial`` of one.
        batch_size: data per step; None for all.
        clip_norm: rescale gradients to at most this norm.
        patience, min_delta: stop when the mean loss of the last ``patience`` steps is not lower by ``min_delta`` than
            that of the ``patience`` steps before them (checked every ``log_every`` steps).
        average: return the mean of the last ``average * num_steps`` iterates (0: the last one); it begins again after a
            quarter, a half and three quarters of them where the loss was still falling.
        log_every: how often the host looks at the losses, calls back and checks that they are finite.
        compile: trace and compile; False runs eagerly, with the same numbers up to rounding.

    Raises:
        TypeError, ValueError: naming the option.
    """

    num_steps: int
    lr: float = 1e-2
    optimizer: str | OptimizerFactory = "adam"
    lr_schedule: Schedule = None
    batch_size: int | None = None
    clip_norm: float | None = None
    patience: int | None = None
    min_delta: float = 0.0
    average: float = 0.0
    log_every: int = 100
    compile: bool = True

    def __post_init__(self) -> None:
        check_count("num_steps", self.num_steps)
        check_count("log_every", self.log_every)
        check_number("lr", self.lr, above=0)
        check_number("min_delta", self.min_delta, minimum=0)
        check_number("average", self.average, minimum=0, maximum=1)
        if self.clip_norm is not None:
            check_number("clip_norm", self.clip_norm, above=0)
        for option in ("batch_size", "patience"):
            if getattr(self, option) is not None:
                check_count(option, getattr(self, option))
        if self.optimizer != "adam" and not callable(self.optimizer):
            raise ValueError(
                "'optimizer' must be 'adam' or a function of the parameter list that returns a torch optimizer, "
                f"got {self.optimizer!r}"
            )
        schedule = self.lr_schedule
        if not (schedule is None or callable(schedule) or schedule in SCHEDULES):
            raise ValueError(
                "'lr_schedule' must be None, 'cosine', 'hold_cosine', 'one_cycle', a function step -> factor or a "
                f"torch LRScheduler, got {schedule!r}"
            )

    @classmethod
    def of(cls, method: Any, **others: Any) -> Training:
        """What the options of a method say of it, with ``others`` in their place."""
        names = (field.name for field in fields(cls))
        found = {name: getattr(method, name) for name in names if hasattr(method, name)}
        return cls(**found | others)


def learning_rate_factors(num_steps: int, schedule: Schedule) -> Tensor:
    """The factor of every step, float64 (num_steps,); ones for a torch scheduler, which keeps its own count."""
    progress = torch.arange(num_steps, dtype=torch.float64) / num_steps
    if schedule is None or is_scheduler(schedule):
        return torch.ones_like(progress)
    if callable(schedule):
        return torch.tensor([float(schedule(step)) for step in range(num_steps)], dtype=torch.float64)
    if schedule == "cosine":
        return 0.5 * (1 + torch.cos(math.pi * progress))
    if schedule == "hold_cosine":
        return 0.5 * (1 + torch.cos(math.pi * (2 * progress - 1).clamp_min(0)))
    return _one_cycle(progress)


def _one_cycle(progress: Tensor, rise: float = 0.3, low: float = 0.04, end: float = 4e-6) -> Tensor:
    """From ``low`` up to 1 and down to ``end`` along two half cosines (Smith & Topin, 2018)."""
    up = low + (1 - low) * 0.5 * (1 - torch.cos(math.pi * progress / rise))
    down = end + (1 - end) * 0.5 * (1 + torch.cos(math.pi * (progress - rise) / (1 - rise)))
    return torch.where(progress < rise, up, down)


def is_scheduler(schedule: Schedule) -> bool:
    """Whether it makes a torch LRScheduler from an optimiser (rather than a factor from a step)."""
    made = schedule.func if isinstance(schedule, functools.partial) else schedule
    return isinstance(made, type) and issubclass(made, LRScheduler)
