"""R-hat of many quantities at once, to the last digit that of ArviZ, which takes one quantity after another."""

from __future__ import annotations

import arviz_stats
import numpy as np
import xarray as xr
from scipy.special import ndtri

from pyrobnn.groups import SAMPLE_DIMS

#: quantities whose 4000 draws stay in the cache
BLOCK = 32


def rank_rhat(draws: np.ndarray) -> np.ndarray:
    """Rank-normalised split R-hat, the larger of bulk and tail.

    Args:
        draws: finite, (chain, draw, quantity), at least two chains of four draws.

    Returns:
        R-hat (quantity,); infinite where no half of a chain moves, NaN where they all stand at one value.

    References:
        Rank-normalization, folding, and localization: an improved R-hat (Vehtari et al., 2021)
        https://doi.org/10.1214/20-BA1221
    """
    split = split_chains(draws)
    num_chains, size = len(split), split.shape[0] * split.shape[1]
    normal = normal_scores(np.arange(1, size + 1), size)
    found = []
    for start in range(0, draws.shape[2], BLOCK):
        columns = np.moveaxis(split[:, :, start : start + BLOCK], 2, 0)
        flat = columns.reshape(len(columns), size).astype(np.float64)
        bulk, ordered = rank_normalised(flat, normal)
        median = 0.5 * (ordered[:, (size - 1) // 2] + ordered[:, size // 2])
        tail, _ = rank_normalised(np.abs(flat - median[:, None]), normal)
        found.append(np.maximum(_rhat(bulk, num_chains), _rhat(tail, num_chains)))
    return np.concatenate(found)


def nested_rhat(draws: np.ndarray, superchains: np.ndarray) -> np.ndarray:
    """Nested R-hat (quantity,) of draws (chain, draw, quantity), between groups of chains that share their start.

    `superchains` (chain,) names the group of each. Chains whose starts are their own must not be grouped: modes
    that every group holds alike would go unseen.

    References:
        Nested R-hat (Margossian et al., 2024) https://doi.org/10.1214/24-BA1453
    """
    data = xr.Dataset({"q": ((*SAMPLE_DIMS, "quantity"), draws)})
    return arviz_stats.rhat_nested(data, superchain_ids=superchains)["q"].values


def split_chains(draws: np.ndarray) -> np.ndarray:
    """Halves of the chains of draws (chain, draw, …) as chains of their own."""
    half = draws.shape[1] // 2
    return np.concatenate([draws[:, :half], draws[:, -half:]])


def normal_scores(rank: np.ndarray, size: int) -> np.ndarray:
    """Normal quantiles of ranks 1 … size (Blom, 1958)."""
    return ndtri((rank - 3 / 8) / (size - 2 * 3 / 8 + 1))


def rank_normalised(values: np.ndarray, normal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Normal scores of the ranks of each row (row, draw), ties at their mean rank; and the row in order."""
    rows, size = values.shape
    order = np.argsort(values, axis=1) + size * np.arange(rows)[:, None]
    ordered = values.ravel()[order]
    scores = np.broadcast_to(normal, values.shape)
    tied = ordered[:, 1:] == ordered[:, :-1]
    if tied.any():
        scores = scores.copy()
        edges = np.diff(np.pad(tied, ((0, 0), (1, 1))).astype(np.int8), axis=1)
        row, first = np.nonzero(edges == 1)
        last = np.nonzero(edges == -1)[1]
        count = last - first + 1
        within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        at = np.repeat(row * size + first, count) + within
        scores.ravel()[at] = np.repeat(normal_scores(0.5 * (first + last) + 1, size), count)
    found = np.empty(values.size)
    found[order] = scores
    return found.reshape(values.shape), ordered


def _rhat(values: np.ndarray, num_chains: int) -> np.ndarray:
    """R-hat of each row (row, chain · draw)."""
    chains = values.reshape(len(values), num_chains, -1)
    num_draws = chains.shape[2]
    between = num_draws * chains.mean(axis=2).var(axis=1, ddof=1)
    within = chains.var(axis=2, ddof=1).mean(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.sqrt((between / within + num_draws - 1) / num_draws)
