"""What a transition of HMC or NUTS depends on, beside the posterior."""

from __future__ import annotations

from typing import Protocol


class TransitionOptions(Protocol):
    """Those options of :class:`pyrobnn.NUTS` that its engines and its findings read."""

    @property
    def step_size(self) -> float | None:
        """The first one; None finds it."""

    @property
    def target_accept(self) -> float:
        """The acceptance rate aimed at."""

    @property
    def max_tree_depth(self) -> int:
        """A draw takes at most two to the power of it leapfrogs."""

    @property
    def trajectory(self) -> int | None:
        """Leapfrogs of a plain HMC transition; None for NUTS."""
