"""The checks of Markov chains: how many there are, whether they agree and move, and what their sampler says."""

from __future__ import annotations

from math import sqrt

import arviz_stats
import numpy as np
import xarray as xr
from scipy import stats

from pyrobnn.core.chains import MIN_DRAWS, divergences_by_chance, ess, rhat
from pyrobnn.core.groups import FUNCTION, SAMPLE_DIMS, SAMPLE_STATS
from pyrobnn.diagnostics.convergence import NORM, convergence, quantities
from pyrobnn.diagnostics.evidence import Evidence, flattened, statistic
from pyrobnn.diagnostics.grades import Found, Limits, Status, grade
from pyrobnn.diagnostics.limits import ENOUGH_DRAWS, RHAT_LIMITS
from pyrobnn.diagnostics.relabelling import switched_labels


def chains(evidence: Evidence, limits: Limits) -> Found | None:
    """Whether there are enough chains, long enough and from different starts, to judge convergence."""
    shape = {
        "chains": evidence.num_chains,
        "draws": evidence.draws_per_chain,
        "more": evidence.more_draws,
    }
    draws = float(evidence.draws_per_chain)
    if evidence.draws_per_chain < MIN_DRAWS:
        return Found(
            "fail",
            draws,
            "chains_short",
            shape,
            limit=MIN_DRAWS,
        )
    if evidence.num_chains > evidence.draws_per_chain < limits[0]:
        return Found("fail", draws, "chains_exchanged", shape)
    if convergence(evidence) is None:
        return Found("warn", draws, "nothing_identified", shape)
    if evidence.num_chains == 1:
        return Found(
            "warn",
            1.0,
            "one_chain",
            shape,
            limit=limits[1],
        )
    return Found("warn", draws, "common_start", shape) if evidence.common_start else None


def largest_rhat(evidence: Evidence, _: Limits) -> Found | None:
    """The largest R-hat over the identified quantities; with more chains than draws, also across draw positions."""
    estimates = convergence(evidence)
    if estimates is None or not np.isfinite(estimates.table["rhat"]).any():
        return None
    ratio = np.nan_to_num(
        estimates.table["rhat"].values,
        nan=1.0,
        posinf=1e6,
    )
    # by quantity and run, in place of the row's
    passing, failing = rhat_limits(evidence)
    if evidence.num_chains > evidence.draws_per_chain:
        # the draws of stationary chains are as much alike by their place in the chain as by the chain
        turned = np.stack(list(quantities(evidence).values())).swapaxes(1, 2)
        ratio = np.maximum(
            ratio,
            np.nan_to_num(
                rhat(turned),
                nan=1.0,
                posinf=1e6,
            ),
        )
    excess = (ratio - 1.0) / (passing - 1.0)
    worst = int(np.argmax(np.where(ratio > failing, 1e9, 1.0) * excess))
    value = float(ratio[worst])
    limit = float(passing[worst])
    status = grade(value, limit, float(failing[worst]))
    numbers = {
        "where": _shown(estimates.names[worst]),
        "count": ratio.size,
        "more": evidence.more_draws,
    }
    if status == "pass":
        return Found(status, value, "", numbers, limit)
    relabelled = switched_labels(
        evidence, estimates.names[worst].partition("[")[0], float(failing[worst])
    )
    if relabelled is not None:
        named = ", ".join(map(repr, relabelled.sites))
        numbers |= {"sites": named, "after": relabelled.after}
        return Found(status, value, "labels_switched", numbers, limit)
    slow = status == "warn" and float(estimates.table["ess_bulk"].min()) < ENOUGH_DRAWS
    return Found(status, value, "chains_slow" if slow else "chains_disagree", numbers, limit)


def smallest_ess(evidence: Evidence, limits: Limits) -> Found | None:
    """The smallest effective sample size of the identified quantities, norms of layers left out.

    Norms wander where two layers share a scale, while the function stays. An effective sample size is an estimate:
    of 40 quantities whose true size is 400, the smallest estimate has the median 285 and is below 207 in 5 % of
    cases. So half of 400 passes.
    """
    estimates = convergence(evidence)
    if estimates is None:
        return None
    bulk = estimates.table["ess_bulk"].values
    tail = estimates.table["ess_tail"].values
    norms = np.array([name.startswith(NORM) for name in estimates.names])
    sizes = np.where(norms & ~norms.all(), np.nan, np.fmin(bulk, tail))
    if not np.isfinite(sizes).any():
        return None
    worst = int(np.nanargmin(sizes))
    value = float(sizes[worst])
    enough = limits[0] * (0.5 if evidence.num_draws >= limits[0] else 1.0)  # fewer are worth fewer
    factor = int(np.ceil(1.2 * limits[0] / max(value, 1.0)))
    is_bulk = np.isfinite(bulk[worst]) and bulk[worst] <= tail[worst]
    numbers = {
        "where": _shown(estimates.names[worst]),
        "kind": "bulk" if is_bulk else "tail",
        "draws": evidence.num_draws,
        "needed": -(-evidence.draws_per_chain * factor // 100) * 100,
        "more": evidence.more_draws,
    }
    return Found(grade(value, enough, limits[1], higher=True), value, "", numbers, enough)


def moving(evidence: Evidence, limits: Limits) -> Found | None:
    """Checks that every chain moves, and that independent draws differ, in all weights and in the function."""
    if evidence.draws_per_chain < 2 or evidence.is_point:
        return None
    still = np.ones((evidence.num_chains, evidence.draws_per_chain - 1), dtype=bool)
    for draws in evidence.sites.values():
        still &= _repeats(draws)
    f = evidence.stored(FUNCTION, "f")
    if f is not None and len(f) == len(still) and f.shape[1] == still.shape[1] + 1:
        still = still | _repeats(f)
    share = float(still.mean())
    stuck = np.flatnonzero(still.all(axis=1)).tolist()
    if stuck:
        return Found("fail", share, "chain_stuck", {"chains": stuck})
    return Found("warn", share, "draws_repeat") if share > limits[0] else None


def _repeats(draws: np.ndarray) -> np.ndarray:
    """Whether each draw but the first equals the one before it, (chain, draw − 1)."""
    flat = flattened(draws, 2)
    return (flat[:, 1:] == flat[:, :-1]).all(axis=2)


def divergences(evidence: Evidence, limits: Limits) -> Found | None:
    """The share of transitions that diverged, beyond the share that correct draws have by chance."""
    diverging = evidence.draws(SAMPLE_STATS, "diverging")
    if diverging is None:
        return None
    count = int(diverging.sum())
    share = float(diverging.mean())
    chance = divergences_by_chance(diverging.size)
    status: Status = "pass"
    if count > chance:
        status = "fail" if share >= limits[1] else "warn"
    numbers = {
        "count": count,
        "total": diverging.size,
        "chance": chance,
    }
    return Found(status, share, "", numbers, chance / diverging.size)


def energy(evidence: Evidence, limits: Limits) -> Found | None:
    """The lowest Bayesian fraction of missing information (BFMI) among the chains.

    It is low where the energy changes little from one transition to the next, so that the tails are explored slowly.
    """
    values = evidence.draws(SAMPLE_STATS, "energy")
    if values is None or values.shape[1] < 10:
        return None
    if not np.isfinite(values).all() or not values.std(axis=1).all():
        return None
    energies = xr.Dataset({"energy": (SAMPLE_DIMS, values)})
    fractions = arviz_stats.bfmi(energies)["energy"].values.ravel()
    value = float(fractions.min())
    return Found(grade(value, *limits, higher=True), value, "", {"chain": int(fractions.argmin())})


def _shown(name: str) -> str:
    return name.split(" #")[0]


def rhat_limit(
    num_chains: int,
    num_draws: int,
    time: float,
    count: int,
    level: float,
) -> float:
    r"""The R-hat that the largest of `count` exceeds at the rate `level` although the chains have converged.

    .. math:: \hat R^2 = 1 + \frac{\tau F - 1}{n / 2}, \qquad F \sim F_{2m - 1,\ 2m (n / 2 \tau - 1)}

    for the split halves of m chains of n draws, each worth 1/τ of an independent one; both of R-hat's ranks, bulk and
    tail, count as quantities. Simulated chains agree to 0.002 at 50 draws.

    >>> round(rhat_limit(4, 1000, 1.0, 50, 5e-3), 3), round(rhat_limit(4, 50, 1.0, 50, 5e-3), 3)
    (1.004, 1.074)
    """
    half = max(num_draws // 2, 2)
    freedom = 2 * num_chains - 1, max(2 * num_chains * (half / time - 1.0), 1.0)
    largest = float(stats.f.isf(level / (2 * count), *freedom))
    return sqrt(max(1.0, 1.0 + (time * largest - 1.0) / half))


@statistic
def rhat_limits(evidence: Evidence) -> tuple[np.ndarray, np.ndarray]:
    """The R-hat of each quantity (quantity,) that chains of this length may have, to pass and not to fail.

    At most 0.5 % of converged runs exceed the first of the limits, and 0.01 % the second.
    """
    columns = quantities(evidence)
    num_chains, num_draws = next(iter(columns.values())).shape
    # about each chain's own mean: chains which disagree are not taken for slow ones
    centred = [draws - draws.mean(axis=1, keepdims=True) for draws in columns.values()]
    sizes = ess(np.stack(centred))
    total = num_chains * num_draws
    longest = max(1.0, total / ENOUGH_DRAWS)
    times = total / np.where(np.isfinite(sizes), sizes, 1.0)
    # each is known roughly, and the shortest of many are those that came out too short
    times = np.clip(np.maximum(times, np.median(times)), 1.0, longest)

    def limits(least: float, level: float) -> np.ndarray:
        by_chance = [rhat_limit(num_chains, num_draws, t, len(columns), level) for t in times]
        return np.maximum(least, by_chance)

    return limits(RHAT_LIMITS[0], 5e-3), limits(RHAT_LIMITS[1], 1e-4)
