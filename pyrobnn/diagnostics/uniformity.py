"""Whether PIT values are uniform: tests of arrays, with what predictions that share one function do to them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import stats
from scipy.special import ndtri

from pyrobnn.core.seeding import own_stream
from pyrobnn.diagnostics.evidence import RATES, spread
from pyrobnn.diagnostics.grades import Found, Limits, grade_tested
from pyrobnn.diagnostics.limits import LEVEL, MAX_DATA, NUM_SIMULATED

#: sd of a uniform value, and of its distance from a half
_SD_MEAN = 12.0**-0.5
SD_SIZE = 48.0**-0.5


class Dependence(NamedTuple):
    """Factors, at the least 1, by which errors exceed those of independent data.

    Of the distance of the PIT from uniform, the share in 90 % intervals, the PIT's mean, and its size: the mean
    distance of u from a half.
    """

    distance: float = 1.0
    coverage: float = 1.0
    mean: float = 1.0
    size: float = 1.0


def dependence_of(draws: np.ndarray) -> Dependence:
    """By what the errors of the PIT exceed those of independent data, from draws (draw, point[, output]).

    All predictions share the one function, whose error is common to them: replicates of all points by one draw say by
    how much, being outcomes of the model itself.
    """
    chosen = draws[spread(len(draws), NUM_SIMULATED)][:, spread(draws.shape[1], MAX_DATA)]
    u = (chosen.argsort(axis=0).argsort(axis=0) + 0.5) / len(chosen)
    flat = u.reshape(len(u), -1)
    num_points = flat.shape[1]
    ordered = np.sort(flat, axis=1)
    place = np.arange(num_points) / num_points
    # Kolmogorov's, of each draw
    distances = np.maximum(ordered - place, place + 1.0 / num_points - ordered).max(axis=1)
    share = (np.abs(flat - 0.5) <= 0.5 * LEVEL).mean(axis=1)
    factors = (
        np.median(distances) / stats.kstwo.median(num_points),
        share.std() / np.sqrt(LEVEL * (1.0 - LEVEL) / num_points),
        flat.mean(axis=1).std() / _SD_MEAN * np.sqrt(num_points),
        np.abs(flat - 0.5).mean(axis=1).std() / SD_SIZE * np.sqrt(num_points),
    )
    return Dependence(*(max(1.0, float(factor)) for factor in factors))


def uniform(
    u: np.ndarray,
    limits: Limits,
    source: str,
    rates: tuple[float, float] = RATES,
    p: float | None = None,
) -> Found:
    """Whether PIT values are uniform: by a distance that matters, and that chance does not explain.

    By the p-value of their distance, mean and size, unless another test's is given.
    """
    u = u.ravel()
    distance = float(stats.kstest(u, "uniform").statistic)
    if p is None:
        p = _p_independent(u, distance)
    mean = float(u.mean())
    outer = float((np.abs(u - 0.5) > 0.45).mean())
    extreme = float((np.abs(u - 0.5) > 0.495).mean())
    numbers = {
        "count": u.size,
        "which": source,
        "outer": outer,
        "extreme": extreme,
        "mean": mean,
        "p": p,
    }
    status = grade_tested(p, distance, rates, limits)
    code = "calibrated" if status == "pass" else _departure(mean, outer, extreme)
    return Found(status, distance, code, numbers, limits[0])


def _p_independent(u: np.ndarray, distance: float) -> float:
    """p-value of the worst of three tests of independent u: its distance from uniform, its mean and its size."""
    departures = np.abs([float(u.mean()) - 0.5, np.abs(u - 0.5).mean() - 0.25])
    errors = np.array([_SD_MEAN, SD_SIZE]) / np.sqrt(u.size)
    tails = 2.0 * stats.norm.sf(departures / errors)
    return least_p(stats.kstwo.sf(distance, u.size), *tails)


def _departure(mean: float, outer: float, extreme: float) -> str:
    """The code of how PIT values depart: by their mean, and their shares in the outer 10 % and the outer 1 %."""
    if abs(mean - 0.5) > 0.1:
        return "biased"
    # intervals that are too wide for most and yet too narrow for the last per cent: noise with heavy tails
    if extreme > 0.015 and outer < 0.1:
        return "heavy_tails"
    return "too_narrow" if outer > 0.1 else "too_wide"


def least_p(*p: float) -> float:
    """The least of some p-values, times their number (Bonferroni)."""
    return float(min(1.0, len(p) * min(p)))


def p_moments(u: np.ndarray, dependence: Dependence) -> float:
    """p-value of the worst of four tests of u: its distance from uniform, mean and variance of Φ⁻¹(u), skewness.

    The most powerful for a bias and a width, and of a skewness Neyman's smooth test: Legendre's polynomial of degree 3.
    """
    z = ndtri(np.clip(u, 1e-6, 1.0 - 1e-6))
    root = np.sqrt(u.size)
    square = float((z**2).sum())
    skew = np.sqrt(7.0) * (((20.0 * u - 30.0) * u + 12.0) * u - 1.0).mean()
    tail = min(stats.chi2.cdf(square, u.size), stats.chi2.sf(square, u.size))
    z_scores = (
        abs(z.mean()) * root / dependence.mean,
        stats.norm.isf(tail) / dependence.size,
        abs(skew) * root,
    )
    distance = stats.kstest(u, "uniform").statistic / dependence.distance
    return least_p(stats.kstwo.sf(distance, u.size), *2.0 * stats.norm.sf(z_scores))


def p_binned(u: np.ndarray, levels: tuple[float, ...]) -> float:
    """p-value of the worst of three moments of u (point,), of which only the levels that it lies between are known.

    They are the mean and variance of Φ⁻¹(u) and the skewness (as `p_moments`). Each value counts as its bin's mean; the
    distribution of the largest of the three is simulated.
    """
    edges = np.array([0.0, *levels, 1.0])
    share = np.diff(edges)
    z = np.clip(ndtri(edges), -40.0, 40.0)
    density = stats.norm.pdf(z)
    # antiderivatives in u of z, of z² − 1 and of Legendre's polynomial of degree 3
    integrals = -density, -z * density, edges * (((5.0 * edges - 10.0) * edges + 6.0) * edges - 1.0)
    counts = own_stream().multinomial(
        u.size,
        share,
        size=20_000,
    )
    sums = np.vstack([np.histogram(u, edges)[0], counts]) @ (np.diff(integrals) / share).T
    largest = np.abs(sums / sums.std(axis=0)).max(axis=1)
    return float((largest >= largest[0] - 1e-9).mean())
