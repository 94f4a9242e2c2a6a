"""Checks of the model itself: does the prior fight the data, is the guide alive, is it the Bayes posterior at all?"""

from __future__ import annotations

import warnings

import numpy as np
import xarray as xr
from arviz_stats.base import array_stats

from pyrobnn.diagnostics import thresholds
from pyrobnn.diagnostics.evidence import Evidence, matched, statistic
from pyrobnn.diagnostics.importance import importance
from pyrobnn.diagnostics.points import has_classes, replicates
from pyrobnn.diagnostics.verdict import Check, Status
from pyrobnn.groups import (
    OBSERVED_DATA,
    POSTERIOR,
    PRIOR,
    PRIOR_PREDICTIVE,
    SAMPLE_STATS,
)

_MAX_PROBES = 24
_MIN_DRAWS = 100
#: draws of an ensemble whose variance says something
_FEWEST_MEMBERS = 4
#: powers of the prior or likelihood, ArviZ's
_ALPHAS = (0.99, 1.01)
_NOISE_SITE = "likelihood.scale"


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


def check_prior_sensitivity(evidence: Evidence) -> Check | None:
    """Whether the prior pulls the function away from the data, or is stronger than they are."""
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
    limit = thresholds.PSENSE_WARN
    pulled = prior > np.maximum(limit, thresholds.PSENSE_FLOORS * found["prior_floor"].values)
    informed = likelihood > np.maximum(limit, thresholds.PSENSE_FLOORS * found["likelihood_floor"].values)
    conflict, weak = float((pulled & informed).mean()), float((pulled & ~informed).mean())
    dominated = float((pulled & (prior >= 0.9 * likelihood)).mean())
    median, other = float(np.median(prior)), float(np.median(likelihood))
    status: Status = (
        "fail"
        if dominated > thresholds.PSENSE_SHARE
        else "info"
        if conflict + weak > thresholds.PSENSE_SHARE
        else "pass"
    )
    if evidence.has_hidden_units and status != "pass":
        status = (
            "info"  # every function of a net leans on its prior: that is the model, no fault of the draws
        )
    kind = "the prior conflicts with the data" if conflict >= weak else "the prior is stronger than the data"
    seen = "" if status == "pass" else f": {kind} at {conflict + weak:.0%} of the train probes"
    return Check(
        "prior_sensitivity",
        status,
        median,
        f"≤ {limit} above its noise floor at half of the train probes; a prior as strong as the likelihood fails",
        thresholds.PSENSE_SOURCE,
        f"Power-scaling sensitivity of f is {median:.2f} to the prior and {other:.2f} to the likelihood "
        f"(median){seen}.",
        ""
        if status in ("pass", "info")
        else "The prior is too tight: widen the prior scale of the weights (or give it a hyperprior) and "
        "fit again.",
    )


def check_temperature(evidence: Evidence) -> Check | None:
    """A warning where the run was tempered."""
    temperature = evidence.number("temperature", 1.0)
    if temperature == 1.0:
        return None
    side = (
        "cold: it is more certain than the model"
        if temperature < 1.0
        else "warm: it is less certain than the model"
    )
    return Check(
        "temperature",
        "warn",
        temperature,
        "1 for the Bayes posterior",
        thresholds.TEMPERATURE_SOURCE,
        f"The effective temperature is {temperature:.3g}; this posterior is {side}.",
        "End the KL schedule at weight 1 (temperature 1), or report the run as tempered.",
    )


def check_noise_prior(evidence: Evidence) -> Check | None:
    """Prior against posterior of the noise."""
    prior = evidence.draws(PRIOR, _NOISE_SITE)
    posterior = evidence.draws(POSTERIOR, _NOISE_SITE)
    if prior is None or posterior is None or prior.size < _MIN_DRAWS:
        return None
    if not (np.isfinite(prior).all() and np.isfinite(posterior).all()) or np.ptp(prior) == 0.0:
        return None
    columns = prior.reshape(-1, prior[0, 0].size), posterior.reshape(-1, posterior[0, 0].size)
    if columns[0].shape[1] != columns[1].shape[1]:
        return None
    medians = np.median(columns[1], axis=0)
    tails = [_tails(before, after) for before, after in zip(columns[0].T, medians, strict=True)]
    lowest = float(np.min(tails))
    large = lowest == np.min(tails, axis=0)[1]
    status: Status = "warn" if lowest < thresholds.NOISE_TAIL_WARN else "pass"
    return Check(
        "noise_prior",
        status,
        lowest,
        "posterior median within the central 99 % of the prior",
        thresholds.PSENSE_SOURCE,
        f"The posterior median of the noise, {np.median(columns[1]):.4g} in fitted units, has prior tail "
        f"probability {lowest:.3f}.",
        ""
        if status == "pass"
        else "The noise prior excludes noise as large as the data say: widen it."
        if large
        else "The noise prior excludes noise as small as the data say: give it mass near zero (HalfNormal).",
    )


def _tails(prior: np.ndarray, noise: float) -> tuple[float, float]:
    """Prior probability (draw,) of a noise below and above `noise`; below is no news where the density reaches zero.

    Near zero P(< t) grows as t to the power a, 1 for a half-normal: where a is at most 2 small noise is not excluded,
    however little of the prior lies below it.
    """
    low, quarter = np.quantile(prior, [0.05, 0.25])
    power = np.log(5.0) / np.log(quarter / low) if 0.0 < low < quarter else 0.0
    below = float((prior <= noise).mean()) if power > 2.0 else 1.0
    return below, float((prior >= noise).mean())


def check_prior_predictive(evidence: Evidence) -> Check | None:
    """Spread of prior functions or replicates against the observed spread, as information."""
    found = replicates(evidence, whole=True, group=PRIOR_PREDICTIVE)
    made, y = (None, evidence.values(OBSERVED_DATA, "y")) if found is None else (found[0][None], found[1])
    if y is None or has_classes(evidence) or y.dtype.kind not in "fiu" or y.size < 2:
        return None
    f = (
        evidence.draws(PRIOR_PREDICTIVE, "f") if y.dtype.kind == "f" else None
    )  # of counts that is another scale
    for name, draws in (("y", made), ("f", f)):
        if draws is not None and np.isfinite(draws).all() and float(np.std(y)) > 0.0:
            # a vague prior of a log rate reaches the largest numbers of float32, and their squares those of float64
            ratio = float(draws.std(axis=(0, 1), dtype=np.float64).mean() / np.std(y))
            what = "replicates of y" if name == "y" else "functions"
            known = np.isfinite(ratio)
            return Check(
                "prior_predictive",
                "info",
                ratio if known else None,
                "",
                thresholds.LOO_PIT_SOURCE,
                f"Before data, {what} spread {ratio:.3g} times as far as the observed y."
                if known
                else f"Before data, {what} spread further than numbers can say.",
            )
    return None


def _random_sites(evidence: Evidence) -> list[str]:
    """The sites that an approximation with a density q treats as random; none for other trees, and of programs.

    A site of a plain program may rightly keep its prior, as a non-centred one does that few data touch, and its prior
    may be as wide as its author likes.
    """
    if evidence.variable(SAMPLE_STATS, "log_q") is None or "deterministic_sites" in evidence.tree.attrs:
        return []
    points = evidence.json("point_sites")
    fixed = set(points) if isinstance(points, list) else set()
    return [name for name in evidence.names(POSTERIOR) if name not in fixed]


def check_collapse(evidence: Evidence) -> Check | None:
    """Whether the approximation has shrunk to a point."""
    shares, narrow = [], []
    for name in _random_sites(evidence):
        draws, prior = evidence.draws(POSTERIOR, name), evidence.draws(PRIOR, name)
        if draws is None or prior is None or draws.shape[2:] != prior.shape[2:]:
            continue
        if min(draws.shape[0] * draws.shape[1], prior.shape[0] * prior.shape[1]) < _MIN_DRAWS:
            continue
        sd = draws.std(axis=(0, 1)).ravel()
        collapsed = sd <= thresholds.COLLAPSED_SD * prior.std(axis=(0, 1)).ravel()
        shares.append((collapsed.sum(), collapsed.size))
        if collapsed.mean() > thresholds.SITE_SHARE:
            narrow.append(name)
    if not shares:
        return None
    share = float(sum(part for part, _ in shares) / sum(size for _, size in shares))
    status: Status = "warn" if narrow else "pass"
    return Check(
        "scale_collapse",
        status,
        share,
        "sd > 0.01 % of the prior's for half of every site",
        thresholds.COLLAPSE_SOURCE,
        f"{share:.0%} of the weights have collapsed to a point"
        + (f", most of {', '.join(narrow[:3])}." if narrow else "."),
        ""
        if status == "pass"
        else "Raise the initial scale of the guide or lower its learning rate: it has become a point.",
    )


def check_spread(evidence: Evidence) -> Check | None:
    r"""Whether draws without a density of their own differ as those of a posterior must.

    .. math:: p = \sum_n \operatorname{var} \log p(y_n \mid \theta_s)

    is the number of parameters that they leave open; one that the data inform counts one.
    """
    pointwise = evidence.log_likelihood
    if pointwise is None or evidence.is_point or evidence.variable(SAMPLE_STATS, "log_q") is not None:
        return None
    if pointwise.shape[0] * pointwise.shape[1] < _FEWEST_MEMBERS or not np.isfinite(pointwise).all():
        return None
    effective = float(pointwise.astype(np.float64).var(axis=(0, 1), ddof=1).sum())
    status: Status = "pass" if effective >= thresholds.EFFECTIVE_WARN else "warn"
    return Check(
        "spread",
        status,
        effective,
        f"≥ {thresholds.EFFECTIVE_WARN} effective parameters",
        thresholds.WAIC_SOURCE,
        f"The draws leave {effective:.2g} parameters open"
        + ("." if status == "pass" else ": together they are one point, without epistemic uncertainty."),
        ""
        if status == "pass"
        else "Look at how they came to be the same: members need starts of their own, SWAG a larger learning rate.",
    )


def check_dead_sites(evidence: Evidence) -> Check | None:
    """Weights whose approximation is still the prior: the data never reached them."""
    dead, counted, named = 0, 0, []
    for name in _random_sites(evidence):
        prior, posterior = evidence.draws(PRIOR, name), evidence.draws(POSTERIOR, name)
        if prior is None or posterior is None or prior.shape[2:] != posterior.shape[2:]:
            continue
        before, after = (draws.reshape(draws.shape[0] * draws.shape[1], -1) for draws in (prior, posterior))
        if min(len(before), len(after)) < _MIN_DRAWS:
            continue
        scale = np.maximum(before.std(axis=0), np.finfo(float).tiny)
        tolerance = max(0.05, 3.0 * np.sqrt(0.5 / len(before) + 0.5 / len(after)))
        shift = np.abs(after.mean(axis=0) - before.mean(axis=0)) / scale
        same = (np.abs(np.log(np.maximum(after.std(axis=0), 1e-300) / scale)) < tolerance) & (
            shift < max(0.05, 3.0 * np.sqrt(1.0 / len(before) + 1.0 / len(after)))
        )
        dead, counted = dead + int(same.sum()), counted + same.size
        if same.mean() > thresholds.SITE_SHARE:
            named.append(name)
    if counted == 0:
        return None
    share = dead / counted
    # a Gaussian around a mode keeps the prior, rightly, in directions that the data leave open
    variational = evidence.text("log_evidence_kind", "" if evidence.text("claim") else "elbo") == "elbo"
    pruned = bool(named) and variational
    status: Status = "warn" if pruned else "info" if named else "pass"
    return Check(
        "dead_sites",
        status,
        float(share),
        "q differs from the prior for half of every site",
        thresholds.COLLAPSE_SOURCE,
        f"{share:.0%} of the weights are distributed as in the prior"
        + (f", most of {', '.join(named[:3])}." if named else "."),
        ""
        if status != "warn"
        else "The guide pruned these weights: warm the KL weight up over more steps, start with a "
        "smaller guide scale, or use a "
        "smaller network.",
    )


def check_in_between(evidence: Evidence) -> Check | None:
    """sd of f between the data against at the data: mean-field guides cannot raise it, the posterior does."""
    f = evidence.f
    if f is None or evidence.is_point:
        return None
    kinds = evidence.probe_kinds(f.shape[2])
    if not ((kinds == "between").any() and (kinds == "train").any()):
        return None
    sd = f.std(axis=(0, 1)).mean(axis=-1)
    at_data = float(np.median(sd[kinds == "train"]))
    if not np.isfinite(sd).all() or at_data <= 0.0:
        return None
    between = np.flatnonzero(kinds == "between")
    widest = int(between[sd[between].argmax()])
    ratio = float(min(sd[widest] / at_data, 1e6))
    return Check(
        "in_between",
        "info",
        ratio,
        "",
        thresholds.IN_BETWEEN_SOURCE,
        f"Between the data the sd of f reaches {ratio:.1f} times its median at the data (at "
        f"{evidence.probe_name(widest)}).",
    )
