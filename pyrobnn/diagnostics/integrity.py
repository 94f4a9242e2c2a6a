"""What stands before any judgement: finite values, an ended fit, rows that are new; and what `audit` looks for."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
from scipy import stats
from scipy.spatial import cKDTree
from scipy.special import logsumexp

from pyrobnn.core import groups
from pyrobnn.core.findings import DRAWS, findings
from pyrobnn.core.groups import (
    CONSTANT_DATA,
    FUNCTION,
    HELD_OUT,
    MOVED,
    OBSERVED_DATA,
    POSTERIOR,
    SAMPLE_DIMS,
    SAMPLE_STATS,
)
from pyrobnn.diagnostics.convergence import quantities
from pyrobnn.diagnostics.evidence import Evidence, flattened, spread
from pyrobnn.diagnostics.grades import Found, Limits, Status, grade

#: what other checks, scores and figures are made of; of a sampler's statistics only `_STATS` are read
_READ = (
    groups.LOG_LIKELIHOOD,
    groups.LOG_PRIOR,
    groups.POSTERIOR_PREDICTIVE,
    groups.REPLICATES,
    groups.PREDICTIONS,
    groups.GRID,
    OBSERVED_DATA,
    HELD_OUT,
)
_STATS = ("lp", "energy", "log_p", "log_q", "diverging", "tree_depth", "acceptance_rate")
#: findings of a fit that no other check is needed for: its draws are not the posterior's
_UNUSABLE = ("modes_unsettled",)
_FEWEST_STEPS = 20  # steps of a search below which losses show nothing
_MIN_NEAR = 20  # replicates near an outcome, below which its density is not estimated from them


def hopeless(evidence: Evidence) -> Found | None:
    """A failure if there are no draws, or draws that are NaN or infinite: nothing else can then be computed."""
    if evidence.num_draws == 0:
        return Found("fail", 0.0, "no_draws")
    count = 0
    for group in (POSTERIOR, FUNCTION):
        for name, not_finite in _not_finite(evidence, group).items():
            # what a program computes from its draws is read by no other check, and the fit has told of it
            is_draw = set(SAMPLE_DIMS) <= set(evidence.tree[group][name].dims)
            if is_draw and name not in evidence.computed:
                count += not_finite
    return Found("fail", float(count), "draws_not_finite", {"count": count}) if count else None


def finite(evidence: Evidence, _: Limits) -> Found | None:
    """Checks that all numbers that a verdict reads are finite. An infinite variance is allowed."""
    counts: dict[str, int] = {}
    for group in _READ:
        for name, count in _not_finite(evidence, group).items():
            if group != OBSERVED_DATA or count != _masked(evidence, name):
                counts[f"{group}/{name}"] = count
    for name, count in _not_finite(evidence, SAMPLE_STATS).items():
        if name in _STATS:
            counts[f"{SAMPLE_STATS}/{name}"] = count
    if not counts:
        return None
    total = sum(counts.values())
    listed = ", ".join(f"{count} of {name}" for name, count in list(counts.items())[:3])
    return Found("warn", float(total), "", {"count": total, "listed": listed})


def _masked(evidence: Evidence, name: str) -> int:
    """Observed values without a term in the log likelihood, as where a program masks those that are missing."""
    terms = evidence.variable(groups.LOG_LIKELIHOOD, name)
    if terms is None:
        return 0
    return evidence.tree[OBSERVED_DATA].dataset[name].size - terms[0, 0].size


def _not_finite(evidence: Evidence, group: str) -> dict[str, int]:
    """Variable of a group → how many of its values are NaN or infinite, where any are."""
    counts = {}
    for name in evidence.names(group):
        values = evidence.tree[group].dataset[name].values
        if np.issubdtype(values.dtype, np.floating):
            bad = np.isnan(values) if name.endswith("var") else ~np.isfinite(values)
            counts[name] = int(bad.sum())
    return {name: count for name, count in counts.items() if count}


def fit(evidence: Evidence, limits: Limits) -> Found | None:
    """Checks that the fit ran to its end, at temperature one, and reported no problem of its own."""
    optimum = _optimum(evidence, limits)
    if optimum is not None and optimum.status == "fail":
        return optimum
    if evidence.number("interrupted", 0.0) != 0.0:
        return Found("warn", None, "interrupted", {"count": evidence.num_draws})
    if optimum is not None:
        return optimum
    temperature = evidence.number("temperature", 1.0)
    if temperature != 1.0:
        return Found("warn", temperature, "tempered", limit=1.0)
    return _warned(evidence)


def _warned(evidence: Evidence) -> Found | None:
    """What the fit found of its draws, or, in a tree without findings, warned of."""
    stored = evidence.json("findings")
    if not isinstance(stored, list):
        warnings = evidence.json("warnings")
        return _fit_warned("warn", list(map(str, warnings)) if isinstance(warnings, list) else [])
    of_draws = [finding for finding in findings(stored) if finding.code in DRAWS]
    # the one that is shown is of those that spoil the draws
    of_draws.sort(key=lambda finding: finding.code not in _UNUSABLE)
    unusable = any(finding.code in _UNUSABLE for finding in of_draws)
    return _fit_warned("fail" if unusable else "warn", list(map(str, of_draws)))


def _fit_warned(status: Status, texts: list[str]) -> Found | None:
    if not texts:
        return None
    numbers = {"first": texts[0].rstrip(".")}
    return Found(status, float(len(texts)), "fit_warned", numbers, 0.0)


def _optimum(evidence: Evidence, limits: Limits) -> Found | None:
    """Whether the search ended short of its optimum, by what the fit found that more steps would gain."""
    measured = evidence.number("gain_left", np.nan)
    fall = evidence.number("fall_left", np.nan)
    limit = evidence.number("gain_limit", np.nan)
    gain = measured if np.isfinite(measured) else fall
    if not (np.isfinite(gain) and np.isfinite(limit)):
        steps = evidence.number("num_steps", np.inf)
        short = steps < _FEWEST_STEPS and evidence.text("stopped") == "num_steps"
        return (
            Found(
                "warn",
                steps,
                "few_steps",
                limit=_FEWEST_STEPS,
            )
            if short
            else None
        )
    # what the losses of a run let expect is rougher than what further steps have gained
    status: Status = "fail" if measured > limits[0] * limit else "warn"
    return None if gain <= limit else Found(status, gain, "unfinished", limit=limit)


def claim(evidence: Evidence, limits: Limits) -> Found | None:
    r"""Asks whether the draws can come from a posterior at all, and whether anything can compare them with it.

    A point estimate has no spread, and an ensemble's members have no density: of draws without a density it can only
    be asked whether they differ. How many parameters they leave open is measured by

    .. math:: p = \sum_n \operatorname{var} \log p(y_n \mid \theta_s),

    to which each parameter that the data determine contributes one (Gelman, Hwang & Vehtari, 2014).
    """
    (fewest_parameters,) = limits
    numbers = {"method": "This run" if evidence.method == "unknown" else evidence.method}
    if evidence.is_point:
        return Found("warn", 1.0, "point_estimate", numbers)
    known = evidence.variable(SAMPLE_STATS, "log_q") is not None or evidence.claim == "exact"
    if not evidence.is_iid or known:
        return None
    effective = _effective_parameters(evidence)
    if effective is not None and effective < fewest_parameters:
        return Found("warn", effective, "one_point", numbers)
    if _held_against_chains(evidence):
        return None
    # what was fitted by its density was cut short where that is missing, or the tree is another's
    code = "density_missing" if evidence.claim == "approximate" else "no_density"
    return Found("warn", None, code, numbers)


def _held_against_chains(evidence: Evidence) -> bool:
    """Whether short chains from the draws say more: all where they have arrived, of a net's function also before."""
    arrived = evidence.values(MOVED, "arrived")
    return arrived is not None and (bool(arrived) or evidence.has_hidden_units)


def _effective_parameters(evidence: Evidence) -> float | None:
    """The number of parameters that the draws leave open; None of three draws or fewer."""
    pointwise = evidence.log_likelihood
    if pointwise is None or pointwise[..., :1].size <= 3 or not np.isfinite(pointwise).all():
        return None
    return float(pointwise.astype(np.float64).var(axis=(0, 1), ddof=1).sum())


# the rows of the data


def rows(evidence: Evidence, limits: Limits) -> Found | None:
    """Counts held-out rows that are training rows too, and training rows that are copies of one another."""
    most_shared, far_too_many, most_copies = limits
    train = _rows(evidence, CONSTANT_DATA, OBSERVED_DATA)
    test = _rows(evidence, HELD_OUT, HELD_OUT)
    if not train:
        return None
    copies = 1.0 - len(set(train)) / len(train)
    if copies > most_copies and _continuous(evidence, len(set(train))):
        return Found("warn", copies, "rows_repeated", {"count": len(train)}, most_copies)
    if not test:
        return None
    share, natural = _exactly(train, test)
    if share <= natural + most_shared:
        shares = [(share, natural), _nearly(train, test)]
        share, natural = max(shares, key=lambda pair: pair[0] - pair[1])
    if share <= natural + most_shared:
        return None
    status: Status = "fail" if share > natural + far_too_many else "warn"
    numbers = {"count": len(test), "natural": natural}
    return Found(status, share, "", numbers, natural + most_shared)


def _exactly(train: list[bytes], test: list[bytes]) -> tuple[float, float]:
    """Shares of held-out rows that are training rows, and of training rows that occur again.

    Of data that repeat themselves as many rows are found in a part as within it.
    """
    counts = Counter(train)
    natural = sum(counts[row] > 1 for row in train) / len(train)
    return sum(row in counts for row in test) / len(test), natural


def _continuous(evidence: Evidence, distinct: int) -> bool:
    """Whether an input takes nearly as many values as there are distinct rows, so that no two agree by chance."""
    x = evidence.values(CONSTANT_DATA, "x")
    if x is None:
        return False
    return any(len(np.unique(column)) > 0.8 * distinct for column in x.reshape(len(x), -1).T)


def _rows(evidence: Evidence, group: str, outcome: str) -> list[bytes]:
    """Input and outcome of every point, in float32; none where they do not go together."""
    x = evidence.values(group, "x")
    y = evidence.values(outcome, "y")
    if x is None or y is None or len(x) != len(y):
        return []
    return [
        np.concatenate([inputs.ravel(), np.ravel(outcomes)]).astype(np.float32).tobytes()
        for inputs, outcomes in zip(x, y, strict=True)
    ]


def _nearly(train: list[bytes], test: list[bytes]) -> tuple[float, float]:
    """Shares of held-out and of training rows that a training row differs from by rounding alone."""
    known, new = (
        np.frombuffer(b"".join(rows), np.float32).reshape(len(rows), -1) for rows in (train, test)
    )
    sd = known.std(axis=0)
    known = known[:, sd > 0.0] / sd[sd > 0.0]
    new = new[:, sd > 0.0] / sd[sd > 0.0]
    if len(known) < 3 or known.shape[1] < 2:
        return 0.0, 0.0
    if not (np.isfinite(known).all() and np.isfinite(new).all()):
        return 0.0, 0.0
    tree = cKDTree(known)
    among_known = tree.query(known, k=2)[0][:, 1]
    from_new = tree.query(new)[0]
    # of the usual distance between neighbours, every column in units of its sd
    near = 0.01 * np.median(among_known)
    return float((from_new < near).mean()), float((among_known < near).mean())


# the rows of the audit


def copied_chains(evidence: Evidence, limits: Limits) -> Found | None:
    """Looks for chains that make the same moves draw by draw, or opposite ones: R-hat calls copies agreement."""
    moves = np.array([np.diff(draws, axis=1) for draws in list(quantities(evidence).values())[:8]])
    if moves.ndim < 3 or moves.shape[1] < 2 or moves.shape[2] < 20:
        return None
    moves = moves - moves.mean(axis=2, keepdims=True)
    moves /= np.maximum(np.linalg.norm(moves, axis=2, keepdims=True), np.finfo(float).tiny)
    alike = np.abs(np.einsum("qcs,qds->qcd", moves, moves)).min(axis=0) > limits[0]
    pairs = np.argwhere(np.triu(alike, 1))
    named = "; ".join(f"{chain}, {copy}" for chain, copy in pairs)
    copies = float(len(np.unique(pairs[:, 1])))
    return Found("fail" if copies else "pass", copies, "", {"named": named}, 0.0)


def repeated_draws(evidence: Evidence, limits: Limits) -> Found | None:
    """Looks for draws that return later in the run.

    A continuous posterior never gives a draw twice, except directly after itself where a proposal was rejected.
    """
    columns = [
        flattened(draws, 2).astype(np.float64)
        for draws in evidence.sites.values()
        if draws.dtype.kind == "f"
    ]
    if not columns or evidence.is_point:
        return None
    values = np.concatenate(columns, axis=2)
    # a draw that stays may differ in its last digits, which a transform rounds otherwise in each
    stays = np.isclose(
        values[:, 1:],
        values[:, :-1],
        rtol=4.0 * np.finfo(np.float32).eps,
        atol=0.0,
    ).all(axis=2)
    places = np.concatenate([values[:, 0], values[:, 1:][~stays]])
    share = (len(places) - len(np.unique(places, axis=0))) / evidence.num_draws
    limit_of_chains, limit_of_others = limits
    limit = limit_of_others if evidence.is_iid else limit_of_chains
    return Found(
        "fail" if share > limit else "pass",
        share,
        limit=limit,
    )


def log_likelihood(evidence: Evidence, limits: Limits) -> Found | None:
    """Checks that the log-likelihood, in nats per datum, is that of the data beside it, and not tempered.

    It is compared with the total that is stored with the function, and with how often replicates of an output come
    near its outcome: in the median over data, and by their order.
    """
    pointwise = evidence.log_likelihood
    if pointwise is None or evidence.is_point or not np.isfinite(pointwise).all():
        return None
    off_total = _off_total(evidence, pointwise)
    if off_total > limits[0]:
        return Found(grade(off_total, *limits), off_total)
    estimate = _by_replicates(evidence, pointwise)
    if estimate is None or len(estimate.log_share) < 8:
        return None
    off = estimate.off
    return Found("fail" if estimate.is_unordered else grade(off, *limits), off)


def _off_total(evidence: Evidence, pointwise: np.ndarray) -> float:
    """Largest difference, in nats per datum, of the sum over data from the total stored with the function, if any."""
    total = evidence.draws(FUNCTION, "log_likelihood")
    if total is None or total.shape != pointwise.shape[:2] or not np.isfinite(total).all():
        return 0.0
    return float(np.abs(pointwise.sum(-1, dtype=np.float64) - total).max()) / pointwise.shape[2]


class _ByReplicates(NamedTuple):
    """The predictive of single data as the log-likelihood has it, and as replicates have it.

    Args:
        lppd: log p(y_i | y) by the stored log-likelihood (datum,).
        log_share: its estimate from replicates near y_i (datum,).
        error: the standard error of one of these.
        whole: whether outcomes are labels or whole numbers.
    """

    lppd: np.ndarray
    log_share: np.ndarray
    error: float
    whole: bool

    @property
    def off(self) -> float:
        """The median distance of the two in nats, less what chance explains of it."""
        # the median size of a normal error is 0.674 of its sd, with a standard error of 0.787 / sqrt(N)
        chance = (0.674 + 3.0 * 0.787 / np.sqrt(len(self.lppd))) * self.error
        size = float(np.median(np.abs(self.lppd - self.log_share)))
        return float(np.sqrt(max(size**2 - chance**2, 0.0)))

    @property
    def is_unordered(self) -> bool:
        """Whether the two do not even go together over the data, although the densities differ beyond their error."""
        if self.whole or not float(self.log_share.std()) > 3.0 * self.error:
            return False
        correlation = stats.spearmanr(self.lppd, self.log_share).statistic
        return bool(correlation < 2.0 / np.sqrt(len(self.lppd)))


def _by_replicates(evidence: Evidence, pointwise: np.ndarray) -> _ByReplicates | None:
    """The two predictives of at most 500 data that replicates say something of; None where there are no replicates."""
    outcomes = evidence.replicates(whole=True)
    num_data = pointwise.shape[2]
    if outcomes is None or outcomes[1].shape != (num_data, 1):
        return None
    rows = spread(num_data, 500)
    draws, y = (values[..., rows, 0].astype(np.float64) for values in outcomes)
    flat = pointwise[:, :, rows].reshape(-1, len(rows)).astype(np.float64)
    lppd = logsumexp(flat, axis=0) - np.log(len(flat))
    whole = evidence.has_classes or bool((draws == np.round(draws)).all())
    estimate = _log_mass(draws, y, lppd) if whole else _log_density(draws, y)
    if estimate is None:
        return None
    log_share, error, use = estimate
    return _ByReplicates(lppd[use], log_share[use], error, whole)


def _log_mass(
    draws: np.ndarray, y: np.ndarray, lppd: np.ndarray
) -> tuple[np.ndarray, float, np.ndarray]:
    """Log share of the replicates (draw, N) that equal the outcome, its error, and where it can be judged by."""
    same = (draws == y).sum(axis=0)
    log_share = np.log(np.maximum(same, 1) / len(draws))
    error = float(np.median(1.0 / np.sqrt(np.maximum(same, 1))))
    # of certain labels nothing is seen
    uncertain = np.maximum(np.abs(log_share), np.abs(lppd)) > 0.05
    return log_share, error, (same >= _MIN_NEAR) & uncertain


def _log_density(draws: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, float, np.ndarray] | None:
    """Log density of the replicates (draw, N) at the outcome, by the distance of near ones, as `_log_mass`."""
    near = max(_MIN_NEAR, int(2.0 * np.sqrt(len(draws))))
    if len(draws) <= 2 * near:
        return None
    distance = np.partition(np.abs(draws - y), near - 1, axis=0)[near - 1]
    reach = np.maximum(distance, np.finfo(float).tiny)
    log_share = np.log((near - 1) / len(draws) / (2.0 * reach))
    inside = np.minimum((draws < y).sum(axis=0), (draws > y).sum(axis=0)) >= near
    repeated = (draws == y).sum(axis=0) > 1
    return log_share, 1.0 / np.sqrt(near), ~repeated & inside
