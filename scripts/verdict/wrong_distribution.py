"""Draws of another distribution than the posterior: shifted, too wide or narrow, of other data, cut off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from verdict.exact_cases import Case

EVERY = slice(None)


def spread(
    factor: float, chains: slice = EVERY, correlation: float = 0.0
) -> Callable[[Case], np.ndarray]:
    """Chains whose sd is `factor` times the posterior's."""

    def spoil(case: Case) -> np.ndarray:
        draws = case.draws(correlation=correlation)
        mean = case.exact()[0]
        draws[chains] = mean + factor * (draws[chains] - mean)
        return draws

    return spoil


def moved(
    sds: float,
    chains: slice = EVERY,
    draws: slice = EVERY,
    weights: slice = EVERY,
    correlation: float = 0.0,
) -> Callable[[Case], np.ndarray]:
    """Some of the draws `sds` posterior sd away, in some weights."""

    def spoil(case: Case) -> np.ndarray:
        shifted = case.draws(correlation=correlation)
        shifted[chains, draws, weights] += sds * case.sd[weights]
        return shifted

    return spoil


def marginals(case: Case) -> np.ndarray:
    """The posterior's conditional sds without its correlations, as of a mean-field fit."""
    mean, covariance = case.exact()
    sd = 1.0 / np.sqrt(np.diag(np.linalg.inv(covariance)))
    return mean + sd * case.rng.normal(size=(*case.shape, len(mean)))


def other_data(case: Case) -> np.ndarray:
    draws = case.draws()
    y = case.x_test @ case.rng.normal(size=case.x.shape[1])
    draws[0] = replace(case, x=case.x_test, y=y).draws()[0]
    return draws


def other_inputs(case: Case) -> np.ndarray:
    """Weights of the inputs in the reverse order; of one input with the other sign."""
    draws = case.draws(correlation=0.2)
    draws[..., :-1] = draws[..., -2::-1] if draws.shape[-1] > 2 else -draws[..., :-1]
    return draws


def at_the_mode(sds: float) -> Callable[[Case], np.ndarray]:
    """Half of the draws, at random, within `sds` of the mode."""

    def spoil(case: Case) -> np.ndarray:
        draws = case.draws(correlation=0.2)
        mean, covariance = case.exact()
        chosen = case.rng.random(case.shape) < 0.5
        noise = case.rng.normal(size=(int(chosen.sum()), len(mean)))
        draws[chosen] = mean + sds * np.sqrt(np.diag(covariance)) * noise
        return draws

    return spoil


def of_the_prior(share: float) -> Callable[[Case], np.ndarray]:
    """A share of the draws, at random, from the prior."""

    def spoil(case: Case) -> np.ndarray:
        draws = case.draws()
        chosen = case.rng.random(case.shape) < share
        draws[chosen] = case.prior * case.rng.normal(size=(int(chosen.sum()), draws.shape[-1]))
        return draws

    return spoil


def shaped(
    draw: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray],
) -> Callable[[Case], np.ndarray]:
    """Draws of another distribution with the posterior's mean and, where `draw` has variance one, its covariance."""

    def spoil(case: Case) -> np.ndarray:
        mean, covariance = case.exact()
        return mean + draw(case.rng, (*case.shape, len(mean))) @ np.linalg.cholesky(covariance).T

    return spoil


def swinging(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Not random at all: each weight of each chain a wave of its own frequency and phase."""
    chains, draws, weights = shape
    frequency = rng.uniform(0.2, 3.0, weights)
    phase = rng.uniform(0.0, 2.0 * np.pi, (chains, 1, weights))
    return np.sqrt(2.0) * np.sin(np.arange(draws)[:, None] * frequency + phase)


def without_tails(case: Case) -> np.ndarray:
    """The half of the draws that is nearest to the mean, each twice as often, in an order at random."""
    mean, covariance = case.exact()
    flat = case.draws().reshape(-1, len(mean))
    candidates = np.concatenate([flat, case.draws().reshape(-1, len(mean))])
    far = np.einsum("si,ij,sj->s", candidates - mean, np.linalg.inv(covariance), candidates - mean)
    return case.rng.permutation(candidates[np.argsort(far)[: len(flat)]]).reshape(*case.shape, -1)


def cut_on_one_side(case: Case) -> np.ndarray:
    """Draws whose first weight is at most half an sd above its mean."""
    mean, covariance = case.exact()
    chains = []
    for _ in range(case.shape[0]):
        candidates = case.draws().reshape(-1, len(mean))
        low = candidates[:, 0] - mean[0] < 0.5 * np.sqrt(covariance[0, 0])
        chains.append(candidates[low][: case.shape[1]])
    return np.stack(chains)
