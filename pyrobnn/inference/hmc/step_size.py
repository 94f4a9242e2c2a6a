"""The step size of the HMC machine: a first one by doubling, then dual averaging inside the step.

*The No-U-Turn Sampler* (Hoffman & Gelman, 2014), https://arxiv.org/abs/1111.4246
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

# pooled acceptance rates are far less noisy than one chain's, so gamma is four times Hoffman & Gelman's: less shrinkage
# of the first swings is left in the average
_GAMMA = 0.2
_T0 = 10.0
_KAPPA = 0.75
#: how the step size adapts: not at all; one for all chains; one for each, until all have found where the mass is
FROZEN = 0.0
POOLED = 1.0
OWN = 2.0


def dual_averaging(
    step: Tensor | float,
    num_chains: int,
    device: torch.device,
    mode: float,
    target: float,
) -> Tensor:
    """The state (7, chain) in float64: log step, its average, mean error, time, log shrinkage point, mode, target."""
    log_step = (
        torch.as_tensor(
            step,
            dtype=torch.float64,
            device=device,
        )
        .log()
        .expand(num_chains)
    )
    zero = torch.zeros_like(log_step)
    return torch.stack([log_step, log_step, zero, zero, log_step, zero + mode, zero + target])


def dual_average(
    dual: Tensor,
    rate: Tensor,
    ended: Tensor,
    num_chains: int,
) -> Tensor:
    r"""One update by the transitions that ended in this step: pooled over chains, or every chain by its own.

    With k of C chains ending, pooled time advances by :math:`w = k \min(2, \sqrt C) / C`: in proportion to k, so that
    every chain counts the same, and by two at most when all end at once, as with more the step size would overshoot and
    swing. A chain's own time advances by one:

    .. math:: \bar h \leftarrow \Bigl(1 - \tfrac{w}{t + t_0}\Bigr) \bar h + \tfrac{w}{t + t_0} (\delta - \bar a), \qquad
              \log \epsilon = \mu - \tfrac{\sqrt t}{\gamma} \bar h
    """
    log_step, log_mean, error, time, center, mode, target = dual.unbind(0)
    by_itself = mode == OWN
    count = ended.sum()
    pace = min(2.0, math.sqrt(num_chains)) / num_chains
    share = torch.where(by_itself, ended.double(), (mode == POOLED) * count * pace)
    pooled = torch.where(ended, rate, 0.0).sum() / count.clamp(min=1)
    mean_rate = torch.where(by_itself, rate, pooled)
    new_time = time + share
    gain = share / (new_time + _T0)
    new_error = (1 - gain) * error + gain * (target - mean_rate)
    new_log = center - new_time.sqrt() / _GAMMA * new_error
    # t^-kappa is the weight of a whole unit of time
    keep = (1 - new_time.clamp(min=1.0) ** -_KAPPA) ** share
    new_mean = keep * log_mean + (1 - keep) * new_log
    new_dual = torch.stack([new_log, new_mean, new_error, new_time, center, mode, target])
    return torch.where(share > 0, new_dual, dual)


def first_step_size(
    gradient: Callable[[Tensor], tuple[Tensor, Tensor]],
    q: Tensor,
    g: Tensor,
    lp: Tensor,
    r: Tensor,
    guess: Tensor | float,
    target: float,
    *,
    by_chain: bool = False,
) -> Tensor | float:
    """Double or halve until the mean acceptance of a leapfrog from (q, r) crosses the target, or that of each chain."""
    step = torch.zeros_like(lp) + guess
    direction = torch.zeros_like(lp)
    done = torch.zeros_like(lp, dtype=torch.bool)
    energy = 0.5 * r.double().square().sum(-1) - lp
    for _ in range(60):
        size = step.to(q.dtype).unsqueeze(-1)
        half = r + 0.5 * size * g
        new_g, new_lp = gradient(q + size * half)
        error = 0.5 * (half + 0.5 * size * new_g).double().square().sum(-1) - new_lp - energy
        accepted = torch.where(torch.isfinite(error), (-error).clamp(max=0.0).exp(), 0.0)
        accepted = accepted if by_chain else accepted.mean().expand_as(accepted)
        wanted = torch.where(accepted > target, 1.0, -1.0).to(step)
        done = done | ((direction != 0) & (wanted != direction))
        if bool(done.all()):
            break
        direction = wanted
        step = torch.where(done, step, step * 2.0**direction)
    return step if by_chain else float(step[0])
