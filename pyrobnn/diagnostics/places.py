"""Whether the draws of several chains lie at a few places, and so are worth no more than the number of those."""

from __future__ import annotations

import numpy as np
from scipy.spatial.distance import cdist
from scipy.special import ndtri
from scipy.stats import rankdata

from pyrobnn.diagnostics import thresholds
from pyrobnn.diagnostics.convergence import quantities
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.verdict import Check

#: draws that are looked at, directions in which, and the share of a direction's sd that one more must have
_MOST_DRAWS, _DIRECTIONS, _LEAST_SD = 1000, 4, 0.03
#: neighbours of a draw at the smallest distance, and the share of the draws that they are at the largest
_FEWEST, _MOST = 0.5, 0.125
#: rise of the dimension, as a share of it, that is a gap between places, beyond how many standard errors
_RISE, _SIGMAS = 0.25, 4.0


def check_places(evidence: Evidence) -> Check | None:
    """A warning or failure where draws of different chains lie in clumps, as those of few draws with some noise do."""
    number = num_places(list(quantities(evidence).values()))
    if number is None:
        return None
    return Check(
        "clumped_draws",
        "fail" if number < thresholds.ESS_FAIL else "warn",
        number,
        f"no clumps; < {thresholds.ESS_FAIL:.0f} of them fails",
        thresholds.DIMENSION_SOURCE,
        f"The draws of different chains lie in about {number:.0f} clumps: they are close to one another or far apart, "
        "with a gap between.",
        "Look at how the draws were made: some that were drawn again with noise count once. If the posterior itself "
        "has many modes, each needs to be sampled for itself.",
    )


def num_places(draws: list[np.ndarray]) -> float | None:
    """How many clumps draws (chain, draw) of several quantities lie in; None where there is no gap between any.

    The number of draws of *other* chains within a distance of a draw grows as a power of it, the dimension, and in a
    smooth distribution ever more slowly. Where it stalls and grows again, a clump has ended.
    """
    if not draws or draws[0].shape[0] < 2:
        return None
    z, chain = _directions(draws)
    distances = cdist(z, z)[chain[:, None] < chain]
    pairs = np.unique((np.geomspace(_FEWEST, _MOST * len(z), _steps(len(z))) * len(z) / 2).astype(int))
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


def _steps(num_draws: int) -> int:
    """Distances at which draws are counted, so that each holds twice the pairs of the one before."""
    return max(2, 1 + int(np.log2(_MOST * num_draws / _FEWEST)))


def _directions(draws: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Draws (draw, direction) in the directions in which the quantities' normal ranks vary most, and their chains."""
    chains, num = draws[0].shape
    rows = np.unique(np.linspace(0, chains * num - 1, min(chains * num, _MOST_DRAWS)).astype(int))
    ranks = np.stack([rankdata(each.reshape(-1)[rows]) for each in draws], axis=1)
    normal = ndtri((ranks - 0.375) / (len(rows) + 0.25))
    left, sd, _ = np.linalg.svd(normal - normal.mean(axis=0), full_matrices=False)
    keep = sd[:_DIRECTIONS] > _LEAST_SD * max(float(sd[0]), np.finfo(float).tiny)
    return left[:, :_DIRECTIONS][:, keep] * np.sqrt(len(rows)), np.repeat(np.arange(chains), num)[rows]
