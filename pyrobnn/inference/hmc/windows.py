"""The plan of a warm-up's windows, and whether a window was enough."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyrobnn.core.chains import rhat

#: what a transition records, filled in this order by Machine._record and pyro_engine._Chain
STATS = ("lp", "energy", "diverging", "tree_depth", "n_steps", "acceptance_rate", "step_size")
#: R-hat of a window: short and correlated, so that chains that agree stay well below
WINDOW_RHAT = 1.2
#: difference of an acceptance rate from its target that a short search for a step size leaves
_RATE_TOLERANCE = 0.2
#: transitions of a chain from which it can be judged; draws that a new mass matrix takes (Stan's first window)
MIN_TRANSITIONS = 8
MIN_WINDOW = 25


class Phase(NamedTuple):
    """Transitions, whether a new mass matrix ends it, whether each chain has a step size of its own."""

    length: int
    mass: bool = False
    own_step: bool = False


def planned(num_warmup: int) -> list[Phase]:
    """Stan's: a step-size phase, windows that double in length, a step-size phase.

    The last window takes what is left over. In the first phase every chain has a step size of its own: a steep start
    must not set the others'.
    """
    begin = min(75, max(1, round(0.15 * num_warmup)))
    end = min(50, max(1, round(0.1 * num_warmup)))
    middle = num_warmup - begin - end
    if middle < 10:
        return [Phase(num_warmup)] if num_warmup else []
    plan = [Phase(begin, own_step=True)]
    length = min(25, max(5, middle // 3))
    while middle >= 3 * length:
        plan.append(Phase(length, mass=True))
        middle -= length
        length *= 2
    return [*plan, Phase(middle, mass=True), Phase(end)]


def extend_phase(plan: Sequence[Phase], index: int, budget: int) -> Sequence[Phase]:
    """The plan with another phase after ``index``, twice as long, as far as ``budget`` transitions in all allow."""
    length, mass, _ = plan[index]
    available = budget - sum(phase.length for phase in plan)
    if available < length:
        return plan
    # a step size for each chain: one that is stuck must not set that of the others
    extra = Phase(min(2 * length, available), mass, mass)
    return [*plan[: index + 1], extra, *plan[index + 1 :]]


def not_stationary(
    z: Tensor,
    stats: Tensor,
    counts: Tensor,
    names: Callable[[int], str] | None,
) -> str:
    """Why the chains of a window (chain, slot, dim) cannot be sampled from yet, in words; or empty.

    Without ``names`` of a coordinate's site, for a net, chains in several modes are not a reason.
    """
    stuck = stuck_chains(stats, counts)
    if stuck:
        return f"{len(stuck)} of {len(counts)} chains did not move"
    num = int(counts.min())
    if num < MIN_TRANSITIONS:
        return f"chain {int(counts.argmin())} made {num} transitions"
    lp = stats[:, :num, STATS.index("lp")]
    early = lp[:, : num // 2]
    late = lp[:, -(num // 2) :]
    rise = float((late.mean(1) - early.mean(1)).mean())
    if rise > float(torch.cat([early, late]).var(1).mean().sqrt()):
        return f"the log density was still rising, by {rise:.3g} from the first to the second half of a window"
    if names is None:
        return ""
    columns = torch.cat([lp.unsqueeze(-1), z[:, :num, :1000].double()], -1)
    ratios = np.nan_to_num(rhat(columns.movedim(2, 0).cpu().numpy()), nan=np.inf)
    worst = int(ratios.argmax())
    if ratios[worst] <= WINDOW_RHAT:
        return ""
    quantity = "the log density" if worst == 0 else repr(names(worst - 1))
    return f"R-hat of {quantity} was {ratios[worst]:.2f} in its last window of {num} transitions"


def acceptance_off_target(stats: Tensor, counts: Tensor, target: float) -> str:
    """Whether the acceptance rate is far from its target, of all chains together or of one, in words; or empty."""
    stuck = stuck_chains(stats, counts)
    if stuck:
        return f"{len(stuck)} of {len(counts)} chains did not move"
    column = stats[..., STATS.index("acceptance_rate")]
    rates = torch.stack([column[c, : int(n)].mean() for c, n in enumerate(counts)])
    mean = float(rates.mean())
    least = float(rates.min())
    if abs(mean - target) <= _RATE_TOLERANCE and least >= target - 2 * _RATE_TOLERANCE:
        return ""
    return f"the acceptance rate was {mean:.2f} ({least:.2f} of chain {int(rates.argmin())}), aimed at {target:g}"


def stuck_chains(stats: Tensor, counts: Tensor) -> list[int]:
    """The chains that have moved in none of at least a few transitions, or made none."""
    lp = stats[..., STATS.index("lp")]
    long = [c for c, n in enumerate(counts.tolist()) if n == 0 or n >= MIN_TRANSITIONS]
    return [
        chain for chain in long if bool((lp[chain, : int(counts[chain])] == lp[chain, 0]).all())
    ]


def kept_in_warmup(num_warmup: int, num_chains: int, dim: int) -> int:
    """Draws per chain that a warm-up window keeps: ample for a pooled covariance, and bounded for large models."""
    return max(32, min(256, num_warmup, 2**28 // (num_chains * dim)))
