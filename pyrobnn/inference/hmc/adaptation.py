r"""Warm-up of the HMC machine: dual averaging inside the step, the plan of windows, and whether a window is enough.

*The No-U-Turn Sampler* (Hoffman & Gelman, 2014), https://arxiv.org/abs/1111.4246
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyrobnn.core.chains import rhat

STATS = ("lp", "energy", "diverging", "tree_depth", "n_steps", "acceptance_rate", "step_size")
# pooled acceptance rates are far less noisy than one chain's, so gamma is four times Hoffman & Gelman's: less shrinkage
# of the first swings is left in the average
_GAMMA, _T0, _KAPPA = 0.2, 10.0, 0.75
#: how the step size adapts: not at all; one for all chains; one for each, until all have found where the mass is
FROZEN, POOLED, OWN = 0.0, 1.0, 2.0
#: R-hat of a window: short and correlated, so that chains that agree stay well below
WINDOW_RHAT = 1.2
#: transitions of a chain from which it can be judged; draws that a new mass matrix takes (Stan's first window)
MIN_TRANSITIONS, MIN_WINDOW = 8, 25
_RATE_TOLERANCE = 0.2  # of an acceptance rate from its target, after a short search for a step size


def dual_averaging(step: Tensor | float, num_chains: int, device: torch.device, mode: float, target: float) -> Tensor:
    """The state (7, chain) in float64: log step, its average, mean error, time, log shrinkage point, mode, target."""
    log_step = torch.as_tensor(step, dtype=torch.float64, device=device).log().expand(num_chains)
    zero = torch.zeros_like(log_step)
    return torch.stack([log_step, log_step, zero, zero, log_step, zero + mode, zero + target])


def dual_average(dual: Tensor, rate: Tensor, ended: Tensor, num_chains: int) -> Tensor:
    r"""One update by the transitions that ended in this step: pooled over chains, or every chain by its own.

    With k of C chains ending, pooled time advances by :math:`w = k \min(2, \sqrt C) / C`: in proportion to k, so that
    every chain counts the same, and by two at most when all end at once, as with more the step size would overshoot and
    swing. A chain's own time advances by one:

    .. math:: \bar h \leftarrow \Bigl(1 - \tfrac{w}{t + t_0}\Bigr) \bar h + \tfrac{w}{t + t_0} (\delta - \bar a), \qquad
              \log \epsilon = \mu - \tfrac{\sqrt t}{\gamma} \bar h
    """
    log_step, log_mean, error, time, center, mode, target = dual.unbind(0)
    own, count = mode == OWN, ended.sum()
    pace = min(2.0, math.sqrt(num_chains)) / num_chains
    share = torch.where(own, ended.double(), (mode == POOLED) * count * pace)
    pooled = torch.where(ended, rate, 0.0).sum() / count.clamp(min=1)
    mean_rate = torch.where(own, rate, pooled)
    new_time = time + share
    gain = share / (new_time + _T0)
    new_error = (1 - gain) * error + gain * (target - mean_rate)
    new_log = center - new_time.sqrt() / _GAMMA * new_error
    # t^-kappa is the weight of a whole unit of time
    keep = (1 - new_time.clamp(min=1.0) ** -_KAPPA) ** share
    new_mean = keep * log_mean + (1 - keep) * new_log
    return torch.where(share > 0, torch.stack([new_log, new_mean, new_error, new_time, center, mode, target]), dual)


def first_step_size(
    gradient: Callable[[Tensor], tuple[Tensor, Tensor]],
    q: Tensor,
    g: Tensor,
    lp: Tensor,
    r: Tensor,
    guess: Tensor | float,
    target: float,
    *,
    each: bool = False,
) -> Tensor | float:
    """Double or halve until the mean (or ``each`` chain's) acceptance of a leapfrog from (q, r) crosses the target."""
    step = torch.zeros_like(lp) + guess
    direction, done = torch.zeros_like(lp), torch.zeros_like(lp, dtype=torch.bool)
    energy = 0.5 * r.double().square().sum(-1) - lp
    for _ in range(60):
        size = step.to(q.dtype).unsqueeze(-1)
        half = r + 0.5 * size * g
        new_g, new_lp = gradient(q + size * half)
        new = half + 0.5 * size * new_g
        error = 0.5 * new.double().square().sum(-1) - new_lp - energy
        accepted = torch.where(torch.isfinite(error), (-error).clamp(max=0.0).exp(), 0.0)
        accepted = accepted if each else accepted.mean().expand_as(accepted)
        wanted = torch.where(accepted > target, 1.0, -1.0).to(step)
        done = done | ((direction != 0) & (wanted != direction))
        if bool(done.all()):
            break
        direction = wanted
        step = torch.where(done, step, step * 2.0**direction)
    return step if each else float(step[0])


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
    first = min(75, max(1, round(0.15 * num_warmup)))
    last = min(50, max(1, round(0.1 * num_warmup)))
    middle = num_warmup - first - last
    if middle < 10:
        return [Phase(num_warmup)] if num_warmup else []
    plan, length = [Phase(first, own_step=True)], min(25, max(5, middle // 3))
    while middle >= 3 * length:
        plan.append(Phase(length, mass=True))
        middle -= length
        length *= 2
    return [*plan, Phase(middle, mass=True), Phase(last)]


def extend_phase(plan: list[Phase], phase: int, most: int) -> list[Phase]:
    """The plan with another phase after ``phase``, twice as long, as far as ``most`` transitions in all allow."""
    length, mass, _ = plan[phase]
    left = most - sum(each.length for each in plan)
    if left < length:
        return plan
    # a step size for each chain: one that is stuck must not set that of the others
    return [*plan[: phase + 1], Phase(min(2 * length, left), mass, mass), *plan[phase + 1 :]]


def not_stationary(z: Tensor, stats: Tensor, counts: Tensor, names: Callable[[int], str] | None) -> str:
    """Why the chains of a window (chain, slot, dim) cannot be sampled from yet, in words; or empty.

    Without ``names`` of a coordinate's site, for a net, chains in several modes are not a reason.
    """
    if stuck := stuck_chains(stats, counts):
        return f"{len(stuck)} of {len(counts)} chains did not move"
    num = int(counts.min())
    if num < MIN_TRANSITIONS:
        return f"chain {int(counts.argmin())} made {num} transitions"
    lp = stats[:, :num, STATS.index("lp")]
    first, second = lp[:, : num // 2], lp[:, -(num // 2) :]
    rise = float((second.mean(1) - first.mean(1)).mean())
    if rise > float(torch.cat([first, second]).var(1).mean().sqrt()):
        return f"the log density was still rising, by {rise:.3g} from the first to the second half of a window"
    if names is None:
        return ""
    columns = torch.cat([lp.unsqueeze(-1), z[:, :num, :1000].double()], -1)
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
    mean, least = float(rates.mean()), float(rates.min())
    if abs(mean - target) <= _RATE_TOLERANCE and least >= target - 2 * _RATE_TOLERANCE:
        return ""
    return f"the acceptance rate was {mean:.2f} ({least:.2f} of chain {int(rates.argmin())}), aimed at {target:g}"


def stuck_chains(stats: Tensor, counts: Tensor) -> list[int]:
    """The chains that have moved in none of at least a few transitions."""
    lp = stats[..., STATS.index("lp")]
    long = [c for c, n in enumerate(counts.tolist()) if n >= MIN_TRANSITIONS]
    return [c for c in long if bool((lp[c, : int(counts[c])] == lp[c, 0]).all())]


def kept_in_warmup(num_warmup: int, num_chains: int, dim: int) -> int:
    """Draws per chain that a warm-up window keeps: ample for a pooled covariance, and bounded for large models."""
    return max(32, min(256, num_warmup, 2**28 // (num_chains * dim)))
