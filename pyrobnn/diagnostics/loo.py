"""Leave-one-out cross-validation for every method: exact-posterior draws and approximations alike."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import arviz_stats
import numpy as np
import pandas as pd
import xarray as xr
from arviz_stats.utils import ELPDData
from scipy import stats

from pyrobnn.diagnostics import thresholds
from pyrobnn.diagnostics.evidence import Evidence, statistic
from pyrobnn.diagnostics.leave_one_out import densities, is_large, leave_one_out, relative_efficiency, usable
from pyrobnn.diagnostics.points import replicates
from pyrobnn.diagnostics.verdict import Check, Status
from pyrobnn.groups import LOG_LIKELIHOOD, SAMPLE_DIMS

_LISTED = 8
#: data whose log-likelihood is held against their replicates
_MAX_ROWS, _FEWEST_ROWS = 2000, 30
#: standard errors of a median, in interquartile ranges, beyond which the distance from it is known
_CLEAR = 4.0


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
        computed: no log-likelihood, or one of a single datum, fewer than 25 draws, a datum whose likelihood is the same
        in all of them, no datum that more than one draw and its copies decide, or an approximation without log_q (an
        ensemble's draws are no posterior draws).

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


def elpd_data(**fields: Any) -> ELPDData:
    """Expected log predictive densities as ArviZ compares them, from the fields of its ``ELPDData``."""
    # since 1.3 there is a class for each way of leaving data out; before, the one class is told which
    one = getattr(arviz_stats.utils, "ELPDDataLOO", None)
    return ELPDData(kind="loo", **fields) if one is None else one(**fields)


@statistic
def _full(evidence: Evidence) -> ELPDData | None:
    pointwise = evidence.log_likelihood
    found = None if pointwise is None else leave_one_out(evidence, every=is_large(pointwise))
    if (
        pointwise is None
        or found is None
        or not np.isfinite(found.elpd.sum())
        or not np.isfinite(found.k).any()
    ):
        return None
    num_data, num_draws = len(found.points), pointwise[:, :, 0].size
    coords = {"obs": found.points}
    return elpd_data(
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
    if pointwise is None:
        return None
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
        return _not_made(evidence)
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
    certain = (k > _certain_k(evidence, elpd, k.size)).any() or hopeless
    if (
        hopeless and evidence.has_hidden_units
    ):  # the ratio p/q over all weights of a net, which decides nothing
        certain = False
    return Check(
        "loo_khat",
        "warn" if certain else "info" if points else "pass",
        float(k.max()) if np.isfinite(k.max()) else None,
        f"≤ {elpd.good_k:.2f} for every datum; above it by more than the error of k-hat warns",
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


def check_rows(evidence: Evidence) -> Check | None:
    """Whether the log-likelihood is that of the data beside it: least where the outcome is far from its replicates.

    Rank correlation of the two over the data, about 1 for any likelihood with one mode and 0 for that of other rows.
    """
    pointwise, outcomes = evidence.log_likelihood, replicates(evidence)
    if pointwise is None or outcomes is None or len(outcomes[1]) != pointwise.shape[2]:
        return None
    points = np.unique(np.linspace(0, pointwise.shape[2] - 1, min(pointwise.shape[2], _MAX_ROWS)).astype(int))
    draws, y = outcomes[0][:, points], outcomes[1][points]
    total = pointwise[:, :, points].mean(axis=(0, 1), dtype=np.float64)
    low, median, high = np.quantile(draws, [0.25, 0.5, 0.75], axis=0)
    if len(points) < _FEWEST_ROWS or not (high > low).all() or not np.isfinite(total).all():
        return None
    scaled = np.abs(y - median) / (high - low)
    # outcomes nearer to their replicates than the error of a median have no order that could be checked
    if np.median(scaled) < _CLEAR / np.sqrt(len(draws)):
        return None
    distance = (scaled**2).sum(axis=1)
    height = total + np.log(high - low).sum(axis=1)
    if np.ptp(distance) == 0.0 or np.ptp(height) == 0.0:
        return None
    agreement = -float(stats.spearmanr(distance, height).statistic)
    limit = 2.0 / np.sqrt(len(points))
    status: Status = "pass" if agreement > limit else "fail"
    return Check(
        "log_likelihood_rows",
        status,
        agreement,
        f"rank correlation > {limit:.2f}",
        "numerical",
        f"The log-likelihood falls with the distance of the outcomes from their replicates: rank correlation "
        f"{agreement:.2f}"
        + ("." if status == "pass" else ", as if it were of other rows or of the other sign."),
        ""
        if status == "pass"
        else "Compute it anew of the data that the tree holds: leave-one-out rests on it.",
    )


def _tails(evidence: Evidence, elpd: ELPDData) -> tuple[np.ndarray, list[int], str]:
    """k-hat of the data that were left out, those above the limit, and the source of the limit."""
    k = np.asarray(elpd.pareto_k).ravel()
    k = k[~np.isnan(k)]
    approximate = evidence.is_iid or k.size < elpd.n_data_points
    source = thresholds.LOO_APPROXIMATE_SOURCE if approximate else thresholds.LOO_SOURCE
    return k, refit_points(elpd), source


def _certain_k(evidence: Evidence, elpd: ELPDData, num_data: int) -> float:
    """The k-hat that none of the data has by chance while its k is within the limit.

    The estimate from a tail of M draws has standard error (1 + k)/√M.
    """
    tail = min(0.2 * elpd.n_samples, 3.0 * np.sqrt(elpd.n_samples / relative_efficiency(evidence)))
    z = stats.norm.isf(thresholds.PIT_WARN / num_data)
    return elpd.good_k + z * (1.0 + elpd.good_k) / np.sqrt(tail)


def _not_made(evidence: Evidence) -> Check | None:
    """What kept leave-one-out from being made, where there is a log-likelihood and a claim to be judged by it."""
    pointwise = evidence.log_likelihood
    if pointwise is None or (evidence.is_iid and densities(evidence) is None):
        return None
    if usable(evidence) is not None:
        return _without_loo("info", "the importance weights rest on a single draw or its copies")
    if pointwise.shape[2] == 1:
        why = "the likelihood is one term for all data together, as that of an observed site with .to_event(); a plate "
        return _without_loo("info", why + "over the data gives each its own")
    if not np.isfinite(pointwise).all():
        return _without_loo("warn", f"{(~np.isfinite(pointwise)).sum()} log-likelihood values are not finite")
    still = np.flatnonzero(pointwise.max((0, 1)) == pointwise.min((0, 1)))
    if still.size:
        # a masked datum has none, rightly
        status: Status = "info" if (pointwise[:, :, still] == 0.0).all() else "warn"
        listed = ", ".join(map(str, still[:_LISTED])) + (", …" if still.size > _LISTED else "")
        return _without_loo(
            status, f"the likelihood of {still.size} data ({listed}) is the same in every draw"
        )
    return _without_loo("info", f"{pointwise[:, :, 0].size} draws are too few")


def _without_loo(status: Status, why: str) -> Check:
    return Check(
        "elpd_loo",
        status,
        None,
        "" if status == "info" else "a finite log-likelihood that the draws move",
        thresholds.LOO_SOURCE,
        f"Leave-one-out was not checked: {why}.",
        ""
        if status == "info"
        else "Look at these data and at the draws: the model does not see them as it should.",
    )
