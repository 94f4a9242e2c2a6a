"""A run of the HMC machine as its host sees it: between steps, and at its end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pyrobnn.inference.hmc.machine import STATS, Scalars

if TYPE_CHECKING:
    from pyrobnn.inference.hmc.run import Run

_SLOT = Scalars._fields.index("slot")


class Draws(NamedTuple):
    """What a run returns: unconstrained draws (chain, draw, dim), statistics (chain, draw, 7), the warm-up's history.

    ``z`` is None where the draws went to a file; ``interrupted``: Ctrl-C came before all of them; ``mode``: how the
    step was compiled, or what was done to it in vain; ``unfinished``: why the warm-up was not finished after
    ``num_warmup`` transitions; ``float64_reason``: why the positions are in float64.
    """

    z: Tensor | None
    stats: Tensor
    compile_seconds: float
    num_gradients: int
    scale: Tensor
    history: dict[str, Tensor]
    interrupted: bool = False
    mode: str = "inductor"
    unfinished: str = ""
    num_warmup: int = 0
    float64_reason: str = ""

    @property
    def positions(self) -> Tensor:
        """``z`` of a run that kept its draws in memory."""
        if self.z is None:
            raise ValueError("the draws went to a file: read them there")
        return self.z


class Progress(NamedTuple):
    """What the host sees before the first step and between steps."""

    phase: str
    draws: int  # of the slowest chain in this phase
    wanted: int  # of the whole warm-up, which may have become longer, or of the sampling
    step_size: float
    tree_depth: float
    divergences: int
    steps: int
    unfinished: str  # why the warm-up was not finished when it was last judged
    positions: Callable[[], Tensor]  # unconstrained (chain, draw, dim): the draws, or where the chains are


def named_stats(stats: Tensor) -> dict[str, Tensor]:
    """Statistics (chain, draw, 7) by name, each (chain, draw) in its own dtype."""
    whole = {"tree_depth": torch.int64, "n_steps": torch.int64, "diverging": torch.bool}
    return {name: stats[..., i].to(whole.get(name, torch.float64)) for i, name in enumerate(STATS)}


def progress(run: Run, warming: bool, count: int, wanted: int) -> Progress:
    """What the host sees of a run whose slowest chain has ``count`` of ``wanted`` draws in this phase."""
    slots = run.state.scalars[_SLOT].long().clamp(max=run.machine.num_slots)
    rows = run.buffers.stats
    latest = rows[torch.arange(len(slots), device=slots.device), (slots - 1).clamp(min=0)]
    column = STATS.index("diverging")
    valid = torch.arange(rows.shape[1], device=slots.device) < slots.unsqueeze(-1)
    diverging = int((rows[..., column] * valid).sum()) + int(run.written_stats[..., column].sum())
    return Progress(
        "warm-up" if warming else "sampling",
        min(count, wanted) + (sum(each.length for each in run.plan[: run.phase]) if warming else 0),
        sum(each.length for each in run.plan) if warming else wanted,
        float(run.state.dual[0].median().exp()),
        float(latest[:, STATS.index("tree_depth")].mean()),
        0 if warming else diverging,
        run.total_steps,
        run.unfinished,
        partial(run.positions, min(count, wanted)),
    )
