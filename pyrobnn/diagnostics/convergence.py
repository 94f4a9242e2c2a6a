"""Convergence of Markov chains, judged in function space, where a Bayesian neural network is identified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr

from pyrobnn.chains import MIN_DRAWS, ess, nested_rhat, rhat
from pyrobnn.diagnostics import thresholds
from pyrobnn.diagnostics.evidence import WEIGHTS, Evidence, flattened, labels, statistic
from pyrobnn.diagnostics.verdict import Check, Status
from pyrobnn.groups import FUNCTION, POSTERIOR, SAMPLE_DIMS, SAMPLE_STATS

#: how the names of values of the function begin
F_AT = "f at "
_NORM = "norm of layer"
_TITLES = ("log-likelihood", "log prior", "log density", "noise")
_MAX_QUANTITIES = 256
_MAX_WEIGHTS = 1000
_MAX_DATA = 32
_STACKING = "; if the modes stay, weight them by stacking on elpd rather than by counting chains"
_SHOWN = 4  # groups of chains that are named


@dataclass(frozen=True, eq=False)
class Convergence:
    """R-hat, effective sample sizes and Monte-Carlo errors of identified quantities.

    Args:
        table: Dataset over ``quantity`` with ``rhat``, ``ess_bulk``, ``ess_tail``, ``mcse`` (in the quantity's
            units) and ``sd``; ``rhat`` is NaN where a single chain leaves it undefined. The coordinate names
            each quantity, e.g. ``"f at x≈1.3"``.
        nested: Whether ``rhat`` is the nested R-hat of superchains, groups of chains that share their start.
    """

    table: xr.Dataset
    nested: bool

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

    Function values at the probes, log-likelihood, log prior, layer norms and noise from the ``function`` group; without
    it (a program, NumPyro, PyMC) the log-likelihood of a spread of the data, their total, and the log density. And
    every named site but the weights of a net with hidden units, ``net.*``, which alone are not identified.
    """
    found: dict[str, np.ndarray] = {}
    f = evidence.f
    if f is not None:
        num_outputs = f.shape[3]
        pairs = [(probe, output) for probe in range(f.shape[2]) for output in range(num_outputs)]
        for probe, output in _spread(pairs, _MAX_QUANTITIES):
            suffix = f" (output {output})" if num_outputs > 1 else ""
            found[f"{F_AT}{evidence.probe_name(probe)}{suffix} #{probe}"] = f[:, :, probe, output]
    else:
        pointwise = evidence.log_likelihood
        if pointwise is not None:
            for datum in _spread(list(range(pointwise.shape[2])), _MAX_DATA):
                found[f"log-likelihood of datum {datum}"] = pointwise[:, :, datum].astype(np.float64)
            found["log-likelihood"] = pointwise.sum(-1, dtype=np.float64)
    found |= _named_sites(evidence)
    for group, name, title in (
        (FUNCTION, "log_likelihood", "log-likelihood"),
        (FUNCTION, "log_prior", "log prior"),
        (SAMPLE_STATS, "lp", "log density"),
        (FUNCTION, "layer_norm", _NORM),
        (FUNCTION, "noise", "noise"),
    ):
        values = evidence.draws(group, name)
        if values is None:
            continue
        columns = values.reshape(*values.shape[:2], -1)
        for index in range(columns.shape[2]):
            found[f"{title} {index}" if columns.shape[2] > 1 else title] = columns[:, :, index]
    return {name: draws for name, draws in found.items() if np.isfinite(draws).all() and np.ptp(draws) > 0.0}


def _named_sites(evidence: Evidence) -> dict[str, np.ndarray]:
    """The elements of every site but a net's weights, at most `_MAX_QUANTITIES`, some of each site."""
    every = evidence.identified_weights
    names = evidence.names(POSTERIOR)
    sites = [n for n in names if every or not n.startswith(WEIGHTS) or n in evidence.computed]
    stored = {name: draws for name in sites if (draws := evidence.draws(POSTERIOR, name)) is not None}
    columns = {name: flattened(draws, 2) for name, draws in stored.items()}
    found = {}
    for name, draws in columns.items():
        shape = stored[name].shape[2:]
        variable = evidence.variable(POSTERIOR, name)
        dims = [] if variable is None else [dim for dim in variable.dims if dim not in SAMPLE_DIMS]
        known = [labels(variable, str(dim)) for dim in dims]
        for index in _spread(range(draws.shape[2]), max(1, _MAX_QUANTITIES // len(columns))):
            place = np.unravel_index(index, shape)
            at = ", ".join(str(i if said is None else said[i]) for i, said in zip(place, known, strict=True))
            found[f"{name}[{at}]" if shape else name] = draws[:, :, index]
    return found


@statistic
def convergence(evidence: Evidence) -> Convergence | None:
    """Rank-normalised split R-hat, bulk and tail ESS and the MCSE of the mean, of every identified quantity.

    Args:
        tree: A DataTree of Markov chains.

    Returns:
        The table, or None where nothing can be computed (fewer than four draws per chain, nothing that varies).

    Caveat:
        Chains that all miss the same mode agree with each other: R-hat is necessary, not sufficient.

    References:
        Rank-normalization, folding, and localization: an improved R-hat (Vehtari et al., 2021).
    """
    found = quantities(evidence)
    if not found or next(iter(found.values())).shape[1] < MIN_DRAWS:
        return None
    draws = np.stack(list(found.values()))
    groups = _superchains(evidence)
    if groups is not None:
        ratio = nested_rhat(draws, groups)
    else:
        ratio = rhat(draws) if draws.shape[1] > 1 else np.full(len(found), np.nan)
    flat = draws.reshape(len(draws), -1)
    columns = {
        "rhat": ratio,
        "ess_bulk": ess(draws),
        "ess_tail": ess(draws, "tail"),
        "mcse": flat.std(axis=1, ddof=1) / np.sqrt(ess(draws, "mean")),
        "sd": flat.std(axis=1),
    }
    table = xr.Dataset(
        {name: ("quantity", column) for name, column in columns.items()}, coords={"quantity": list(found)}
    )
    return Convergence(table, groups is not None)


def _superchains(evidence: Evidence) -> np.ndarray | None:
    """The group of each chain, from the attribute ``superchains``: groups of equal size; None where there are none."""
    said = evidence.json("superchains")
    groups = np.asarray(said if isinstance(said, list) else [])
    if groups.shape != (evidence.num_chains,):
        return None
    sizes = np.unique(groups, return_counts=True)[1]
    return groups if len(sizes) > 1 and sizes[0] > 1 and (sizes == sizes[0]).all() else None


def _shared(evidence: Evidence) -> str:
    """Which chains are said to share a start, in words."""
    said = evidence.json("superchains")
    if not isinstance(said, list) or len(said) != evidence.num_chains:
        return ""
    groups = [[str(c) for c, each in enumerate(said) if each == group] for group in dict.fromkeys(said)]
    groups = [group for group in groups if len(group) > 1]
    shown = "; ".join(", ".join(group) for group in groups[:_SHOWN]) + ("; …" if len(groups) > _SHOWN else "")
    return f" Chains that share a start: {shown}." if groups else ""


@statistic
def rhat_limits(evidence: Evidence) -> tuple[np.ndarray, np.ndarray]:
    """The R-hat of each quantity (quantity,) that chains of this length may have, to pass and not to fail.

    The correlation within chains is measured about each chain's own mean, so that chains which disagree are not taken
    for slow ones, and is no longer than chains may have that are worth `thresholds.ESS_PASS` draws.
    """
    found = quantities(evidence)
    chains, draws = next(iter(found.values())).shape
    centred = np.stack([each - each.mean(axis=1, keepdims=True) for each in found.values()])
    worth = ess(centred)
    longest = max(1.0, chains * draws / thresholds.ESS_PASS)
    times = chains * draws / np.where(np.isfinite(worth), worth, 1.0)
    # each is known roughly, and the shortest of many are those that came out too short
    times = np.clip(np.maximum(times, np.median(times)), 1.0, longest)
    limits = [
        [max(least, thresholds.rhat_limit(chains, draws, time, len(found), level)) for time in times]
        for least, level in (
            (thresholds.RHAT_PASS, thresholds.RHAT_FALSE_WARN),
            (thresholds.RHAT_FAIL, thresholds.RHAT_FALSE_FAIL),
        )
    ]
    return np.array(limits[0]), np.array(limits[1])


@statistic
def weight_rhat(evidence: Evidence) -> tuple[float, float, int] | None:
    """Largest and median R-hat over (at most 1000) weights, and how many were looked at; None where undefined."""
    if evidence.num_chains < 2 or evidence.draws_per_chain < MIN_DRAWS:
        return None
    names = [name for name in evidence.names(POSTERIOR) if name.startswith(WEIGHTS)]
    stored = [evidence.stored(POSTERIOR, name) for name in names]
    columns = [flattened(draws, 2) for draws in stored if draws is not None and draws.ndim > 2]
    if not columns:
        return None
    every = -(-sum(column.shape[2] for column in columns) // _MAX_WEIGHTS)
    flat = np.concatenate([column[:, :, ::every] for column in columns], axis=2)
    flat = flat[:, :, np.isfinite(flat).all(axis=(0, 1)) & (np.ptp(flat, axis=(0, 1)) > 0.0)]
    if flat.shape[2] == 0:
        return None
    found = rhat(np.moveaxis(flat, 2, 0))
    return float(np.nanmax(found)), float(np.nanmedian(found)), int(flat.shape[2])


def _rhat_known(found: Convergence | None) -> bool:
    return found is not None and bool(np.isfinite(found.table["rhat"]).any())


def check_rhat(evidence: Evidence) -> Check | None:
    """The largest R-hat over the identified quantities, and where it is."""
    found = convergence(evidence)
    if found is None or not _rhat_known(found):
        return None
    rhat = np.nan_to_num(found.table["rhat"].values, nan=1.0, posinf=1e6)
    passing, failing = rhat_limits(evidence)
    excess = (rhat - 1.0) / (passing - 1.0)
    worst = int(np.argmax(np.where(rhat > failing, 1e9, 1.0) * excess))
    value, name = float(rhat[worst]), _shown(found.names[worst])
    good, bad = float(passing[worst]), float(failing[worst])
    status: Status = "pass" if value <= good else "fail" if value > bad else "warn"
    kind = "nested R-hat (chains grouped by their start)" if found.nested else "R-hat"
    the = "the " if name.startswith((*_TITLES, _NORM)) else ""
    where = name.removeprefix("f ") if name.startswith(F_AT) else f"in {the}{name}"
    ess = float(found.table["ess_bulk"].min())
    slow = status == "warn" and ess < thresholds.ESS_PASS
    return Check(
        "rhat_function",
        status,
        value,
        f"≤ {good:.3g} to pass, > {bad:.3g} to fail, by the length of the run",
        thresholds.NESTED_RHAT_SOURCE if found.nested else thresholds.RHAT_SOURCE,
        f"The largest {kind} over {rhat.size} identified quantities is {value:.3f}, {where}.{_shared(evidence)}",
        ""
        if status == "pass"
        else f"Chains mix slowly {where}: raise {evidence.more_draws}."
        if slow
        else f"Chains disagree {where}: raise num_warmup, and draw new starts (another seed).",
    )


def check_modes(evidence: Evidence) -> Check | None:
    """A failure where chains fall into separate groups of function values."""
    f = evidence.f
    if f is None or not np.isfinite(f).all() or not _rhat_known(convergence(evidence)):
        return None
    means = f.mean(axis=1)
    within = np.sqrt(f.var(axis=1).mean(axis=0))
    ordered = np.sort(means, axis=0)
    gaps = np.diff(ordered, axis=0).max(axis=0) / np.maximum(within, np.finfo(float).tiny)
    probe, output = np.unravel_index(int(gaps.argmax()), gaps.shape)
    gap = float(min(gaps[probe, output], 1e6))
    if gap < thresholds.MODES_FAIL:
        return None
    column = means[:, probe, output]
    cut = int(np.diff(np.sort(column)).argmax())
    low = sorted(int(chain) for chain in np.argsort(column)[: cut + 1])
    high = sorted(set(range(len(column))) - set(low))
    where, late = evidence.probe_name(int(probe)), _levels(evidence)
    what, cure = ("different functions", "") if late else ("different modes of the function", _STACKING)
    return Check(
        "modes",
        "fail",
        gap,
        f"chain means < {thresholds.MODES_FAIL:.0f} within-chain sd apart",
        thresholds.RHAT_SOURCE,
        f"At {where} chains {low} and chains {high} sit in {what}, {gap:.1f} within-chain sd apart.{late}",
        f"Chains disagree at {where}: raise num_warmup, and draw new starts (another seed){cure}.",
    )


def _levels(evidence: Evidence) -> str:
    """How far apart chains are in their log density, in words; empty where no farther than one of them varies."""
    lp = evidence.draws(SAMPLE_STATS, "lp")
    if lp is None or lp.ndim != 2 or not np.isfinite(lp).all():
        return ""
    means, spread = lp.mean(axis=1), float(np.sqrt(lp.var(axis=1).mean()))
    apart = float(np.ptp(means))
    if not apart > thresholds.MODES_FAIL * spread > 0.0:
        return ""
    return (
        f" The log density of chain {int(means.argmin())} is {apart:.3g} nats below that of chain "
        f"{int(means.argmax())}, where that of one varies by {spread:.2g}: the lower have not arrived, or hold next to "
        "none of the posterior."
    )


def check_ess(evidence: Evidence) -> Check | None:
    """The smallest effective sample size over the identified quantities, but for the norms of layers.

    Norms wander slowly where layers can share a scale between them, and the function does not: R-hat judges both.
    """
    found = convergence(evidence)
    if found is None:
        return None
    bulk, tail = found.table["ess_bulk"].values, found.table["ess_tail"].values
    norms = np.array([name.startswith(_NORM) for name in found.names])
    both = np.where(norms & ~norms.all(), np.nan, np.fmin(bulk, tail))
    if not np.isfinite(both).any():
        return None
    worst = int(np.nanargmin(both))
    value = float(both[worst])
    kind = "bulk" if np.isfinite(bulk[worst]) and bulk[worst] <= tail[worst] else "tail"
    error = (
        thresholds.ESS_ERROR if evidence.num_draws >= thresholds.ESS_PASS else 0.0
    )  # fewer are worth fewer
    enough = (1.0 - error) * thresholds.ESS_PASS
    status: Status = "pass" if value >= enough else "fail" if value < thresholds.ESS_FAIL else "warn"
    factor = int(np.ceil(1.2 * thresholds.ESS_PASS / max(value, 1.0)))
    more = -(-evidence.draws_per_chain * factor // 100) * 100
    return Check(
        "ess_function",
        status,
        value,
        f"≥ {thresholds.ESS_PASS:.0f} (100 for each of four chains) within the error of the smallest of many, so ≥ "
        f"{enough:.0f}; < {thresholds.ESS_FAIL:.0f} fails",
        thresholds.ESS_SOURCE,
        f"The smallest effective sample size is {value:.0f} ({kind}, {_shown(found.names[worst])}) of "
        f"{evidence.num_draws} draws.",
        ""
        if status == "pass"
        else f"Draw more: {more} draws per chain would give about 400; raise {evidence.more_draws}.",
    )


def check_mcse(evidence: Evidence) -> Check | None:
    """The Monte-Carlo error of posterior means, as information."""
    found = convergence(evidence)
    if found is None:
        return None
    relative = (found.table["mcse"] / found.table["sd"]).values
    if not np.isfinite(relative).any():
        return None
    largest = float(np.nanmax(relative))
    return Check(
        "mcse_function",
        "info",
        largest,
        "",
        thresholds.ESS_SOURCE,
        f"The Monte-Carlo error of posterior means is at most {largest:.1%} of the posterior sd.",
    )


def check_weights(evidence: Evidence) -> Check | None:
    """R-hat of single weights, as information."""
    found = weight_rhat(evidence)
    if found is None or convergence(evidence) is None:
        return None
    largest, median, count = found
    return Check(
        "rhat_weights",
        "info",
        largest,
        "",
        thresholds.RHAT_SOURCE,
        f"Over {count} weights R-hat is {median:.2f} in the median and {largest:.2f} at most: not identified, "
        "since hidden units can swap and change sign, so this decides nothing.",
    )


def _shown(name: str) -> str:
    return name.split(" #")[0]


def _spread(items: Sequence, limit: int) -> Sequence:
    """At most `limit` of `items`, evenly spread."""
    if len(items) <= limit:
        return items
    return [items[int(index)] for index in np.linspace(0, len(items) - 1, limit)]
