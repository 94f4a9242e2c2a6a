"""The first draws of a run are on trial: where too many diverge, the warm-up goes on with a higher target.

While the step size adapts it follows the chains: it shrinks where they are in a narrow place and grows where they are
in a wide one. A frozen step does neither. Where the scale of the density changes from place to place, its acceptance
rate is below the one aimed at, and transitions diverge of which the warm-up has seen none. Only draws at the frozen
step show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pyrobnn.core.chains import DIVERGING_BY_CHANCE
from pyrobnn.inference.hmc.windows import Phase

#: draws of each chain at which the trial is judged first; then at twice as many, up to half of the draws
FIRST_TRIAL = 25
#: an acceptance rate beyond which a smaller step costs more than it mends
HIGHEST_TARGET = 0.99
#: share of divergent transitions from which the target rises by two steps at once
_MANY = 0.01
#: divergences whose share can be compared with that of the trial before
_ENOUGH = 5
#: transitions in which the step size settles at a higher target
_SETTLING = 50


class Raise(NamedTuple):
    """A trial that failed: its divergences among so many transitions, and the target from then on."""

    divergences: int
    transitions: int
    target_accept: float


def raised_target(
    target: float,
    divergences: int,
    transitions: int,
    raises: Sequence[Raise] = (),
) -> float:
    """The acceptance rate to aim at after a trial; the same one where at most one more diverged than are expected.

    A raise too many costs a few leapfrogs, so that the bound is lower than that of :func:`divergences_by_chance`. Nor
    does the target rise where the last raise has not helped: at the edge of a support every step size diverges.
    """
    if divergences <= 1 + DIVERGING_BY_CHANCE * transitions:
        return target
    if raises and divergences >= _ENOUGH:
        before = raises[-1].divergences / raises[-1].transitions
        if divergences / transitions > 0.5 * before:
            return target
    halvings = 2 if divergences > _MANY * transitions else 1
    return max(target, min(HIGHEST_TARGET, 1.0 - (1.0 - target) / 2**halvings))


def phases_after(num_draws: int) -> list[Phase]:
    """What a failed trial of so many draws of each chain adds to the warm-up: itself, and a search for a step."""
    return [Phase(num_draws), Phase(_SETTLING)]
