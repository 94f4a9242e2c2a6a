"""What stands before any judgement: finite values, an ended fit, rows that are new; and what `audit` looks for."""

from __future__ import annotations

from collections import Counter

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
    OBSERVED_DATA,
    POSTERIOR,
    SAMPLE_DIMS,
    SAMPLE_STATS,
)
from pyrobnn.diagnostics.convergence import quantities
from pyrobnn.diagnostics.evidence import Evidence, flattened, spread
from pyrobnn.diagnostics.points import has_classes, replicates
from pyrobnn.diagnostics.verdict import Found, Status, grade

#: what other checks, scores and figures are made of; of a sampler's statistics only `_STATS` are read
_READ = (
    *(
        groups.LOG_LIKELIHOOD,
        groups.LOG_PRIOR,
        groups.POSTERIOR_PREDICTIVE,
        groups.PREDICTIONS,
        groups.GRID,
    ),
    *(OBSERVED_DATA, HELD_OUT),
)
_STATS = ("lp", "energy", "log_p", "log_q", "diverging", "tree_depth", "acceptance_rate")
#: findings of a fit that no other check is needed for: its draws are not the posterior's
_UNUSABLE = ("modes_unsettled",)
_FEWEST_STEPS = 20  # steps of a search below which losses show nothing


def hopeless(evidence: Evidence) -> Found | None:
    """A failure if there are no draws, or draws that are NaN or infinite: nothing else can then be computed."""
    if evidence.num_draws == 0:
        return Found("fail", 0.0, "no_draws")
    # what a program computes from its draws is read by no other check, and the fit has told of it
    bad = {
        (group, name): count
        for group in (POSTERIOR, FUNCTION)
        for name, count in _not_finite(evidence, group).items()
        if name not in evidence.computed
        and set(SAMPLE_DIMS) <= set(evidence.tree[group][name].dims)
    }
    count = sum(bad.values())
    return Found("fail", float(count), "draws_not_finite", {"count": count}) if bad else None


def finite(evidence: Evidence, _: tuple[float, ...]) -> Found | None:
    """Whether all that is read is finite; an infinite variance is allowed."""
    counts = {
        (group, name): n for group in _READ for name, n in _not_finite(evidence, group).items()
    }
    bad = {
        "/".join(key): n
        for key, n in counts.items()
        if key[0] != OBSERVED_DATA or n != _masked(evidence, key[1])
    }
    bad |= {
        f"{SAMPLE_STATS}/{k}": n
        for k, n in _not_finite(evidence, SAMPLE_STATS).items()
        if k in _STATS
    }
    count = sum(bad.values())
    listed = ", ".join(f"{n} of {name}" for name, n in list(bad.items())[:3])
    return Found("warn", float(count), "", {"count": count, "listed": listed}) if bad else None


def _masked(evidence: Evidence, name: str) -> int:
    """Observed values without a term in the log likelihood, as where a program masks those that are missing."""
    terms = evidence.variable(groups.LOG_LIKELIHOOD, name)
    return (
        0 if terms is None else evidence.tree[OBSERVED_DATA].dataset[name].size - terms[0, 0].size
    )


def _not_finite(evidence: Evidence, group: str) -> dict[str, int]:
    """Variable of a group → how many of its values are NaN or infinite, where any are."""
    counts = {}
    for name in evidence.names(group):
        values = evidence.tree[group].dataset[name].values
        if np.issubdtype(values.dtype, np.floating):
            bad = np.isnan(values) if name.endswith("var") else ~np.isfinite(values)
            counts[name] = int(bad.sum())
    return {name: count for name, count in counts.items() if count}


def fit(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    """Whether the fit ran to its end, at temperature one and without findings of its own."""
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
    kept = evidence.json("findings")
    told = evidence.json("warnings")
    notes = [str(each) for each in told] if isinstance(told, list) else []
    if isinstance(kept, list):  # of findings those that are of the draws
        notes = [str(each) for each in findings(kept) if each.code in DRAWS]
        unusable = [note for note in findings(kept) if note.code in _UNUSABLE]
        if unusable:
            return Found(
                "fail",
                float(len(notes)),
                "fit_warned",
                {"first": str(unusable[0]).rstrip(".")},
                0.0,
            )
    numbers = {"first": notes[0].rstrip(".") if notes else ""}
    return Found("warn", float(len(notes)), "fit_warned", numbers, 0.0) if notes else None


def _optimum(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    """Whether the search ended short of its optimum, by what the fit found that more steps would gain."""
    measured, fall, limit = (
        evidence.number(name, np.nan) for name in ("gain_left", "fall_left", "gain_limit")
    )
    gain = measured if np.isfinite(measured) else fall
    if not (np.isfinite(gain) and np.isfinite(limit)):
        steps = evidence.number("num_steps", np.inf)
        short = steps < _FEWEST_STEPS and evidence.text("stopped") == "num_steps"
        return Found("warn", steps, "few_steps", limit=_FEWEST_STEPS) if short else None
    # what the losses of a run let expect is rougher than what further steps have gained
    status: Status = "fail" if measured > limits[0] * limit else "warn"
    return None if gain <= limit else Found(status, gain, "unfinished", limit=limit)


def claim(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    r"""Whether the draws can be those of a posterior, and whether they can be compared with one.

    Draws without a density of their own must at least differ. The number of parameters that they leave open is

    .. math:: p = \sum_n \operatorname{var} \log p(y_n \mid \theta_s),

    to which a parameter that the data inform contributes one (Gelman, Hwang & Vehtari, 2014).
    """
    numbers = {"method": "This run" if evidence.method == "unknown" else evidence.method}
    if evidence.is_point:
        return Found("warn", 1.0, "point_estimate", numbers)
    known = evidence.variable(SAMPLE_STATS, "log_q") is not None or evidence.claim == "exact"
    if not evidence.is_iid or known:
        return None
    pointwise = evidence.log_likelihood
    if pointwise is not None and pointwise[..., :1].size > 3 and np.isfinite(pointwise).all():
        effective = float(pointwise.astype(np.float64).var(axis=(0, 1), ddof=1).sum())
        if effective < limits[0]:
            return Found("warn", effective, "one_point", numbers)
    # what was fitted by its density was cut short where that is missing, or the tree is another's
    code = "density_missing" if evidence.claim == "approximate" else "no_density"
    return Found("warn", None, code, numbers)


# the rows of the data


def rows(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    """Whether held-out rows are training rows, and whether training rows are copies of one another."""
    train = _rows(evidence, CONSTANT_DATA, OBSERVED_DATA)
    test = _rows(evidence, HELD_OUT, HELD_OUT)
    if not train:
        return None
    known = Counter(train)
    copies = 1.0 - len(known) / len(train)
    # of data that repeat themselves as many rows are found in a part as within it
    natural = sum(count > 1 for count in map(known.__getitem__, train)) / len(train)
    if copies > limits[2] and _continuous(evidence, len(known)):
        return Found("warn", copies, "rows_repeated", {"count": len(train)}, limits[2])
    if not test:
        return None
    share = sum(row in known for row in test) / len(test)
    if share <= natural + limits[0]:
        share, natural = max(
            (share, natural), _nearly(train, test), key=lambda pair: pair[0] - pair[1]
        )
    status: Status = "fail" if share > natural + limits[1] else "warn"
    if share <= natural + limits[0]:
        return None
    return Found(status, share, "", {"count": len(test), "natural": natural}, natural + limits[0])


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
    pairs = zip(x, y, strict=True)
    return [
        np.concatenate([one.ravel(), np.ravel(of)]).astype(np.float32).tobytes()
        for one, of in pairs
    ]


def _nearly(train: list[bytes], test: list[bytes]) -> tuple[float, float]:
    """Shares of held-out and of training rows that a training row differs from by rounding alone."""
    known, new = (
        np.frombuffer(b"".join(rows), np.float32).reshape(len(rows), -1) for rows in (train, test)
    )
    sd = known.std(axis=0)
    known = known[:, sd > 0.0] / sd[sd > 0.0]
    new = new[:, sd > 0.0] / sd[sd > 0.0]
    if (
        len(known) < 3
        or known.shape[1] < 2
        or not (np.isfinite(known).all() and np.isfinite(new).all())
    ):
        return 0.0, 0.0
    tree = cKDTree(known)
    own = tree.query(known, k=2)[0][:, 1]
    other = tree.query(new)[0]
    near = 0.01 * np.median(
        own
    )  # of the usual distance between neighbours, every column in units of its sd
    return float((other < near).mean()), float((own < near).mean())


# the rows of the audit


def copied_chains(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    """Whether chains make the same moves draw by draw, or the opposite ones: R-hat calls that agreement."""
    moves = np.array([np.diff(draws, axis=1) for draws in list(quantities(evidence).values())[:8]])
    if moves.ndim < 3 or moves.shape[1] < 2 or moves.shape[2] < 20:
        return None
    moves = moves - moves.mean(axis=2, keepdims=True)
    moves /= np.maximum(np.linalg.norm(moves, axis=2, keepdims=True), np.finfo(float).tiny)
    alike = np.abs(np.einsum("qcs,qds->qcd", moves, moves)).min(axis=0) > limits[0]
    pairs = np.argwhere(np.triu(alike, 1))
    named = "; ".join(f"{first}, {second}" for first, second in pairs)
    copies = float(len(np.unique(pairs[:, 1])))
    return Found("fail" if copies else "pass", copies, "", {"named": named}, 0.0)


def repeated_draws(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    """Whether a draw returns later than right after itself: a continuous posterior never gives one twice."""
    flat = [flattened(each, 2) for each in evidence.sites.values() if each.dtype.kind == "f"]
    if not flat or evidence.is_point:
        return None
    values = np.concatenate([each.astype(np.float64) for each in flat], axis=2)
    # a draw that stays may differ in its last digits, which a transform rounds otherwise in each
    stays = np.isclose(
        values[:, 1:], values[:, :-1], rtol=4.0 * np.finfo(np.float32).eps, atol=0.0
    ).all(axis=2)
    places = np.concatenate([values[:, 0], values[:, 1:][~stays]])
    share = (len(places) - len(np.unique(places, axis=0))) / evidence.num_draws
    limit = limits[evidence.is_iid]
    return Found("fail" if share > limit else "pass", share, limit=limit)


def log_likelihood(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    """Whether the log-likelihood is that of the data beside it, in nats per datum: neither of other rows nor tempered.

    By the total that is stored with the function; by how often replicates of one output come near the outcome, in the
    median over data and by their order.
    """
    pointwise = evidence.log_likelihood
    outcomes = replicates(evidence, whole=True)
    if pointwise is None or evidence.is_point or not np.isfinite(pointwise).all():
        return None
    total = evidence.draws(FUNCTION, "log_likelihood")
    if total is not None and total.shape == pointwise.shape[:2] and np.isfinite(total).all():
        off = float(np.abs(pointwise.sum(-1, dtype=np.float64) - total).max()) / pointwise.shape[2]
        if off > limits[0]:
            return Found(grade(off, *limits), off)
    if outcomes is None or outcomes[1].shape != (pointwise.shape[2], 1):
        return None
    rows = spread(pointwise.shape[2], 500)
    draws, y = (each[..., rows, 0].astype(np.float64) for each in outcomes)
    flat = pointwise[:, :, rows].reshape(-1, len(rows)).astype(np.float64)
    lppd = logsumexp(flat, axis=0) - np.log(len(flat))
    same = (draws == y).sum(axis=0)
    few = 20
    whole = has_classes(evidence) or bool((draws == np.round(draws)).all())
    if whole:
        seen = np.log(np.maximum(same, 1) / len(draws))
        error = float(np.median(1.0 / np.sqrt(np.maximum(same, 1))))
        use = (same >= few) & (
            np.maximum(np.abs(seen), np.abs(lppd)) > 0.05
        )  # of certain labels nothing is seen
    else:
        near = max(few, int(2.0 * np.sqrt(len(draws))))
        if len(draws) <= 2 * near:
            return None
        reach = np.maximum(
            np.partition(np.abs(draws - y), near - 1, axis=0)[near - 1], np.finfo(float).tiny
        )
        seen = np.log((near - 1) / len(draws) / (2.0 * reach))
        error = 1.0 / np.sqrt(near)
        use = (same <= 1) & (np.minimum((draws < y).sum(axis=0), (draws > y).sum(axis=0)) >= near)
    if use.sum() < 8:
        return None
    # the median size of a normal error is 0.674 of its sd, with a standard error of 0.787 / sqrt(N)
    chance = (0.674 + 3.0 * 0.787 / np.sqrt(use.sum())) * error
    off = float(np.sqrt(max(float(np.median(np.abs(lppd - seen)[use])) ** 2 - chance**2, 0.0)))
    ordered = not whole and float(seen[use].std()) > 3.0 * error
    strange = ordered and stats.spearmanr(lppd[use], seen[use]).statistic < 2.0 / np.sqrt(use.sum())
    return Found("fail" if strange else grade(off, *limits), off)
