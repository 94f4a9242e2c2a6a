"""R-hat and effective sample sizes of many quantities at once: the one place where either is computed.

They are those of ArviZ up to rounding, which takes one quantity after another and one lag after another: ten to thirty
times as long, too long to ask while a sampler runs.

*Rank-normalization, folding, and localization: an improved R-hat* (Vehtari et al., 2021),
https://doi.org/10.1214/20-BA1221
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

#: R-hat that every quantity of converged chains has at most (Vehtari et al., 2021, section 4)
RHAT_LIMIT = 1.01
#: R-hat above which a fit says that its chains disagree: what converged chains of few draws may still have
RHAT_NOTED = 1.05
#: draws per chain below which neither is defined: two halves of two draws
MIN_DRAWS = 4
_BLOCK = 32  # quantities at once: their 4000 draws stay in the processor's cache


def rhat(draws: Any) -> np.ndarray:
    """Rank-normalised split R-hat, the larger of bulk and tail.

    Args:
        draws: array (…, chain, draw), or what numpy makes one of, of at least four draws. A single chain is compared
            with itself, by its halves.

    Returns:
        R-hat (…); infinite where no half of a chain moves but they differ, NaN where all stand at one value or a draw
        is not finite.

    Example:
        >>> round(float(rhat(np.random.default_rng(0).normal(size=(4, 1000)))), 2)
        1.0
    """

    def larger(chains: np.ndarray) -> np.ndarray:
        folded = np.abs(chains - np.median(chains, axis=(1, 2), keepdims=True))
        return np.maximum(_ratio(_normal_scores(chains)), _ratio(_normal_scores(folded)))

    return _of_each(larger, draws)


def nested_rhat(draws: Any, superchains: np.ndarray) -> np.ndarray:
    """Nested R-hat (quantity,) of draws (quantity, chain, draw), between groups of chains that share their start.

    `superchains` (chain,) names the group of each. Chains whose starts are their own must not be grouped: modes
    that every group holds alike would go unseen.

    References:
        Nested R-hat (Margossian et al., 2024) https://doi.org/10.1214/24-BA1453
    """
    import arviz_stats
    import xarray as xr

    data = xr.Dataset({"q": (("quantity", "chain", "draw"), draws)})
    return arviz_stats.rhat_nested(data, superchain_ids=superchains)["q"].values


def ess(draws: Any, kind: Literal["bulk", "tail", "mean"] = "bulk") -> np.ndarray:
    """Effective sample size: by Geyer's initial monotone sequence over the halves of all chains.

    Args:
        draws: array (…, chain, draw), or what numpy makes one of, of at least four draws.
        kind: ``"mean"``, of the draws as they are; ``"bulk"``, of their normal scores; ``"tail"``, the smaller of those
            of the 5 % and the 95 % quantile.

    Returns:
        Independent draws that estimate as well (…); NaN where a draw is not finite.

    Example:
        >>> bool(ess(np.random.default_rng(0).normal(size=(4, 1000))) > 3000)
        True
    """
    if kind == "mean":
        return _of_each(_initial_monotone, draws)
    if kind == "bulk":
        return _of_each(lambda chains: _initial_monotone(_normal_scores(chains)), draws)
    draws = np.asarray(draws)
    ends = np.quantile(draws, [0.05, 0.95], axis=(-2, -1), keepdims=True)
    finite = np.isfinite(draws).all((-2, -1))
    low, high = (_of_each(_initial_monotone, draws <= end) for end in ends)
    return np.where(finite, np.minimum(low, high), np.nan)


def _of_each(statistic: Callable[[np.ndarray], np.ndarray], draws: Any) -> np.ndarray:
    """A statistic of blocks (quantity, half of a chain, draw) of draws (…, chain, draw); (…)."""
    draws = np.asarray(draws)
    if draws.ndim < 2 or draws.shape[-1] < MIN_DRAWS:
        raise ValueError(f"draws must be (…, chain, draw) with at least {MIN_DRAWS} draws, got {draws.shape}")
    flat, half = draws.reshape(-1, *draws.shape[-2:]), draws.shape[-1] // 2
    found = np.empty(len(flat))
    for start in range(0, len(flat), _BLOCK):
        block = flat[start : start + _BLOCK].astype(np.float64)
        with np.errstate(all="ignore"):  # what does not move, or is not finite
            value = statistic(np.concatenate([block[..., :half], block[..., -half:]], axis=1))
        found[start : start + _BLOCK] = np.where(np.isfinite(block).all((1, 2)), value, np.nan)
    return found.reshape(draws.shape[:-2])


def _normal_scores(chains: np.ndarray) -> np.ndarray:
    """Normal quantiles (Blom, 1958) of the ranks of each quantity (quantity, chain, draw), ties at their mean rank."""
    from scipy.special import ndtri  # late: a fit that asks for no R-hat does without SciPy
    from scipy.stats import rankdata

    flat = chains.reshape(len(chains), -1)
    order = np.argsort(flat, axis=1)
    ordered = np.take_along_axis(flat, order, axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():  # ten times as slow
        ranks = rankdata(flat, axis=1)
    else:
        ranks = np.empty_like(flat)
        np.put_along_axis(ranks, order, np.arange(1.0, flat.shape[1] + 1)[None], axis=1)
    return ndtri((ranks - 3 / 8) / (flat.shape[1] + 1 / 4)).reshape(chains.shape)


def _ratio(chains: np.ndarray) -> np.ndarray:
    """R-hat of each quantity (quantity, chain, draw)."""
    num_draws = chains.shape[2]
    between = num_draws * chains.mean(axis=2).var(axis=1, ddof=1)
    within = chains.var(axis=2, ddof=1).mean(axis=1)
    return np.sqrt((between / within + num_draws - 1) / num_draws)


def _initial_monotone(chains: np.ndarray) -> np.ndarray:
    """Draws over their autocorrelation time, for chains (quantity, chain, draw); (quantity,)."""
    _, num_chains, num_draws = chains.shape
    total = num_chains * num_draws
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
    found = np.where(np.isfinite(rho).all(axis=1), total / time, np.nan)
    return np.where(np.ptp(chains, axis=(1, 2)) < np.finfo(float).resolution, float(total), found)


def _autocorrelation(chains: np.ndarray) -> np.ndarray:
    """At every lag, of chains (quantity, chain, draw) that are told apart by their means; (quantity, draw)."""
    from scipy import fft

    _, num_chains, num_draws = chains.shape
    means, length = chains.mean(axis=2), fft.next_fast_len(2 * num_draws)
    spectrum = fft.rfft(chains - means[:, :, None], n=length, axis=2)
    power = (spectrum.real**2 + spectrum.imag**2).mean(axis=1)
    covariance = fft.irfft(power, n=length, axis=1)[:, :num_draws] / num_draws
    within = covariance[:, 0] * num_draws / (num_draws - 1.0)
    variance = covariance[:, 0] + means.var(axis=1, ddof=1)
    rho = 1.0 - (within[:, None] - covariance) / variance[:, None]
    rho[:, 0] = 1.0
    return rho
