"""Draws that repeat each other: chains that are copies, draws that stand there several times, with noise or without."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from verdict.exact_cases import Case


def copied(case: Case) -> np.ndarray:
    return np.repeat(
        case.draws()[:1],
        case.shape[0],
        axis=0,
    )


def opposite(case: Case) -> np.ndarray:
    """Every other chain the mirror image of the one before."""
    draws = case.draws(correlation=0.2)
    mean = case.exact()[0]
    draws[1::2] = 2.0 * mean - draws[::2]
    return draws


def delayed(case: Case) -> np.ndarray:
    chain_draws = case.draws(correlation=0.2)[0]
    return np.stack([np.roll(chain_draws, 37 * chain, axis=0) for chain in range(case.shape[0])])


def drawn_again(case: Case) -> np.ndarray:
    """Draws of each chain drawn from it again with replacement, in their order."""
    rows = np.sort(
        case.rng.integers(
            0,
            case.shape[1],
            size=case.shape[1],
        )
    )
    return case.draws(correlation=0.2)[:, rows]


def jittered(sds: float) -> Callable[[Case], np.ndarray]:
    """One chain as all, each with a little noise of its own."""

    def spoil(case: Case) -> np.ndarray:
        draws = copied(case)
        sd = case.sd
        return draws + sds * sd * case.rng.normal(size=draws.shape)

    return spoil


def blocks(case: Case) -> np.ndarray:
    """Every ten draws twice, one after the other."""
    starts = range(0, case.shape[1] // 2, 10)
    rows = np.concatenate([np.r_[at : at + 10, at : at + 10] for at in starts])
    return case.draws(correlation=0.2)[:, rows]


def shuffled_with_noise(case: Case) -> np.ndarray:
    """One chain as all, each in an order of its own and with a little noise."""
    chain_draws = case.draws()[0]
    draws = np.stack([case.rng.permutation(chain_draws) for _ in range(case.shape[0])])
    return draws + 0.05 * case.sd * case.rng.normal(size=draws.shape)


def few_with_noise(case: Case) -> np.ndarray:
    """Fifty draws again and again, each time with a tenth of an sd of noise."""
    distinct = case.draws()[0, :50]
    draws = distinct[
        case.rng.integers(
            0,
            len(distinct),
            size=case.shape,
        )
    ]
    return draws + 0.1 * case.sd * case.rng.normal(size=draws.shape)
