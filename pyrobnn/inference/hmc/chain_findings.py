"""What a finished run of chains says about itself, as findings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyrobnn.chains import RHAT_NOTED
from pyrobnn.checks import divergences_by_chance
from pyrobnn.findings import Finding
from pyrobnn.inference.fitting.problem import Problem
from pyrobnn.inference.hmc.converged import check_convergence
from pyrobnn.inference.hmc.machine import STATS
from pyrobnn.inference.hmc.warmup import stuck_chains

if TYPE_CHECKING:
    from pyrobnn.inference.hmc.draws import Draws
    from pyrobnn.inference.nuts import NUTS

#: fraction of missing information (BFMI) below which a chain's energy changes too slowly (Betancourt, 2016)
MIN_BFMI = 0.3
#: draws of each chain, and effective draws in all, below which nothing is said of them or too few are
MIN_DRAWS = 100
#: sds of one chain's log density between the means of two: chains of a net that have not come equally far
MAX_GAP = 3.0
#: share of trees at their greatest depth
MAX_SATURATED = 0.1


def run_findings(problem: Problem, draws: Mapping[str, Tensor], result: Draws, config: NUTS) -> list[Finding]:
    """Everything about the run that a user has to know.

    Args:
        problem: what was fitted.
        draws: site → (chain, draw, …).
        result: of the run.
        config: its options.
    """
    stats = result.stats
    found = _transitions(stats, config)
    chains, num = stats.shape[:2]
    if config.until is None and num >= MIN_DRAWS and chains > 1:
        found += _log_density_gap(stats) if problem.is_bnn else _agreement(problem, draws, stats)
    if result.unfinished:
        found.append(
            Finding("warmup_unfinished", {"num_warmup": result.num_warmup, "reason": result.unfinished})
        )
    return found


def _transitions(stats: Tensor, config: NUTS) -> list[Finding]:
    """Divergences, chains that stand still, trees at their greatest depth; of statistics (chain, draw, 7)."""
    diverging = stats[..., STATS.index("diverging")]
    count, total = int(diverging.sum()), diverging.numel()
    found = []
    if count == total or count > divergences_by_chance(total):
        values = {"count": count, "total": total, "target_accept": config.target_accept}
        found.append(Finding("diverged", values))
    stuck = stuck_chains(stats, torch.full((len(stats),), stats.shape[1]))
    if stuck and count < total:
        found.append(Finding("stuck_chains", {"stuck": stuck, "num_chains": len(stats)}))
    saturated = (stats[..., STATS.index("tree_depth")] >= config.max_tree_depth).double().mean().item()
    if config.trajectory is None and saturated > MAX_SATURATED:
        found.append(Finding("tree_depth", {"share": saturated, "max_tree_depth": config.max_tree_depth}))
    return found


def _agreement(problem: Problem, draws: Mapping[str, Tensor], stats: Tensor) -> list[Finding]:
    """Of a program, whose sites are identified; a net's function is judged by the diagnosis."""
    total = stats.shape[0] * stats.shape[1]
    far = check_convergence(problem, draws, stats)
    found = []
    if far.rhat > RHAT_NOTED:
        found.append(Finding("chains_disagree", {"quantity": far.worst, "rhat": far.rhat}))
    elif total >= 10 * MIN_DRAWS and far.ess < MIN_DRAWS:
        found.append(
            Finding("few_effective_draws", {"quantity": far.slowest, "ess": far.ess, "draws": total})
        )
    energy = stats[..., STATS.index("energy")].double()
    bfmi = energy.diff(dim=1).square().mean(1) / energy.var(1, correction=0)
    if total >= 10 * MIN_DRAWS and float(bfmi.min()) < MIN_BFMI:
        # where a scale is close to zero, as in a funnel's neck, chains that all stay outside agree
        found.append(Finding("slow_energy", {"chain": int(bfmi.argmin()), "bfmi": float(bfmi.min())}))
    return found


def _log_density_gap(stats: Tensor) -> list[Finding]:
    """Chains of a net in different modes have different functions; the gap says whether they have arrived in them."""
    lp = stats[:, stats.shape[1] // 2 :, STATS.index("lp")].double()
    mean, spread = lp.mean(1), float(lp.var(1).mean().sqrt())
    gap = float(mean.max() - mean.min())
    if not gap > MAX_GAP * spread > 0.0:
        return []
    values = {"low": int(mean.argmin()), "high": int(mean.argmax()), "gap": gap, "spread": spread}
    return [Finding("log_density_gap", values)]
