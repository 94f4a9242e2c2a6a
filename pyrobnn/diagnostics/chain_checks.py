"""The checks of Markov chains: how many there are, whether they agree and move, and what their sampler says."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import arviz_stats
import numpy as np
import xarray as xr
from scipy import stats

from pyrobnn.core.chains import MIN_DRAWS, divergences_by_chance, ess, rhat
from pyrobnn.core.groups import FUNCTION, SAMPLE_DIMS, SAMPLE_STATS
from pyrobnn.diagnostics.convergence import LOG_DENSITY, NORM, Convergence, convergence, quantities
from pyrobnn.diagnostics.evidence import Evidence, flattened, statistic
from pyrobnn.diagnostics.grades import Found, Limits, Status, grade
from pyrobnn.diagnostics.limits import ENOUGH_DRAWS, RHAT_LIMITS
from pyrobnn.diagnostics.relabelling import switched_labels


def chains(evidence: Evidence, limits: Limits) -> Found | None:
    """Asks whether there are enough chains, long enough and from different starts, to judge convergence."""
    enough_draws, enough_chains = limits
    num_draws = evidence.draws_per_chain
    numbers = {
        "chains": evidence.num_chains,
        "draws": num_draws,
        "more": evidence.more_draws,
    }
    if num_draws < MIN_DRAWS:
        return Found("fail", float(num_draws), "chains_short", numbers, limit=MIN_DRAWS)
    if num_draws < enough_draws and num_draws < evidence.num_chains:
        return Found("fail", float(num_draws), "chains_exchanged", numbers)
    if convergence(evidence) is None:
        return Found("warn", float(num_draws), "nothing_identified", numbers)
    if evidence.num_chains == 1:
        return Found("warn", 1.0, "one_chain", numbers, limit=enough_chains)
    if evidence.common_start:
        return Found("warn", float(num_draws), "common_start", numbers)
    return None


def rhat_limit(
    num_chains: int,
    num_draws: int,
    time: float,
    count: int,
    level: float,
) -> float:
    r"""The R-hat that the largest of `count` exceeds at the rate `level` although the chains have converged.

    .. math:: \hat R^2 = 1 + \frac{\tau F - 1}{n / 2}, \qquad F \sim F_{2m - 1,\ 2m (n / 2 \tau - 1)}

    for the split halves of m chains of n draws, with the autocorrelation time τ, ``time``; both of R-hat's ranks, bulk
    and tail, count as quantities. Simulated chains agree to 0.002 at 50 draws.

    >>> round(rhat_limit(4, 1000, 1.0, 50, 5e-3), 3), round(rhat_limit(4, 50, 1.0, 50, 5e-3), 3)
    (1.004, 1.074)
    """
    half = max(num_draws // 2, 2)
    freedom_between = 2 * num_chains - 1
    freedom_within = max(2 * num_chains * (half / time - 1.0), 1.0)
    largest = float(stats.f.isf(level / (2 * count), freedom_between, freedom_within))
    return sqrt(max(1.0, 1.0 + (time * largest - 1.0) / half))


@statistic
def rhat_limits(evidence: Evidence) -> tuple[np.ndarray, np.ndarray]:
    """The R-hat of each quantity (quantity,) that chains of this length may have, to pass and not to fail.

    At most 0.5 % of converged runs exceed the first of the limits, and 0.01 % the second.
    """
    columns = quantities(evidence)
    num_chains, num_draws = next(iter(columns.values())).shape
    times = _autocorrelation_times(list(columns.values()))

    def limits(least: float, level: float) -> np.ndarray:
        by_chance = [rhat_limit(num_chains, num_draws, time, len(times), level) for time in times]
        return np.maximum(least, by_chance)

    return limits(RHAT_LIMITS[0], 5e-3), limits(RHAT_LIMITS[1], 1e-4)


def _limit_of_slow_chains(evidence: Evidence, quantity: int) -> float:
    """The R-hat of this quantity that chains around one mean have as they move within themselves, however slowly."""
    columns = list(quantities(evidence).values())
    num_chains, num_draws = columns[quantity].shape
    time = float(_times_within_chains([columns[quantity]])[0])
    return rhat_limit(num_chains, num_draws, time, len(columns), 5e-3)


def _times_within_chains(columns: Sequence[np.ndarray]) -> np.ndarray:
    """The autocorrelation time (quantity,) of quantities (chain, draw) about each chain's own mean.

    Chains which disagree are thereby not taken for slow ones.
    """
    centred = [draws - draws.mean(axis=1, keepdims=True) for draws in columns]
    sizes = ess(np.stack(centred))
    return columns[0].size / np.where(np.isfinite(sizes), sizes, 1.0)


def _autocorrelation_times(columns: Sequence[np.ndarray]) -> np.ndarray:
    """How many draws of each quantity, (chain, draw) each, are worth an independent one, (quantity,)."""
    longest = max(1.0, columns[0].size / ENOUGH_DRAWS)
    times = _times_within_chains(columns)
    # each is known roughly, and the shortest of many are those that came out too short
    return np.clip(np.maximum(times, np.median(times)), 1.0, longest)


def largest_rhat(evidence: Evidence, _: Limits) -> Found | None:
    """The largest R-hat over the identified quantities; with more chains than draws, also across draw positions."""
    estimates = convergence(evidence)
    if estimates is None or not np.isfinite(estimates.table["rhat"]).any():
        return None
    ratios = _rhats(evidence, estimates)
    # (quantity,) each, for the length of this run, in place of the table's two limits
    passing, failing = rhat_limits(evidence)
    # the worst is the farthest beyond its own limit, before all others where it is beyond the second
    excess = (ratios - 1.0) / (passing - 1.0)
    worst = int(np.argmax(np.where(ratios > failing, 1e9, 1.0) * excess))
    name = estimates.names[worst]
    value = float(ratios[worst])
    limit = float(passing[worst])
    status = grade(value, limit, float(failing[worst]))
    numbers = {
        "where": _shown(name),
        "count": ratios.size,
        "more": evidence.more_draws,
    }
    if status == "pass":
        return Found(status, value, "", numbers, limit)
    # an exchange of components leaves the density as it is
    densities = np.array([title.startswith(LOG_DENSITY) for title in estimates.names])
    same_density = bool((ratios <= failing)[densities].all())
    relabelled = switched_labels(evidence, name.partition("[")[0], float(failing[worst]))
    if relabelled is not None and same_density:
        sites = ", ".join(map(repr, relabelled.sites))
        numbers |= {"sites": sites, "after": relabelled.after}
        return Found(status, value, "labels_switched", numbers, limit)
    is_short = float(estimates.table["ess_bulk"].min()) < ENOUGH_DRAWS
    is_slow = is_short and (status == "warn" or value <= _limit_of_slow_chains(evidence, worst))
    return Found(status, value, "chains_slow" if is_slow else "chains_disagree", numbers, limit)


def _rhats(evidence: Evidence, estimates: Convergence) -> np.ndarray:
    """R-hat of each quantity (quantity,), finite; with more chains than draws the larger of both ways."""
    ratios = _finite(estimates.table["rhat"].values)
    if evidence.num_chains <= evidence.draws_per_chain:
        return ratios
    # the draws of stationary chains are as much alike by their place in the chain as by the chain
    turned = np.stack(list(quantities(evidence).values())).swapaxes(1, 2)
    return np.maximum(ratios, _finite(rhat(turned)))


def _finite(ratios: np.ndarray) -> np.ndarray:
    """R-hats, one where a quantity does not vary, and a million where one is infinite."""
    return np.nan_to_num(ratios, nan=1.0, posinf=1e6)


def smallest_ess(evidence: Evidence, limits: Limits) -> Found | None:
    """The smallest effective sample size of the identified quantities, norms of layers left out.

    Norms wander where two layers share a scale, while the function stays. An effective sample size is an estimate:
    of 40 quantities whose true size is 400, the smallest estimate has the median 285 and is below 207 in 5 % of
    cases. So half of 400 passes.
    """
    enough_draws, too_few = limits
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
    # fewer draws cannot be worth as many
    enough = enough_draws * (0.5 if evidence.num_draws >= enough_draws else 1.0)
    factor = int(np.ceil(1.2 * enough_draws / max(value, 1.0)))
    is_bulk = np.isfinite(bulk[worst]) and bulk[worst] <= tail[worst]
    numbers = {
        "where": _shown(estimates.names[worst]),
        "kind": "bulk" if is_bulk else "tail",
        "draws": evidence.num_draws,
        "needed": -(-evidence.draws_per_chain * factor // 100) * 100,
        "more": evidence.more_draws,
    }
    return Found(grade(value, enough, too_few, higher=True), value, "", numbers, enough)


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
    _, share_that_fails = limits
    diverging = evidence.draws(SAMPLE_STATS, "diverging")
    if diverging is None:
        return None
    count = int(diverging.sum())
    share = float(diverging.mean())
    chance = divergences_by_chance(diverging.size)
    status: Status = "pass"
    if count > chance:
        status = "fail" if share >= share_that_fails else "warn"
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
    energies = evidence.draws(SAMPLE_STATS, "energy")
    if energies is None or energies.shape[1] < 10:
        return None
    if not np.isfinite(energies).all() or not energies.std(axis=1).all():
        return None
    dataset = xr.Dataset({"energy": (SAMPLE_DIMS, energies)})
    fractions = arviz_stats.bfmi(dataset)["energy"].values.ravel()
    lowest = int(fractions.argmin())
    value = float(fractions[lowest])
    return Found(grade(value, *limits, higher=True), value, "", {"chain": lowest})


def _shown(name: str) -> str:
    return name.split(" #")[0]
