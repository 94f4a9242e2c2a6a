"""What stands before any judgement: draws that are finite, a fit that ended, draws that claim to be a posterior's."""

from __future__ import annotations

from collections import Counter

import numpy as np
from scipy.spatial import cKDTree

from pyrobnn.core.groups import (
    CONSTANT_DATA,
    FUNCTION,
    GRID,
    HELD_OUT,
    LOG_LIKELIHOOD,
    LOG_PRIOR,
    OBSERVED_DATA,
    POSTERIOR,
    POSTERIOR_PREDICTIVE,
    PREDICTIONS,
    SAMPLE_DIMS,
    SAMPLE_STATS,
)
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.verdict import Found, Status
from pyrobnn.wording.findings import DRAWS, findings

#: what other checks, scores and figures are made of; of a sampler's statistics only `_STATS` are read
_READ = (LOG_LIKELIHOOD, LOG_PRIOR, POSTERIOR_PREDICTIVE, OBSERVED_DATA, PREDICTIONS, HELD_OUT, GRID)
_STATS = ("lp", "energy", "log_p", "log_q", "diverging", "tree_depth", "acceptance_rate")
_FEWEST_STEPS = 20  # steps of a search below which losses show nothing
_MOST_VALUES = 1_000_000  # numbers of training rows above which no near copies are looked for


def hopeless(evidence: Evidence) -> Found | None:
    """A failure if there are no draws, or draws that are NaN or infinite: nothing else can then be computed."""
    if evidence.num_draws == 0:
        return Found("fail", 0.0, "no_draws")
    # what a program computes from its draws is read by no other check, and the fit has told of it
    bad = {
        (group, name): count
        for group in (POSTERIOR, FUNCTION)
        for name, count in _not_finite(evidence, group).items()
        if name not in evidence.computed and set(SAMPLE_DIMS) <= set(evidence.tree[group][name].dims)
    }
    count = sum(bad.values())
    return Found("fail", float(count), "draws_not_finite", {"count": count}) if bad else None


def finite(evidence: Evidence, _: tuple[float, ...]) -> Found | None:
    """A warning if anything else that is read holds NaN or infinity; an infinite variance is a variance."""
    bad = {f"{group}/{name}": n for group in _READ for name, n in _not_finite(evidence, group).items()}
    bad |= {f"{SAMPLE_STATS}/{k}": n for k, n in _not_finite(evidence, SAMPLE_STATS).items() if k in _STATS}
    count = sum(bad.values())
    listed = ", ".join(f"{n} of {name}" for name, n in list(bad.items())[:3])
    return Found("warn", float(count), "", {"count": count, "listed": listed}) if bad else None


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
    notes = _about_draws(evidence)
    numbers = {"first": notes[0].rstrip(".") if notes else ""}
    return Found("warn", float(len(notes)), "fit_warned", numbers, 0.0) if notes else None


def _about_draws(evidence: Evidence) -> list[str]:
    """What the fit has found of its draws, by the codes of its findings; all of its warnings where it keeps none."""
    found, told = evidence.json("findings"), evidence.json("warnings")
    if not isinstance(found, list):
        return [str(note) for note in told] if isinstance(told, list) else []
    return [str(each) for each in findings(found) if each.code in DRAWS]


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
    r"""A warning of draws that cannot be a posterior's, or that nothing can compare with one.

    Draws without a density of their own must differ at least:

    .. math:: p = \sum_n \operatorname{var} \log p(y_n \mid \theta_s)

    is the number of parameters that they leave open; one that the data inform counts one (Gelman, Hwang & Vehtari,
    2014).
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
    train, test = _rows(evidence, CONSTANT_DATA, OBSERVED_DATA), _rows(evidence, HELD_OUT, HELD_OUT)
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
        share, natural = max((share, natural), _nearly(train, test), key=lambda pair: pair[0] - pair[1])
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
    x, y = evidence.values(group, "x"), evidence.values(outcome, "y")
    if x is None or y is None or len(x) != len(y):
        return []
    pairs = zip(x, y, strict=True)
    return [np.concatenate([one.ravel(), np.ravel(of)]).astype(np.float32).tobytes() for one, of in pairs]


def _nearly(train: list[bytes], test: list[bytes]) -> tuple[float, float]:
    """Shares of held-out and of training rows that a training row differs from by rounding alone."""
    known, new = (np.frombuffer(b"".join(rows), np.float32).reshape(len(rows), -1) for rows in (train, test))
    sd = known.std(axis=0)
    known, new = known[:, sd > 0.0] / sd[sd > 0.0], new[:, sd > 0.0] / sd[sd > 0.0]
    few = len(known) < 3 or known.shape[1] < 2
    if few or known.size > _MOST_VALUES or not (np.isfinite(known).all() and np.isfinite(new).all()):
        return 0.0, 0.0
    tree = cKDTree(known)
    own, other = tree.query(known, k=2)[0][:, 1], tree.query(new)[0]
    near = 0.01 * np.median(own)  # of the usual distance between neighbours, every column in units of its sd
    return float((other < near).mean()), float((own < near).mean())
