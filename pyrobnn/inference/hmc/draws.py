"""What the host is told of a run of the HMC machine: now and then, and at its end."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Draws(NamedTuple):
    """What a run returns: unconstrained draws (chain, draw, dim), statistics (chain, draw, 7), the warm-up's history.

    ``z`` is None where the draws went to a file; ``interrupted``: Ctrl-C came before all of them; ``mode``: how the
    step was compiled, or what was done to it in vain; ``unfinished``: why the warm-up was not finished after
    ``num_warmup`` transitions; ``wide``: why the positions were kept in float64.
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
    wide: str = ""

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
