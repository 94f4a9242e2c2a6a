"""The step size of the HMC machine: a first one by doubling, then dual averaging inside the step.

*The No-U-Turn Sampler* (Hoffman & Gelman, 2014), https://arxiv.org/abs/1111.4246
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyrobnn.inference.hmc.leapfrog import Place, leapfrog
from pyrobnn.model.gradient import Gradient

# pooled acceptance rates are far less noisy than one chain's, so gamma is four times Hoffman & Gelman's: less shrinkage
# of the first swings is left in the average
_GAMMA = 0.2
_T0 = 10.0
_KAPPA = 0.75
#: how the step size adapts: not at all; one for all chains; one for each, until all have found where the mass is
FROZEN = 0.0
POOLED = 1.0
OWN = 2.0


class Adaptation(NamedTuple):
    """Rows of the state of dual averaging, one number per chain."""

    log_step: Tensor
    log_mean: Tensor  # its average
    error: Tensor  # mean of target less acceptance rate
    time: Tensor
    center: Tensor  # the log step towards which it is shrunk
    mode: Tensor
    target: Tensor


def first_adaptation(
    step: Tensor | float,
    num_chains: int,
    device: torch.device,
    mode: float,
    target: float,
) -> Tensor:
    """The state as it begins at the step ``step``.

    Float64 (len(Adaptation._fields), chain), rows as of :class:`Adaptation`.
    """
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


def updated_adaptation(
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
    before = Adaptation(*dual.unbind(0))
    by_itself = before.mode == OWN
    count = ended.sum()
    pace = min(2.0, math.sqrt(num_chains)) / num_chains
    share = torch.where(by_itself, ended.double(), (before.mode == POOLED) * count * pace)
    pooled = torch.where(ended, rate, 0.0).sum() / count.clamp(min=1)
    mean_rate = torch.where(by_itself, rate, pooled)
    time = before.time + share
    gain = share / (time + _T0)
    error = (1 - gain) * before.error + gain * (before.target - mean_rate)
    log_step = before.center - time.sqrt() / _GAMMA * error
    # t^-kappa is the weight of a whole unit of time
    keep = (1 - time.clamp(min=1.0) ** -_KAPPA) ** share
    log_mean = keep * before.log_mean + (1 - keep) * log_step
    after = before._replace(
        log_step=log_step,
        log_mean=log_mean,
        error=error,
        time=time,
    )
    return torch.where(share > 0, torch.stack(after), dual)


def first_step_size(
    gradient: Gradient,
    place: Place,
    r: Tensor,
    guess: Tensor | float,
    target: float,
    *,
    by_chain: bool = False,
) -> Tensor | float:
    """Double or halve until the mean acceptance of a leapfrog crosses the target, or that of each chain.

    Args:
        gradient: whitened.
        place, r: where the leapfrog begins, with which momenta (chain, dim).
    """
    step = torch.zeros_like(place.lp) + guess
    direction = torch.zeros_like(place.lp)
    done = torch.zeros_like(place.lp, dtype=torch.bool)
    energy = _energy(place, r)
    for _ in range(60):
        move = step.to(r.dtype).unsqueeze(-1)
        error = _energy(*leapfrog(gradient, place.q, r, place.g, move)) - energy
        accepted = torch.where(torch.isfinite(error), (-error).clamp(max=0.0).exp(), 0.0)
        accepted = accepted if by_chain else accepted.mean().expand_as(accepted)
        wanted = torch.where(accepted > target, 1.0, -1.0).to(step)
        done = done | ((direction != 0) & (wanted != direction))
        if bool(done.all()):
            break
        direction = wanted
        step = torch.where(done, step, step * 2.0**direction)
    return step if by_chain else float(step[0])


def _energy(place: Place, r: Tensor) -> Tensor:
    """The energy (chain,), squares taken in float64: what has run away overflows later."""
    return 0.5 * r.double().square().sum(-1) - place.lp
