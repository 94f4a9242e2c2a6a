"""Pareto smoothing of importance ratios: arithmetic on arrays of log ratios, without a tree."""

from __future__ import annotations

import warnings
from math import log10

import numpy as np
from arviz_stats.base import array_stats
from scipy.special import logsumexp

#: the Pareto tail is a fifth of the draws and needs five
FEWEST_WEIGHTED = 25
#: k-hat above which no number of draws makes the weights reliable (Vehtari et al., 2024, section 3.2)
PARETO_K = 0.7
_FLAT = 1e-9


def good_k(num_draws: int) -> float:
    """Largest Pareto k-hat at which `num_draws` importance draws still give a reliable estimate.

    min(1 − 1/log10 S, 0.7), equation 13 of Vehtari et al. (2024).

    >>> round(good_k(4000), 2), round(good_k(200), 2)
    (0.7, 0.57)
    """
    return max(0.0, min(1.0 - 1.0 / log10(num_draws), PARETO_K)) if num_draws > 10 else 0.0


def pareto_smooth(log_ratio: np.ndarray, r_eff: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Pareto-smoothed log weights and k-hat of log ratios log p − log q.

    ArviZ's ``psislw`` takes the *negative* log ratio; this takes the ratio. A flat ratio (q is p) has k-hat 0; one
    whose tail underflows, or consists of copies of one draw, has k-hat infinity.

    Args:
        log_ratio: (…, chain, draw).
        r_eff: effective draws per draw, which sets how many make the tail.

    Returns:
        Log weights (…, chain, draw), each normalised over its draws, and k-hat (…).
    """
    scale = np.maximum(1.0, np.abs(log_ratio).max(axis=(-2, -1)))
    flat = np.ptp(log_ratio, axis=(-2, -1)) <= _FLAT * scale
    with warnings.catch_warnings(action="ignore"), np.errstate(all="ignore"):
        log_weights, k = _psislw(log_ratio, r_eff)
    # where the tail underflows, psislw answers NaN weights with a small k-hat, the opposite of the truth
    degenerate = ~(np.isfinite(k) & np.isfinite(log_weights).all(axis=(-2, -1)))
    raw = log_ratio - logsumexp(
        log_ratio,
        axis=(-2, -1),
        keepdims=True,
    )
    log_weights = np.where(degenerate[..., None, None], raw, log_weights)
    return log_weights, np.where(flat, 0.0, np.where(degenerate, np.inf, k))


def _psislw(log_ratio: np.ndarray, r_eff: float) -> tuple[np.ndarray, np.ndarray]:
    """ArviZ's smoothing, with NaN for the rows whose largest ratios are all the same: it refuses them all for one."""
    try:
        return array_stats.psislw(
            -log_ratio,
            r_eff=r_eff,
            axis=(-2, -1),
        )
    except ValueError:
        if log_ratio.ndim == 2:
            return np.full(log_ratio.shape, np.nan), np.array(np.nan)
        rows = [_psislw(row, r_eff) for row in log_ratio]
        return np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows])
