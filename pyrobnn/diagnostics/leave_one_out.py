"""Leave-one-out for every method: the smoothed weights of leaving each datum out, and elpd, k-hat and PIT from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import arviz_stats
import numpy as np
import xarray as xr
from arviz_stats.utils import ELPDData
from scipy.special import logsumexp

from pyrobnn.core.chains import ess
from pyrobnn.core.groups import LEFT_OUT, SAMPLE_STATS
from pyrobnn.core.seeding import own_stream
from pyrobnn.diagnostics.evidence import Evidence, flattened, matched, spread, statistic
from pyrobnn.diagnostics.limits import MAX_DATA
from pyrobnn.diagnostics.pareto import FEWEST_WEIGHTED, good_k, pareto_smooth
from pyrobnn.diagnostics.prediction_metrics import pit_of

#: data above which only `MAX_DATA` of them are left out, evenly spread: each takes about a millisecond
MAX_ROWS = 50_000
_BLOCK = 4_000_000  # log-likelihood values that are smoothed at once
#: share of the data whose k-hat may be too large before their PIT says nothing
_UNRELIABLE = 0.1


@dataclass(frozen=True, eq=False)
class LeaveOneOut:
    """What the smoothed weights of leaving each datum out tell; they themselves are too many to keep.

    Args:
        points: which data (point,): all, or of more than 50 000 a spread of 2000.
        k: Pareto k-hat of each (point,); infinite where one draw or its copies carry all the weight.
        elpd: log p(y_i | y_−i) of each (point,). lppd: log p(y_i | y) of each (point,).
        pit: P(ỹ_i ≤ y_i | y_−i), ties by a random part, of evenly spread data, (at most 2000, output); None without
            training replicates.
        mean: E[ỹ_i | y_−i] of the first output, of the same data.
        pit_points: which data those are.
    """

    points: np.ndarray
    k: np.ndarray
    elpd: np.ndarray
    lppd: np.ndarray
    pit: np.ndarray | None
    mean: np.ndarray | None
    pit_points: np.ndarray


@statistic
def leave_one_out(evidence: Evidence) -> LeaveOneOut | None:
    r"""The predictive of each datum from the posterior without it: one smoothing for elpd, k-hat and LOO-PIT.

    .. math:: r_{is} \propto \frac{1}{p(y_i \mid \theta_s)} \cdot \frac{p(\theta_s, y)}{q(\theta_s)}

    where the second factor is 1 for Markov chains. None as in `loo`.
    """
    pointwise = _usable(evidence)
    if pointwise is None:
        return None
    num_data = pointwise.shape[2]
    num_draws = pointwise[:, :, 0].size
    shown = spread(num_data, MAX_DATA)
    points = shown if num_data > MAX_ROWS else np.arange(num_data)
    outcomes = _replicates_of_the_draws(evidence, num_data, num_draws)
    blocks = []
    for block in np.array_split(points, -(-points.size * num_draws // _BLOCK)):
        log_density = np.moveaxis(pointwise[:, :, block].astype(np.float64), 2, 0)
        blocks.append(_leave_out(evidence, block, log_density, shown, outcomes))
    pits = [block.pit for block in blocks if block.pit is not None]
    means = [block.mean for block in blocks if block.mean is not None]
    return LeaveOneOut(
        points=points,
        k=np.concatenate([block.k for block in blocks]),
        elpd=np.concatenate([block.elpd for block in blocks]),
        lppd=np.concatenate([block.lppd for block in blocks]),
        pit=np.concatenate(pits) if pits else None,
        mean=np.concatenate(means) if means else None,
        pit_points=shown,
    )


def _replicates_of_the_draws(
    evidence: Evidence, num_data: int, num_draws: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Replicates (draw, obs, output) and outcomes (obs, output); None unless one of each draw and datum is there."""
    outcomes = evidence.replicates()
    if outcomes is None:
        return None
    draws, y = outcomes
    return outcomes if (len(y), len(draws)) == (num_data, num_draws) else None


def _leave_out(
    evidence: Evidence,
    points: np.ndarray,
    log_density: np.ndarray,
    shown: np.ndarray,
    outcomes: tuple[np.ndarray, np.ndarray] | None,
) -> LeaveOneOut:
    """The estimates of some data by their log densities (point, chain, draw), with the PIT of those that are shown."""
    pair = _densities(evidence)
    log_ratio = -log_density if pair is None else pair[0] - pair[1] - log_density
    log_weights, k = pareto_smooth(log_ratio, relative_efficiency(evidence))
    num_draws = log_density[0].size
    pit = None
    mean = None
    is_shown = np.isin(points, shown)
    if outcomes is not None:
        draws, y = outcomes
        weights = np.exp(log_weights[is_shown]).reshape(int(is_shown.sum()), num_draws)
        pit = _weighted_pit(weights, points[is_shown], draws, y)
        mean = np.einsum("ps,sp->p", weights, draws[:, points[is_shown], 0])
    return LeaveOneOut(
        points=points,
        k=k,
        elpd=logsumexp(log_weights + log_density, axis=(1, 2)),
        lppd=logsumexp(log_density, axis=(1, 2)) - np.log(num_draws),
        pit=pit,
        mean=mean,
        pit_points=points[is_shown],
    )


def _weighted_pit(
    weights: np.ndarray,
    points: np.ndarray,
    draws: np.ndarray,
    y: np.ndarray,
) -> np.ndarray:
    """Weighted share of the draws (draw, obs, output) below y (obs, output) at the points, and part of the ties."""
    draws = draws[:, points]
    y = y[points]
    # of counts and censored rows the transform is uniform only if drawn from what they leave open
    below = (draws < y) + own_stream(int(points[0])).random(y.shape) * (draws == y)
    return np.clip(np.einsum("ps,spo->po", weights, below), 0.0, 1.0)


def loo_pit(tree: xr.DataTree | Evidence) -> tuple[np.ndarray, np.ndarray] | None:
    """Leave-one-out PIT of the training data: each datum against the predictive that has not seen it.

    The weights are the Pareto-smoothed ones of `loo`; for approximations they include p/q. Rows that
    ``to_datatree(exact_loo=…)`` removed have their exact values.

    Args:
        tree: A DataTree with ``log_likelihood``, ``posterior_predictive`` and ``observed_data``.

    Returns:
        Indices of (at most 2000, evenly spread) data, and their PIT (datum, output); None where replicates or
        log-likelihood are missing, or leave-one-out is undefined (see `loo`) or unreliable for a tenth of the data.

    References:
        Visualization in Bayesian workflow (Gabry et al., 2019) https://doi.org/10.1111/rssa.12378
    """
    evidence = Evidence.of(tree)
    estimates = leave_one_out(evidence)
    pointwise = evidence.log_likelihood
    if pointwise is None or estimates is None or estimates.pit is None:
        return None
    points = estimates.pit_points
    k = estimates.k[np.isin(estimates.points, points)]
    pit = estimates.pit.copy()
    exact = evidence.variable(LEFT_OUT, "pit")
    if exact is not None:
        exact = exact[np.isin(exact["row"], points)]
        at = np.searchsorted(points, exact["row"])
        k[at] = 0.0
        pit[at] = exact
    unreliable = float((k > good_k(pointwise[:, :, 0].size)).mean())
    return None if unreliable > _UNRELIABLE else (points, pit)


def left_out_pit(evidence: Evidence) -> tuple[np.ndarray, np.ndarray] | None:
    """Which training data of a regression have a LOO-PIT, and that; None of classes."""
    return None if evidence.has_classes else loo_pit(evidence)


def left_out_mean(evidence: Evidence) -> np.ndarray | None:
    """The predictive mean (datum,) of the first output from the posterior without each datum of :func:`loo_pit`."""
    estimates = leave_one_out(evidence)
    return None if estimates is None else estimates.mean


@statistic
def _densities(evidence: Evidence) -> tuple[np.ndarray, np.ndarray] | None:
    """log p and log q of an approximation at the draws of its log-likelihood; None for chains, or where missing."""
    pointwise = evidence.log_likelihood
    log_p = evidence.log_target
    log_q = evidence.draws(SAMPLE_STATS, "log_q")
    if not evidence.is_iid or pointwise is None or log_p is None or log_q is None:
        return None
    log_p = matched(log_p, pointwise)
    log_q = matched(log_q, pointwise)
    if log_p is None or log_q is None or not np.isfinite(log_p - log_q).all():
        return None
    return log_p, log_q


@statistic
def _usable(evidence: Evidence) -> np.ndarray | None:
    """The log-likelihood (chain, draw, obs) if leave-one-out is defined by it."""
    pointwise = evidence.log_likelihood
    # without its only datum a posterior is the prior
    if (
        pointwise is None
        or pointwise.shape[0] * pointwise.shape[1] < FEWEST_WEIGHTED
        or pointwise.shape[2] < 2
    ):
        return None
    if evidence.is_point or not np.isfinite(pointwise).all():
        return None
    if np.ptp(pointwise, axis=(0, 1)).max() == 0.0:  # there is no tail to smooth
        return None
    return None if evidence.is_iid and _densities(evidence) is None else pointwise


@statistic
def relative_efficiency(evidence: Evidence) -> float:
    """Mean ESS per draw of the elements of the posterior, as ArviZ has it; of many elements a spread of 200."""
    if _densities(evidence) is not None or evidence.num_chains == 1 or evidence.draws_per_chain < 4:
        return 1.0
    columns = [flattened(draws, 2) for draws in evidence.sites.values()]
    stride = -(-sum(column.shape[2] for column in columns) // 200)
    thinned = np.concatenate([column[:, :, ::stride] for column in columns], axis=2)
    sizes = ess(np.moveaxis(thinned.astype(np.float64), 2, 0), "mean")
    sizes = sizes[np.isfinite(sizes)]
    return float(sizes.mean() / evidence.num_draws) if sizes.size else 1.0


@statistic
def loo(evidence: Evidence) -> ELPDData | None:
    """PSIS-LOO of a tree: Σ_i log p(y_i | y_−i), in the units of the log-likelihood.

    The weights are smoothed by ArviZ, for approximations with their log_p and log_q. Of more than 50 000 data the sum
    is over 2000 of them, evenly spread. Rows that ``to_datatree(exact_loo=…)`` removed: their exact value, k-hat 0.

    Args:
        tree: A DataTree with a ``log_likelihood`` group.

    Returns:
        ArviZ's ELPDData with pointwise ``elpd_i`` and ``pareto_k`` over ``obs``; None where it cannot be
        computed: no log-likelihood, or one of a single datum, fewer than 25 draws, no datum that more than one draw
        and its copies decide, or an approximation without log_q (an ensemble's draws are not posterior draws).

    References:
        Practical Bayesian model evaluation using LOO (Vehtari, Gelman & Gabry, 2017)
        https://doi.org/10.1007/s11222-016-9696-4
    """
    pointwise = _usable(evidence)
    estimates = leave_one_out(evidence)
    if pointwise is None or estimates is None:
        return None
    if not np.isfinite(estimates.elpd.sum()) or not np.isfinite(estimates.k).any():
        return None
    num_data = len(estimates.points)
    num_draws = pointwise[:, :, 0].size
    coords = {"obs": estimates.points}
    elpd = estimates.elpd.copy()
    k = estimates.k.copy()
    exact = evidence.variable(LEFT_OUT, "elpd")
    if exact is not None:
        at = np.searchsorted(estimates.points, exact["row"])
        # as ArviZ's reloo says of a refit
        elpd[at] = exact
        k[at] = 0.0
    # since 1.3 there is a class for each way of leaving data out; before, the one class is told which
    of_loo = getattr(arviz_stats.utils, "ELPDDataLOO", None)
    make = partial(ELPDData, kind="loo") if of_loo is None else of_loo
    return make(
        elpd=float(elpd.sum()),
        se=float(np.sqrt(num_data * elpd.var())),
        p=float((estimates.lppd - elpd).sum()),
        n_samples=num_draws,
        n_data_points=num_data,
        scale="log",
        warning=bool((k > good_k(num_draws)).any()),
        good_k=good_k(num_draws),
        elpd_i=xr.DataArray(elpd, dims="obs", coords=coords),
        pareto_k=xr.DataArray(k, dims="obs", coords=coords),
        approx_posterior=_densities(evidence) is not None,
    )


def add_exact(
    tree: xr.DataTree,
    budget: int,
    same: bool,
    left_out: Callable[[int], tuple[float, float | None, xr.DataTree]],
) -> None:
    """Take the exact log densities and PIT of the rows whose k-hat is too large, the worst ``budget``, into ``tree``.

    Args:
        same: whether its data are the rows of the fit; else ValueError.
        left_out: a row's log p(y_i | y_-i) = log p(y) - log p(y_-i), its error, and the tree of that row, of the
            posterior without it.
    """
    estimate = loo(tree)
    rows = [] if estimate is None else refit_points(estimate)[:budget]
    if not rows:
        return
    if not same:
        raise ValueError("'exact_loo' removes rows of the fit: pass its own x and y")
    elpd, errors, trees = zip(*map(left_out, rows), strict=True)
    values: dict[str, Any] = {
        "elpd": ("row", np.array(elpd, dtype=float)),
        "error": ("row", np.array(errors, dtype=float)),
    }
    outcomes = [Evidence(row_tree).replicates() for row_tree in trees]
    pit = [pit_of(*pair) for pair in outcomes if pair]
    if pit:
        values["pit"] = (("row", "output"), np.concatenate(pit))
    tree[LEFT_OUT] = xr.DataTree(xr.Dataset(values, coords={"row": rows}))


def refit_points(elpd: ELPDData) -> list[int]:
    """Data whose leave-one-out is unreliable (Pareto k above ``good_k``), worst first: refit without them."""
    k = np.asarray(elpd.pareto_k).ravel()
    k = np.where(np.isnan(k), -np.inf, k)
    rows = np.arange(len(k))
    if isinstance(elpd.pareto_k, xr.DataArray):
        rows = np.asarray(elpd.pareto_k["obs"])
    return [int(rows[at]) for at in np.argsort(-k, kind="stable") if k[at] > elpd.good_k]
