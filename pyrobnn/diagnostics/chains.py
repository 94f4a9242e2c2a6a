"""Whether there are chains enough, long enough and from starts of their own, to judge convergence by."""

from __future__ import annotations

from pyrobnn.chains import MIN_DRAWS
from pyrobnn.diagnostics import thresholds
from pyrobnn.diagnostics.convergence import convergence
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.verdict import Check


def check_chains(evidence: Evidence) -> Check | None:
    """A warning where there is a single chain."""
    if evidence.num_chains != 1:
        return None
    return Check(
        "num_chains",
        "warn",
        1.0,
        "≥ 4 chains",
        thresholds.RHAT_SOURCE,
        "There is one chain, so nothing can show whether it missed a mode.",
        "Run at least four chains from different starting points.",
    )


def check_length(evidence: Evidence) -> Check | None:
    """A failure where the chains are too short for any estimate."""
    if evidence.draws_per_chain >= MIN_DRAWS:
        return None
    total = evidence.num_draws
    return Check(
        "ess",
        "fail",
        float(total),
        f"≥ {thresholds.ESS_PASS:.0f}, < {thresholds.ESS_FAIL:.0f} fails",
        thresholds.ESS_SOURCE,
        f"There are {total} draws in all, too few to estimate anything.",
        f"Raise {evidence.more_draws}, for at least 500 draws per chain.",
    )


def check_checked(evidence: Evidence) -> Check | None:
    """A warning where nothing in the tree can show whether the chains converged: silence is no pass."""
    if convergence(evidence) is not None or evidence.draws_per_chain < MIN_DRAWS:
        return None
    return Check(
        "convergence",
        "warn",
        None,
        "R-hat and ESS of at least one identified quantity",
        thresholds.RHAT_SOURCE,
        "Convergence was not checked: besides a net's weights, which are not identified, the tree holds nothing that "
        "moves.",
        "Store values of the function or the log-likelihood beside the weights: posterior.to_datatree(x, y), or "
        "arviz_base.from_dict with 'log_likelihood'.",
    )


def check_common_start(evidence: Evidence) -> Check | None:
    """A warning where all chains started around one point: their agreement shows no more than that they stayed."""
    if not evidence.common_start or evidence.num_chains == 1:
        return None
    return Check(
        "common_start",
        "warn",
        None,
        "chains that start apart",
        thresholds.RHAT_SOURCE,
        "All chains started around one point, so their agreement cannot show whether they missed a mode.",
        "Fit again from starts of the chains' own: leave out init.",
    )
