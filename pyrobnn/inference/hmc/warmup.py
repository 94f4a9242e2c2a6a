"""The plan of a warm-up, and whether its last window says that the chains can be sampled from."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyrobnn.core.chains import rhat
from pyrobnn.inference.hmc.adaptation import windows
from pyrobnn.inference.hmc.machine import STATS

#: R-hat of a window: short and correlated, so that chains that agree stay well below
WINDOW_RHAT = 1.2
#: transitions of a chain from which it can be judged; draws that a new mass matrix takes (Stan's first window)
MIN_TRANSITIONS, MIN_WINDOW = 8, 25
#: of an acceptance rate from its target, after a short search for a step size
_RATE_TOLERANCE = 0.2
_GAP = 10.0  # nats per dimension by which chains in one place do not differ
_COORDINATES = 1000  # looked at, beside the log density
# draws of a window that are kept, per chain; numbers, over all chains
_KEPT, _KEPT_SCALARS = (32, 256), 2**28


class Phase(NamedTuple):
    """Transitions, whether a new mass matrix ends it, whether each chain has a step size of its own."""

    length: int
    mass: bool
    own_step: bool


def planned(num_warmup: int) -> list[Phase]:
    """Stan's windows; in the first every chain has a step size of its own: a steep start must not set the others'."""
    plan = [Phase(length, mass, False) for length, mass in windows(num_warmup)]
    return [plan[0]._replace(own_step=len(plan) > 1), *plan[1:]] if plan else []


def extend_phase(plan: list[Phase], phase: int, most: int) -> list[Phase]:
    """The plan with another phase after ``phase``, twice as long, as far as ``most`` transitions in all allow."""
    length, mass, _ = plan[phase]
    left = most - sum(each.length for each in plan)
    if left < length:
        return plan
    # a step size for each chain: one that is stuck must not set that of the others
    return [*plan[: phase + 1], Phase(min(2 * length, left), mass, mass), *plan[phase + 1 :]]


def truncate(plan: list[Phase], phase: int, done: int) -> list[Phase] | None:
    """The plan that ends with ``phase`` after the ``done`` transitions it has; None where these say nothing yet."""
    if done < MIN_TRANSITIONS:
        return None
    return [*plan[:phase], plan[phase]._replace(length=done, mass=plan[phase].mass and done >= MIN_WINDOW)]


def not_stationary(z: Tensor, stats: Tensor, counts: Tensor, names: Callable[[int], str] | None) -> str:
    """Why the chains of a window (chain, slot, dim) cannot be sampled from yet, in words; or empty.

    Without ``names`` of a coordinate's site, for a net, chains in several modes are no reason.
    """
    if stuck := stuck_chains(stats, counts):
        return f"{len(stuck)} of {len(counts)} chains did not move"
    num = int(counts.min())
    if num < MIN_TRANSITIONS:
        return f"chain {int(counts.argmin())} made {num} transitions"
    lp = stats[:, :num, STATS.index("lp")]
    rise, spread = trend(lp)
    if rise > spread:
        return (
            f"the log density was still rising, by {rise:.3g} from the first to the second half of a window"
        )
    if names is None:
        return ""
    columns = torch.cat([lp.unsqueeze(-1), z[:, :num, :_COORDINATES].double()], -1)
    found = np.nan_to_num(rhat(columns.movedim(2, 0).cpu().numpy()), nan=np.inf)
    worst = int(found.argmax())
    if found[worst] <= WINDOW_RHAT:
        return ""
    what = "the log density" if worst == 0 else repr(names(worst - 1))
    return f"R-hat of {what} was {found[worst]:.2f} in its last window of {num} transitions"


def acceptance_off_target(stats: Tensor, counts: Tensor, target: float) -> str:
    """Whether the acceptance rate is far from its target, of all chains together or of one, in words; or empty."""
    if stuck := stuck_chains(stats, counts):
        return f"{len(stuck)} of {len(counts)} chains did not move"
    column = stats[..., STATS.index("acceptance_rate")]
    rates = torch.stack([column[c, : int(n)].mean() for c, n in enumerate(counts)])
    if (
        abs(float(rates.mean()) - target) > _RATE_TOLERANCE
        or float(rates.min()) < target - 2 * _RATE_TOLERANCE
    ):
        worst = f"{float(rates.min()):.2f} of chain {int(rates.argmin())}"
        return f"the acceptance rate was {float(rates.mean()):.2f} ({worst}), aimed at {target:g}"
    return ""


def stuck_chains(stats: Tensor, counts: Tensor) -> list[int]:
    """The chains that have moved in none of at least a few transitions."""
    lp = stats[..., STATS.index("lp")]
    long = [c for c, n in enumerate(counts.tolist()) if n >= MIN_TRANSITIONS]
    return [c for c in long if bool((lp[c, : int(counts[c])] == lp[c, 0]).all())]


def in_transient(stats: Tensor, counts: Tensor, dim: int) -> bool:
    """Whether some chain has not come to where the others are: stuck, or far below them in log density."""
    if stuck_chains(stats, counts):
        return True
    lp = stats[..., STATS.index("lp")]
    late = torch.stack([lp[c, int(n) // 2 : max(int(n), 1)].median() for c, n in enumerate(counts)])
    return float(late.max() - late.min()) > _GAP * (dim + _GAP)


def trend(lp: Tensor) -> tuple[float, float]:
    """How much the log density (chain, draw) rose from the first half to the second, and its spread within a half."""
    half = lp.shape[1] // 2
    first, second = lp[:, :half], lp[:, -half:]
    spread = torch.cat([first, second]).var(1).mean().sqrt()
    return float((second.mean(1) - first.mean(1)).mean()), float(spread)


def kept_in_warmup(num_warmup: int, num_chains: int, dim: int) -> int:
    """Draws per chain that a warm-up window keeps: ample for a pooled covariance, and bounded for large models."""
    return max(_KEPT[0], min(_KEPT[1], num_warmup, _KEPT_SCALARS // (num_chains * dim)))
