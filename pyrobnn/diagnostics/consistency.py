"""Whether what a tree holds fits together: draws as fine as a continuous posterior's, a log-likelihood of its data."""

from __future__ import annotations

import numpy as np
from scipy.special import gammaln, logsumexp

from pyrobnn.diagnostics import thresholds
from pyrobnn.diagnostics.evidence import WEIGHTS, Evidence, flattened
from pyrobnn.diagnostics.points import has_classes, replicates
from pyrobnn.diagnostics.verdict import Check, Status, grade
from pyrobnn.groups import FUNCTION, POSTERIOR

#: draws that tell a grid from chance, columns of a site that are looked at
_FEWEST_DRAWS, _MOST_COLUMNS = 50, 256
#: data whose log-likelihood is held against their replicates, and the fewest
_MOST_ROWS, _FEWEST_ROWS = 500, 8
#: replicates beside an outcome that say how dense they are there
_NEIGHBOURS, _LEAST_SEEN = 2.0, 20
#: outputs in which the twenty nearest of some hundreds still say how dense the draws are
_MOST_OUTPUTS = 3
#: nats below which a datum is too certain to tell one scale of its log-likelihood from another
_CERTAIN = 0.05
#: median of the size of a standard normal, and √N times the standard error of that median
_MEDIAN_SIZE, _MEDIAN_ERROR = 0.674, 0.787


def check_rounded(evidence: Evidence) -> Check | None:
    """A warning or failure where draws of a continuous site stand on a coarse grid."""
    if evidence.is_point or evidence.num_draws < _FEWEST_DRAWS:
        return None
    coarsest, where = 0.0, ""
    for name in evidence.names(POSTERIOR):
        draws = evidence.stored(POSTERIOR, name)
        if draws is None or draws.dtype.kind != "f" or name in evidence.computed:
            continue
        columns = flattened(draws, 2).reshape(evidence.num_draws, -1)
        chosen = np.unique(
            np.linspace(0, columns.shape[1] - 1, min(columns.shape[1], _MOST_COLUMNS)).astype(int)
        )
        spacing = _spacing(columns[:, chosen], counts=not name.startswith(WEIGHTS)) if len(chosen) else 0.0
        if spacing > coarsest:
            coarsest, where = spacing, name
    status = grade(coarsest, thresholds.GRID_WARN, thresholds.GRID_FAIL)
    if status == "pass":
        return None
    return Check(
        "rounded_draws",
        status,
        coarsest,
        f"steps between values ≤ {thresholds.GRID_WARN} sd; > {thresholds.GRID_FAIL} sd fails",
        "numerical",
        f"Draws of {where} stand on a grid with steps of {coarsest:.2g} of their sd.",
        "Store the draws as they were made: rounding has taken quantiles and small probabilities from them.",
    )


def _spacing(columns: np.ndarray, *, counts: bool) -> float:
    """The widest typical step, in sd, between the values of a column (draw, column) that hardly differ; else 0.

    A column is looked at where fewer than half of the draws differ in it, though they differ elsewhere; two values are
    an indicator, and whole numbers may be `counts`.
    """
    rows = len(np.unique(columns, axis=0))
    widest = 0.0
    for column in columns.T.astype(np.float64):
        values = np.unique(column)
        if not (2 < len(values) < 0.5 * rows) or (counts and (values == np.round(values)).all()):
            continue
        widest = max(widest, float(np.median(np.diff(values)) / column.std()))
    return widest


def check_held_weights(evidence: Evidence) -> Check | None:
    """A failure where single weights of a net have one value in all draws of a chain, and others move."""
    if evidence.is_point or evidence.num_draws < _FEWEST_DRAWS or evidence.claim == "none":
        return None
    held, moving, where = 0, 0, ""
    for name in evidence.names(POSTERIOR):
        draws = evidence.stored(POSTERIOR, name)
        if draws is None or draws.dtype.kind != "f" or not name.startswith(WEIGHTS):
            continue
        still = (np.ptp(flattened(draws, 2), axis=1) == 0.0).sum(axis=1)  # of each chain
        worst, size = int(still.max(initial=0)), int(np.prod(draws.shape[2:]))
        # a site that is held whole is a part that its method does not infer, and a whole chain has a check of its own
        if 0 < worst < size:
            held, where = held + worst, where or name
        moving += size - worst
    if not held or not moving:
        return None
    return Check(
        "held_weights",
        "fail",
        float(held),
        "0 weights that never move beside others that do",
        "numerical",
        f"{held} {'weight' if held == 1 else 'weights'} (in {where}) {'has' if held == 1 else 'have'} one value in all "
        "draws: no draw from a posterior does.",
        "Look at how the draws were stored: weights that were cut off or overwritten are not the posterior's.",
    )


def check_likelihood_scale(evidence: Evidence) -> Check | None:
    """Whether the log-likelihood is, in nats, that of the replicates beside it: neither tempered nor counted thrice."""
    pointwise = evidence.log_likelihood
    if pointwise is None or evidence.is_point or not np.isfinite(pointwise).all():
        return None
    found = _off_total(evidence, pointwise)
    if found is None:
        found = _off_replicates(evidence, pointwise)
    if found is None:
        return None
    off, words = found
    status: Status = grade(off, thresholds.LIKELIHOOD_OFF_WARN, thresholds.LIKELIHOOD_OFF_FAIL)
    return Check(
        "log_likelihood_scale",
        status,
        off,
        f"≤ {thresholds.LIKELIHOOD_OFF_WARN} nats per datum; > {thresholds.LIKELIHOOD_OFF_FAIL} fails",
        "numerical",
        f"The log-likelihood is {off:.2g} nats per datum off {words}.",
        ""
        if status == "pass"
        else "Compute it anew with the model that the draws are of, untempered and each datum once: leave-one-out and "
        "every ranking rest on it.",
    )


def _off_total(evidence: Evidence, pointwise: np.ndarray) -> tuple[float, str] | None:
    """Nats per datum between the sum over the data and the total stored with the function, where they differ at all."""
    total = evidence.draws(FUNCTION, "log_likelihood")
    if total is None or total.shape != pointwise.shape[:2] or not np.isfinite(total).all():
        return None
    off = float(np.abs(pointwise.sum(-1, dtype=np.float64) - total).max()) / pointwise.shape[2]
    return (
        (off, "the total that is stored with the function") if off > thresholds.LIKELIHOOD_OFF_WARN else None
    )


def _off_replicates(evidence: Evidence, pointwise: np.ndarray) -> tuple[float, str] | None:
    """Typical nats per datum between the predictive density and how often replicates come near the outcome.

    The median over the data that say anything of the size of the difference, without what the error of the frequencies
    alone makes of it.
    """
    outcomes = replicates(evidence, whole=True)
    if outcomes is None or len(outcomes[1]) != pointwise.shape[2] or outcomes[1].shape[1] > _MOST_OUTPUTS:
        return None
    rows = np.unique(np.linspace(0, pointwise.shape[2] - 1, min(pointwise.shape[2], _MOST_ROWS)).astype(int))
    draws, y = outcomes[0][:, rows].astype(np.float64), outcomes[1][rows].astype(np.float64)
    flat = pointwise[:, :, rows].reshape(-1, len(rows)).astype(np.float64)
    lppd = logsumexp(flat, axis=0) - np.log(len(flat))
    whole = has_classes(evidence) or bool((draws == np.round(draws)).all())
    seen, error = _frequency(draws, y) if whole else _density(draws, y)
    use = np.isfinite(seen) & (np.maximum(np.abs(seen), np.abs(lppd)) > (_CERTAIN if whole else 0.0))
    if use.sum() < _FEWEST_ROWS:
        return None
    # the median size of normal errors, and three standard errors of that median above it
    chance = (_MEDIAN_SIZE + 3.0 * _MEDIAN_ERROR / np.sqrt(use.sum())) * float(np.median(error[use]))
    size = float(np.median(np.abs(lppd - seen)[use]))
    return float(np.sqrt(max(size**2 - chance**2, 0.0))), "what the replicates of the outcomes say"


def _frequency(draws: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log of the share of draws (draw, point, output) that are y (point, output), and its standard error (point,).

    NaN where they are few.
    """
    count = (draws == y).all(axis=2).sum(axis=0).astype(np.float64)
    with np.errstate(divide="ignore"):
        seen = np.where(count >= _LEAST_SEEN, np.log(count / len(draws)), np.nan)
    return seen, np.sqrt(np.maximum(1.0 / np.maximum(count, 1.0) - 1.0 / len(draws), 0.0))


def _density(draws: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log density of draws (draw, point, output) at y (point, output), and its standard error (point,).

    By the distance of the k-th nearest, outputs in units of the draws' sd. NaN where y lies outside of nearly all
    draws, or where several are exactly there. In several outputs fewer are taken, which reach further.
    """
    outputs = y.shape[1]
    k = max(_LEAST_SEEN, int(_NEIGHBOURS * np.sqrt(len(draws)))) if outputs == 1 else _LEAST_SEEN
    if len(draws) <= 2 * k:
        return np.full(len(y), np.nan), np.ones(len(y))
    sd = draws.std(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        reach = np.partition(np.linalg.norm((draws - y) / sd, axis=2), k - 1, axis=0)[k - 1]
        ball = 0.5 * outputs * np.log(np.pi) - gammaln(0.5 * outputs + 1.0) + outputs * np.log(reach)
        seen = np.log((k - 1) / len(draws)) - ball - np.log(sd).sum(axis=1)
    ties = (draws == y).all(axis=2).sum(axis=0)
    beyond = np.minimum((draws < y).sum(axis=0), (draws > y).sum(axis=0)).min(axis=1)
    seen = np.where((reach > 0.0) & (ties <= 1) & (beyond >= k), seen, np.nan)
    return seen, np.full(len(y), 1.0 / np.sqrt(k))
