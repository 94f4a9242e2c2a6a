"""How a search by gradient steps is run: its number of steps, its rate, and what makes a step of a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyrobnn.core.checks import check_count, check_number

OptimizerFactory = Callable[..., torch.optim.Optimizer]
Schedule = str | Callable[..., Any] | None
SCHEDULES = ("cosine", "hold_cosine")


@dataclass(frozen=True)
class Optimizer:
    """What makes a step of a gradient: ``pb.MAP(optimizer=Optimizer(schedule=None, clip_norm=1.0))``.

    Args:
        kind: ``"adam"`` (inside the compiled graph) or a factory ``[theta] -> torch.optim.Optimizer``, whose own
            learning rate counts.
        schedule: None (constant), ``"cosine"`` (to zero), ``"hold_cosine"`` (the same after a constant half) or a
            function step → factor; ``"auto"`` is the method's own.
        clip_norm: rescale gradients to at most this norm.
        average: return the mean of the last ``average * num_steps`` iterates (0: the last one); it begins again after a
            quarter, a half and three quarters of them where the loss was still falling. None is the method's own.

    Raises:
        TypeError, ValueError: naming the option.
    """

    kind: str | OptimizerFactory = "adam"
    schedule: Schedule = "auto"
    clip_norm: float | None = None
    average: float | None = None

    def __post_init__(self) -> None:
        if self.kind != "adam" and not callable(self.kind):
            raise ValueError(
                "'optimizer' must be 'adam', a function of the parameter list that returns a torch optimizer, or an "
                f"Optimizer of one, got {self.kind!r}"
            )
        if not (self.schedule is None or callable(self.schedule) or self.schedule in ("auto", *SCHEDULES)):
            raise ValueError(
                f"'schedule' must be None, 'cosine', 'hold_cosine' or a function step -> factor, got {self.schedule!r}"
            )
        if self.clip_norm is not None:
            check_number("clip_norm", self.clip_norm, above=0)
        if self.average is not None:
            check_number("average", self.average, minimum=0, maximum=1)

    @classmethod
    def of(cls, given: Any, schedule: Schedule) -> Optimizer:
        """An option ``optimizer`` of a method whose own schedule is ``schedule``; a file has it as a map."""
        options = given if isinstance(given, dict) else {"kind": given}
        own = given if isinstance(given, Optimizer) else cls(**options)
        return replace(own, schedule=schedule) if own.schedule == "auto" else own


@dataclass(frozen=True)
class Training:
    """A search by gradient steps, checked.

    Args:
        num_steps: largest number of updates.
        lr: peak learning rate.
        optimizer: an :class:`Optimizer`, or its ``kind``.
        compile: trace and compile; False runs eagerly, with the same numbers up to rounding.
        look_every: how often the host looks at the losses, calls back and checks that they are finite; 0 for every 100
            steps, or ten times in a short run.

    Raises:
        TypeError, ValueError: naming the option.
    """

    num_steps: int
    lr: float = 1e-2
    optimizer: Any = "adam"
    compile: bool = True
    look_every: int = 0

    def __post_init__(self) -> None:
        check_count("num_steps", self.num_steps)
        check_number("lr", self.lr, above=0)
        object.__setattr__(self, "optimizer", Optimizer.of(self.optimizer, None))
        if not self.look_every:
            object.__setattr__(self, "look_every", max(1, min(100, self.num_steps // 10)))

    @classmethod
    def of(cls, method: Any, schedule: Schedule) -> Training:
        """What the options of a method say of it, ``schedule`` being the method's own."""
        if method.batch_size is not None:
            check_count("batch_size", method.batch_size)
        return cls(method.num_steps, method.lr, Optimizer.of(method.optimizer, schedule), method.compile)


def learning_rate_factors(num_steps: int, schedule: Schedule) -> Tensor:
    """The factor of every step, float64 (num_steps,)."""
    progress = torch.arange(num_steps, dtype=torch.float64) / num_steps
    if schedule is None:
        return torch.ones_like(progress)
    if callable(schedule):
        return torch.tensor([float(schedule(step)) for step in range(num_steps)], dtype=torch.float64)
    return 0.5 * (1 + torch.cos(math.pi * (progress if schedule == "cosine" else (2 * progress - 1).clamp_min(0))))
