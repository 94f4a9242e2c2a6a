"""The smoothed importance weights of leaving each datum out, and what follows from them: elpd, k-hat and LOO-PIT."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xarray as xr
from scipy.special import logsumexp

from pyrobnn.chains import ess
from pyrobnn.diagnostics import thresholds
from pyrobnn.diagnostics.evidence import Evidence, flattened, matched, statistic
from pyrobnn.diagnostics.importance import log_target, pareto_smooth
from pyrobnn.diagnostics.points import replicates
from pyrobnn.groups import POSTERIOR, SAMPLE_STATS

_MIN_DRAWS = 25
_MAX_PIT = 2000
#: log-likelihood values that are smoothed at once
_BLOCK = 4_000_000
# above so many log-likelihood values LOO is subsampled: smoothing takes about a millisecond per datum
_MAX_ELEMENTS = 40_000_000
_MAX_ELEMENTS_ESS = 200


@dataclass(frozen=True, eq=False)
class LeaveOneOut:
    """What the smoothed weights of leaving each datum out tell; they themselves are too many to keep.

    Args:
        points: which data (point,): all, or at most 2000 evenly spread where LOO is subsampled.
        k: Pareto k-hat of each (point,); infinite where one draw or its copies carry all the weight.
        elpd: log p(y_i | y_−i) of each (point,). lppd: log p(y_i | y) of each (point,).
        pit: P(ỹ_i ≤ y_i | y_−i), ties by a random part, of evenly spread data, (at most 2000, output); None without
            training replicates.
        pit_points: which data those are.
    """

    points: np.ndarray
    k: np.ndarray
    elpd: np.ndarray
    lppd: np.ndarray
    pit: np.ndarray | None
    pit_points: np.ndarray


@statistic
def leave_one_out(evidence: Evidence, *, every: bool = False) -> LeaveOneOut | None:
    r"""The predictive of each datum from the posterior without it: one smoothing for elpd, k-hat and LOO-PIT.

    .. math:: r_{is} \propto \frac{1}{p(y_i \mid \theta_s)} \cdot \frac{p(\theta_s, y)}{q(\theta_s)}

    where the second factor is 1 for Markov chains. None as in `loo`. Of a large tree only a spread of the data, unless
    `every` datum is asked for.
    """
    pointwise = usable(evidence)
    if pointwise is None:
        return None
    num_data = pointwise.shape[2]
    spread = np.unique(np.linspace(0, num_data - 1, min(num_data, _MAX_PIT)).astype(int))
    points = spread if is_large(pointwise) and not every else np.arange(num_data)
    pair, outcomes = densities(evidence), replicates(evidence)
    if outcomes is not None and (len(outcomes[1]) != num_data or len(outcomes[0]) != pointwise[:, :, 0].size):
        outcomes = None
    r_eff = relative_efficiency(evidence)
    k, elpd, lppd, pit = [], [], [], []
    for part in np.array_split(points, -(-points.size * pointwise[:, :, 0].size // _BLOCK)):
        log_density = np.moveaxis(pointwise[:, :, part].astype(np.float64), 2, 0)
        log_ratio = -log_density if pair is None else pair[0] - pair[1] - log_density
        log_weights, tail = pareto_smooth(log_ratio, r_eff)
        k.append(tail)
        elpd.append(logsumexp(log_weights + log_density, axis=(1, 2)))
        lppd.append(logsumexp(log_density, axis=(1, 2)) - np.log(log_density[0].size))
        if outcomes is not None:
            chosen = np.isin(part, spread)
            pit.append(_weighted_pit(np.exp(log_weights[chosen]), part[chosen], *outcomes))
    return LeaveOneOut(
        points,
        np.concatenate(k),
        np.concatenate(elpd),
        np.concatenate(lppd),
        np.concatenate(pit) if pit else None,
        spread,
    )


def _weighted_pit(weights: np.ndarray, points: np.ndarray, draws: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Weighted share of the draws (draw, obs, output) below y (obs, output) at the points, and part of the ties."""
    draws, y = draws[:, points], y[points]
    # of counts and censored rows the transform is uniform only if drawn from what they leave open
    below = (draws < y) + np.random.default_rng(int(points[0])).random(y.shape) * (draws == y)
    return np.clip(np.einsum("ps,spo->po", weights.reshape(len(points), -1), below), 0.0, 1.0)


def loo_pit(tree: xr.DataTree | Evidence) -> tuple[np.ndarray, np.ndarray] | None:
    """Leave-one-out PIT of the training data: each datum against the predictive that has not seen it.

    The weights are the Pareto-smoothed ones of `loo`; for approximations they include p/q.

    Args:
        tree: A DataTree with ``log_likelihood``, ``posterior_predictive`` and ``observed_data``.

    Returns:
        Indices of (at most 2000, evenly spread) data, and their PIT (datum, output); None where replicates or
        log-likelihood are missing, or leave-one-out is undefined (see `loo`) or unreliable for a tenth of the data.

    References:
        Visualization in Bayesian workflow (Gabry et al., 2019) https://doi.org/10.1111/rssa.12378
    """
    found = leave_one_out(tree)
    pointwise = Evidence.of(tree).log_likelihood
    if pointwise is None or found is None or found.pit is None:
        return None
    k = found.k[np.isin(found.points, found.pit_points)]
    good_k = thresholds.good_k(pointwise[:, :, 0].size)
    if (k > good_k).mean() > thresholds.LOO_PIT_UNRELIABLE:
        return None
    return found.pit_points, found.pit


@statistic
def densities(evidence: Evidence) -> tuple[np.ndarray, np.ndarray] | None:
    """log p and log q of an approximation at the draws of its log-likelihood; None for chains, or where missing."""
    pointwise = evidence.log_likelihood
    log_p = log_target(evidence)
    log_q = evidence.draws(SAMPLE_STATS, "log_q")
    if not evidence.is_iid or pointwise is None or log_p is None or log_q is None:
        return None
    log_p, log_q = matched(log_p, pointwise), matched(log_q, pointwise)
    if log_p is None or log_q is None or not np.isfinite(log_p - log_q).all():
        return None
    return log_p, log_q


@statistic
def usable(evidence: Evidence) -> np.ndarray | None:
    """The log-likelihood (chain, draw, obs) if leave-one-out is defined by it."""
    pointwise = evidence.log_likelihood
    if pointwise is None or pointwise.shape[0] * pointwise.shape[1] < _MIN_DRAWS:
        return None
    if pointwise.shape[2] < 2:  # without its only datum a posterior is the prior
        return None
    if evidence.is_point or not np.isfinite(pointwise).all():
        return None
    still = pointwise.max((0, 1)) == pointwise.min((0, 1))
    if still.any():  # there is no tail to smooth
        return None
    return None if evidence.is_iid and densities(evidence) is None else pointwise


def is_large(pointwise: np.ndarray) -> bool:
    """Whether a log likelihood (chain, draw, datum) is so large that LOO takes a subsample of the data."""
    return pointwise.shape[2] >= thresholds.LOO_SUBSAMPLE_FROM or pointwise.size > _MAX_ELEMENTS


@statistic
def relative_efficiency(evidence: Evidence) -> float:
    """Mean ESS per draw of the elements of the posterior, as ArviZ has it; of many elements a spread of 200."""
    if densities(evidence) is not None or evidence.num_chains == 1 or evidence.draws_per_chain < 4:
        return 1.0
    stored = [evidence.stored(POSTERIOR, name) for name in evidence.names(POSTERIOR)]
    columns = [flattened(draws, 2) for draws in stored if draws is not None]
    every = -(-sum(column.shape[2] for column in columns) // _MAX_ELEMENTS_ESS)
    draws = np.concatenate([column[:, :, ::every] for column in columns], axis=2).astype(np.float64)
    each = ess(np.moveaxis(draws, 2, 0), "mean")
    each = each[np.isfinite(each)]
    return float(each.mean() / evidence.num_draws) if each.size else 1.0
