"""How the draws were made: chains, their mixing and energy, and the loss of an optimisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import xarray as xr
from arviz_stats import bfmi
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from pyrobnn.core.groups import HISTORY, POSTERIOR, SAMPLE_DIMS, SAMPLE_STATS
from pyrobnn.diagnostics.convergence import F_AT, convergence, quantities
from pyrobnn.diagnostics.evidence import Evidence, Trees, gather
from pyrobnn.plots.style import (
    MUTED,
    PALETTE,
    empty_panel,
    evenly,
    fit_line,
    one_each,
    panels,
    reference_line,
    style,
)

#: chains and points of a line that are drawn: more cannot be told apart
MAX_CHAINS, MAX_POINTS = 8, 300


def _watched(evidence: Evidence) -> dict[str, np.ndarray]:
    """What to watch, name → (chain, draw), four quantities at most; weights only where a tree holds nothing else."""
    known, found = quantities(evidence), convergence(evidence)
    functions = [name for name in known if name.startswith(F_AT)]
    sites = evidence.names(POSTERIOR)
    judged = functions or [name for name in known if name.split("[")[0] in sites]
    if found is not None:
        rhat = dict(zip(found.names, np.nan_to_num(found.table["rhat"].values), strict=True))
        judged = sorted(judged, key=lambda name: -rhat[name])[: 2 if functions else 3]
    first = [name for name in ("log density", *judged, "noise", "noise 0") if name in known]
    chosen = first + [name for name in known if name not in first and not name.startswith(F_AT)]
    if chosen:
        return {name.split(" #")[0]: known[name] for name in chosen[:4]}
    stored = {name: evidence.draws(POSTERIOR, name) for name in sites}
    weights = {name: v.reshape(*v.shape[:2], -1)[..., 0] for name, v in stored.items() if v is not None}
    return {name: v for name, v in list(weights.items())[:4] if np.isfinite(v).all() and np.ptp(v) > 0}


def _of_chains(trees: Trees, draw: Callable[[Axes, np.ndarray], None], fewest_chains: int = 1) -> Figure:
    """A panel per tree of chains and watched quantity; independent draws have no trace."""
    found = {
        label: _watched(each)
        for label, each in gather(trees).items()
        if not each.is_iid and each.num_draws and each.num_chains >= fewest_chains
    }
    cells = [
        (f"{label}: {name}" if len(found) > 1 else name, draws)
        for label, watched in found.items()
        for name, draws in watched.items()
    ]
    with style():
        figure, axes = panels(max(1, len(cells)), size=(3.0, 1.9), max_columns=2)
        if not cells:
            empty_panel(axes[0, 0], "no chains: independent draws of an approximation have no trace")
        for (title, draws), (ax,) in zip(cells, axes, strict=False):
            # a probe is named by its inputs, whose names may be long
            ax.set_title(title if len(title) < 33 else f"{title[:31]}…", fontsize=9)
            draw(ax, draws)
        return figure


def trace(trees: Trees) -> Figure:
    """Every chain's path: log density, the function (of programs, the sites) where they agree least, the noise.

    Healthy chains overlap like one band. Weights are shown only where a tree holds nothing better: they are
    not identified in a neural network, and chains may disagree about them while agreeing about every
    prediction. At most 8 chains and 300 evenly spaced draws of each are drawn. Trees of independent draws
    are left out.

    Args:
        trees: one DataTree or a mapping from label to DataTree.

    Returns:
        A figure with one panel per tree and quantity, at most four quantities.
    """

    def draw(ax: Axes, path: np.ndarray) -> None:
        at = evenly(path.shape[1], MAX_POINTS)
        for chain, colour in zip(path[:MAX_CHAINS], PALETTE, strict=False):
            ax.plot(at, chain[at], color=colour, lw=0.6, alpha=0.75)
        ax.set_xlabel("draw")

    return _of_chains(trees, draw)


def rank(trees: Trees) -> Figure:
    """Rank histograms: where each chain's draws stand among the draws of all chains.

    Chains that sample the same distribution have flat histograms; the grey band is where a bin's height lies
    with 99 % probability for independent draws (autocorrelated draws leave it a little more often). Tilted:
    a chain sits too high or low. U-shaped: it is too wide. Trees of independent draws, or of a single chain,
    are left out. Vehtari et al., Rank-Normalization, Folding, and Localization: An Improved R-hat (2021),
    https://doi.org/10.1214/20-BA1221

    Args:
        trees: one DataTree or a mapping from label to DataTree.

    Returns:
        A figure with one panel per tree and quantity, at most four quantities.
    """

    def draw(ax: Axes, path: np.ndarray) -> None:
        chains, draws = path.shape
        bins = max(4, min(20, draws // 10))
        ranks = stats.rankdata(path).reshape(chains, draws) / (chains * draws)
        low, high = stats.binom.ppf((0.005, 0.995), draws, 1 / bins) * bins / draws
        ax.axhspan(low, high, color=MUTED, alpha=0.15, lw=0)
        for chain, colour in zip(ranks[:MAX_CHAINS], PALETTE, strict=False):
            height = np.histogram(chain, bins=bins, range=(0, 1))[0] * bins / draws
            ax.stairs(height, np.linspace(0, 1, bins + 1), color=colour, lw=1.1, baseline=None)
        reference_line(ax, 1.0)
        ax.set_ylim(bottom=0)
        ax.set_xlabel("rank (share of all draws)")

    return _of_chains(trees, draw, fewest_chains=2)


def energy(trees: Trees) -> Figure:
    r"""Marginal energy against the energy change between draws, and the worst chain's BFMI.

    .. math:: \mathrm{BFMI} = \frac{\sum_n (E_n - E_{n-1})^2}{\sum_n (E_n - \bar E)^2}

    Where the transitions are much narrower than the marginal (BFMI below 0.3) the sampler crawls through
    energies and misses the tails. Betancourt, Diagnosing Suboptimal Cotangent Disintegrations (2016),
    https://arxiv.org/abs/1604.00695

    Args:
        trees: one DataTree or a mapping from label to DataTree with ``sample_stats.energy``.

    Returns:
        A figure with one panel per tree.
    """

    def read(evidence: Evidence) -> np.ndarray | None:
        values = None if evidence.is_iid else evidence.draws(SAMPLE_STATS, "energy")
        usable = values is not None and values.shape[1] > 2 and np.isfinite(values).all()
        return values if usable else None

    def draw(ax: Axes, evidence: Evidence, values: np.ndarray) -> None:
        marginal = (values - values.mean(axis=1, keepdims=True)).ravel()
        change = np.diff(values, axis=1).ravel()
        edges = np.histogram_bin_edges(np.concatenate([marginal, change]), bins=36).tolist()
        ax.hist(marginal, edges, density=True, color=PALETTE[0], alpha=0.35, linewidth=0, label="marginal")
        ax.hist(change, edges, density=True, histtype="step", color=PALETTE[1], lw=1.3, label="transition")
        if (np.ptp(values, axis=1) > 0).all():
            worst = float(np.min(bfmi(xr.Dataset({"energy": (SAMPLE_DIMS, values)}))["energy"].values))
            ax.text(0.02, 0.97, f"BFMI {worst:.2f}", transform=ax.transAxes, va="top", fontsize=8)
        ax.set(yticks=[], xlabel="energy − its mean")
        ax.legend(loc="upper right")

    missing = "no finite energies: only Hamiltonian samplers have them"
    return one_each(trees, read, draw, missing, size=(3.0, 2.1))


def loss(trees: Trees) -> Figure:
    """The tracked loss (else the first tracked scalar) against the step, raw (thin) and smoothed over 2 % of the steps.

    The vertical axis stops at the 95th percentile of the last nine tenths, so that the first steps do not
    flatten the rest. A loss that still falls at the end has not converged.

    Args:
        trees: one DataTree or a mapping from label to DataTree with a ``history`` group.

    Returns:
        A figure with one panel per tree.
    """

    def read(evidence: Evidence) -> tuple[str, np.ndarray] | None:
        found = _histories(evidence)
        chosen = "loss" if "loss" in found else next(iter(found), None)
        return None if chosen is None else (chosen, found[chosen])

    def draw(ax: Axes, evidence: Evidence, found: tuple[str, np.ndarray]) -> None:
        chosen, values = found
        each, at = _steps_each(evidence, values), evenly(len(values), 2 * MAX_POINTS)
        ax.plot(at * each, values[at], color=PALETTE[0], lw=0.5, alpha=0.4)
        steps, smooth = _smooth(values)
        ax.plot(steps * each, smooth, color=PALETTE[0], lw=1.5)
        late = values[len(values) // 10 :]
        low, high = late.min(), np.quantile(late, 0.95)
        if low < high:
            ax.set_ylim(low - 0.05 * (high - low), high + 0.4 * (high - low))
        ax.set(xlabel="step", ylabel=chosen)

    return one_each(trees, read, draw, "no history: nothing was optimised", size=(3.0, 2.1))


def training(trees: Trees, *, names: Sequence[str] | None = None) -> Figure:
    """Every tracked scalar in one axes, one line per fit: to see what an option changes on the way.

    Lines are smoothed over 2 % of the steps. The vertical axis leaves out the first tenth of the steps, which would
    flatten the rest.

    Args:
        trees: one DataTree or a mapping from label to DataTree with a ``history`` group.
        names: which scalars, ``["kl", "loss"]`` for instance; None takes all that vary in one of the trees.

    Returns:
        A figure with one axes per scalar; a legend names the fits.

    Raises:
        ValueError: a scalar that no tree has.
    """
    evidences = gather(trees)
    tracked = {label: _histories(evidence) for label, evidence in evidences.items()}
    known = list(dict.fromkeys(name for found in tracked.values() for name in found))
    if missing := [name for name in names or () if name not in known]:
        raise ValueError(f"'names' has {missing}, but the histories have {known}")
    varying = [name for name in known if any(np.ptp(f.get(name, [0])) > 0 for f in tracked.values())]
    chosen = list(names or varying)
    with style():
        figure, axes = panels(max(1, len(chosen)), size=(3.4, 2.5), max_columns=3)
        if not chosen:
            empty_panel(axes[0, 0], "no history: nothing was optimised")
        lines = {}
        for name, (ax,) in zip(chosen, axes, strict=False):
            late = []
            for index, (label, found) in enumerate(tracked.items()):
                if name not in found:
                    continue
                steps, values = _smooth(found[name])
                steps = steps * _steps_each(evidences[label], found[name])
                (lines[label],) = ax.plot(steps, values, lw=1.3, **fit_line(index))
                late.append(values[len(values) // 10 :])
            low, high = np.concatenate(late).min(), np.concatenate(late).max()
            if low < high:
                ax.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
            ax.set(xlabel="step", title=name.replace("_", " "))
        if len(lines) > 1:
            columns = min(5, len(lines))
            figure.legend(list(lines.values()), list(lines), loc="outside lower center", ncols=columns)
        return figure


def _histories(evidence: Evidence) -> dict[str, np.ndarray]:
    """Tracked scalars by name, (step,), the mean over members; those with fewer than two finite values are left out."""
    found = {}
    for name in evidence.names(HISTORY):
        values = np.atleast_1d(evidence.tree[HISTORY].dataset[name].values).astype(float)
        values = values.reshape(values.shape[0], -1).mean(1) if values.size else values
        if np.isfinite(values).sum() > 1:
            found[name] = values[np.isfinite(values)]
    return found


def _steps_each(evidence: Evidence, values: np.ndarray) -> float:
    """Steps per tracked value: a fit may keep the means of blocks of steps, and says how many steps it took."""
    return max(1.0, evidence.number("num_steps", len(values)) / len(values))


def _smooth(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Centres and means of a window of 2 % of the steps."""
    window = max(1, len(values) // 50)
    smooth = np.convolve(values, np.ones(window) / window, mode="valid")
    kept = evenly(len(smooth), MAX_POINTS)
    return kept + window / 2, smooth[kept]
