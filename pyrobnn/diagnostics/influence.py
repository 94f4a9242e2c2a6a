"""Observations that dominate the fit, as leave-one-out shows them."""

from __future__ import annotations

import numpy as np
from arviz_stats.utils import ELPDData
from scipy import stats

from pyrobnn.core.groups import LEFT_OUT
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.grades import Found, Limits, Status
from pyrobnn.diagnostics.leave_one_out import loo, refit_points, relative_efficiency
from pyrobnn.diagnostics.own_latents import own_latents


def tails(evidence: Evidence, limits: Limits) -> Found | None:
    """Counts the observations that dominate the fit, beyond the number expected by chance.

    They are those whose leave-one-out estimate is unreliable, as their Pareto k-hat shows.
    """
    elpd = loo(evidence)
    if elpd is None:
        return None
    k = np.asarray(elpd.pareto_k).ravel()
    k = k[~np.isnan(k)]
    points = refit_points(elpd)
    # of an approximation that is far off itself every datum is unreliable, which tells nothing of the data
    far_off = evidence.is_iid and len(points) > 0.5 * k.size
    # and where each has a latent value of its own, it decides that value by construction
    expected = far_off or own_latents(evidence, k.size) is not None
    status: Status = "info" if points else "pass"
    if not expected and bool((k > _k_by_chance(evidence, elpd, limits[0] / k.size)).any()):
        status = "warn"
    removed = len(evidence.names(LEFT_OUT) and evidence.tree[LEFT_OUT]["row"])
    numbers = {
        "count": len(points),
        "total": k.size,
        "rows": points[:8],
        "removed": removed,
    }
    code = "loo_exact" if removed and not points else ""
    return Found(status, float(k[np.isfinite(k)].max()), code, numbers, elpd.good_k)


def _k_by_chance(evidence: Evidence, elpd: ELPDData, rate: float) -> float:
    """The k-hat that a reliable datum exceeds at a rate: one from a tail of M draws has the error (1 + k) / sqrt(M)."""
    tail = min(0.2 * elpd.n_samples, 3.0 * np.sqrt(elpd.n_samples / relative_efficiency(evidence)))
    error = (1.0 + elpd.good_k) / np.sqrt(tail)
    return float(elpd.good_k + stats.norm.isf(rate) * error)
