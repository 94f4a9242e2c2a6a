"""Checks of the Hamiltonian sampler itself: divergences, energy, tree depth, acceptance."""

from __future__ import annotations

import arviz_stats
import numpy as np
import xarray as xr

from pyrobnn.checks import divergences_by_chance
from pyrobnn.diagnostics import thresholds
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.verdict import Check, Status
from pyrobnn.groups import SAMPLE_DIMS, SAMPLE_STATS

_DEFAULT_MAX_TREE_DEPTH = 10


def check_divergences(evidence: Evidence) -> Check | None:
    """How many transitions diverged."""
    diverging = evidence.draws(SAMPLE_STATS, "diverging")
    if diverging is None:
        return None
    count, share = int(diverging.sum()), float(diverging.mean())
    chance = divergences_by_chance(diverging.size)
    status: Status = "pass" if count <= chance else "fail" if share >= thresholds.DIVERGENCE_FAIL else "warn"
    worst = int(diverging.sum(axis=1).argmax())
    where = f", most in chain {worst}" if count else ""
    return Check(
        "divergences",
        status,
        share,
        f"≤ {chance} of {diverging.size}, which right draws have by chance, to pass; "
        f"< {thresholds.DIVERGENCE_FAIL:.0%} to warn",
        thresholds.HMC_SOURCE,
        f"{count} of {diverging.size} transitions diverged ({share:.1%}){where}.",
        ""
        if status == "pass"
        else "Raise target_accept (0.95, then 0.99), and make a hierarchical prior non-centred: divergences mark a "
        "region that the sampler cannot enter.",
    )


def check_bfmi(evidence: Evidence) -> Check | None:
    """The lowest fraction of missing information of the energy over the chains."""
    energy = evidence.draws(SAMPLE_STATS, "energy")
    if (
        energy is None
        or energy.shape[1] < 10
        or not np.isfinite(energy).all()
        or (energy.std(axis=1) == 0).any()
    ):
        return None
    data = xr.Dataset({"energy": (SAMPLE_DIMS, energy)})
    per_chain = np.asarray(arviz_stats.bfmi(data)["energy"].values).ravel()
    lowest, chain = float(per_chain.min()), int(per_chain.argmin())
    status: Status = (
        "pass" if lowest >= thresholds.BFMI_PASS else "fail" if lowest < thresholds.BFMI_FAIL else "warn"
    )
    return Check(
        "bfmi",
        status,
        lowest,
        f"≥ {thresholds.BFMI_PASS} to pass, < {thresholds.BFMI_FAIL} to fail",
        thresholds.BFMI_SOURCE,
        f"The lowest energy fraction (BFMI) is {lowest:.2f}, in chain {chain}.",
        ""
        if status == "pass"
        else "Reparameterise scale sites (non-centred, or on the log scale): the energy is heavy-tailed and the "
        "sampler crosses it too slowly.",
    )


def check_tree_depth(evidence: Evidence) -> Check | None:
    """How many trajectories were cut at the maximal tree depth."""
    reached = evidence.draws(SAMPLE_STATS, "reached_max_treedepth")
    if reached is None:
        depth = evidence.draws(SAMPLE_STATS, "tree_depth")
        if depth is None:
            return None
        limit = evidence.settings.get("max_tree_depth", _DEFAULT_MAX_TREE_DEPTH)
        reached = depth >= float(limit)
    share = float(reached.mean())
    status: Status = "warn" if share > thresholds.TREE_DEPTH_WARN else "pass"
    return Check(
        "tree_depth",
        status,
        share,
        f"≤ {thresholds.TREE_DEPTH_WARN:.0%} of transitions at the maximum",
        thresholds.HMC_SOURCE,
        f"{share:.1%} of the trajectories were cut at the maximal tree depth.",
        ""
        if status == "pass"
        else "Raise max_tree_depth by one or two: trajectories are cut short, which costs effective draws but "
        "does not bias them.",
    )


def check_acceptance(evidence: Evidence) -> Check | None:
    """The lowest mean acceptance rate over the chains."""
    rate = evidence.draws(SAMPLE_STATS, "acceptance_rate")
    if rate is None or not np.isfinite(rate).all():
        return None
    per_chain = rate.mean(axis=1)
    lowest, chain = float(per_chain.min()), int(per_chain.argmin())
    status: Status = "warn" if lowest < thresholds.ACCEPTANCE_WARN else "pass"
    return Check(
        "acceptance",
        status,
        lowest,
        f"≥ {thresholds.ACCEPTANCE_WARN} in every chain",
        thresholds.ACCEPTANCE_SOURCE,
        f"The lowest mean acceptance rate is {lowest:.2f}, in chain {chain}.",
        "" if status == "pass" else "Raise num_warmup: the step size did not adapt to its target.",
    )
