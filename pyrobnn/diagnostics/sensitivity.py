"""Sensitivity of the function to the prior: whether the prior has as much influence as the data."""

from __future__ import annotations

import warnings

import numpy as np
import xarray as xr
from arviz_stats.base import array_stats

from pyrobnn.diagnostics.evidence import Evidence, matched, statistic
from pyrobnn.diagnostics.importance import importance
from pyrobnn.diagnostics.verdict import Found, Status

_MAX_PROBES = 24
_MIN_DRAWS = 100
#: powers of the prior or likelihood, ArviZ's
_ALPHAS = (0.99, 1.01)


@statistic
def power_scaling(evidence: Evidence) -> xr.Dataset | None:
    """Sensitivity of f at the train probes to power-scaling the prior and the likelihood (``arviz_stats.psense``).

    In a network the log prior sums over hundreds of weights, and its Monte-Carlo correlation with f alone gives
    a sensitivity well above 0.05. The noise floor says how large: the same statistic with the log prior shifted
    along the chains, which
    keeps its autocorrelation but breaks its link to f.

    Args:
        tree: A DataTree with function values, ``log_prior`` and ``log_likelihood``.

    Returns:
        Dataset over (quantity) with ``prior``, ``likelihood`` and their noise floors ``prior_floor``,
        ``likelihood_floor``; None where something is missing or there are fewer than 100 draws.

    References:
        Detecting and diagnosing prior and likelihood sensitivity with power-scaling (Kallioinen et al., 2024).
    """
    f, log_prior, pointwise = evidence.f, evidence.log_prior, evidence.log_likelihood
    if f is None or log_prior is None or pointwise is None or evidence.num_draws < _MIN_DRAWS:
        return None
    f, log_prior = matched(f, pointwise), matched(log_prior, pointwise)
    if f is None or log_prior is None or pointwise.shape[0] * pointwise.shape[1] < _MIN_DRAWS:
        return None
    kinds = evidence.probe_kinds(f.shape[2])
    train = np.flatnonzero((kinds == "train") | (kinds == "user"))
    if train.size == 0:
        return None
    chosen = train[np.unique(np.linspace(0, train.size - 1, min(train.size, _MAX_PROBES)).astype(int))]
    values = f[:, :, chosen].reshape(*f.shape[:2], -1)[:, :, : 2 * _MAX_PROBES]
    total = pointwise.sum(-1, dtype=np.float64)
    if not (np.isfinite(values).all() and np.isfinite(log_prior).all() and np.isfinite(total).all()):
        return None
    if np.ptp(log_prior) == 0.0 or np.ptp(total) == 0.0:
        return None
    values = values[:, :, np.ptp(values, axis=(0, 1)) > 0.0]
    if values.shape[2] == 0:
        return None
    found = {
        "prior": _psense(values, log_prior),
        "likelihood": _psense(values, total),
        "prior_floor": _floor(values, log_prior),
        "likelihood_floor": _floor(values, total),
    }
    return xr.Dataset({name: ("quantity", array) for name, array in found.items()})


def _psense(values: np.ndarray, log_density: np.ndarray) -> np.ndarray:
    """``arviz_stats.psense`` of values (chain, draw, quantity), on arrays: making it a tree would cost as much."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        weights = []
        for alpha in _ALPHAS:
            each = np.exp(array_stats.power_scale_lw(log_density, alpha=alpha, axis=(0, 1)))
            weights.append(np.broadcast_to(each / each.sum(), (values.shape[2], *log_density.shape)))
        lower, upper = weights
        found = array_stats.power_scale_sense(np.moveaxis(values, 2, 0), lower, upper, *_ALPHAS)
    return np.where(np.isfinite(found), found, 0.0)


def _floor(values: np.ndarray, log_density: np.ndarray) -> np.ndarray:
    num_draws = values.shape[1]
    shifts = [num_draws // 3, num_draws // 2, (2 * num_draws) // 3]
    found = [
        _psense(values, np.roll(np.roll(log_density, shift, axis=1), index, axis=0))
        for index, shift in enumerate(shifts)
    ]
    return np.max(found, axis=0)


def prior_sensitivity(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    """A warning where the prior has as much influence on the function as the data, at half of the train probes.

    That a prior matters is no fault: of a net, whose every function leans on its prior, it is information.
    """
    if evidence.number("temperature", 1.0) != 1.0:
        return None
    if evidence.is_iid:
        weights = importance(evidence)
        # reweighting draws of q tells about the posterior only if q is close to it
        if weights is None or weights.k > weights.good_k:
            return None
    found = power_scaling(evidence)
    if found is None:
        return None
    prior, likelihood = found["prior"].values, found["likelihood"].values
    floors, share = limits[1:]
    pulled = prior > np.maximum(limits[0], floors * found["prior_floor"].values)
    dominated = float((pulled & (prior >= 0.9 * likelihood)).mean())
    pulls = dominated > share and not evidence.has_hidden_units
    status: Status = "warn" if pulls else "info" if pulled.mean() > share else "pass"
    return Found(status, float(np.median(prior)), "", {"likelihood": float(np.median(likelihood))}, limits[0])
