"""Leave-one-out cross-validation for every method: exact-posterior draws and approximations alike."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import arviz_stats
import numpy as np
import pandas as pd
import xarray as xr
from arviz_stats.utils import ELPDData

from pyrobnn.diagnostics import thresholds
from pyrobnn.diagnostics.evidence import Evidence, statistic
from pyrobnn.diagnostics.leave_one_out import densities, is_large, leave_one_out, relative_efficiency, usable
from pyrobnn.diagnostics.verdict import Check
from pyrobnn.groups import LOG_LIKELIHOOD, SAMPLE_DIMS

_LISTED = 8


def loo(tree: xr.DataTree | Evidence, *, num_subsample: int | None = None, seed: int = 0) -> ELPDData | None:
    """PSIS-LOO of a tree: Σ_i log p(y_i | y_−i), in the units of the log-likelihood.

    The weights are smoothed by ArviZ, for approximations with their log_p and log_q. From 50 000 data on (or 40 million
    log-likelihood values), ``arviz_stats.loo_subsample`` with the difference estimator.

    Args:
        tree: A DataTree with a ``log_likelihood`` group.
        num_subsample: Number of data to subsample; None decides by size.
        seed: Seed of the subsample.

    Returns:
        ArviZ's ELPDData with pointwise ``elpd_i`` and ``pareto_k`` over ``obs``; None where it cannot be
        computed: no log-likelihood, fewer than 25 draws, a datum whose likelihood is the same in all of them, no datum
        that more than one draw and its copies decide, or an approximation without log_q (an ensemble's draws are no
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
    evidence = Evidence.of(tree)
    pointwise = usable(evidence)
    if pointwise is None:
        return None
    if num_subsample is None and is_large(pointwise):
        num_subsample = thresholds.LOO_SUBSAMPLE_SIZE
    if num_subsample is not None and num_subsample < pointwise.shape[2]:
        return _subsampled(evidence, num_subsample=num_subsample, seed=seed)
    return _full(evidence)


@statistic
def _full(evidence: Evidence) -> ELPDData | None:
    found = leave_one_out(evidence, every=is_large(evidence.log_likelihood))
    if found is None or not np.isfinite(found.elpd.sum()) or not np.isfinite(found.k).any():
        return None
    num_data, num_draws = len(found.points), evidence.log_likelihood[:, :, 0].size
    coords = {"obs": found.points}
    return ELPDData(
        kind="loo",
        elpd=float(found.elpd.sum()),
        se=float(np.sqrt(num_data * found.elpd.var())),
        p=float((found.lppd - found.elpd).sum()),
        n_samples=num_draws,
        n_data_points=num_data,
        scale="log",
        warning=bool((found.k > thresholds.good_k(num_draws)).any()),
        good_k=thresholds.good_k(num_draws),
        elpd_i=xr.DataArray(found.elpd, dims="obs", coords=coords),
        pareto_k=xr.DataArray(found.k, dims="obs", coords=coords),
        approx_posterior=densities(evidence) is not None,
    )


@statistic
def _subsampled(evidence: Evidence, *, num_subsample: int, seed: int) -> ELPDData | None:
    pointwise, pair = evidence.log_likelihood, densities(evidence)
    sizes = (*SAMPLE_DIMS, "obs")
    coords = {name: np.arange(size) for name, size in zip(sizes, pointwise.shape, strict=True)}
    # a tree of the log-likelihood alone, so that ArviZ reads nothing else
    data = xr.DataTree.from_dict({LOG_LIKELIHOOD: xr.Dataset({"y": (sizes, pointwise)}, coords=coords)})
    del coords["obs"]
    log_p, log_q = (
        (None, None)
        if pair is None
        else (xr.DataArray(each, dims=SAMPLE_DIMS, coords=coords) for each in pair)
    )
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            found = arviz_stats.loo_subsample(
                data,
                observations=num_subsample,
                pointwise=True,
                reff=relative_efficiency(evidence),
                log_p=log_p,
                log_q=log_q,
                seed=seed,
            )
    except ValueError as error:
        if "tail values are the same" not in str(error):
            raise
        return None
    hopeless = not np.isfinite(found.elpd) or not np.isfinite(found.pareto_k).any()
    return None if hopeless else found


def compare(trees: Mapping[str, xr.DataTree | Evidence]) -> pd.DataFrame:
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


def check_elpd(evidence: Evidence) -> Check | None:
    """The elpd with its standard error, as information."""
    elpd = loo(evidence)
    if elpd is None:
        return None if usable(evidence) is None else _degenerate()
    k, points, source = _tails(evidence, elpd)
    subsampled = f", from {k.size} of {elpd.n_data_points} data" if k.size < elpd.n_data_points else ""
    trusted = "" if not points else f"; {len(points)} of its terms are unreliable"
    return Check(
        "elpd_loo",
        "info",
        float(elpd.elpd),
        "",
        source,
        f"elpd_loo is {elpd.elpd:.1f} ± {elpd.se:.1f} (p_loo {elpd.p:.1f}{subsampled}){trusted}.",
    )


def check_loo_khat(evidence: Evidence) -> Check | None:
    """The data at which the elpd cannot be trusted."""
    elpd = loo(evidence)
    if elpd is None:
        return None
    k, points, source = _tails(evidence, elpd)
    listed = ", ".join(str(index) for index in points[:_LISTED]) + (", …" if len(points) > _LISTED else "")
    hopeless = evidence.is_iid and len(points) > 0.5 * k.size
    return Check(
        "loo_khat",
        "warn" if points else "pass",
        float(k.max()) if np.isfinite(k.max()) else None,
        f"≤ {elpd.good_k:.2f} for every datum",
        source,
        f"Pareto k-hat exceeds its limit at {len(points)} of {k.size} data"
        + (f" ({listed})." if points else "."),
        ""
        if not points
        else "Do not rank methods by this elpd: the approximation's own k-hat is the cause; use NUTS or "
        "held-out data."
        if hopeless
        else f"Refit without data {listed} (arviz_stats.reloo) or match moments before trusting this elpd.",
    )


def _tails(evidence: Evidence, elpd: ELPDData) -> tuple[np.ndarray, list[int], str]:
    """k-hat of the data that were left out, those above the limit, and the source of the limit."""
    k = np.asarray(elpd.pareto_k).ravel()
    k = k[~np.isnan(k)]
    approximate = evidence.is_iid or k.size < elpd.n_data_points
    source = thresholds.LOO_APPROXIMATE_SOURCE if approximate else thresholds.LOO_SOURCE
    return k, refit_points(elpd), source


def _degenerate() -> Check:
    """Information for the case that everything is there and yet no weight but one is left."""
    return Check(
        "elpd_loo",
        "info",
        None,
        "",
        thresholds.LOO_APPROXIMATE_SOURCE,
        "Leave-one-out cannot be computed: the importance weights rest on a single draw or its copies.",
    )
