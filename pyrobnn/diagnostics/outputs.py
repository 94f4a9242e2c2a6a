"""Whether the errors of several outputs depend on each other as the model says that they do."""

from __future__ import annotations

import itertools

import numpy as np
from scipy import stats

from pyrobnn.core.groups import HELD_OUT
from pyrobnn.diagnostics.evidence import Evidence, spread
from pyrobnn.diagnostics.grades import Found, Limits, grade_tested
from pyrobnn.diagnostics.labels import output_names
from pyrobnn.diagnostics.limits import FEWEST_HELD_OUT, MIN_DATA
from pyrobnn.diagnostics.points import predictive_draws

#: outputs that are compared with each other, and replicates of the data that say what chance does
_MAX_OUTPUTS = 6
_MAX_REPLICATES = 200


def across_outputs(evidence: Evidence, limits: Limits) -> Found | None:
    """Asks whether the errors of two outputs are correlated as the model says that they are.

    The measure is the rank correlation of the distances from the predictive mean, compared with that of replicates of
    the same rows: outputs whose noise is independent in the model and not in the data fail.
    """
    sets = _sets(evidence)
    pairs = list(itertools.chain.from_iterable(_pairs(y, draws) for y, draws in sets))
    if not pairs:
        return None
    p, excess, (first, second) = min(pairs)
    names = output_names(evidence, sets[0][0].shape[1])
    status = grade_tested(min(1.0, p * len(pairs)), abs(excess), evidence.rates, limits)
    numbers = {"where": f"{names[first]} and {names[second]}", "p": min(1.0, p * len(pairs))}
    return Found(status, excess, "", numbers, limits[0])


def _sets(evidence: Evidence) -> list[tuple[np.ndarray, np.ndarray]]:
    """Outcomes (row, output) of a regression and their replicates (draw, row, output): of training, and held out."""
    if evidence.has_classes:
        return []
    sets = []
    outcomes = evidence.replicates()
    if outcomes is not None and len(outcomes[1]) >= MIN_DATA:
        sets.append((outcomes[1], outcomes[0]))
    new = evidence.values(HELD_OUT, "y")
    draws = predictive_draws(evidence)
    if new is not None and draws is not None and len(new) >= FEWEST_HELD_OUT:
        sets.append((new.reshape(len(new), -1), draws))
    return [(y, draws) for y, draws in sets if y.shape[1] > 1 and y.shape == draws.shape[1:]]


def _pairs(y: np.ndarray, draws: np.ndarray) -> list[tuple[float, float, tuple[int, int]]]:
    """Of each pair of outputs: p, how far the correlation of their errors exceeds that of replicates, which pair."""
    mean = draws.mean(axis=0)
    kept = draws[spread(len(draws), _MAX_REPLICATES)]
    correlation = _rank_correlation(y - mean)
    replicated = np.stack([_rank_correlation(values - mean) for values in kept])
    pairs = []
    for pair in itertools.combinations(range(min(y.shape[1], _MAX_OUTPUTS)), 2):
        chance = np.arctanh(np.clip(replicated[:, pair[0], pair[1]], -0.999, 0.999))
        ours = correlation[pair]
        if not np.isfinite(ours) or not np.isfinite(chance).all() or np.ptp(chance) == 0.0:
            continue
        z = (np.arctanh(np.clip(ours, -0.999, 0.999)) - chance.mean()) / chance.std(ddof=1)
        p = float(2.0 * stats.norm.sf(abs(z)))
        pairs.append((p, float(ours - np.tanh(chance.mean())), pair))
    return pairs


def _rank_correlation(errors: np.ndarray) -> np.ndarray:
    """Spearman's, of errors (row, output); (output, output)."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.corrcoef(stats.rankdata(errors, axis=0), rowvar=False)
