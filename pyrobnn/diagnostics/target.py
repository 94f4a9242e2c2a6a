"""Whether draws are draws of the model's posterior: Stein's identities, and how Hamiltonian moves change the draws.

Both need the model's gradient and no reference: draws of the posterior fulfil the identities, and stay draws of it
wherever they are moved.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from scipy import stats

from pyrobnn.core.chains import ess
from pyrobnn.core.groups import MOVED, STEIN
from pyrobnn.diagnostics.evidence import Evidence, labels
from pyrobnn.diagnostics.grades import (
    MOST,
    Found,
    Limits,
    Status,
    by_kind,
    grade_by_kind,
    grade_tested,
    worse,
)
from pyrobnn.diagnostics.limits import SIGMAS

#: rates at which correct draws may warn, and fail: this library's convention
_RATES = 1e-3, 1e-5
#: acceptance rate below which the draws have hardly moved
_LEAST_ACCEPTED = 0.2
#: correlation of the moved draws with where they were, above which a fault that should fail might seem to pass: the
#: moves then mend less than half of an sd that is too small by one half
_MOST_CORRELATED = 0.65
_FEWEST_EFFECTIVE_DRAWS = 4.0
#: least ratio by which the sd of a positive quantity is scaled up
_LEAST_RATIO = 0.25
#: points that chains began at, below which a jackknife over them says nothing
_FEWEST_POINTS = 3


def virial(evidence: Evidence, limits: Limits) -> Found | None:
    """Compares the spread of the draws with the spread that the log density implies.

    For draws z of the posterior, −E[(z − z̄)·∇log p] is the number of parameters. It is larger where the draws are
    too wide, and smaller where they are too narrow.
    """
    values = evidence.draws(STEIN, "virial")
    size = evidence.values(STEIN, "size")
    if values is None or size is None or not np.isfinite(values).all():
        return None
    names = np.array([*_sites(evidence), "all weights"])
    ratio = np.concatenate([values / size, values.sum(-1, keepdims=True) / size.sum()], axis=-1)
    mean, p = _tested(ratio, 1.0, positive=True)
    worst = _worst(evidence, names, mean, p, np.abs(np.log(np.maximum(mean, 1e-6))), limits)
    # a variational optimum has the ratio one, so a net's draws below it earn a warning; a site held at a point has
    # exactly zero
    below_one = worst.value is not None and worst.value < 1.0 and worst.value != 0.0
    status: Status = "warn" if worst.status == "info" and below_one else worst.status
    return _pass_as_info(replace(worst, status=status, limit=1.0), evidence)


def score(evidence: Evidence, limits: Limits) -> Found | None:
    """The mean gradient of the log density over the draws, which is zero for draws of the posterior.

    Where E[∇log p] is not zero, the draws are centred in the wrong place.
    """
    values = evidence.draws(STEIN, "score")
    size = evidence.values(STEIN, "size")
    if values is None or size is None or not np.isfinite(values).all():
        return None
    columns = values.reshape(*values.shape[:2], -1)
    scale = columns.std(axis=(0, 1))
    varies = scale > 0.0
    if not varies.any():
        return None
    names = np.repeat(_sites(evidence), values.shape[3])[varies]
    mean, p = _tested(
        columns[:, :, varies] / scale[varies],
        0.0,
        chosen_of=int(size.sum()),
    )
    return _pass_as_info(_worst(evidence, names, np.abs(mean), p, np.abs(mean), limits), evidence)


def function_moves(evidence: Evidence, limits: Limits) -> Found | None:
    """Moves the draws by Hamiltonian Monte Carlo and compares the function before and after.

    Such moves do not change the distribution of draws of the posterior. For a program its sites are compared. Two
    standard errors are subtracted from every change, so that chance alone does not count. Draws of an approximation
    are held against short chains that begin at some of them, where a gradient is cheap enough, of a program where the
    chains arrive at the posterior.
    """
    arrived = beside_posterior(evidence)
    if arrived is not None:
        return _judge_beside(evidence, limits, arrived)
    _, _, alike, _ = limits
    pair = _before_and_after(evidence, "")
    if pair is None or isinstance(pair, Found):
        return pair
    before, after = pair
    # all draws, of which only some were moved
    f = before if evidence.f is None else evidence.f.reshape(-1, *evidence.f.shape[2:])
    if f.shape[1:] != before.shape[1:]:
        return None
    kinds = evidence.point_kinds(f.shape[1], "sites" if evidence.f is None else "probes")
    change = _change_where_it_varies(f, after)
    shift = _beyond_chance(change.shift, change.shift_error)
    log_ratio = _beyond_chance(change.log_ratio, change.log_ratio_error)
    status = grade_by_kind(shift, np.exp(-log_ratio), kinds, limits)
    ratio = _typical_ratio(change.log_ratio, kinds)
    numbers = {
        "shift": float(np.nanmedian(np.abs(change.shift))),
        "inverse": 1.0 / ratio,
        "remedy": _remedy(evidence),
    }
    result = Found(status, ratio, "", numbers, alike)
    return _unless_unmoved(result, evidence, before, after)


def _typical_ratio(log_ratio: np.ndarray, kinds: np.ndarray) -> float:
    """The ratio of sds that is typical of the kind of points where it is farthest from one."""
    medians = [float(np.median(of_kind)) for of_kind in by_kind(log_ratio, kinds)]
    return float(np.exp(max(medians, key=abs)))


def density_moves(evidence: Evidence, limits: Limits) -> Found | None:
    """Moves draws of chains by Hamiltonian Monte Carlo and compares their log density before and after.

    Draws of the wrong shape can have the posterior's mean and covariance, and with them the right function and the
    right mean gradient. The spread of their log density is then still wrong.
    """
    near, far, alike, unlike = limits
    pair = _before_and_after(evidence, "density_")
    if pair is None or isinstance(pair, Found):
        return pair
    change = _change(*pair)
    shift = abs(float(change.shift))
    log_ratio = abs(float(change.log_ratio))
    status = worse(
        _grade_in_errors(shift, float(change.shift_error), (near, far)),
        _grade_in_errors(log_ratio, float(change.log_ratio_error), (alike, unlike)),
    )
    numbers = {
        "shift": shift,
        "inverse": float(np.exp(-change.log_ratio)),
        "remedy": _remedy(evidence),
    }
    limit = float(np.exp(-alike))
    result = Found(status, float(np.exp(change.log_ratio)), "", numbers, limit)
    return _unless_unmoved(result, evidence, *pair)


def _tested(
    values: np.ndarray,
    expected: float,
    chosen_of: int = 0,
    positive: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Mean (quantity,) of values (chain, draw, quantity), and the p-value of its being `expected`, by Student's t.

    Bonferroni over the quantities and those that they were chosen of. The sd of a ``positive`` ratio comes out low
    together with its mean: below the expected mean the sd is scaled up to what it would be there.
    """
    total = values.shape[0] * values.shape[1]
    columns = np.moveaxis(values, 2, 0)
    worth = ess(columns, "mean")
    worth = np.clip(np.where(np.isfinite(worth), worth, total), _FEWEST_EFFECTIVE_DRAWS, total)
    mean = columns.mean(axis=(1, 2))
    sd = columns.std(axis=(1, 2))
    if positive:
        sd = sd / np.clip(mean / expected, _LEAST_RATIO, 1.0)
    t = np.abs(mean - expected) * np.sqrt(worth) / np.maximum(sd, 1e-12)
    return mean, np.minimum(1.0, 2.0 * stats.t.sf(t, worth - 1.0) * (values.shape[2] + chosen_of))


def _worst(
    evidence: Evidence,
    names: np.ndarray,
    value: np.ndarray,
    p: np.ndarray,
    effect: np.ndarray,
    limits: Limits,
) -> Found:
    """The finding for the quantity with the largest significant effect, or else with the largest effect.

    Of an approximation of a net with hidden units no fault in single weights fails, and no pass passes
    (`_pass_as_info`). Near the posterior of such a net a density misses it in single weights, rightly for its
    functions: a fault is information. It is a warning of a variational one, which fulfils the identities at its
    optimum, and of one that claims nothing.
    """
    significant = (p < _RATES[0]) & (effect > limits[0])
    worst = int(np.argmax(np.where(significant, 1e6 + effect, effect)))
    status = grade_tested(p[worst], effect[worst], _RATES, limits)
    if status != "pass" and evidence.is_iid and evidence.has_hidden_units:
        fulfils = evidence.text("log_evidence_kind") == "elbo" or evidence.claim == "none"
        status = "warn" if fulfils else "info"
    numbers = {
        "where": str(names[worst]),
        "p": float(p[worst]),
        "remedy": _remedy(evidence),
    }
    return Found(status, float(value[worst]), "", numbers)


def _pass_as_info(result: Found, evidence: Evidence) -> Found:
    """The finding; a pass of an approximation of a net becomes information only, as faults do in `_worst`.

    In single weights these identities hold at the optimum of a variational bound, whatever its family misses, and
    where they fail a Gaussian at a mode may still have the right function. A pass is therefore no evidence.
    """
    vouches = not (evidence.is_iid and evidence.has_hidden_units)
    return result if vouches or result.status != "pass" else replace(result, status="info")


def _remedy(evidence: Evidence) -> str:
    if evidence.is_iid:
        return evidence.remedy
    return "Check that data, prior and likelihood are those of the run, then fit again with a longer warm-up."


def _sites(evidence: Evidence) -> list[str]:
    virial = evidence.variable(STEIN, "virial")
    if virial is None:
        return []
    return labels(virial, "site") or [f"site {index}" for index in range(virial.sizes["site"])]


def _undecided(acceptance: float, stayed: float = 1.0) -> Found:
    return Found("info", None, "moves_undecided", {"acceptance": acceptance, "stayed": stayed})


def _before_and_after(
    evidence: Evidence, prefix: str
) -> tuple[np.ndarray, np.ndarray] | Found | None:
    """Draws of a quantity (draw, …) before and after the moves; a finding if these decide nothing; None without."""
    before = evidence.draws(MOVED, f"{prefix}before")
    after = evidence.draws(MOVED, f"{prefix}after")
    acceptance = evidence.values(MOVED, "acceptance")
    if before is None or after is None or acceptance is None or before.shape != after.shape:
        return None
    # class scores relative to their mean, as `Evidence.f`
    if prefix == "" and evidence.likelihood == "categorical" and after.shape[-1] > 1:
        before = before - before.mean(axis=-1, keepdims=True)
        after = after - after.mean(axis=-1, keepdims=True)
    before = before.reshape(-1, *before.shape[2:])
    after = after.reshape(-1, *after.shape[2:])
    rate = float(acceptance)
    if rate < _LEAST_ACCEPTED or not _vary(before, after):
        return _undecided(rate)
    return before, after


def _vary(before: np.ndarray, after: np.ndarray) -> bool:
    """Whether draws (draw, …) are finite and vary, and still do when moved, wherever they did."""
    if not (np.isfinite(before).all() and np.isfinite(after).all()):
        return False
    # a function may be held at a point, as that of a net without a bias is
    varies = np.ptp(before, axis=0) > 0.0
    return bool(varies.any() and np.ptp(after, axis=0)[varies].all())


def _unless_unmoved(
    result: Found,
    evidence: Evidence,
    before: np.ndarray,
    after: np.ndarray,
) -> Found:
    """The finding, unless it is a pass and the draws have moved too little to deserve one."""
    before = _centred_columns(before)
    after = _centred_columns(after)
    scale = np.maximum(before.std(axis=0) * after.std(axis=0), np.finfo(float).tiny)
    stayed = float(np.median((before * after).mean(axis=0) / scale))
    if result.status == "pass" and stayed > _MOST_CORRELATED:
        return _undecided(float(evidence.tree[MOVED]["acceptance"]), stayed)
    return result


def _centred_columns(draws: np.ndarray) -> np.ndarray:
    """Draws (draw, …) as columns (draw, quantity) about their means."""
    columns = draws.reshape(len(draws), -1)
    return columns - columns.mean(axis=0)


def beside_posterior(evidence: Evidence) -> bool | None:
    """Whether short chains from the draws of a net have arrived at its posterior; None where there are none."""
    arrived = evidence.values(MOVED, "arrived")
    return None if arrived is None else bool(arrived)


class _Comparison(NamedTuple):
    """The function by an approximation, compared with that by short chains that began at its draws, (probe, output).

    Args:
        shift: distance of the means, in sds of the chains.
        log_ratio: of the approximation's sd over that of the chains.
        regions: the region of every probe, (probe,).
        chance: what chance may add to a shift and to a log ratio.
    """

    shift: np.ndarray
    log_ratio: np.ndarray
    regions: np.ndarray
    chance: _Chance


class _Chance(NamedTuple):
    """What chance may add to a shift of the mean, in sds, and to a log ratio of sds, (probe, output) each."""

    shift: np.ndarray
    log_ratio: np.ndarray


class _Region(NamedTuple):
    """The comparison in one region: its grade, the medians of shift and log ratio, and what a tenth exceeds.

    Args:
        worst_shift: by how much the mean is off, or more, at a tenth of the values.
        worst_factor: by which factor the sd is off, either way, or more, at a tenth.
    """

    name: str
    status: Status
    shift: float
    log_ratio: float
    worst_shift: float
    worst_factor: float

    @property
    def badness(self) -> tuple[int, float]:
        """By the grade, then by the larger of both differences."""
        return _RANKS[self.status], max(self.shift, abs(self.log_ratio))


_RANKS: dict[Status, int] = {"pass": 0, "warn": 1, "fail": 2}


def _judge_beside(evidence: Evidence, limits: Limits, arrived: bool) -> Found | None:
    """The function by an approximation, compared with the posterior that short chains from its draws have arrived at.

    Of a program they are compared site by site. Agreement with chains that have not arrived proves nothing.
    """
    comparison = _compared_with_chains(evidence, arrived)
    if comparison is None:
        return None
    regions = [_region(comparison, name, limits) for name in np.unique(comparison.regions)]
    worst = max(regions, key=lambda region: region.badness)
    if worst.status == "pass" and not arrived:
        return Found("info", None, "moves_short", _arrival(evidence))
    ratio = float(np.exp(worst.log_ratio))
    numbers = {
        "shift": worst.shift,
        "inverse": 1.0 / ratio,
        "region": worst.name,
        "worst_shift": worst.worst_shift,
        "worst_factor": worst.worst_factor,
        "arrived": arrived,
        "linearized": evidence.is_linearized,
        "remedy": _remedy(evidence),
    }
    code = "sites_beside_posterior" if evidence.f is None else "beside_posterior"
    return Found(worst.status, ratio, code, numbers, limits[2])


def _compared_with_chains(evidence: Evidence, arrived: bool) -> _Comparison | None:
    """The comparison; None where no chains have moved.

    Of chains that have not arrived, what chance may do is taken off every change: draws of the posterior would not
    have changed at all. So it is of a program, whose sites may have heavy tails. A linearised net is not where its
    chains begin: what they still approach it by is no difference.
    """
    regions = evidence.values(MOVED, "region")
    starts = evidence.values(MOVED, "starts")
    f = _function(evidence, "approximate")
    f_moved = _function(evidence, "moved")
    if f is None or f_moved is None or regions is None or starts is None:
        return None
    function = _moments_of(f)
    moved = _moments_of(f_moved)
    shift = function.mean - moved.mean
    log_ratio = function.log_sd - moved.log_sd
    begun = _moments(evidence, "started")
    if begun is not None and not arrived:
        shift = np.where(shift * (moved.mean - begun.mean) > 0, 0.0, shift)
        log_ratio = np.where(log_ratio * (moved.log_sd - begun.log_sd) > 0, 0.0, log_ratio)
    none = np.zeros_like(shift)
    chance = _Chance(none, none)
    if not arrived or evidence.f is None:
        chance = _chance(f_moved, evidence.values(MOVED, "moved_start"), float(starts))
    if evidence.f is None:
        chance = _with_draws(chance, f, moved)
    return _Comparison(np.abs(shift) / np.exp(moved.log_sd), log_ratio, regions, chance)


def _chance(f: np.ndarray, start: np.ndarray | None, num_starts: float) -> _Chance:
    """Half a 95 % interval of the mean and of the log sd by chains that have not arrived.

    Chains that began at one point may still be near it: what varies independently are these points, and the jackknife
    leaves out the chains of one at a time. Where fewer than three are known, as in files of earlier versions, two
    standard errors of that many independent draws.

    Args:
        f: draws of the chains (draw, probe, output).
        start: which point the chain of a draw began at, (draw,).
        num_starts: different points that chains began at.
    """
    points = np.unique([] if start is None else start)
    if start is None or len(points) < _FEWEST_POINTS:
        two_errors = np.full(f.shape[1:], 2.0 / np.sqrt(num_starts))
        return _Chance(two_errors, two_errors)
    f = f - f.mean(axis=0)
    without = [_moments_of(f[start != point]) for point in points]
    half_width = float(stats.t.ppf(0.975, len(points) - 1))
    mean_error = _jackknife_error(np.stack([moments.mean for moments in without]))
    log_sd_error = _jackknife_error(np.stack([moments.log_sd for moments in without]))
    shift = half_width * mean_error / np.exp(_moments_of(f).log_sd)
    return _Chance(shift, half_width * log_sd_error)


def _with_draws(chance: _Chance, f: np.ndarray, moved: _Moments) -> _Chance:
    """What chance may do to the chains, and to independent draws (draw, probe, output) by two standard errors."""
    _, mean_error, log_sd_error = _spread(f)
    shift = 2.0 * mean_error / np.exp(moved.log_sd)
    return _Chance(np.hypot(chance.shift, shift), np.hypot(chance.log_ratio, 2.0 * log_sd_error))


def _jackknife_error(without: np.ndarray) -> np.ndarray:
    """The standard error of an estimate, from its values without each of several groups, (group, …)."""
    return np.sqrt((len(without) - 1.0) * without.var(axis=0))


class _Moments(NamedTuple):
    """Mean and logarithm of the sd of a function, (probe, output)."""

    mean: np.ndarray
    log_sd: np.ndarray


def _moments(evidence: Evidence, name: str) -> _Moments | None:
    """The moments of the draws of this name; None where there are none."""
    f = _function(evidence, name)
    return None if f is None else _moments_of(f)


def _moments_of(f: np.ndarray) -> _Moments:
    """The moments of draws (draw, probe, output)."""
    return _Moments(f.mean(axis=0), np.log(np.maximum(f.std(axis=0), 1e-30)))


def _function(evidence: Evidence, name: str) -> np.ndarray | None:
    """Draws (draw, probe, output) of this name, logits less their mean over classes; None where there are none."""
    f = evidence.values(MOVED, name)
    if f is not None and evidence.likelihood == "categorical" and f.shape[-1] > 1:
        f = f - f.mean(axis=-1, keepdims=True)
    return f


def _region(comparison: _Comparison, name: str, limits: Limits) -> _Region:
    """The comparison in the region of this name."""
    is_inside = comparison.regions == name
    shift = comparison.shift[is_inside]
    log_ratio = comparison.log_ratio[is_inside]
    chance = comparison.chance
    status = grade_by_kind(
        np.maximum(shift - chance.shift[is_inside], 0.0),
        np.exp(-np.maximum(np.abs(log_ratio) - chance.log_ratio[is_inside], 0.0)),
        comparison.regions[is_inside],
        limits,
    )
    return _Region(
        str(name),
        status,
        float(np.median(shift)),
        float(np.median(log_ratio)),
        float(np.quantile(shift, MOST)),
        float(np.exp(np.quantile(np.abs(log_ratio), MOST))),
    )


def _arrival(evidence: Evidence) -> dict[str, float]:
    """How far short chains have come, by what shows that they have not arrived."""
    names = ("transitions", "nested_rhat", "drift", "memory")
    values = {name: evidence.values(MOVED, name) for name in names}
    return {
        name: float(value)
        for name, value in values.items()
        if value is not None and np.isfinite(value)
    }


def _beyond_chance(change: np.ndarray, error: np.ndarray) -> np.ndarray:
    """The size of a change less two standard errors, at least zero."""
    return np.maximum(np.abs(change) - 2.0 * error, 0.0)


def _grade_in_errors(effect: float, error: float, limits: Limits) -> Status:
    """The grade of an effect with its standard error."""
    # negated, as the smaller p is the surer
    standard_errors = -effect / max(error, 1e-300)
    return grade_tested(standard_errors, effect, (-SIGMAS[0], -SIGMAS[1]), limits)


class _Change(NamedTuple):
    """How moving draws (draw, …) has changed their mean and sd, (…) each.

    Args:
        shift: of the mean, in sds of the moved draws.
        log_ratio: of the sd before over that after.
        shift_error, log_ratio_error: their standard errors.
    """

    shift: np.ndarray
    log_ratio: np.ndarray
    shift_error: np.ndarray
    log_ratio_error: np.ndarray


def _change(before: np.ndarray, after: np.ndarray) -> _Change:
    """The change between draws (draw, …) and moved ones, of which there may be fewer."""
    sd_before, mean_error_before, log_sd_error_before = _spread(before)
    sd_after, mean_error_after, log_sd_error_after = _spread(after)
    return _Change(
        (after.mean(axis=0) - before.mean(axis=0)) / sd_after,
        np.log(sd_before / sd_after),
        np.hypot(mean_error_before, mean_error_after) / sd_after,
        np.hypot(log_sd_error_before, log_sd_error_after),
    )


def _spread(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The sd of draws (draw, …), and the standard errors of their mean and of the logarithm of their sd."""
    squares = (draws - draws.mean(axis=0)) ** 2
    sd = np.sqrt(squares.mean(axis=0))
    mean_error = sd / np.sqrt(len(draws))
    log_sd_error = 0.5 * squares.std(axis=0) / squares.mean(axis=0) / np.sqrt(len(draws))
    return sd, mean_error, log_sd_error


def _change_where_it_varies(before: np.ndarray, after: np.ndarray) -> _Change:
    """As `_change`, NaN where the draws before are all the same."""
    still = np.ptp(before, axis=0) == 0.0
    return _Change(*(np.where(still, np.nan, change) for change in _change(before, after)))
