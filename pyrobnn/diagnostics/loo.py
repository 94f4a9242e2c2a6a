"""Leave-one-out cross-validation for every method: exact-posterior draws and approximations alike."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import arviz_stats
import numpy as np
import pandas as pd
import xarray as xr
from arviz_stats.utils import ELPDData

from pyrobnn.diagnostics import reading, thresholds
from pyrobnn.diagnostics.convergence import quantities
from pyrobnn.diagnostics.importance import pareto_smooth
from pyrobnn.diagnostics.verdict import Check

_MIN_DRAWS = 25
_LISTED = 8
# above so many log-likelihood values LOO is subsampled: smoothing takes about a millisecond per datum
_MAX_ELEMENTS = 40_000_000


def loo(tree: xr.DataTree, *, num_subsample: int | None = None, seed: int = 0) -> ELPDData | None:
    """PSIS-LOO of a tree: Σ_i log p(y_i | y_−i), in the units of the log-likelihood.

    Markov chains use ``arviz_stats.loo``; approximations ``arviz_stats.loo_approximate_posterior`` with their
    log_p and log_q. From 50 000 data on (or 40 million log-likelihood values), ``arviz_stats.loo_subsample``
    with the difference estimator.

    Args:
        tree: A DataTree with a ``log_likelihood`` group.
        num_subsample: Number of data to subsample; None decides by size.
        seed: Seed of the subsample.

    Returns:
        ArviZ's ELPDData with pointwise ``elpd_i`` and ``pareto_k`` over ``obs``; None where it cannot be
        computed: no log-likelihood, fewer than 25 draws, a datum whose likelihood is the same in all of them or in
        all that decide its tail (copies of a draw), or an approximation without log_q (an ensemble's draws are no
        posterior draws).

    Raises:
        ValueError: If `num_subsample` is not positive.

    References:
        Practical Bayesian model evaluation using LOO (Vehtari, Gelman & Gabry, 2017)
        https://doi.org/10.1007/s11222-016-9696-4 Bayesian leave-one-out cross-validation for large data
        (Magnusson et al., 2019) https://arxiv.org/abs/1904.10679
    """
    if num_subsample is not None and num_subsample < 1:
        raise ValueError(f"'num_subsample' is {num_subsample}; expected a positive number of data, or None.")
    prepared = _prepare(tree)
    if prepared is None:
        return None
    data, log_p, log_q = prepared
    num_data = data["log_likelihood"].sizes["obs"]
    if num_subsample is None and (
        num_data >= thresholds.LOO_SUBSAMPLE_FROM or data["log_likelihood"]["y"].size > _MAX_ELEMENTS
    ):
        num_subsample = thresholds.LOO_SUBSAMPLE_SIZE
    subsampled = num_subsample is not None and num_subsample < num_data
    if not subsampled:
        data["log_likelihood"] = data["log_likelihood"].to_dataset().astype(np.float64)
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            found = _estimate(tree, data, log_p, log_q, num_subsample if subsampled else None, seed)
    except ValueError as error:
        if "tail values are the same" not in str(error):
            raise
        return None
    if not subsampled:
        # an underflowing tail leaves NaN, in the weights or in k-hat depending on ArviZ's version
        found.pareto_k = found.pareto_k.fillna(np.inf)
    hopeless = not np.isfinite(found.elpd) or not np.isfinite(found.pareto_k).any()
    return None if hopeless else found


def _estimate(tree, data, log_p, log_q, num_subsample: int | None, seed: int) -> ELPDData:
    if num_subsample is not None:
        return arviz_stats.loo_subsample(
            data,
            observations=num_subsample,
            pointwise=True,
            reff=1.0 if log_p is not None else _relative_efficiency(tree),
            log_p=log_p,
            log_q=log_q,
            seed=seed,
        )
    if log_p is not None:
        return arviz_stats.loo_approximate_posterior(data, log_p, log_q, pointwise=True)
    return arviz_stats.loo(data, pointwise=True, reff=_relative_efficiency(tree))


def compare(trees: Mapping[str, xr.DataTree]) -> pd.DataFrame:
    """Methods ranked by elpd with standard errors of the differences and stacking weights (``arviz_stats.compare``).

    Args:
        trees: Label → DataTree; all fitted to the same data.

    Returns:
        One row per method for which `loo` exists, best first; columns as in ``arviz_stats.compare``.

    Raises:
        ValueError: If fewer than two trees allow LOO, or their numbers of data differ.
    """
    found = {label: loo(tree) for label, tree in trees.items()}
    usable = {label: elpd for label, elpd in found.items() if elpd is not None}
    if len(usable) < 2:
        raise ValueError(
            f"comparing needs two trees with LOO, got {sorted(usable)}; the others lack a log_likelihood "
            "group or log_q."
        )
    counts = {label: int(elpd.n_data_points) for label, elpd in usable.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(f"the trees were fitted to different numbers of data: {counts}.")
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return arviz_stats.compare(usable)


def refit_points(elpd: ELPDData) -> list[int]:
    """Data whose leave-one-out is unreliable (Pareto k above ``good_k``), worst first: refit without them."""
    k = np.asarray(elpd.pareto_k).ravel()
    k = np.where(np.isnan(k), -np.inf, k)
    bad = np.flatnonzero(k > elpd.good_k)
    return [int(index) for index in bad[np.argsort(-k[bad])]]


def loo_weights(tree: xr.DataTree, points: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Smoothed log weights (point, chain, draw) of leaving each of `points` out, and their k-hat; None as in `loo`."""
    pointwise = reading.log_likelihood(tree)
    if pointwise is None or not _usable(tree, pointwise):
        return None
    log_ratio = -np.moveaxis(pointwise[:, :, points].astype(np.float64), 2, 0)
    densities = _densities(tree, pointwise)
    if densities is not None:
        log_ratio = log_ratio + (densities[0] - densities[1])
    return pareto_smooth(log_ratio)


def loo_checks(tree: xr.DataTree, elpd: ELPDData | None) -> list[Check]:
    """The elpd with its standard error, and the data at which it cannot be trusted."""
    if elpd is None:
        return _degenerate(tree)
    k = np.asarray(elpd.pareto_k).ravel()
    k = k[~np.isnan(k)]
    points = refit_points(elpd)
    subsampled = f", from {k.size} of {elpd.n_data_points} data" if k.size < elpd.n_data_points else ""
    approximate = reading.is_iid(tree)
    source = thresholds.LOO_APPROXIMATE_SOURCE if approximate or subsampled else thresholds.LOO_SOURCE
    trusted = "" if not points else f"; {len(points)} of its terms are unreliable"
    checks = [
        Check(
            "elpd_loo",
            "info",
            float(elpd.elpd),
            "",
            source,
            f"elpd_loo is {elpd.elpd:.1f} ± {elpd.se:.1f} (p_loo {elpd.p:.1f}{subsampled}){trusted}.",
        )
    ]
    largest = float(k.max()) if np.isfinite(k.max()) else None
    listed = ", ".join(str(index) for index in points[:_LISTED]) + (", …" if len(points) > _LISTED else "")
    checks.append(
        Check(
            "loo_khat",
            "warn" if points else "pass",
            largest,
            f"≤ {elpd.good_k:.2f} for every datum",
            source,
            f"Pareto k-hat exceeds its limit at {len(points)} of {k.size} data"
            + (f" ({listed})." if points else "."),
            ""
            if not points
            else "Do not rank methods by this elpd: the approximation's own k-hat is the cause; use NUTS or "
            "held-out data."
            if approximate and len(points) > 0.5 * k.size
            else f"Refit without data {listed} (arviz_stats.reloo) or match moments before trusting this elpd.",
        )
    )
    return checks


def _degenerate(tree: xr.DataTree) -> list[Check]:
    """Information for the case that everything is there and yet no weight but one is left."""
    if _prepare(tree) is None:
        return []
    return [
        Check(
            "elpd_loo",
            "info",
            None,
            "",
            thresholds.LOO_APPROXIMATE_SOURCE,
            "Leave-one-out cannot be computed: the importance weights rest on a single draw or its copies.",
        )
    ]


def _densities(tree: xr.DataTree, pointwise: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """log p and log q of an approximation at the draws of its log-likelihood; None for chains, or where missing."""
    log_p = reading.draws_of(tree, "sample_stats", "log_p")
    log_q = reading.draws_of(tree, "sample_stats", "log_q")
    if not reading.is_iid(tree) or log_p is None or log_q is None:
        return None
    log_p, log_q = reading.matched(log_p, pointwise), reading.matched(log_q, pointwise)
    if log_p is None or log_q is None or not np.isfinite(log_p - log_q).all():
        return None
    return log_p, log_q


def _usable(tree: xr.DataTree, pointwise: np.ndarray) -> bool:
    if pointwise.shape[0] * pointwise.shape[1] < _MIN_DRAWS or pointwise.shape[2] == 0:
        return False
    if reading.is_point(tree) or not np.isfinite(pointwise).all():
        return False
    still = pointwise.max((0, 1)) == pointwise.min((0, 1))
    if still.any():  # there is no tail to smooth
        return False
    return not reading.is_iid(tree) or _densities(tree, pointwise) is not None


def _prepare(tree: xr.DataTree) -> tuple[xr.DataTree, xr.DataArray | None, xr.DataArray | None] | None:
    """A tree of the log-likelihood alone, so that ArviZ reads nothing else; with log_p and log_q."""
    pointwise = reading.log_likelihood(tree)
    if pointwise is None or not _usable(tree, pointwise):
        return None
    sizes = (*reading.SAMPLE_DIMS, "obs")
    coords = {name: np.arange(size) for name, size in zip(sizes, pointwise.shape, strict=True)}
    data = xr.DataTree.from_dict({"log_likelihood": xr.Dataset({"y": (sizes, pointwise)}, coords=coords)})
    densities = _densities(tree, pointwise)
    if densities is None:
        return data, None, None
    del coords["obs"]
    log_p, log_q = (xr.DataArray(each, dims=reading.SAMPLE_DIMS, coords=coords) for each in densities)
    return data, log_p, log_q


def _relative_efficiency(tree: xr.DataTree) -> float:
    """Mean ESS of identified quantities per draw: weights are not identified, so theirs would say too little."""
    found = quantities(tree)
    if not found or tree["posterior"].sizes["draw"] < 4:
        return 1.0
    names = list(found)[:: max(1, len(found) // 32)]
    draws = np.stack([found[name] for name in names])
    ess = np.asarray(arviz_stats.ess(draws.transpose(1, 2, 0), method="mean", chain_axis=0, draw_axis=1))
    ess = ess[np.isfinite(ess)]
    return float(np.clip(ess.mean() / reading.num_draws(tree), 1e-3, 1.0)) if ess.size else 1.0
