"""Whether draws are of the model's posterior at all: Stein's identities, and what Hamiltonian moves change of them.

Both need the model's gradient and no reference: draws of the posterior fulfil the identities, and stay draws of it
wherever they are moved.
"""

from __future__ import annotations

import numpy as np
from scipy import stats
from scipy.special import ndtri, owens_t

from pyrobnn.core.chains import ess
from pyrobnn.core.groups import MOVED, STEIN
from pyrobnn.diagnostics.evidence import Evidence, labels
from pyrobnn.diagnostics.fidelity import MOST, by_kind
from pyrobnn.diagnostics.verdict import Found, Status, grade, grade_tested, worse

#: rates at which right draws may warn, and fail: this library's convention
RATES = 1e-3, 1e-5
#: standard errors beyond which a change of the log density warns, and fails: this library's convention
_SIGMAS = 3.5, 5.0
#: acceptance below which the draws have hardly moved
_LEAST_ACCEPTED = 0.2
_FEWEST_EFFECTIVE = 4.0
#: below which a ratio is so far off that its error needs no care
_LEAST_RATIO = 0.25


def virial(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    """Whether the draws spread as the density falls: −E[(z − z̄)·∇log p] is their dimension."""
    values, size = evidence.draws(STEIN, "virial"), evidence.values(STEIN, "size")
    if values is None or size is None or not np.isfinite(values).all():
        return None
    names = [*_sites(evidence), "all weights"]
    ratio = np.concatenate([values / size, values.sum(-1, keepdims=True) / size.sum()], axis=-1)
    mean, p = _tested(ratio, 1.0, positive=True)
    gap = np.abs(np.log(np.maximum(mean, 1e-6)))
    worst = _worst(p, gap, limits[0])
    value = float(mean[worst])
    status = _status(evidence, grade_tested(p[worst], gap[worst], RATES, limits))
    if status == "info" and value < 1.0 and ratio[..., worst].any():
        status = "warn"  # held sites have none; no optimum is this narrow
    numbers = {"where": names[worst], "p": float(p[worst]), "remedy": _remedy(evidence)}
    return Found(status, value, "", numbers, 1.0)


def score(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    """Whether the draws lie where the density does: E[∇log p] = 0."""
    values, size = evidence.draws(STEIN, "score"), evidence.values(STEIN, "size")
    if values is None or size is None or not np.isfinite(values).all():
        return None
    columns = values.reshape(*values.shape[:2], -1)
    scale = columns.std(axis=(0, 1))
    columns = columns[:, :, scale > 0.0] / scale[scale > 0.0]
    names = np.repeat(_sites(evidence), values.shape[3])[scale > 0.0]
    if columns.shape[2] == 0:
        return None
    mean, p = _tested(columns, 0.0, chosen_of=int(size.sum()))
    gap = np.abs(mean)
    worst = _worst(p, gap, limits[0])
    status = _status(evidence, grade_tested(p[worst], gap[worst], RATES, limits))
    numbers = {"where": str(names[worst]), "p": float(p[worst]), "remedy": _remedy(evidence)}
    return Found(status, float(gap[worst]), "", numbers)


def _tested(
    values: np.ndarray, expected: float, chosen_of: int = 0, positive: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Mean (quantity,) of values (chain, draw, quantity), and by Student's t the p-value of its being the one expected.

    Bonferroni over the quantities and those that some of them were chosen of. A ``positive`` ratio's sd comes out low
    together with its mean: where that is below the one expected, its logarithm is tested.
    """
    total = values.shape[0] * values.shape[1]
    columns = np.moveaxis(values, 2, 0)
    worth = ess(columns, "mean")
    worth = np.clip(np.where(np.isfinite(worth), worth, total), _FEWEST_EFFECTIVE, total)
    mean, sd = columns.mean(axis=(1, 2)), columns.std(axis=(1, 2))
    if positive:
        sd = sd / np.clip(mean / expected, _LEAST_RATIO, 1.0)
    t = np.abs(mean - expected) * np.sqrt(worth) / np.maximum(sd, 1e-12)
    return mean, np.minimum(1.0, 2.0 * stats.t.sf(t, worth - 1.0) * (values.shape[2] + chosen_of))


def _worst(p: np.ndarray, gap: np.ndarray, least: float) -> int:
    """The largest effect among those that are no chance, else the largest of all."""
    sure = (p < RATES[0]) & (gap > least)
    return int(np.argmax(np.where(sure, 1e6 + gap, gap)))


def _status(evidence: Evidence, status: Status) -> Status:
    """Of a density near the posterior of a net: it misses it in single weights, rightly for its functions."""
    if status == "pass" or not (evidence.is_iid and evidence.has_hidden_units):
        return status
    # a variational one fulfils the identities at its optimum, and one that claims nothing is told all the same
    fulfils = evidence.text("log_evidence_kind") == "elbo" or evidence.claim == "none"
    return "warn" if fulfils else "info"


def _remedy(evidence: Evidence) -> str:
    if evidence.is_iid:
        return evidence.remedy
    return (
        "Check that data, prior and likelihood are those that the chains were run on, then fit again with a longer "
        "warm-up."
    )


def _sites(evidence: Evidence) -> list[str]:
    virial = evidence.variable(STEIN, "virial")
    if virial is None:
        return []
    return labels(virial, "site") or [f"site {index}" for index in range(virial.sizes["site"])]


# moves


def _moved(evidence: Evidence) -> tuple[np.ndarray, np.ndarray, float] | None:
    """The function of all draws (chain, draw, probe, output) and of the moved ones, and their acceptance rate."""
    after, acceptance = evidence.draws(MOVED, "after"), evidence.values(MOVED, "acceptance")
    before = evidence.f
    if after is None or acceptance is None or before is None or after.shape[2:] != before.shape[2:]:
        return None
    if evidence.likelihood == "categorical" and after.shape[-1] > 1:
        after = after - after.mean(axis=-1, keepdims=True)
    return before, after, float(acceptance)


def _undecided(acceptance: float, stayed: float = 1.0) -> Found:
    return Found("info", None, "moves_undecided", {"acceptance": acceptance, "stayed": stayed})


def function_moves(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    """Whether the function stays as it is when draws are moved towards the posterior, as those of it would.

    Two standard errors are taken off every change; nine in ten points have twice the limits of the median.
    """
    found = _moved(evidence)
    if found is None:
        return None
    before, after = (f.reshape(-1, *f.shape[2:]) for f in found[:2])
    moves = np.ptp(before, 0) > 0.0  # a function may be held at a point, as that of a net without a bias is
    finite = bool(np.isfinite(before).all() and np.isfinite(after).all())
    if found[2] < _LEAST_ACCEPTED or not finite or not moves.any() or not np.ptp(after, 0)[moves].all():
        return _undecided(found[2])
    shift, gap, errors = (np.where(moves, each, np.nan) for each in _change(before, after))
    shifts = by_kind(np.maximum(np.abs(shift) - 2.0 * errors[0], 0.0), evidence, "probes")
    gaps = by_kind(np.maximum(np.abs(gap) - 2.0 * errors[1], 0.0), evidence, "probes")
    off, narrow = limits[:2], -np.log(limits[2:4])
    status = worse(
        *(grade(float(np.median(each)), *off) for each in shifts.values()),
        *(grade(float(np.quantile(each, MOST)), *(2.0 * limit for limit in off)) for each in shifts.values()),
        *(grade(float(np.median(each)), *narrow) for each in gaps.values()),
        *(grade(float(np.quantile(each, MOST)), narrow[1], 2.0 * narrow[1]) for each in gaps.values()),
    )
    stayed = _correlation(evidence)
    if status == "pass" and stayed > _blind((off[0], off[1]), (narrow[0], narrow[1])):
        return _undecided(found[2], stayed)
    kind = max(gaps, key=lambda name: float(np.median(gaps[name])))
    ratio = float(np.exp(np.median(by_kind(gap, evidence, "probes")[kind])))
    typical = float(np.nanmedian(np.abs(shift)))
    numbers = {"shift": typical, "inverse": 1.0 / ratio, "remedy": _remedy(evidence)}
    return Found(status, ratio, "", numbers, limits[2])


def density_moves(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    """Whether the log density of chains keeps its mean and spread when their draws are moved.

    Draws of another distribution with the posterior's own mean and covariance, as those without its tails, or in
    another shape, have right functions and means of gradients: how their log density varies is theirs alone.
    """
    before, after = (evidence.draws(MOVED, f"density_{when}") for when in ("before", "after"))
    acceptance = evidence.values(MOVED, "acceptance")
    if before is None or after is None or acceptance is None:
        return None
    before, after = (each.reshape(-1).astype(np.float64) for each in (before, after))
    finite = bool(np.isfinite(before).all() and np.isfinite(after).all())
    if acceptance < _LEAST_ACCEPTED or not finite or not np.ptp(before) > 0.0 < np.ptp(after):
        return _undecided(float(acceptance))
    shift, gap, errors = _change(before, after)
    pairs = (limits[:2], float(shift), float(errors[0])), (limits[2:4], float(gap), float(errors[1]))
    status = worse(*(_graded(abs(effect), error, of) for of, effect, error in pairs))
    stayed = float(np.corrcoef(before, after)[0, 1])
    beyond = [tuple(max(x, s * error) for x, s in zip(of, _SIGMAS, strict=True)) for of, _, error in pairs]
    if status == "pass" and stayed > _blind(beyond[0], beyond[1]):  # type: ignore[arg-type]
        return _undecided(float(acceptance), stayed)
    ratio = float(np.exp(gap))
    numbers = {"shift": abs(float(shift)), "inverse": 1.0 / ratio, "remedy": _remedy(evidence)}
    return Found(status, ratio, "", numbers, float(np.exp(-limits[2])))


def _graded(size: float, error: float, limits: tuple[float, ...]) -> Status:
    """The grade of an effect that counts where it is beyond chance."""
    sigmas = size / max(error, np.finfo(float).tiny)
    if size > limits[1] and sigmas > _SIGMAS[1]:
        return "fail"
    return "warn" if size > limits[0] and sigmas > _SIGMAS[0] else "pass"


def range_moves(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    """Whether moved draws of chains stay where the function of all draws is: none can leave the range of right ones.

    Of draws that lack what lies beyond an edge, as one half of the functions, many cross it at once; of n right draws
    two in n + 1 lie outside of the others.
    """
    found = _moved(evidence)
    if found is None:
        return None
    before, after, acceptance = found
    if acceptance < _LEAST_ACCEPTED or not (np.isfinite(before).all() and np.isfinite(after).all()):
        return _undecided(acceptance)
    columns = before.reshape(*before.shape[:2], -1)
    worth = np.nan_to_num(ess(np.moveaxis(columns, 2, 0), "mean"), nan=1.0)
    worth = np.minimum(worth, columns.shape[0] * columns.shape[1])
    low, high = columns.min((0, 1)), columns.max((0, 1))
    moved = after.reshape(-1, columns.shape[2])
    outside = ((moved < low) | (moved > high)).sum(axis=0)
    p = stats.poisson.sf(outside - 1, 2.0 * len(moved) / (worth + 1.0)) * len(worth)
    worst = int(np.argmin(p))
    share, p_least = float(outside[worst]) / len(moved), min(1.0, float(p[worst]))
    status = grade_tested(p_least, share, RATES, limits)
    stayed = _correlation(evidence)
    told = _range_would_tell(stayed, len(moved), float(np.median(worth)), len(worth), limits)
    if status == "pass" and not told:
        return _undecided(acceptance, stayed)
    return Found(status, share, "", {"p": p_least, "remedy": _remedy(evidence)}, limits[0])


def _change(before: np.ndarray, after: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Shift of the mean in sd of `after`, log ratio of the sds, and the standard errors of both, of draws (draw, …)."""
    sds, shifts, ratios = [], [], []
    for f in (before, after):
        squares = (f - f.mean(axis=0)) ** 2
        sds.append(np.sqrt(squares.mean(axis=0)))
        shifts.append(sds[-1] / np.sqrt(len(f)))
        ratios.append(0.5 * squares.std(axis=0) / squares.mean(axis=0) / np.sqrt(len(f)))
    shift = (after.mean(axis=0) - before.mean(axis=0)) / sds[1]
    return shift, np.log(sds[0] / sds[1]), np.stack([np.hypot(*shifts) / sds[1], np.hypot(*ratios)])


def _correlation(evidence: Evidence) -> float:
    """How closely moved functions follow where they were, in the median of the probes; 0 where nobody says."""
    there, moved = (evidence.draws(MOVED, name) for name in ("before", "after"))
    if there is None or moved is None:
        return 0.0
    before, after = (f.reshape(f.shape[0] * f.shape[1], -1) for f in (there, moved))
    before, after = (f - f.mean(axis=0) for f in (before, after))
    scale = np.maximum(before.std(axis=0) * after.std(axis=0), np.finfo(float).tiny)
    return float(np.median((before * after).mean(axis=0) / scale))


def _blind(shifts: tuple[float, float], gaps: tuple[float, float]) -> float:
    """The correlation of draws with where they were above which a fault that should fail could seem to pass.

    Mean and variance are then nearer to the posterior's by 1 − r and 1 − r² alone: of a mean that is off, and an sd too
    small or too large, the one seen least decides. `shifts` (sd), `gaps` (log ratios): what must not pass, and fails.
    """
    least, fails = (np.exp(2.0 * gap) for gap in gaps)
    squares = 1.0 - (least - 1.0) / (fails - 1.0), (fails / least - 1.0) / (fails - 1.0)
    return float(min(1.0 - shifts[0] / shifts[1], np.sqrt(max(0.0, min(squares)))))


def _range_would_tell(
    stayed: float, num_moved: int, ess: float, num_places: int, limits: tuple[float, ...]
) -> bool:
    r"""Whether draws that lack the share of the posterior that should fail would not have passed.

    .. math:: P(Z > h, Z' < h) = 2 T(h, \sqrt{(1 - r) / (1 + r)})

    of normal pairs of correlation r is what crosses an edge h, by Owen's T.
    """
    lack, stayed = limits[1], min(max(stayed, 0.0), 1.0)
    crossing = 2.0 * float(owens_t(ndtri(lack), np.sqrt((1.0 - stayed) / (1.0 + stayed)))) / (1.0 - lack)
    p = num_places * stats.poisson.sf(round(crossing * num_moved) - 1, 2.0 * num_moved / (ess + 1.0))
    return crossing > limits[0] and p < RATES[0]
