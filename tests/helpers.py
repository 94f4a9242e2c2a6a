"""Stochastic checks with one failure rate for the project.

A Monte Carlo mean is compared with the truth at SIGMAS standard errors, where the standard error follows from
the effective sample size of the run itself: sd / sqrt(ESS). A run with too small an ESS fails on that ground
rather than passing by its wide tolerance. For a single element the failure rate is 6e-7; all elements of a
tensor are checked together with the same rate per family (Bonferroni).
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from arviz_stats.base import array_stats
from scipy import stats

SIGMAS = 5.0


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Seeds torch's global generator inside the block and restores it: for initial weights and ``rsample``."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def covering(cases: Mapping[str, Sequence], each: int, also: Iterable[Sequence] = ()) -> set[str]:
    """The names of a sample of a product in which each value of each list stands ``each`` times, or as often as it can.

    Cases are taken in the order of a hash of their names: spread, the same in every run, and hardly others when a list
    grows.

    Args:
        cases: the values of every case, one for each list of the product.
        each: how often a value is wanted.
        also: the values of cases that are run anyway, and count.
    """

    def places(values: Sequence) -> list[tuple]:
        return [(place, repr(value)) for place, value in enumerate(values)]

    seen = Counter(value for values in also for value in places(values))
    kept = set()
    for enough in (
        any,
        all,
    ):  # first the cases of which every value is wanted, then those of which one is
        for name in sorted(cases, key=lambda name: zlib.crc32(name.encode())):
            values = places(cases[name])
            if name not in kept and not enough(seen[value] >= each for value in values):
                kept.add(name)
                seen.update(values)
    return kept


def assert_mean_within(
    draws, truth, *, sigmas: float = SIGMAS, min_ess: float = 400.0, name: str = "mean"
) -> None:
    """The means of ``draws`` (chain, draw, *shape) equal ``truth`` (*shape) within Monte Carlo error.

    Args:
        draws: Tensor or array with at least one chain; i.i.d. draws are passed as (1, draw, *shape).
        truth: the exact means, broadcastable to *shape.
        sigmas: width of the check for one element, in standard errors.
        min_ess: effective sample size demanded of every element.
        name: what is checked, for the message.

    Raises:
        AssertionError: naming the worst element, its distance in standard errors and the ESS.
    """
    draws = _as_draws(draws)
    truth = np.broadcast_to(np.asarray(truth, dtype=float), draws.shape[2:]).ravel()
    flat = draws.reshape(*draws.shape[:2], -1)
    # the ESS of the plain draws gives the error of their mean; the rank-normalised one (bulk) also sees
    # chains that disagree. The smaller of the two is what the run can vouch for.
    ess = np.minimum(_ess(flat, "mean"), _ess(flat, "bulk"))
    _demand_ess(ess, min_ess, name)
    error = flat.mean((0, 1)) - truth
    standard_error = flat.std((0, 1), ddof=1) / np.sqrt(ess)
    _demand_close(error, standard_error, truth, ess, sigmas, name)


def assert_same_mean(
    draws, others, *, sigmas: float = SIGMAS, min_ess: float = 100.0, name: str = "mean"
) -> None:
    """The means of two runs (chain, draw, *shape) are equal within the Monte Carlo error of both."""
    means, errors, sizes = [], [], []
    for run in (_as_draws(draws), _as_draws(others)):
        flat = run.reshape(*run.shape[:2], -1)
        ess = np.minimum(_ess(flat, "mean"), _ess(flat, "bulk"))
        _demand_ess(ess, min_ess, name)
        means.append(flat.mean((0, 1)))
        errors.append(flat.std((0, 1), ddof=1) / np.sqrt(ess))
        sizes.append(ess)
    _demand_close(
        means[0] - means[1],
        np.hypot(*errors),
        means[1],
        np.minimum(*sizes),
        sigmas,
        name,
    )


def assert_var_within(
    draws,
    truth,
    *,
    mean=None,
    sigmas: float = SIGMAS,
    min_ess: float = 400.0,
    name: str = "variance",
) -> None:
    """The variances of ``draws`` (chain, draw, *shape) equal ``truth`` (*shape) within Monte Carlo error.

    It is the check of a mean: of (θ − mean)², around the exact ``mean`` when it is known and the sample mean
    (whose own error is of smaller order) otherwise.
    """
    draws = _as_draws(draws)
    centre = draws.mean((0, 1)) if mean is None else np.asarray(mean, dtype=float)
    assert_mean_within((draws - centre) ** 2, truth, sigmas=sigmas, min_ess=min_ess, name=name)


def _as_draws(draws) -> np.ndarray:
    draws = draws.detach().cpu().numpy() if isinstance(draws, torch.Tensor) else np.asarray(draws)
    if draws.ndim < 2:
        raise ValueError(
            f"draws must have the dimensions (chain, draw, *shape), got shape {draws.shape}"
        )
    draws = draws.astype(float)
    if not np.isfinite(draws).all():
        raise AssertionError("draws contain NaN or infinity")
    return draws


def _ess(flat: np.ndarray, method: str) -> np.ndarray:
    return np.atleast_1d(array_stats.ess(flat, chain_axis=0, draw_axis=1, method=method)).astype(
        float
    )


def _demand_ess(ess: np.ndarray, min_ess: float, name: str) -> None:
    worst = int(np.nanargmin(ess)) if np.isfinite(ess).any() else 0
    if not np.all(ess >= min_ess):
        raise AssertionError(
            f"{name}: the effective sample size of element {worst} is {ess[worst]:.0f}, below {min_ess:.0f}: "
            "the run is too short to be checked"
        )


def _demand_close(error, standard_error, truth, ess, sigmas: float, name: str) -> None:
    # one failure rate for the family: |z| of n elements against the quantile at alpha / n
    alpha = 2 * stats.norm.sf(sigmas)
    limit = stats.norm.isf(alpha / 2 / error.size)
    floor = 1e-12 * (1 + np.abs(truth))  # float rounding, for a constant element
    z = np.abs(error) / np.maximum(standard_error, floor)
    worst = int(np.argmax(z))
    if not np.all(z <= limit):
        raise AssertionError(
            f"{name}: element {worst} is {truth[worst] + error[worst]:.6g}, expected {truth[worst]:.6g}: "
            f"{z[worst]:.1f} standard errors away (limit {limit:.1f}, ESS {ess[worst]:.0f})"
        )
