r"""Warm-up of the HMC machine: dual averaging inside the step, mass matrices between windows, pooled over chains.

*The No-U-Turn Sampler* (Hoffman & Gelman, 2014), https://arxiv.org/abs/1111.4246
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pyrobnn.inference.hmc.metric import centred

# pooled acceptance rates are far less noisy than one chain's, so gamma is four times Hoffman & Gelman's: less shrinkage
# of the first swings is left in the average
_GAMMA, _T0, _KAPPA = 0.2, 10.0, 0.75
_WHOLE = 2**24
#: how the step size adapts: not at all; one for all chains; one for each, until all have found where the mass is
FROZEN, POOLED, OWN = 0.0, 1.0, 2.0


def dual_averaging(step_size: Tensor | float, num_chains: int, device: torch.device, mode: float) -> Tensor:
    """The state (6, chain) in float64: log step, its average, mean error, time, log shrinkage point, mode."""
    log_step = torch.as_tensor(step_size, dtype=torch.float64, device=device).log().expand(num_chains)
    zero = torch.zeros_like(log_step)
    return torch.stack([log_step, log_step, zero, zero, log_step, zero + mode])


def dual_average(dual: Tensor, rate: Tensor, ended: Tensor, target: float, num_chains: int) -> Tensor:
    r"""One update by the transitions that ended in this step: pooled over chains, or every chain by its own.

    With k of C chains ending, pooled time advances by :math:`w = k \min(2, \sqrt C) / C`: in proportion to k, so that
    every chain counts the same, and by two at most when all end at once, as with more the step size would overshoot and
    swing. A chain's own time advances by one:

    .. math:: \bar h \leftarrow \Bigl(1 - \tfrac{w}{t + t_0}\Bigr) \bar h + \tfrac{w}{t + t_0} (\delta - \bar a), \qquad
              \log \epsilon = \mu - \tfrac{\sqrt t}{\gamma} \bar h
    """
    log_step, log_mean, error, time, center, mode = dual.unbind(0)
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
    updated = torch.stack(
        [new_log, keep * log_mean + (1 - keep) * new_log, new_error, new_time, center, mode]
    )
    return torch.where(share > 0, updated, dual)


def windows(num_warmup: int) -> list[tuple[int, bool]]:
    """Lengths of the warm-up phases in transitions, and whether each ends with a new mass matrix.

    A step-size phase, windows that double in length, a step-size phase; the last window takes what is left over.
    """
    first = min(75, max(1, round(0.15 * num_warmup)))
    last = min(50, max(1, round(0.1 * num_warmup)))
    middle = num_warmup - first - last
    if middle < 10:
        return [(num_warmup, False)] if num_warmup else []
    plan, length = [(first, False)], min(25, max(5, middle // 3))
    while middle >= 3 * length:
        plan.append((length, True))
        middle -= length
        length *= 2
    return [*plan, (middle, True), (last, False)]


def whitening(z: Tensor, counts: Tensor, old: Tensor, dense: bool) -> Tensor:
    """A, :math:`A A^T` the pooled covariance of a window (chain, slot, dim); ``old`` if it says nothing."""
    total = int(counts.sum())
    if total < 3:
        return old
    if not dense and z.numel() > _WHOLE and z.shape[-1] > 1:  # the float64 copies of large windows stay small
        halves = zip(z.chunk(2, -1), old.chunk(2, -1), strict=True)
        return torch.cat([whitening(half, counts, scale, dense) for half, scale in halves])
    x, freedom = centred(z, counts)
    shrink = total / (total + 5.0)
    var = x.square().sum(0) / freedom
    before = old.double().square().sum(-1) if dense else old.double().square()
    # Stan adds 1e-3, which hides scales far below it: here no more than lies between the estimate and what is in use
    added = (1 - shrink) * 1e-3 * (var * before).sqrt().clamp(max=1.0)
    if not dense:
        return torch.where(var > 0, shrink * var + added, before).sqrt().to(old.dtype)
    # with few draws for many dimensions the off-diagonal part is mostly noise: shrink it by its share
    cov = x.T @ x / freedom
    trust = total / (total + 2.0 * len(var))
    cov = shrink * (trust * cov + (1 - trust) * var.diag_embed())
    cov = cov + torch.where(var > 0, added, before).diag_embed()
    return torch.linalg.cholesky(cov).to(old.dtype).contiguous()  # LAPACK returns it transposed


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
