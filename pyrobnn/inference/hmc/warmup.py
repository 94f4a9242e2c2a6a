"""Whether a warm-up is finished: what its last window says of the chains, and whether float32 holds their steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pyrobnn.chains import rhat
from pyrobnn.density import Density
from pyrobnn.inference.fitting.float64 import log_joint_float64
from pyrobnn.inference.hmc.adaptation import windows
from pyrobnn.inference.hmc.machine import STATS

_RHAT = 1.2  # of a window: short and correlated, so that chains that agree stay well below
Phase = tuple[
    int, bool, bool
]  # transitions, whether a new mass matrix ends it, whether each chain has its own step

_KEPT = (32, 256)
_KEPT_SCALARS = 2**28  # over all chains
_REACH = 0.2  # of an acceptance rate from its target, in a short phase
_BEHIND = 10.0  # dimensions, in nats, by which chains in one place do not differ
_FEW = 8  # transitions of a chain that say nothing
_WINDOW = 25  # transitions that a mass matrix is made of, at least
_COORDINATES = 1000  # looked at, beside the log density
_NOISE = 0.1  # nats between densities of float32 and float64, beyond a constant
_ROOM = 8.0  # units of the last place in a step
_POINTS = 32


class TooCoarse(Exception):
    """Ends a run whose chains float32 cannot hold, with the reason and with what another run begins with.

    Attributes: ``reason`` in words; ``z`` positions (chain, dim).
    """

    def __init__(self, reason: str, z: Tensor) -> None:
        super().__init__(reason)
        self.reason, self.z = reason, z


def planned(num_warmup: int) -> list[Phase]:
    """The phases of a warm-up as far as they are known when it begins."""
    plan = [(length, mass, False) for length, mass in windows(num_warmup)]
    # a chain that starts where it is steep has a step size of its own
    return [(*plan[0][:2], len(plan) > 1), *plan[1:]] if plan else []


def extended(plan: list[Phase], phase: int, most: int, reason: str, before: str) -> tuple[list[Phase], str]:
    """The plan with another phase after ``phase``, twice as long, where a ``reason`` asks for it and ``most`` allows.

    Returns:
        The plan, and why the warm-up is not finished if it ends with it (``before``: as judged until now).
    """
    length, mass, _ = plan[phase]
    left = most - sum(done for done, *_ in plan)
    if not reason or left < length:
        return plan, reason if mass else reason or before
    # one step size for each: a chain that is stuck must not set that of the others
    added = (min(2 * length, left), mass, mass)
    return [*plan[: phase + 1], added, *plan[phase + 1 :]], reason if mass else reason or before


def lengthened(plan: list[Phase], phase: int, most: int, reason: str) -> list[Phase]:
    """The plan with another first phase, twice as long, where a ``reason`` asks for it and ``most`` allows.

    Where it is not allowed every chain keeps a step size of its own until the last phase: one that is stuck where the
    density is steep would make the steps of all too small, and every window useless.
    """
    length = plan[phase][0]
    if not reason:
        return plan
    if sum(done for done, *_ in plan[: phase + 1]) + 2 * length <= most:
        return [*plan[: phase + 1], (2 * length, False, True), *plan[phase + 1 :]]
    return [*plan[: phase + 1], *((num, mass, mass) for num, mass, _ in plan[phase + 1 :])]


def cut(plan: list[Phase], phase: int, done: int) -> list[Phase] | None:
    """The plan that ends with ``phase`` after the ``done`` transitions it has; None where these say nothing yet."""
    _, mass, own = plan[phase]
    return None if done < _FEW else [*plan[:phase], (done, mass and done >= _WINDOW, own)]


def underway(stats: Tensor, counts: Tensor, dim: int) -> str:
    """Which chain has not come to where the others are, in words; empty if all have arrived, or none.

    Args:
        stats: statistics (chain, slot, 7) of the first phase.
        counts: transitions of each chain.
        dim: of the positions: typical log densities differ by about half of it.
    """
    if stuck := frozen(stats, counts):
        return stuck
    lp = stats[..., STATS.index("lp")]
    late = torch.stack([lp[c, int(n) // 2 : max(int(n), 1)].median() for c, n in enumerate(counts)])
    behind = float(late.max() - late.min())
    if int(counts.min()) < _FEW or behind > _BEHIND * (dim + _BEHIND):
        return f"chain {int(late.argmin())} was {behind:.3g} nats below another"
    return ""


def judge(
    window: Tensor,
    stats: Tensor,
    counts: Tensor,
    target: float,
    names: Callable[[int], str] | None,
    mass: bool,
) -> str:
    """Why a window of draws (``mass``), or a search for a step size, was not the last, in words; empty if it was."""
    if mass:
        return unsettled(window, stats, counts, names)
    return frozen(stats, counts) or far_off(stats, counts, target)


def unsettled(z: Tensor, stats: Tensor, counts: Tensor, names: Callable[[int], str] | None) -> str:
    """Why the chains of a window cannot be sampled from yet, in words; empty if nothing speaks against it.

    Args:
        z: draws (chain, slot, dim) in unconstrained space, of which each chain's first ``counts`` (chain,) are valid.
        stats: their statistics (chain, slot, 7).
        counts: transitions of each chain.
        names: of the site of a coordinate; None for a net, whose weights are not identified: chains in several modes
            are then no reason, only a log density that is still rising.
    """
    if stuck := frozen(stats, counts):
        return stuck
    num = int(counts.min())
    if num < _FEW:
        slow = int(counts.argmin())
        return f"chain {slow} made {num} transitions while the others made {float(counts.double().mean()):.0f} each"
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
    if found[worst] > _RHAT:
        what = "the log density" if worst == 0 else repr(names(worst - 1))
        return f"R-hat of {what} was {found[worst]:.2f} in its last window of {num} transitions"
    return ""


def far_off(stats: Tensor, counts: Tensor, target: float) -> str:
    """Whether the acceptance rate is out of reach of its target, of all chains together or of one, in words."""
    rates = torch.stack(
        [stats[c, : int(n), STATS.index("acceptance_rate")].mean() for c, n in enumerate(counts)]
    )
    worst = int(rates.argmin())
    if abs(float(rates.mean()) - target) > _REACH:
        return f"the acceptance rate was {float(rates.mean()):.2f}, aimed at {target:g}"
    if float(rates[worst]) < target - 2 * _REACH:
        return f"the acceptance rate of chain {worst} was {float(rates[worst]):.2f}, aimed at {target:g}"
    return ""


def frozen(stats: Tensor, counts: Tensor) -> str:
    """Which chains have moved in none of at least a few transitions, in words; empty if all move."""
    lp = stats[..., STATS.index("lp")]
    still = [
        c for c, n in enumerate(counts.tolist()) if n >= _FEW and bool((lp[c, : int(n)] == lp[c, 0]).all())
    ]
    if not still:
        return ""
    return f"{len(still)} of {len(counts)} chains did not move (chain {', '.join(map(str, still))})"


def trend(lp: Tensor) -> tuple[float, float]:
    """How much the log density (chain, draw) rose from the first half to the second, and its spread within a half."""
    half = lp.shape[1] // 2
    first, second = lp[:, :half], lp[:, -half:]
    spread = torch.cat([first, second]).var(1).mean().sqrt()
    return float((second.mean(1) - first.mean(1)).mean()), float(spread)


def inspector(density: Density) -> Callable[[Tensor, Tensor], str] | None:
    """What says why float32 cannot hold some chains of a program; None where it is not asked, or cannot be told."""
    if density.dtype != torch.float32:
        return None
    exact = log_joint_float64(density)
    try:
        exact(density.sample_box(1, seed=0)[0].double())
    except (RuntimeError, TypeError, ValueError):  # a program that cannot be run in float64
        return None
    return lambda z, steps: too_coarse(density.log_joint, exact, z, steps)


def too_coarse(
    log_joint: Callable[[Tensor], Tensor], exact: Callable[[Tensor], Tensor], z: Tensor, steps: Tensor
) -> str:
    """Why float32 cannot hold these draws, in words; empty if it can.

    Args:
        log_joint: log density of one float32 vector (dim,).
        exact: the same in float64.
        z: draws (point, dim) of one chain, in float32.
        steps: the sampler's step along each coordinate (dim,).
    """
    resolution = torch.finfo(z.dtype).eps * z.abs().mean(0)
    if bool((steps < _ROOM * resolution).any()):
        worst = int((steps / resolution).argmin())
        return f"steps of {float(steps[worst]):.1g} at positions near {float(z[:, worst].mean()):.7g}"
    points = z[:: max(1, len(z) // _POINTS)][:_POINTS]
    noise = torch.stack([log_joint(point) - exact(point.double()) for point in points])
    noise = noise[noise.isfinite()]
    if len(noise) > 2 and float(noise.std()) > _NOISE:
        return f"the log density was rounded by {float(noise.std()):.2g} nats"
    return ""


def kept_in_warmup(num_warmup: int, num_chains: int, dim: int) -> int:
    """Draws per chain that a warm-up window keeps: ample for a pooled covariance, and bounded for large models."""
    return max(_KEPT[0], min(_KEPT[1], num_warmup, _KEPT_SCALARS // (num_chains * dim)))
