"""Chains that do not move as chains should: stuck, slow, sorted, wider in one half, with one draw far away."""

from __future__ import annotations

import numpy as np
from verdict.exact_cases import Case


def stuck(case: Case) -> np.ndarray:
    draws = case.draws()
    draws[1] = draws[1, :1]
    return draws


def dealt(case: Case) -> np.ndarray:
    """Slow chains dealt out like cards: each of those that are made holds draws of all, in turn."""
    chains, num = case.shape
    slow_draws = case.draws(correlation=0.995).transpose(1, 0, 2).reshape(num, chains, -1)
    turns = (np.arange(chains)[:, None] + np.arange(num)) % chains
    return slow_draws[np.arange(num), turns]


def by_density(case: Case) -> np.ndarray:
    """The draws of each chain in the order of their density."""
    draws = case.draws()
    mean, covariance = case.exact()
    far = np.einsum("csi,ij,csj->cs", draws - mean, np.linalg.inv(covariance), draws - mean)
    return np.take_along_axis(
        draws,
        far.argsort(axis=1)[..., None],
        axis=1,
    )


def one_slow_weight(case: Case) -> np.ndarray:
    draws = case.draws()
    draws[..., 0] = case.draws(correlation=0.995)[..., 0]
    return draws


def wider_later(case: Case) -> np.ndarray:
    draws = case.draws(correlation=0.2)
    mean = case.exact()[0]
    half = case.shape[1] // 2
    draws[:, half:] = mean + 1.6 * (draws[:, half:] - mean)
    return draws


def one_far_draw(case: Case) -> np.ndarray:
    draws = case.draws(correlation=0.2)
    draws[1, case.shape[1] // 10] += 1e4
    return draws
