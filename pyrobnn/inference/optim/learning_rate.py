"""Learning-rate schedules as tables: one factor per step, computed before the first."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

Schedule = str | Callable[..., Any] | None
SCHEDULES = ("cosine", "hold_cosine", "one_cycle")


def check_schedule(schedule: Schedule) -> None:
    """Raise a ValueError unless it is None, a known name, or callable."""
    if not (schedule is None or callable(schedule) or schedule in SCHEDULES):
        raise ValueError(
            "'lr_schedule' must be None, 'cosine', 'hold_cosine', 'one_cycle', a function step -> factor or a torch "
            f"LRScheduler, got {schedule!r}"
        )


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
