"""What a finished run of the HMC machine says about itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pyrobnn.core.chains import RHAT_NOTED, divergences_by_chance
from pyrobnn.core.findings import Finding
from pyrobnn.inference.hmc.chain_convergence import JudgedNet, check_convergence
from pyrobnn.inference.hmc.retrace import impossible_ends
from pyrobnn.inference.hmc.run import Draws
from pyrobnn.inference.hmc.transition_options import TransitionOptions
from pyrobnn.inference.hmc.windows import STATS, stuck_chains
from pyrobnn.model import Density

#: fraction of missing information (BFMI) below which a chain's energy changes too slowly (Betancourt, 2016)
MIN_BFMI = 0.3
#: draws of each chain below which nothing is said of them; effective draws in all below which they are too few
MIN_DRAWS = 100


def run_findings(
    net: JudgedNet | None,
    draws: Mapping[str, Tensor],
    result: Draws,
    config: TransitionOptions,
    *,
    judged: bool,
) -> list[Finding]:
    """Everything about the run that a user has to know.

    Args:
        net: None for a plain program.
        draws: site → (chain, draw, …).
        judged: a test for convergence has ended the run, or would have.
    """
    target = result.raises[-1].target_accept if result.raises else config.target_accept
    findings = _transition_findings(result.stats, config, target)
    num_chains, num = result.stats.shape[:2]
    if not judged and num >= MIN_DRAWS and num_chains > 1:
        if net is None:
            findings += _agreement(draws, result.stats)
        else:
            findings += _log_density_gap(result.stats)
    if result.unfinished:
        numbers = {"num_warmup": result.num_warmup, "reason": result.unfinished}
        findings.append(Finding("warmup_unfinished", numbers))
    return findings


def with_reasons(findings: list[Finding], density: Density, result: Draws) -> list[Finding]:
    """The findings, that of divergences with the parameters that were impossible where they ended."""
    explained = []
    for finding in findings:
        if finding.code == "diverged":
            # Pyro's own engine keeps its metric to itself
            scale = result.scale if len(result.scale) else result.z.new_ones(density.dim)
            ends = impossible_ends(density, result.z, result.stats, scale)
            finding = Finding(finding.code, {**finding.values, **ends})
        explained.append(finding)
    return explained


def _transition_findings(
    stats: Tensor, config: TransitionOptions, target_accept: float
) -> list[Finding]:
    """Divergences, chains that stand still, trees at their greatest depth; of statistics (chain, draw, 7)."""
    diverging = stats[..., STATS.index("diverging")]
    count = int(diverging.sum())
    total = diverging.numel()
    findings = []
    if count == total or count > divergences_by_chance(total):
        numbers = {
            "count": count,
            "total": total,
            "target_accept": target_accept,
        }
        findings.append(Finding("diverged", numbers))
    stuck = stuck_chains(stats, torch.full((len(stats),), stats.shape[1]))
    if stuck and count < total:
        findings.append(Finding("stuck_chains", {"stuck": stuck, "num_chains": len(stats)}))
    deepest = stats[..., STATS.index("tree_depth")] >= config.max_tree_depth
    saturated = deepest.double().mean().item()
    if config.trajectory is None and saturated > 0.1:
        numbers = {"share": saturated, "max_tree_depth": config.max_tree_depth}
        findings.append(Finding("tree_depth", numbers))
    return findings


def _agreement(draws: Mapping[str, Tensor], stats: Tensor) -> list[Finding]:
    """How far the chains of a program agree, whose sites are identified; a net's function the diagnosis judges."""
    total = stats.shape[0] * stats.shape[1]
    convergence = check_convergence(None, draws, stats)
    findings = []
    if convergence.rhat > RHAT_NOTED:
        findings.append(
            Finding("chains_disagree", {"quantity": convergence.worst, "rhat": convergence.rhat})
        )
    elif total >= 10 * MIN_DRAWS and convergence.ess < MIN_DRAWS:
        numbers = {
            "quantity": convergence.slowest,
            "ess": convergence.ess,
            "draws": total,
        }
        findings.append(Finding("few_effective_draws", numbers))
    energy = stats[..., STATS.index("energy")].double()
    bfmi = energy.diff(dim=1).square().mean(1) / energy.var(1, correction=0)
    if total >= 10 * MIN_DRAWS and float(bfmi.min()) < MIN_BFMI:
        # where a scale is close to zero, as in a funnel's neck, chains that all stay outside agree
        numbers = {"chain": int(bfmi.argmin()), "bfmi": float(bfmi.min())}
        findings.append(Finding("slow_energy", numbers))
    return findings


def _log_density_gap(stats: Tensor) -> list[Finding]:
    """Chains of a net in different modes have different functions; the gap says whether they have arrived in them."""
    lp = stats[:, stats.shape[1] // 2 :, STATS.index("lp")].double()
    mean = lp.mean(1)
    spread = float(lp.var(1).mean().sqrt())
    gap = float(mean.max() - mean.min())
    if not gap > 3.0 * spread > 0.0:  # three sds of one chain's log density
        return []
    values = {
        "low": int(mean.argmin()),
        "high": int(mean.argmax()),
        "gap": gap,
        "spread": spread,
    }
    return [Finding("log_density_gap", values)]
