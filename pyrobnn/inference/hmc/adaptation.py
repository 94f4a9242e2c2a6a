r"""Warm-up of the HMC machine: metric, dual averaging inside the step, plan of windows, whether a window is enough.

Positions are whitened, :math:`z = A q`, with :math:`A A^\top` the inverse mass matrix: A is a scale (dim,), the
diagonal metric, or a lower triangular matrix (dim, dim), the dense one.

*The No-U-Turn Sampler* (Hoffman & Gelman, 2014), https://arxiv.org/abs/1111.4246
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyrobnn.core.chains import rhat

Form = Literal["auto", "diag", "dense"]
_MAX_DENSE = (
    100  # coordinates up to which "auto" gives a program a dense metric, cheap beside its gradient
)
_PART = 2**24  # numbers of a window that are copied in float64 at once


def form_of(mass_matrix: Form, is_bnn: bool, dim: int) -> Form:
    """The form that ``"auto"`` stands for: the modes of a net share no covariance, a small program's chains do."""
    if mass_matrix != "auto":
        return mass_matrix
    return "diag" if is_bnn or dim > _MAX_DENSE else "dense"


def unwhiten(q: Tensor, a: Tensor) -> Tensor:
    """Positions :math:`A q` of whitened ones (…, dim)."""
    return q * a if a.dim() == 1 else q @ a.T


def pulled(g: Tensor, a: Tensor) -> Tensor:
    r"""Whitened gradients :math:`A^\top g` (…, dim)."""
    return g * a if a.dim() == 1 else g @ a


def whiten(z: Tensor, a: Tensor) -> Tensor:
    """Whitened positions :math:`A^{-1} z` (chain, dim)."""
    return (
        z / a if a.dim() == 1 else torch.linalg.solve_triangular(a, z.T, upper=False).T.contiguous()
    )


def standard_deviations(a: Tensor) -> Tensor:
    """The standard deviation along each coordinate that A stands for (dim,)."""
    return a if a.dim() == 1 else a.norm(dim=1)


def whitening(z: Tensor, counts: Tensor, old: Tensor) -> Tensor:
    """A of the pooled covariance of a window (chain, slot, dim), in the form of ``old``; ``old`` if it says nothing.

    Of each chain the first ``counts`` (chain,) draws are valid.
    """
    total = int(counts.sum())
    dense = old.dim() == 2
    if total < 3:
        return old
    if not dense and z.numel() > _PART and z.shape[-1] > 1:
        halves = zip(z.chunk(2, -1), old.chunk(2, -1), strict=True)
        return torch.cat([whitening(half, counts, scale) for half, scale in halves])
    x, freedom = _centred(z, counts)
    x = whiten(x, old.double()) if dense else x
    shrink = total / (total + 5.0)
    var = x.square().sum(0) / freedom
    before = torch.ones_like(var) if dense else old.double().square()
    # Stan adds 1e-3, which hides scales far below it: here no more than lies between the estimate and what is in use
    added = (1 - shrink) * 1e-3 * (var * before).sqrt().clamp(max=1.0)
    if not dense:
        return torch.where(var > 0, shrink * var + added, before).sqrt().to(old.dtype)
    # with few draws for many dimensions the off-diagonal part is mostly noise: shrink it by its share. As that is done
    # in the coordinates that are in use, the condition number left over falls from window to window
    trust = total / (total + 0.5 * len(var))
    cov = shrink * (trust * (x.T @ x / freedom) + (1 - trust) * var.diag_embed())
    cov = cov + torch.where(var > 0, added, before).diag_embed()
    factor, failed = torch.linalg.cholesky_ex(
        cov
    )  # of positions that ran away to infinity there is none
    # LAPACK returns the factor transposed
    return old if failed else (old.double() @ factor).to(old.dtype).contiguous()


def _centred(x: Tensor, counts: Tensor) -> tuple[Tensor, int]:
    """Deviations (chain * slot, dim) in float64, zero where there is no draw, and their degrees of freedom.

    Around each chain's mean where they are long enough to tell, so that chains in different modes do not pass for one
    wide mode; around the mean of all where they are short.
    """
    total = int(counts.sum())
    valid = (torch.arange(x.shape[1], device=x.device) < counts.unsqueeze(-1)).unsqueeze(-1)
    x = torch.where(valid, x.double(), 0.0)
    own = counts.double().mean() >= 20
    per_chain = counts.clamp(min=1).reshape(-1, 1, 1)
    mean = x.sum(1, keepdim=True) / per_chain if own else (x.sum((0, 1)) / total).reshape(1, 1, -1)
    return torch.where(valid, x - mean, 0.0).flatten(0, 1), max(
        total - (len(counts) if own else 1), 1
    )


STATS = ("lp", "energy", "diverging", "tree_depth", "n_steps", "acceptance_rate", "step_size")
# pooled acceptance rates are far less noisy than one chain's, so gamma is four times Hoffman & Gelman's: less shrinkage
# of the first swings is left in the average
_GAMMA = 0.2
_T0 = 10.0
_KAPPA = 0.75
#: how the step size adapts: not at all; one for all chains; one for each, until all have found where the mass is
FROZEN = 0.0
POOLED = 1.0
OWN = 2.0
#: R-hat of a window: short and correlated, so that chains that agree stay well below
WINDOW_RHAT = 1.2
#: transitions of a chain from which it can be judged; draws that a new mass matrix takes (Stan's first window)
MIN_TRANSITIONS = 8
MIN_WINDOW = 25
_RATE_TOLERANCE = 0.2  # of an acceptance rate from its target, after a short search for a step size


def dual_averaging(
    step: Tensor | float, num_chains: int, device: torch.device, mode: float, target: float
) -> Tensor:
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
    own = mode == OWN
    count = ended.sum()
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
    return torch.where(
        share > 0, torch.stack([new_log, new_mean, new_error, new_time, center, mode, target]), dual
    )


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
    direction = torch.zeros_like(lp)
    done = torch.zeros_like(lp, dtype=torch.bool)
    energy = 0.5 * r.double().square().sum(-1) - lp
    for _ in range(60):
        size = step.to(q.dtype).unsqueeze(-1)
        half = r + 0.5 * size * g
        new_g, new_lp = gradient(q + size * half)
        error = 0.5 * (half + 0.5 * size * new_g).double().square().sum(-1) - new_lp - energy
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
    plan = [Phase(first, own_step=True)]
    length = min(25, max(5, middle // 3))
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


def not_stationary(
    z: Tensor, stats: Tensor, counts: Tensor, names: Callable[[int], str] | None
) -> str:
    """Why the chains of a window (chain, slot, dim) cannot be sampled from yet, in words; or empty.

    Without ``names`` of a coordinate's site, for a net, chains in several modes are not a reason.
    """
    if stuck := stuck_chains(stats, counts):
        return f"{len(stuck)} of {len(counts)} chains did not move"
    num = int(counts.min())
    if num < MIN_TRANSITIONS:
        return f"chain {int(counts.argmin())} made {num} transitions"
    lp = stats[:, :num, STATS.index("lp")]
    first = lp[:, : num // 2]
    second = lp[:, -(num // 2) :]
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
    mean = float(rates.mean())
    least = float(rates.min())
    if abs(mean - target) <= _RATE_TOLERANCE and least >= target - 2 * _RATE_TOLERANCE:
        return ""
    return f"the acceptance rate was {mean:.2f} ({least:.2f} of chain {int(rates.argmin())}), aimed at {target:g}"


def stuck_chains(stats: Tensor, counts: Tensor) -> list[int]:
    """The chains that have moved in none of at least a few transitions, or made none."""
    lp = stats[..., STATS.index("lp")]
    long = [c for c, n in enumerate(counts.tolist()) if n == 0 or n >= MIN_TRANSITIONS]
    return [c for c in long if bool((lp[c, : int(counts[c])] == lp[c, 0]).all())]


def kept_in_warmup(num_warmup: int, num_chains: int, dim: int) -> int:
    """Draws per chain that a warm-up window keeps: ample for a pooled covariance, and bounded for large models."""
    return max(32, min(256, num_warmup, 2**28 // (num_chains * dim)))
