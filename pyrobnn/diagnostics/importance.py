"""Approximations judged by importance sampling: how far q is from p, measured by the tail of p/q."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyrobnn.core.groups import SAMPLE_STATS
from pyrobnn.diagnostics.convergence import named_sites, quantities
from pyrobnn.diagnostics.evidence import Evidence, statistic
from pyrobnn.diagnostics.grades import Found, Limits, Status, grade, worse
from pyrobnn.diagnostics.limits import CHANGE_LIMITS, ENOUGH_DRAWS, SIGMAS
from pyrobnn.diagnostics.pareto import FEWEST_WEIGHTED, PARETO_K, good_k, pareto_smooth
from pyrobnn.diagnostics.target import beside_posterior, function_moves


@dataclass(frozen=True, eq=False)
class Importance:
    """Pareto-smoothed importance weights of the posterior against its approximation.

    Args:
        k: Pareto k-hat; infinite where one draw carries all the weight.
        log_weights: Smoothed and normalised log weights (chain, draw).
        good_k: Largest k-hat that is reliable at this number of draws.
        ess: Effective number of draws after weighting, 1/Σw².
    """

    k: float
    log_weights: np.ndarray
    good_k: float
    ess: float


@statistic
def importance(evidence: Evidence) -> Importance | None:
    """Pareto-smoothed importance weights p/q of the draws of an approximation.

    Args:
        tree: A DataTree whose ``sample_stats`` hold ``log_p`` and ``log_q``.

    Returns:
        The weights and their k-hat; None for Markov chains, where log_q is missing, or with fewer than 25 draws.

    Caveat:
        k-hat grows with dimension: in thousands of weights every approximation fails, and predictions may be right.

    References:
        Pareto smoothed importance sampling (Vehtari et al., 2024) https://jmlr.org/papers/v25/19-556.html
    """
    log_p = evidence.log_target
    log_q = evidence.draws(SAMPLE_STATS, "log_q")
    if log_p is None or log_q is None or log_p.size < FEWEST_WEIGHTED:
        return None
    log_ratio = log_p - log_q
    if not np.isfinite(log_ratio).all():
        return None
    log_weights, k = pareto_smooth(log_ratio)
    effective = 1.0 / float((np.exp(log_weights) ** 2).sum())
    return Importance(float(k), log_weights, good_k(log_p.size), effective)


def weighted(evidence: Evidence, limits: Limits) -> Found | None:
    """Weights the draws by p/q, posterior over approximation, and compares the function before and after.

    Of a program its named sites are compared. Where the weights are too unequal for a comparison, their Pareto k-hat
    is shown. A k-hat beyond its limit decides nothing for a net with hidden units, nor where the draws can be held
    against chains that have arrived, or a function stays the same when they are moved (`function_moves`): a heavy tail
    of the weights is enough to raise it. That moves do not change a program's sites is not enough: they do not find
    the neck of a funnel.
    """
    _, _, limit_of_ratio, _ = limits
    log_p = evidence.log_target
    log_q = evidence.draws(SAMPLE_STATS, "log_q")
    if log_p is None or log_q is None:
        return None
    not_finite = int((~np.isfinite(log_p - log_q)).sum())
    if not_finite:
        return Found("fail", None, "density_not_finite", {"count": not_finite})
    count = float(evidence.num_draws)
    by_count = grade(count, ENOUGH_DRAWS, 100.0, higher=True)
    smoothed = importance(evidence)
    if smoothed is None:
        return Found(
            by_count,
            count,
            "few_draws",
            limit=ENOUGH_DRAWS,
        )
    if smoothed.k > smoothed.good_k:
        return _unreliable(evidence, smoothed)
    status, effects = _corrected(evidence, smoothed, limits)
    numbers = effects | {"khat": float(smoothed.k), "remedy": evidence.remedy}
    if by_count != "pass" and status == "pass":
        return Found(by_count, count, "few_draws", numbers, ENOUGH_DRAWS)
    return Found(status, effects["ratio"], "", numbers, limit_of_ratio)


def _unreliable(evidence: Evidence, smoothed: Importance) -> Found:
    """What a k-hat beyond its limit says: nothing where a heavy tail alone may explain it."""
    numbers = {"khat": f"{smoothed.k:.2f}", "remedy": evidence.remedy}
    value = float(smoothed.k) if np.isfinite(smoothed.k) else None
    undecided = evidence.has_hidden_units or bool(beside_posterior(evidence))
    if not undecided and evidence.f is not None:
        moves = function_moves(evidence, CHANGE_LIMITS)
        undecided = moves is not None and moves.status == "pass"
    if undecided:
        return Found("info", value, "khat_undecided", numbers, smoothed.good_k)
    code = "khat_infinite" if value is None else "khat"
    status: Status = "fail" if smoothed.k > PARETO_K else "warn"
    return Found(status, value, code, numbers, smoothed.good_k)


def _corrected(
    evidence: Evidence, smoothed: Importance, limits: Limits
) -> tuple[Status, dict[str, float]]:
    """How far weighting moves distribution functions, in the median of the probes or at the worst named site, and sds.

    What minimises a divergence has the mean and the spread that Stein's identities ask for, and may miss the shape.
    """
    near, far, alike, unlike = limits
    f = evidence.f
    weights = np.exp(smoothed.log_weights).reshape(-1, 1)
    values = _judged_columns(evidence, len(weights))
    if not values.size:
        return "pass", {"distance": 0.0, "ratio": 1.0}
    gaps = _log_sd_ratios(values, weights)
    distance, error = _distances(values, weights)
    typical = np.median if f is not None else np.max
    sure = float(typical(np.where(distance > SIGMAS[0] * error, distance, 0.0)))
    gap = float(np.median(np.abs(gaps))) - 2.0 / np.sqrt(smoothed.ess)
    status = worse(grade(sure, near, far), grade(gap, *-np.log([alike, unlike])))
    return status, {"distance": float(typical(distance)), "ratio": float(np.exp(-np.median(gaps)))}


def _judged_columns(evidence: Evidence, num_draws: int) -> np.ndarray:
    """Function values (draw, quantity), or those of a program's sites, without what is the same in all draws."""
    if evidence.f is None:
        columns = [*(named_sites(evidence) or quantities(evidence)).values()]
    else:
        columns = [evidence.f]
    values = np.concatenate([column.reshape(num_draws, -1) for column in columns], axis=1)
    return values[:, np.ptp(values, axis=0) > 0.0]


def _log_sd_ratios(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Log ratio (quantity,) of the sds of draws (draw, quantity) over those of themselves weighted (draw, 1)."""
    sd = values.std(axis=0)
    weighted_mean = (weights * values).sum(axis=0)
    weighted_sd = np.sqrt((weights * (values - weighted_mean) ** 2).sum(axis=0))
    return np.log(sd / np.maximum(weighted_sd, 1e-6 * sd))


def _distances(values: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Kolmogorov's distance between draws (draw, quantity) and themselves weighted (draw, 1), with standard errors."""
    order = values.argsort(axis=0)
    columns = np.arange(values.shape[1])
    gain = (weights[order, 0] - 1.0 / len(values)).cumsum(axis=0)
    at = np.abs(gain).argmax(axis=0)
    below = values <= values[order[at, columns], columns]
    weighted_part = weights * (below - (weights * below).sum(axis=0))
    plain_part = (below - below.mean(axis=0)) / len(values)
    parts = weighted_part - plain_part
    return np.abs(gain)[at, columns], np.sqrt((parts**2).sum(axis=0))
