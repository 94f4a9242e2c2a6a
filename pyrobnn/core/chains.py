"""R-hat, effective sample sizes (of chains, and of SMC by ancestors) and divergences: where they are computed.

*Rank-normalization, folding, and localization: an improved R-hat* (Vehtari et al., 2021),
https://doi.org/10.1214/20-BA1221
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

#: R-hat that every quantity of converged chains has at most (Vehtari et al., 2021, section 4)
RHAT_LIMIT = 1.01
#: R-hat above which a fit says that its chains disagree: what converged chains of few draws may still have
RHAT_NOTED = 1.05
#: draws per chain below which neither is defined: two halves of two draws
MIN_DRAWS = 4
#: share of transitions that diverge at NUTS's default target where nothing is wrong
DIVERGING_BY_CHANCE = 5e-4


def rhat(draws: ArrayLike) -> np.ndarray:
    """Rank-normalised split R-hat, the larger of bulk and tail.

    Args:
        draws: array (…, chain, draw), or what numpy makes one of, of at least four draws. A single chain of eight or
            more is compared with itself, by its quarters.

    Returns:
        R-hat (…); infinite where no half of a chain moves but they differ, NaN where all stand at one value or a draw
        is not finite.
    """
    draws = np.asarray(draws)
    if draws.ndim > 1 and draws.shape[-2] == 1 and draws.shape[-1] >= 2 * MIN_DRAWS:
        half = draws.shape[-1] // 2
        draws = np.concatenate([draws[..., :half], draws[..., -half:]], axis=-2)
    return _of_each(_rank_normalised_split_rhat, draws)


def ess(draws: ArrayLike, kind: Literal["bulk", "tail", "mean"] = "bulk") -> np.ndarray:
    """Effective sample size: by Geyer's initial monotone sequence over the halves of all chains.

    Args:
        draws: array (…, chain, draw), or what numpy makes one of, of at least four draws.
        kind: ``"mean"``, of the draws as they are; ``"bulk"``, of their normal scores; ``"tail"``, the smaller of those
            of the 5 % and the 95 % quantile.

    Returns:
        Independent draws that estimate as well (…); NaN where a draw is not finite.
    """

    return _of_each(_ESS[kind], draws)


def _ess_mean(values: np.ndarray) -> float:
    return _geyer(_halves(values))


def _ess_bulk(values: np.ndarray) -> float:
    return _geyer(_normal_scores(_halves(values)))


def _ess_tail(values: np.ndarray) -> float:
    low, high = np.quantile(values, (0.05, 0.95))
    return min(_geyer(_halves(values <= low)), _geyer(_halves(values <= high)))


_ESS = {
    "mean": _ess_mean,
    "bulk": _ess_bulk,
    "tail": _ess_tail,
}


def _rank_normalised_split_rhat(draws: np.ndarray) -> float:
    """Of one quantity (chain, draw); NaN of a single chain."""
    if len(draws) == 1:
        return np.nan
    halves = _halves(draws)
    folded = abs(halves - np.median(halves))
    bulk = _rhat_of_scores(_normal_scores(halves))
    tail = _rhat_of_scores(_normal_scores(folded))
    return np.fmax(bulk, tail)


def _rhat_of_scores(scores: np.ndarray) -> float:
    """Gelman and Rubin's ratio of scores (chain, draw)."""
    num_draws = scores.shape[1]
    between = num_draws * scores.mean(1).var(ddof=1)
    within = scores.var(1, ddof=1).mean()
    return np.sqrt((between / within + num_draws - 1) / num_draws)


def _halves(draws: np.ndarray) -> np.ndarray:
    """The halves of all chains, (2 · chain, draw // 2)."""
    half = draws.shape[1] // 2
    return np.concatenate([draws[:, :half], draws[:, -half:]]).astype(np.float64)


def _normal_scores(values: np.ndarray) -> np.ndarray:
    """Normal scores of the ranks (Blom's), ties at their mean rank."""
    _, where, counts = np.unique(
        values,
        return_inverse=True,
        return_counts=True,
    )
    ranks = (counts.cumsum() - (counts - 1) / 2)[where].reshape(values.shape)
    return torch.special.ndtri(torch.from_numpy((ranks - 0.375) / (ranks.size + 0.25))).numpy()


def _geyer(draws: np.ndarray) -> float:
    """Effective sample size of the mean of one quantity (chain, draw)."""
    size = draws.size
    num_draws = draws.shape[1]
    if np.ptp(draws) == 0:
        return size
    spectrum = np.fft.rfft(draws - draws.mean(1, keepdims=True), 2 * num_draws)
    covariance = np.fft.irfft(abs(spectrum) ** 2, 2 * num_draws)[:, :num_draws].mean(0) / num_draws
    total = covariance[0] + (draws.mean(1).var(ddof=1) if len(draws) > 1 else 0.0)
    autocorrelation = 1 - (covariance[0] * num_draws / (num_draws - 1) - covariance) / total
    autocorrelation[0] = 1.0
    # sums of neighbouring autocorrelations are positive and fall: beyond the first that is not, there is noise alone
    pairs = autocorrelation[: max(2, (num_draws - 1) // 2 * 2)].reshape(-1, 2).sum(1)
    not_positive = pairs <= 0
    end = int(not_positive.argmax()) if not_positive.any() else len(pairs) - 1
    remainder = autocorrelation[2 * end]
    if pairs[end] < 0:
        remainder = max(remainder, 0.0)
    autocorrelation_time = 2 * np.minimum.accumulate(pairs[:end]).sum() - 1 + remainder
    # antithetic chains: at most N log10 N
    return size / max(autocorrelation_time, 1 / np.log10(size))


def _of_each(compute: Callable[[np.ndarray], float], draws: ArrayLike) -> np.ndarray:
    """A statistic of each quantity of draws (…, chain, draw); NaN where one is not finite."""
    draws = np.asarray(draws)
    if draws.ndim < 2 or draws.shape[-1] < MIN_DRAWS:
        raise ValueError(
            f"draws must be (…, chain, draw) with at least {MIN_DRAWS} draws, got {draws.shape}"
        )
    statistics = np.full(draws.shape[:-2], np.nan)
    finite = np.isfinite(draws).all((-2, -1))
    with np.errstate(all="ignore"):  # what does not move
        statistics[finite] = [compute(quantity) for quantity in draws[finite]]
    return statistics


def divergences_by_chance(num_transitions: int) -> int:
    """Divergences that a run may have whose draws are right: more of them happen to one such run in fifty.

    Of NUTS at its default target five transitions in ten thousand diverge where nothing is wrong (eight nets: 0 to 15
    of 16,000, two in the median); 26 where an sd is 6 % too small, 143 in eight schools, centred.

    >>> divergences_by_chance(100), divergences_by_chance(800), divergences_by_chance(4000)
    (1, 2, 5)
    """
    mean = torch.tensor(DIVERGING_BY_CHANCE * num_transitions, dtype=torch.float64)
    counts = torch.arange(10 + 2 * int(mean), dtype=torch.float64)
    distribution_function = torch.special.gammaincc(counts + 1, mean)  # Poisson's
    return int((distribution_function < 0.98).sum())


def ess_of_families(draws: np.ndarray, ancestor: np.ndarray) -> np.ndarray:
    r"""Effective sample size of means of particles (quantity, island, draw), by which of them are relatives.

    .. math:: \frac{N \sum_i (x_i - \bar x)^2}{\sum_a \bigl(\sum_{i \in a} (x_i - \bar x)\bigr)^2}

    for families a, of one ancestor (island, draw) each: where modes parted while the ancestors were few, their weights
    are off by more than particles within an island show.

    References:
        Variance estimation in the particle filter (Lee & Whiteley, 2018) https://doi.org/10.1093/biomet/asy028
    """
    # the same number on another island is another ancestor
    island = np.arange(len(ancestor))[:, None]
    _, family = np.unique(ancestor + 1j * island, return_inverse=True)
    family = family.ravel()
    centred = (draws - draws.mean((1, 2), keepdims=True)).reshape(len(draws), -1)
    sums = np.stack([np.bincount(family, values) for values in centred])
    return family.size * (centred**2).sum(1) / (sums**2).sum(1)
