"""`audit`: whether a tree was forged or damaged on its way, as no fit of this library makes one; on request."""

from __future__ import annotations

import numpy as np
import xarray as xr
from scipy import stats
from scipy.spatial.distance import cdist
from scipy.special import gammaln, logsumexp, ndtri
from scipy.stats import rankdata

from pyrobnn.core.groups import FUNCTION
from pyrobnn.diagnostics.check_table import Row, of_chains, of_draws
from pyrobnn.diagnostics.convergence import quantities
from pyrobnn.diagnostics.evidence import WEIGHTS, Evidence, flattened, spread
from pyrobnn.diagnostics.judge import made
from pyrobnn.diagnostics.points import has_classes, replicates
from pyrobnn.diagnostics.verdict import Found, Verdict, grade

#: draws that tell a grid from chance, columns of a site that are looked at
_FEWEST_DRAWS, _MOST_COLUMNS = 50, 256
#: data whose log-likelihood is held against their replicates, and the fewest; fewest replicates beside an outcome that
#: say how dense they are there, outputs in which they still do; nats below which a label is too certain to tell a scale
_MOST_ROWS, _FEWEST_ROWS, _LEAST_SEEN, _MOST_OUTPUTS, _CERTAIN_NATS = 500, 8, 20, 3, 0.05
#: median of the size of a standard normal, and √N times the standard error of that median
_MEDIAN_SIZE, _MEDIAN_ERROR = 0.674, 0.787
#: quantities by whose moves chains are compared, and the moves that this takes
_FOLLOWED, _FEWEST_MOVES = 8, 20
#: draws that are looked at for clumps, directions in which, and the share of a direction's sd that one more must have
_MOST_DRAWS, _DIRECTIONS, _LEAST_SD = 1000, 4, 0.03
#: neighbours of a draw at the smallest distance, and the share of the draws that they are at the largest
_NEAREST, _FARTHEST_SHARE = 0.5, 0.125
#: rise of the dimension, as a share of it, that is a gap between clumps, beyond how many standard errors
_RISE, _SIGMAS = 0.25, 4.0


def copied_chains(evidence: Evidence, _: tuple[float, ...]) -> Found | None:
    """Whether chains repeat one another draw by draw: R-hat calls that agreement, and the ESS counts every copy."""
    flat = [flattened(each, 2).reshape(len(each), -1) for each in evidence.sites.values()]
    if not flat or len(flat[0]) < 2 or evidence.is_point:
        return None
    groups: dict[bytes, list[int]] = {}
    for chain in range(len(flat[0])):
        groups.setdefault(b"".join(each[chain].tobytes() for each in flat), []).append(chain)
    copies = [group for group in groups.values() if len(group) > 1] or _followers(evidence)
    named = "; ".join(", ".join(map(str, group)) for group in copies)
    count = float(sum(len(group) - 1 for group in copies))
    return Found("fail" if copies else "pass", count, "", {"named": named}, 0.0)


def _followers(evidence: Evidence) -> list[list[int]]:
    """Groups of chains that make the same moves, draw by draw, though not to the last digit, or the opposite ones."""
    steps = [np.diff(draws, axis=1) for draws in list(quantities(evidence).values())[:_FOLLOWED]]
    if not steps:
        return []
    moves = np.stack(steps)
    if moves.ndim < 3 or moves.shape[2] < _FEWEST_MOVES or (moves.std(axis=2) == 0.0).any():
        return []
    moves = moves - moves.mean(axis=2, keepdims=True)
    moves /= np.linalg.norm(moves, axis=2, keepdims=True)
    alike = np.abs(np.einsum("qcs,qds->qcd", moves, moves)).min(axis=0) > 0.9
    groups = {tuple(np.flatnonzero(row).tolist()) for row in alike}
    return sorted(list(group) for group in groups if len(group) > 1)


def repeated_draws(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    """Whether draws occur again elsewhere than right after themselves: a continuous posterior never gives one twice."""
    flat = [flattened(each, 2) for each in evidence.sites.values() if each.dtype.kind == "f"]
    if not flat or evidence.is_point:
        return None
    values = np.concatenate([each.astype(np.float64) for each in flat], axis=2)
    # a draw that stays may differ in its last digits, which a transform rounds otherwise in each
    rounding = 4.0 * np.finfo(np.float32).eps
    stays = np.isclose(values[:, 1:], values[:, :-1], rtol=rounding, atol=0.0).all(axis=2)
    places = np.concatenate([values[:, 0], values[:, 1:][~stays]])
    share = (len(places) - len(np.unique(places, axis=0))) / evidence.num_draws
    limit = limits[evidence.is_iid]
    return Found("fail" if share > limit else "pass", share, limit=limit)


def clumped_draws(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    """Whether draws of different chains lie in clumps, as those of few draws with noise (Levina & Bickel, 2004)."""
    number = num_places(list(quantities(evidence).values()))
    return Found("pass") if number is None else Found("fail" if number < limits[0] else "warn", number)


def num_places(draws: list[np.ndarray]) -> float | None:
    """How many clumps draws (chain, draw) of several quantities lie in; None where there is no gap between any.

    The number of draws of *other* chains within a distance of a draw grows as a power of it, the dimension, and in a
    smooth distribution ever more slowly. Where it stalls and grows again, a clump has ended.
    """
    if not draws or draws[0].shape[0] < 2:
        return None
    z, chain = _directions(draws)
    distances = cdist(z, z)[chain[:, None] < chain]
    # each step holds twice the pairs of the one before
    steps = max(2, 1 + int(np.log2(_FARTHEST_SHARE * len(z) / _NEAREST)))
    pairs = np.unique((np.geomspace(_NEAREST, _FARTHEST_SHARE * len(z), steps) * len(z) / 2).astype(int))
    pairs = pairs[(pairs > 0) & (pairs <= len(distances))]
    if len(pairs) < 3:
        return None
    radius = np.maximum(np.partition(distances, pairs - 1)[pairs - 1], np.finfo(float).tiny)
    shells = np.diff(pairs)
    dimension = np.diff(np.log(pairs)) / np.maximum(np.diff(np.log(radius)), 1e-6)
    dimension = np.minimum(dimension, 2.0 * z.shape[1])
    later = np.maximum.accumulate(dimension[::-1])[::-1]
    rise = later - dimension - _SIGMAS * (later + dimension) / np.sqrt(shells)
    gap = int(np.argmin(dimension))
    if rise[gap] < _RISE * z.shape[1]:
        return None
    neighbours = 2.0 * pairs[gap] / len(z)
    chains = len(np.unique(chain))
    return float(len(z) / (1.0 + neighbours * chains / (chains - 1)))


def _directions(draws: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Draws (draw, direction) in the directions in which the quantities' normal ranks vary most, and their chains."""
    chains, num = draws[0].shape
    rows = spread(chains * num, _MOST_DRAWS)
    ranks = np.stack([rankdata(each.reshape(-1)[rows]) for each in draws], axis=1)
    normal = ndtri((ranks - 0.375) / (len(rows) + 0.25))
    left, sd, _ = np.linalg.svd(normal - normal.mean(axis=0), full_matrices=False)
    keep = sd[:_DIRECTIONS] > _LEAST_SD * max(float(sd[0]), np.finfo(float).tiny)
    return left[:, :_DIRECTIONS][:, keep] * np.sqrt(len(rows)), np.repeat(np.arange(chains), num)[rows]


def rounded_draws(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    """Whether draws of a continuous site stand on a coarse grid."""
    if evidence.is_point or evidence.num_draws < _FEWEST_DRAWS:
        return None
    coarsest, where = 0.0, ""
    for name, values in evidence.sites.items():
        if values.dtype.kind != "f" or name in evidence.computed:
            continue
        columns = flattened(values, 2).reshape(evidence.num_draws, -1)
        chosen = columns[:, spread(columns.shape[1], _MOST_COLUMNS)]
        spacing = _spacing(chosen, counts=not name.startswith(WEIGHTS)) if chosen.size else 0.0
        if spacing > coarsest:
            coarsest, where = spacing, name
    return Found(grade(coarsest, *limits), coarsest, "", {"where": where})


def _spacing(columns: np.ndarray, *, counts: bool) -> float:
    """The widest typical step, in sd, between the values of a column (draw, column) that hardly differ; else 0."""
    rows = len(np.unique(columns, axis=0))
    widest = 0.0
    for column in columns.T.astype(np.float64):
        values = np.unique(column)
        # two are an indicator
        if not (2 < len(values) < 0.5 * rows) or (counts and (values == np.round(values)).all()):
            continue
        widest = max(widest, float(np.median(np.diff(values)) / column.std()))
    return widest


def held_weights(evidence: Evidence, _: tuple[float, ...]) -> Found | None:
    """Whether single weights of a net have one value in all draws of a chain, and others move."""
    if evidence.is_point or evidence.num_draws < _FEWEST_DRAWS or evidence.claim == "none":
        return None
    held, moving, where = 0, 0, ""
    for name, values in evidence.sites.items():
        if values.dtype.kind != "f" or not name.startswith(WEIGHTS):
            continue
        still = (np.ptp(flattened(values, 2), axis=1) == 0.0).sum(axis=1)  # of each chain
        worst, size = int(still.max(initial=0)), int(np.prod(values.shape[2:]))
        # a site that is held whole is a part that its method does not infer, and a whole chain has a check of its own
        if 0 < worst < size:
            held, where = held + worst, where or name
        moving += size - worst
    return Found("fail" if held and moving else "pass", float(held), "", {"where": where}, 0.0)


def log_likelihood(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    """Whether the log-likelihood is that of the data beside it, in nats: neither of other rows nor tempered.

    By the median nats per datum between the predictive density and how often replicates come near the outcome, and by
    the order of both; by the total that is stored with the function, where that is another.
    """
    pointwise, outcomes = evidence.log_likelihood, replicates(evidence, whole=True)
    if pointwise is None or evidence.is_point or not np.isfinite(pointwise).all():
        return None
    total = evidence.draws(FUNCTION, "log_likelihood")
    if total is not None and total.shape == pointwise.shape[:2] and np.isfinite(total).all():
        off = float(np.abs(pointwise.sum(-1, dtype=np.float64) - total).max()) / pointwise.shape[2]
        if off > limits[0]:
            return Found(grade(off, *limits), off)
    if outcomes is None or len(outcomes[1]) != pointwise.shape[2] or outcomes[1].shape[1] > _MOST_OUTPUTS:
        return None
    rows = spread(pointwise.shape[2], _MOST_ROWS)
    draws, y = outcomes[0][:, rows].astype(np.float64), outcomes[1][rows].astype(np.float64)
    flat = pointwise[:, :, rows].reshape(-1, len(rows)).astype(np.float64)
    lppd = logsumexp(flat, axis=0) - np.log(len(flat))
    whole = has_classes(evidence) or bool((draws == np.round(draws)).all())
    seen, error, far = _frequency(draws, y) if whole else _density(draws, y)
    use = np.isfinite(seen) & (np.maximum(np.abs(seen), np.abs(lppd)) > (_CERTAIN_NATS if whole else 0.0))
    if use.sum() < _FEWEST_ROWS:
        return None
    # far from nearly all replicates their density is known from above
    size = np.where(far, np.maximum(lppd - seen, 0.0), np.abs(lppd - seen))[use]
    # the median size of normal errors, and three standard errors of that median above it
    chance = (_MEDIAN_SIZE + 3.0 * _MEDIAN_ERROR / np.sqrt(use.sum())) * error
    off = float(np.sqrt(max(float(np.median(size)) ** 2 - chance**2, 0.0)))
    ordered = not whole and float(seen[use].std()) > 3.0 * error
    strange = ordered and stats.spearmanr(lppd[use], seen[use]).statistic < 2.0 / np.sqrt(use.sum())
    return Found("fail" if strange else grade(off, *limits), off)


def _frequency(draws: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, float, np.ndarray]:
    """Log share of draws (draw, point, output) that are y (point, output), NaN where few, its error, and no outcome."""
    count = (draws == y).all(axis=2).sum(axis=0).astype(np.float64)
    enough = count >= _LEAST_SEEN
    seen = np.where(enough, np.log(np.maximum(count, 1.0) / len(draws)), np.nan)
    errors = np.sqrt(np.maximum(1.0 / np.maximum(count, 1.0) - 1.0 / len(draws), 0.0))
    return seen, float(np.median(errors[enough])) if enough.any() else 1.0, np.zeros(len(y), dtype=bool)


def _density(draws: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, float, np.ndarray]:
    """Log density of draws (draw, point, output) at y (point, output) by the k-th nearest, its error, and who is far.

    NaN where several draws are exactly there.
    """
    outputs = y.shape[1]
    k = max(_LEAST_SEEN, int(2.0 * np.sqrt(len(draws)))) if outputs == 1 else _LEAST_SEEN
    if len(draws) <= 2 * k:
        return np.full(len(y), np.nan), 1.0, np.zeros(len(y), dtype=bool)
    sd = draws.std(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        reach = np.partition(np.linalg.norm((draws - y) / sd, axis=2), k - 1, axis=0)[k - 1]
        ball = 0.5 * outputs * np.log(np.pi) - gammaln(0.5 * outputs + 1.0) + outputs * np.log(reach)
        seen = np.log((k - 1) / len(draws)) - ball - np.log(sd).sum(axis=1)
    ties = (draws == y).all(axis=2).sum(axis=0)
    beyond = np.minimum((draws < y).sum(axis=0), (draws > y).sum(axis=0)).min(axis=1)
    return np.where((reach > 0.0) & (ties <= 1), seen, np.nan), 1.0 / np.sqrt(k), beyond < k


#: shares, counts, steps in sd and nats per datum: this library's convention; what it is known by in each docstring
AUDIT = (
    Row("copied_chains", "draws", copied_chains, (), "arithmetic", of_chains),
    Row("repeated_draws", "draws", repeated_draws, (0.02, 0.25), "arithmetic", of_draws),
    Row("clumped_draws", "draws", clumped_draws, (100.0,), "https://papers.nips.cc/paper/2577", of_chains),
    Row("rounded_draws", "draws", rounded_draws, (0.2, 0.5), "arithmetic", of_draws),
    Row("held_weights", "draws", held_weights, (), "arithmetic", of_chains),
    Row("log_likelihood", "draws", log_likelihood, (0.1, 0.3), "arithmetic", of_draws),
)


def audit(tree: xr.DataTree | Evidence) -> Verdict:
    """Say whether a tree was forged or damaged: chains copied, draws repeated or rounded, another log-likelihood.

    No fit of this library makes such a tree, so `diagnose` does not look; ask where one comes from elsewhere.

    Args:
        tree: Draws as DataTree; only ``posterior`` is required.

    Returns:
        A verdict whose checks are all about the draws.

    Raises:
        TypeError, ValueError: As `diagnose`.
    """
    evidence = Evidence.of(tree)
    evidence.require_draws()
    found = [made(row, evidence) for row in AUDIT if row.applies(evidence)]
    label = evidence.text("label") or evidence.method
    return Verdict(evidence.method, label, tuple(check for check in found if check is not None))
