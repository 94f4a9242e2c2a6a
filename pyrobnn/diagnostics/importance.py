"""Approximations judged by importance sampling: how far q is from p, measured by the tail of p/q."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import xarray as xr
from arviz_stats.base import array_stats
from scipy.special import logsumexp

from pyrobnn.diagnostics import thresholds
from pyrobnn.diagnostics.evidence import Evidence, statistic
from pyrobnn.diagnostics.verdict import Check, Status, grade, worse
from pyrobnn.groups import FUNCTION, MOVED, SAMPLE_STATS

_MIN_DRAWS = 25  # the Pareto tail is a fifth of the draws and needs five
_FLAT = 1e-9


@dataclass(frozen=True, eq=False)
class Importance:
    """Pareto-smoothed importance weights of the posterior against its approximation.

    Args:
        k: Pareto k-hat; infinite where one draw carries all the weight.
        log_weights: Smoothed and normalised log weights (chain, draw).
        good_k: Largest k-hat that is reliable at this number of draws.
        ess: Effective number of draws after weighting, 1/Σw².
        space: "full" or "subspace".
    """

    k: float
    log_weights: np.ndarray
    good_k: float
    ess: float
    space: str


@statistic
def log_target(evidence: Evidence) -> np.ndarray | None:
    """Log density (chain, draw) of the model that the draws predict with; None where missing.

    A linearised Laplace predicts with the linearised net, and is a posterior of that model and not of the net.
    """
    stored = evidence.draws(SAMPLE_STATS, "log_p")
    if stored is None or evidence.settings.get("predictive") != "linearized":
        return stored
    prior, likelihood = (evidence.draws(FUNCTION, name) for name in ("log_prior", "log_likelihood"))
    if prior is None or likelihood is None or not prior.shape == likelihood.shape == stored.shape:
        return stored
    return prior + likelihood


def pareto_smooth(log_ratio: np.ndarray, r_eff: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Pareto-smoothed log weights and k-hat of log ratios log p − log q.

    ArviZ's ``psislw`` takes the *negative* log ratio (it was made for the log-likelihood of leave-one-out);
    this takes the ratio itself. A flat ratio (q is p) has k-hat 0 by definition; a ratio whose tail underflows,
    or consists of copies of one draw, has k-hat infinity.

    Args:
        log_ratio: (…, chain, draw).
        r_eff: effective draws per draw, which sets how many make the tail.

    Returns:
        Log weights (…, chain, draw), each normalised over its draws, and k-hat (…).
    """
    spread = np.ptp(log_ratio, axis=(-2, -1))
    scale = np.maximum(1.0, np.abs(log_ratio).max(axis=(-2, -1)))
    flat = spread <= _FLAT * scale
    safe = log_ratio
    if flat.any():
        ramp = np.linspace(0.0, 1.0, log_ratio.shape[-2] * log_ratio.shape[-1]).reshape(log_ratio.shape[-2:])
        safe = np.where(flat[..., None, None], ramp, log_ratio)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        log_weights, k = _psislw(safe, r_eff)
    # where the tail underflows, psislw answers NaN weights with a small k-hat, the opposite of the truth
    degenerate = ~(np.isfinite(k) & np.isfinite(log_weights).all(axis=(-2, -1)))
    raw = log_ratio - logsumexp(log_ratio, axis=(-2, -1), keepdims=True)
    log_weights = np.where(degenerate[..., None, None], raw, log_weights)
    k = np.where(flat, 0.0, np.where(degenerate, np.inf, k))
    uniform = -np.log(log_ratio.shape[-2] * log_ratio.shape[-1])
    return np.where(flat[..., None, None], uniform, log_weights), k


def _psislw(log_ratio: np.ndarray, r_eff: float) -> tuple[np.ndarray, np.ndarray]:
    """ArviZ's smoothing, with NaN for the rows whose largest ratios are all the same: it refuses them all for one."""
    try:
        return array_stats.psislw(-log_ratio, r_eff=r_eff, axis=(-2, -1))
    except ValueError:
        if log_ratio.ndim == 2:
            return np.full(log_ratio.shape, np.nan), np.array(np.nan)
        rows = [_psislw(row, r_eff) for row in log_ratio]
        return np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows])


@statistic
def importance(evidence: Evidence, *, space: str = "full") -> Importance | None:
    """Pareto-smoothed importance weights p/q of the draws of an approximation.

    Args:
        tree: A DataTree whose ``sample_stats`` hold ``log_p`` and ``log_q`` (or ``*_subspace``).
        space: "full", or "subspace" for the last layer or another part that the approximation treats as random.

    Returns:
        The weights and their k-hat; None for Markov chains, where log_q is missing, or with fewer than 25 draws.

    Raises:
        ValueError: If `space` is neither.

    Caveat:
        k-hat grows with dimension: in thousands of weights every approximation fails in full. It then says
        nothing about the predictive; look at the subspace and at the distance from a reference.

    References:
        Pareto smoothed importance sampling (Vehtari et al., 2024) https://jmlr.org/papers/v25/19-556.html
        Yes, but did it work? (Yao et al., 2018) https://arxiv.org/abs/1802.02538
    """
    if space not in ("full", "subspace"):
        raise ValueError(f"'space' is {space!r}; expected 'full' or 'subspace'.")
    suffix = "" if space == "full" else "_subspace"
    log_p = log_target(evidence) if space == "full" else evidence.draws(SAMPLE_STATS, "log_p" + suffix)
    log_q = evidence.draws(SAMPLE_STATS, "log_q" + suffix)
    if log_p is None or log_q is None or log_p.size < _MIN_DRAWS:
        return None
    log_ratio = log_p - log_q
    if not np.isfinite(log_ratio).all():
        return None
    log_weights, k = pareto_smooth(log_ratio)
    ess = 1.0 / float((np.exp(log_weights) ** 2).sum())
    return Importance(float(k), log_weights, thresholds.good_k(log_p.size), ess, space)


@statistic
def corrected_moments(evidence: Evidence, *, group: str = FUNCTION) -> xr.Dataset | None:
    """Mean and sd of f before and after importance weighting, where k-hat allows it.

    Args:
        tree: A DataTree of an approximation.
        group: "function" (probes) or "predictions" (held-out points).

    Returns:
        Dataset over (point, output) with ``mean``, ``sd`` of the raw draws and ``mean_corrected``,
        ``sd_corrected``, in the units of f; None where k-hat (in full, else in the subspace) exceeds its limit
        or nothing can be computed.
    """
    found = importance(evidence)
    if found is None or found.k > found.good_k:
        found = importance(evidence, space="subspace")
    if found is None or found.k > found.good_k:
        return None
    f = evidence.f if group == FUNCTION else evidence.draws(group, "f")
    if f is None:
        return None
    f = f.reshape(*f.shape[:3], -1)
    weights = np.exp(found.log_weights)[:, :, None, None]
    mean, corrected = f.mean(axis=(0, 1)), (weights * f).sum(axis=(0, 1))
    variance = (weights * (f - corrected) ** 2).sum(axis=(0, 1))
    dims = ("point", "output")
    return xr.Dataset(
        {
            "mean": (dims, mean),
            "sd": (dims, f.std(axis=(0, 1))),
            "mean_corrected": (dims, corrected),
            "sd_corrected": (dims, np.sqrt(variance)),
        }
    )


def check_count(evidence: Evidence) -> Check | None:
    """Whether there are enough independent draws."""
    if evidence.variable(SAMPLE_STATS, "log_q") is None:
        return None
    count = evidence.num_draws
    status: Status = (
        "pass" if count >= thresholds.ESS_PASS else "fail" if count < thresholds.ESS_FAIL else "warn"
    )
    return Check(
        "num_draws",
        status,
        float(count),
        f"≥ {thresholds.ESS_PASS:.0f}, < {thresholds.ESS_FAIL:.0f} fails",
        thresholds.PARETO_SOURCE,
        f"There are {count} independent draws.",
        "" if status == "pass" else "Raise num_draws to 1000: draws from an approximation cost little.",
    )


def check_khat(evidence: Evidence) -> Check | None:
    """k-hat of p/q over all weights; it decides where there is none of a subspace."""
    full, part = importance(evidence), importance(evidence, space="subspace")
    if full is None:
        return None if part is not None else _unjudged(evidence)
    # the weights of a net with hidden units are many and not what is predicted with: see `importance`
    decides = part is None and not evidence.has_hidden_units
    return _k_check(full, evidence.remedy, decides=decides)


def check_khat_subspace(evidence: Evidence) -> Check | None:
    """k-hat of p/q over the part of the weights that the approximation treats as random."""
    part = importance(evidence, space="subspace")
    return None if part is None else _k_check(part, evidence.remedy, decides=True)


def check_correction(evidence: Evidence) -> Check | None:
    """Whether importance weights leave the function as it is, where they are reliable; else they cannot say.

    In many weights they hardly ever are: `check_moves` needs none.
    """
    moments = corrected_moments(evidence)
    if moments is None:
        return _uncorrected(evidence)
    found = importance(evidence)
    if found is None or found.k > found.good_k:
        found = importance(evidence, space="subspace")
    error = 2.0 / np.sqrt(found.ess) if found is not None else 0.0
    sd = np.maximum(moments["sd_corrected"].values, np.finfo(float).tiny)
    shift = np.abs((moments["mean_corrected"] - moments["mean"]).values) / sd
    gap = np.abs(np.log(np.maximum(moments["sd"].values, np.finfo(float).tiny) / sd))
    status = worse(
        grade(float(np.median(shift)) - error, thresholds.WASSERSTEIN_PASS, thresholds.WASSERSTEIN_FAIL),
        grade(float(np.median(gap)) - error, *-np.log([thresholds.SD_RATIO_PASS, thresholds.SD_RATIO_FAIL])),
    )
    ratio = float(min(np.median(sd / np.maximum(moments["sd"].values, np.finfo(float).tiny)), 1e6))
    return Check(
        "psis_correction",
        status,
        float(min(shift.max(), 1e6)),
        f"median shift ≤ {thresholds.WASSERSTEIN_PASS} sd and sd ratio within [{thresholds.SD_RATIO_PASS}, "
        f"{1 / thresholds.SD_RATIO_PASS:.2f}], beyond the error",
        thresholds.PARETO_SOURCE,
        f"Importance weighting moves the mean of f by at most {min(float(shift.max()), 1e6):.2f} sd and multiplies its "
        f"sd by {ratio:.2f} in the median.",
        "" if status == "pass" else evidence.remedy,
    )


def _uncorrected(evidence: Evidence) -> Check | None:
    """That importance weights cannot say how the function is off, where nothing else has been tried."""
    found = importance(evidence)
    if found is None or MOVED in evidence.tree.children or evidence.f is None:
        return None
    return Check(
        "psis_correction",
        "info",
        None,
        "",
        thresholds.PARETO_SOURCE,
        "How far the function is from the posterior's cannot be said: weighted, the draws are worth "
        f"{found.ess:.0f} of {found.log_weights.size}.",
    )


def _k_check(found: Importance, remedy: str, *, decides: bool) -> Check:
    where = "all weights" if found.space == "full" else "the last layer or subspace alone"
    finite = bool(np.isfinite(found.k))
    status: Status = (
        "pass" if found.k <= found.good_k else "fail" if found.k > thresholds.PARETO_K else "warn"
    )
    seen = (
        f"Pareto k-hat of p/q over {where} is {found.k:.2f}"
        if finite
        else f"Over {where} one draw carries all the importance weight (k-hat is infinite)"
    )
    if not decides:
        return Check(
            "khat",
            "info" if status != "pass" else "pass",
            found.k if finite else None,
            f"≤ {found.good_k:.2f} (not decided over all weights)",
            thresholds.APPROXIMATION_SOURCE,
            f"{seen}; that says something of the weights of a net, not of its function, and decides nothing.",
        )
    action = ""
    if status == "warn":
        action = "Raise num_draws: k-hat is in the range where more draws make importance weights reliable."
    elif status == "fail":
        action = remedy
    return Check(
        "khat" if found.space == "full" else "khat_subspace",
        status,
        found.k if finite else None,
        f"≤ {found.good_k:.2f} to pass, > {thresholds.PARETO_K} to fail",
        thresholds.APPROXIMATION_SOURCE,
        f"{seen}; weighted, the draws are worth {found.ess:.0f} of {found.log_weights.size}.",
        action,
    )


def _unjudged(evidence: Evidence) -> Check:
    method = evidence.method
    log_p = evidence.draws(SAMPLE_STATS, "log_p")
    log_q = evidence.draws(SAMPLE_STATS, "log_q")
    if log_p is not None and log_q is not None and not np.isfinite(log_p - log_q).all():
        return Check(
            "khat",
            "fail",
            None,
            "finite log p and log q",
            thresholds.APPROXIMATION_SOURCE,
            f"log p or log q is not finite for {int((~np.isfinite(log_p - log_q)).sum())} draws.",
            "Fit again with a smaller step size or more damping: some draws lie where the model has no density.",
        )
    if log_p is not None and log_q is not None:
        return Check(
            "khat",
            "info",
            None,
            "",
            thresholds.APPROXIMATION_SOURCE,
            f"{log_p.size} draws are too few for Pareto k-hat, which needs {_MIN_DRAWS}.",
            "Raise num_draws.",
        )
    # it was fitted by its density: where that is missing, the fit was cut short or the tree is another's
    if evidence.claim == "approximate":
        return Check(
            "khat",
            "warn",
            None,
            "log_p and log_q of the draws",
            thresholds.APPROXIMATION_SOURCE,
            f"log p and log q of the draws of {method} were not computed, so no importance weight can tell how far off "
            "they are.",
            "Fit it to its end; until then judge it by held-out scores and calibration.",
        )
    name = "This method" if method == "unknown" else method
    return Check(
        "posterior_claim",
        "warn",
        None,
        "log_p and log_q of the draws",
        thresholds.POSTERIOR_CLAIM_SOURCE,
        f"{name} has no density q, so its draws are not this prior's posterior and no importance weight can "
        "tell how far off they are.",
        "Judge it by held-out scores and calibration, or compare it with a NUTS run as reference.",
    )
