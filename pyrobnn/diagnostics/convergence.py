"""Convergence of Markov chains, judged in function space, where a Bayesian neural network is identified."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import arviz_stats
import numpy as np
import xarray as xr
from scipy import stats

from pyrobnn.core.chains import MIN_DRAWS, divergences_by_chance, ess, ess_of_families, rhat
from pyrobnn.core.groups import FUNCTION, POSTERIOR, SAMPLE_DIMS, SAMPLE_STATS
from pyrobnn.diagnostics.evidence import WEIGHTS, Evidence, flattened, labels, spread, statistic
from pyrobnn.diagnostics.verdict import Found, Status, grade

#: how the names of values of the function begin
F_AT = "f at "
_NORM = "norm of layer"
_MAX_QUANTITIES = 256
_MAX_DATA = 32
#: R-hat of long chains, to pass and not to fail (Vehtari et al., 2021, section 4; the second as in Stan's manuals)
RHAT_LIMITS = 1.01, 1.05
#: effective draws that estimates rest on: 100 for each of four chains (Vehtari et al., 2021, section 4)
ENOUGH_DRAWS = 400.0


@dataclass(frozen=True, eq=False)
class Convergence:
    """R-hat and effective sample sizes of identified quantities.

    Args:
        table: Dataset over ``quantity`` with ``rhat``, ``ess_bulk`` and ``ess_tail``; ``rhat`` is NaN where a single
            chain leaves it undefined. The coordinate names each quantity, e.g. ``"f at x≈1.3"``.
    """

    table: xr.Dataset

    @property
    def of_function(self) -> xr.Dataset:
        """The rows of the table that are values of the function."""
        return self.table.isel(quantity=[name.startswith(F_AT) for name in self.names])

    @property
    def names(self) -> list[str]:
        """The name of each quantity, as the table has it."""
        return [str(name) for name in self.table["quantity"].values]


@statistic
def quantities(evidence: Evidence) -> dict[str, np.ndarray]:
    """The identified scalar quantities of a tree, name → (chain, draw); constant ones are left out.

    Function values at the probes and what else the ``function`` group holds; without it (a program, another library)
    the log-likelihood of a spread of the data. And every named site but the weights of a net with hidden units.
    """
    columns: dict[str, np.ndarray] = {}
    pointwise = evidence.log_likelihood
    if evidence.f is not None:
        columns |= _function_values(evidence, evidence.f)
    elif pointwise is not None:
        for datum in spread(pointwise.shape[2], _MAX_DATA):
            draws = pointwise[:, :, datum].astype(np.float64)
            columns[f"log-likelihood of datum {datum}"] = draws
        columns["log-likelihood"] = pointwise.sum(-1, dtype=np.float64)
    columns |= named_sites(evidence)
    titles = {
        "log_likelihood": "log-likelihood",
        "log_prior": "log prior",
        "layer_norm": _NORM,
        "noise": "noise",
    }
    for name, title in titles.items():
        columns |= _numbered(title, evidence.draws(FUNCTION, name))
    columns |= _numbered("log density", evidence.draws(SAMPLE_STATS, "lp"))
    return {name: draws for name, draws in columns.items() if _varies(draws)}


def _varies(draws: np.ndarray) -> bool:
    return bool(np.isfinite(draws).all()) and float(np.ptp(draws)) > 0.0


def _function_values(evidence: Evidence, f: np.ndarray) -> dict[str, np.ndarray]:
    """Values of the function f (chain, draw, probe, output), at most `_MAX_QUANTITIES`, name → (chain, draw)."""
    num_outputs = f.shape[3]
    columns = {}
    for index in spread(f.shape[2] * num_outputs, _MAX_QUANTITIES):
        probe, output = divmod(int(index), num_outputs)
        suffix = f" (output {output})" if num_outputs > 1 else ""
        name = f"{F_AT}{evidence.probe_name(probe)}{suffix} #{probe}"
        columns[name] = f[:, :, probe, output]
    return columns


def _numbered(title: str, values: np.ndarray | None) -> dict[str, np.ndarray]:
    """The elements of values (chain, draw, …), numbered where there are several."""
    if values is None:
        return {}
    flat = flattened(values, 2)
    if flat.shape[2] == 1:
        return {title: flat[:, :, 0]}
    return {f"{title} {index}": flat[:, :, index] for index in range(flat.shape[2])}


def named_sites(evidence: Evidence) -> dict[str, np.ndarray]:
    """The elements of every site but a net's weights, at most `_MAX_QUANTITIES`, some of each site."""
    computed = evidence.computed
    stored = {}
    for name, draws in evidence.sites.items():
        is_weight = name.startswith(WEIGHTS) and name not in computed
        if evidence.identified_weights or not is_weight:
            stored[name] = draws
    columns = {}
    for name, draws in stored.items():
        flat = flattened(draws, 2).astype(np.float64)
        shape = draws.shape[2:]
        for index in spread(flat.shape[2], max(1, _MAX_QUANTITIES // len(stored))):
            title = f"{name}[{_place(evidence, name, index, shape)}]" if shape else name
            columns[title] = flat[:, :, index]
    return columns


def _place(
    evidence: Evidence,
    name: str,
    index: int,
    shape: tuple[int, ...],
) -> str:
    """Where an element of a site stands, by the labels of its axes, else by their numbers."""
    variable = evidence.variable(POSTERIOR, name)
    dims = [] if variable is None else [dim for dim in variable.dims if dim not in SAMPLE_DIMS]
    words = []
    for position, dim in zip(
        np.unravel_index(index, shape),
        dims,
        strict=True,
    ):
        axis_labels = labels(variable, str(dim))
        words.append(str(position if axis_labels is None else axis_labels[position]))
    return ", ".join(words)


@statistic
def convergence(evidence: Evidence) -> Convergence | None:
    """Rank-normalised split R-hat, and bulk and tail ESS, of every identified quantity.

    Args:
        tree: A DataTree of Markov chains.

    Returns:
        The table, or None where nothing can be computed (fewer than four draws per chain, nothing that varies).

    Caveat:
        Chains that all miss the same mode agree with each other: R-hat is necessary, not sufficient.

    References:
        Rank-normalization, folding, and localization: an improved R-hat (Vehtari et al., 2021).
    """
    columns = quantities(evidence)
    if not columns or next(iter(columns.values())).shape[1] < MIN_DRAWS:
        return None
    draws = np.stack(list(columns.values()))
    ratio = rhat(draws) if draws.shape[1] > 1 else np.full(len(columns), np.nan)
    bulk = ess(draws)
    ancestor = evidence.draws(SAMPLE_STATS, "ancestor")
    if ancestor is not None and ancestor.shape == draws.shape[1:]:
        bulk = np.fmin(bulk, ess_of_families(draws, ancestor))
    table = xr.Dataset(
        {
            "rhat": ("quantity", ratio),
            "ess_bulk": ("quantity", bulk),
            "ess_tail": ("quantity", ess(draws, "tail")),
        },
        coords={"quantity": list(columns)},
    )
    return Convergence(table)


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


# the rows of the table


def chains(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
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


def largest_rhat(evidence: Evidence, _: tuple[float, ...]) -> Found | None:
    """The largest R-hat over the identified quantities; with more chains than draws, also across draw positions."""
    estimates = convergence(evidence)
    if estimates is None or not np.isfinite(estimates.table["rhat"]).any():
        return None
    ratio = np.nan_to_num(
        estimates.table["rhat"].values,
        nan=1.0,
        posinf=1e6,
    )
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
    slow = status == "warn" and float(estimates.table["ess_bulk"].min()) < ENOUGH_DRAWS
    return Found(status, value, "chains_slow" if slow else "chains_disagree", numbers, limit)


def smallest_ess(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    """The smallest effective sample size over the identified quantities except the norms of layers.

    Norms wander where layers share a scale, and the function does not. Where all of 40 sizes are 400, the smallest of
    their estimates has the median 285 and is below 207 in 5 % of cases: half of 400 passes.
    """
    estimates = convergence(evidence)
    if estimates is None:
        return None
    bulk = estimates.table["ess_bulk"].values
    tail = estimates.table["ess_tail"].values
    norms = np.array([name.startswith(_NORM) for name in estimates.names])
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


def moving(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    """Whether each chain moves, and whether independent draws differ: in all weights and in the function."""
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


def divergences(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    """The share of transitions that diverged; right draws have some by chance."""
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


def energy(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    """The lowest fraction of missing information of the energy over the chains."""
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
