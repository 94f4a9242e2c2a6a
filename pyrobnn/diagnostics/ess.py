"""Effective sample sizes of many quantities at once; up to rounding ArviZ's, which takes lag after lag of each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import fft

from pyrobnn.diagnostics.rhat import BLOCK, normal_scores, rank_normalised, split_chains


def mean_ess(draws: np.ndarray) -> np.ndarray:
    """Effective sample size for the mean of draws (chain, draw, quantity) of at least four draws; (quantity,)."""
    return _blockwise(_ess, split_chains(draws))


def bulk_ess(draws: np.ndarray) -> np.ndarray:
    """Effective sample size of the rank-normalised draws (chain, draw, quantity); (quantity,).

    References:
        Rank-normalization, folding, and localization: an improved R-hat (Vehtari et al., 2021)
        https://doi.org/10.1214/20-BA1221
    """
    split = split_chains(draws)
    size = split.shape[0] * split.shape[1]
    normal = normal_scores(np.arange(1, size + 1), size)

    def ranked(chains: np.ndarray) -> np.ndarray:
        scores, _ = rank_normalised(chains.reshape(len(chains), size), normal)
        return np.where(np.isfinite(chains).all((1, 2)), _ess(scores.reshape(chains.shape)), np.nan)

    return _blockwise(ranked, split)


def tail_ess(draws: np.ndarray, low: float = 0.05, high: float = 0.95) -> np.ndarray:
    """The smaller of the effective sample sizes of two quantiles of draws (chain, draw, quantity); (quantity,)."""
    ends = np.quantile(draws, [low, high], axis=(0, 1))
    found = [_blockwise(_ess, split_chains(draws <= end)) for end in ends]
    return np.where(np.isfinite(draws).all((0, 1)), np.minimum(*found), np.nan)


def _blockwise(ess: Callable[[np.ndarray], np.ndarray], split: np.ndarray) -> np.ndarray:
    """`ess` of blocks (quantity, chain, draw) of `split` (chain, draw, quantity)."""
    starts = range(0, split.shape[2], BLOCK)
    blocks = (np.moveaxis(split[:, :, start : start + BLOCK], 2, 0).astype(np.float64) for start in starts)
    return np.concatenate([ess(block) for block in blocks])


def _ess(chains: np.ndarray) -> np.ndarray:
    """Geyer's initial monotone sequence of pairs, for chains (quantity, chain, draw); (quantity,)."""
    _, num_chains, num_draws = chains.shape
    total = num_chains * num_draws
    with np.errstate(all="ignore"):  # what does not move, or is not finite
        rho = _autocorrelation(chains)
    # pairs of lags up to the first whose sum is not positive; from there on they are noise
    num_pairs = max(1, (num_draws - 1) // 2)
    pairs = rho[:, : 2 * num_pairs].reshape(len(rho), num_pairs, 2).sum(2)
    ended = pairs <= 0.0
    ended[:, -1] = True
    last = ended.argmax(axis=1)
    row = np.arange(len(rho))
    sums = np.cumsum(np.minimum.accumulate(pairs, axis=1), axis=1)
    before = np.where(last > 0, sums[row, last - 1], 0.0)
    even = rho[row, 2 * last]
    kept = np.where((pairs[row, last] >= 0.0) | (even > 0.0), even, 0.0)
    time = np.maximum(-1.0 + 2.0 * before + kept, 1.0 / np.log10(total))
    with np.errstate(invalid="ignore"):
        still = np.ptp(chains, axis=(1, 2)) < np.finfo(float).resolution
    found = np.where(np.isfinite(rho).all(axis=1), total / time, np.nan)
    return np.where(still, float(total), found)


def _autocorrelation(chains: np.ndarray) -> np.ndarray:
    """At every lag, of chains (quantity, chain, draw) that are told apart by their means; (quantity, draw)."""
    _, num_chains, num_draws = chains.shape
    means, length = chains.mean(axis=2), fft.next_fast_len(2 * num_draws)
    spectrum = fft.rfft(chains - means[:, :, None], n=length, axis=2)
    power = (spectrum.real**2 + spectrum.imag**2).mean(axis=1)
    covariance = fft.irfft(power, n=length, axis=1)[:, :num_draws] / num_draws
    within = covariance[:, 0] * num_draws / (num_draws - 1.0)
    variance = covariance[:, 0] + (means.var(axis=1, ddof=1) if num_chains > 1 else 0.0)
    rho = 1.0 - (within[:, None] - covariance) / variance[:, None]
    rho[:, 0] = 1.0
    return rho
