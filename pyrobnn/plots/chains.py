"""How the draws were made: chains, their mixing and energy, and the loss of an optimisation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr
from arviz_stats import bfmi
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from pyrobnn.diagnostics.convergence import F_AT, convergence, quantities
from pyrobnn.diagnostics.evidence import Evidence, Trees, gather
from pyrobnn.groups import FUNCTION, HISTORY, POSTERIOR, SAMPLE_DIMS, SAMPLE_STATS
from pyrobnn.plots.style import FITS, INK, MUTED, PALETTE, empty_panel, fit_line, panels, style

MAX_CHAINS = 8
MAX_STEPS = 300
MAX_TITLE = 32


def _watched(evidence: Evidence, most: int) -> dict[str, np.ndarray]:
    """What to watch, name → (chain, draw): log density, the function where chains agree least, the noise.

    Of programs the sites where they agree least. The weights of a network are not identified; they are shown only where
    a tree holds nothing else.
    """
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
        return {name.split(" #")[0]: known[name] for name in chosen[:most]}
    stored = {name: evidence.draws(POSTERIOR, name) for name in evidence.names(POSTERIOR)}
    weights = {name: v.reshape(*v.shape[:2], -1)[..., 0] for name, v in stored.items() if v is not None}
    return {name: v for name, v in list(weights.items())[:most] if np.isfinite(v).all() and np.ptp(v) > 0}


def _mcmc(trees: Trees) -> dict[str, Evidence]:
    """The trees whose draws come from chains: only there do trace, rank and energy say anything."""
    return {label: each for label, each in gather(trees).items() if not each.is_iid and each.num_draws}


def _rows(
    trees: dict[str, Evidence], most: int, size: tuple[float, float]
) -> tuple[Figure, list[tuple[Axes, str, np.ndarray]]]:
    """A figure with one panel per tree and quantity, and (axes, title, draws) for each."""
    cells = [
        (f"{label}: {name}" if len(trees) > 1 else name, draws)
        for label, evidence in trees.items()
        for name, draws in _watched(evidence, most).items()
    ]
    figure, axes = panels(max(1, len(cells)), size=size, max_columns=2)
    if not cells:
        empty_panel(axes[0, 0], "no chains: independent draws of an approximation have no trace")
    return figure, [(ax, title, draws) for (title, draws), (ax,) in zip(cells, axes, strict=False)]


def _short(title: str) -> str:
    """As much of a title as a panel holds: a probe is named by its inputs, whose names may be long."""
    return title if len(title) <= MAX_TITLE else f"{title[: MAX_TITLE - 1]}…"


def _chain_colours(count: int) -> list[str]:
    return [PALETTE[c % len(PALETTE)] for c in range(count)]


def trace(trees: Trees, *, num_quantities: int = 4) -> Figure:
    """Every chain's path: log density, the function (of programs, the sites) where they agree least, the noise.

    Healthy chains overlap like one band. Weights are shown only where a tree holds nothing better: they are
    not identified in a neural network, and chains may disagree about them while agreeing about every
    prediction. At most 8 chains and 300 evenly spaced draws of each are drawn. Trees of independent draws
    are left out.

    Args:
        trees: one DataTree or a mapping from label to DataTree.
        num_quantities: most panels per tree.

    Returns:
        A figure with one panel per tree and quantity.
    """
    with style():
        figure, cells = _rows(_mcmc(trees), num_quantities, (3.0, 1.9))
        for ax, title, path in cells:
            ax.set_title(_short(title), fontsize=9)
            chains, draws = path.shape
            at = np.unique(np.linspace(0, draws - 1, min(draws, MAX_STEPS)).round().astype(int))
            for chain, colour in enumerate(_chain_colours(min(chains, MAX_CHAINS))):
                ax.plot(at, path[chain, at], color=colour, lw=0.6, alpha=0.75)
            ax.set_xlabel("draw")
        return figure


def rank(trees: Trees, *, num_quantities: int = 4, num_bins: int = 20) -> Figure:
    """Rank histograms: where each chain's draws stand among the draws of all chains.

    Chains that sample the same distribution have flat histograms; the grey band is where a bin's height lies
    with 99 % probability for independent draws (autocorrelated draws leave it a little more often). Tilted:
    a chain sits too high or low. U-shaped: it is too wide. Trees of independent draws, or of a single chain,
    are left out. Vehtari et al., Rank-Normalization, Folding, and Localization: An Improved R-hat (2021),
    https://doi.org/10.1214/20-BA1221

    Args:
        trees: one DataTree or a mapping from label to DataTree.
        num_quantities: most panels per tree.
        num_bins: bins of each histogram.

    Returns:
        A figure with one panel per tree and quantity.
    """
    with style():
        several = {label: each for label, each in _mcmc(trees).items() if each.num_chains > 1}
        figure, cells = _rows(several, num_quantities, (3.0, 1.9))
        for ax, title, path in cells:
            ax.set_title(_short(title), fontsize=9)
            chains, draws = path.shape
            bins = max(4, min(num_bins, draws // 10))
            ranks = stats.rankdata(path).reshape(chains, draws) / (chains * draws)
            expected = draws / bins
            low, high = stats.binom.ppf((0.005, 0.995), draws, 1 / bins) / expected
            ax.axhspan(low, high, color=MUTED, alpha=0.15, lw=0)
            for chain, colour in enumerate(_chain_colours(min(chains, MAX_CHAINS))):
                height = np.histogram(ranks[chain], bins=bins, range=(0, 1))[0] / expected
                ax.stairs(height, np.linspace(0, 1, bins + 1), color=colour, lw=1.1, baseline=None)
            ax.axhline(1, color=INK, lw=0.8, ls=(0, (4, 2)))
            ax.set_ylim(bottom=0)
            ax.set_xlabel("rank (share of all draws)")
        return figure


def energy(trees: Trees) -> Figure:
    r"""Marginal energy against the energy change between draws, and the worst chain's BFMI.

    .. math:: \mathrm{BFMI} = \frac{\sum_n (E_n - E_{n-1})^2}{\sum_n (E_n - \bar E)^2}

    Where the transitions are much narrower than the marginal (BFMI below 0.3) the sampler crawls through
    energies and misses the tails. Betancourt, Diagnosing Suboptimal Cotangent Disintegrations (2016),
    https://arxiv.org/abs/1604.00695

    Args:
        trees: one DataTree or a mapping from label to DataTree with ``sample_stats.energy``.

    Returns:
        A figure with one panel per tree that has energies.
    """
    found = {
        label: values
        for label, evidence in _mcmc(trees).items()
        if (values := evidence.draws(SAMPLE_STATS, "energy")) is not None
        and values.shape[1] > 2
        and np.isfinite(values).all()
    }
    with style():
        figure, axes = panels(max(1, len(found)), size=(3.0, 2.1))
        if not found:
            empty_panel(axes[0, 0], "no finite energies: only Hamiltonian samplers have them")
        for (label, values), (ax,) in zip(found.items(), axes, strict=False):
            ax.set_title(label)
            _energy_panel(ax, values)
        return figure


def _energy_panel(ax: Axes, values: np.ndarray) -> None:
    marginal = (values - values.mean(axis=1, keepdims=True)).ravel()
    change = np.diff(values, axis=1).ravel()
    edges = np.histogram_bin_edges(np.concatenate([marginal, change]), bins=36)
    ax.hist(
        marginal,
        bins=edges.tolist(),
        density=True,
        color=PALETTE[0],
        alpha=0.35,
        linewidth=0,
        label="marginal",
    )
    ax.hist(
        change,
        bins=edges.tolist(),
        density=True,
        histtype="step",
        color=PALETTE[1],
        lw=1.3,
        label="transition",
    )
    if (np.ptp(values, axis=1) > 0).all():
        data = xr.Dataset({"energy": (SAMPLE_DIMS, values)})
        worst = float(np.min(bfmi(data)["energy"].values))
        ax.text(0.02, 0.97, f"BFMI {worst:.2f}", transform=ax.transAxes, va="top", fontsize=8)
    ax.set_yticks([])
    ax.set_xlabel("energy − its mean")
    ax.legend(loc="upper right")


def loss(trees: Trees, *, name: str = "loss") -> Figure:
    """The tracked loss against the step, raw (thin) and smoothed over 2 % of the steps.

    The vertical axis stops at the 95th percentile of the last nine tenths, so that the first steps do not
    flatten the rest. A loss that still falls at the end has not converged.

    Args:
        trees: one DataTree or a mapping from label to DataTree with a ``history`` group.
        name: which tracked scalar; where a tree lacks it, its first one is drawn.

    Returns:
        A figure with one panel per tree that has a history.
    """
    found = {}
    for label, evidence in gather(trees).items():
        names = evidence.names(HISTORY)
        chosen = name if name in names else next(iter(names), name)
        if (tracked := evidence.variable(HISTORY, chosen)) is not None:
            values = np.atleast_1d(tracked.values).astype(float)
            values = values.reshape(values.shape[0], -1).mean(1)
            if np.isfinite(values).sum() > 1:
                found[label] = (chosen, values, _steps_each(evidence, values))
    with style():
        figure, axes = panels(max(1, len(found)), size=(3.0, 2.1))
        if not found:
            empty_panel(axes[0, 0], "no history: nothing was optimised")
        for (label, (chosen, values, each)), (ax,) in zip(found.items(), axes, strict=False):
            ax.set_title(label)
            at = np.unique(
                np.linspace(0, len(values) - 1, min(len(values), 2 * MAX_STEPS)).round().astype(int)
            )
            ax.plot(at * each, values[at], color=PALETTE[0], lw=0.5, alpha=0.4)
            steps, smooth = _smooth(values)
            ax.plot(steps * each, smooth, color=PALETTE[0], lw=1.5)
            late = values[len(values) // 10 :]
            late = late[np.isfinite(late)]
            if len(late) > 2 and np.ptp(late) > 0:
                low, high = late.min(), np.quantile(late, 0.95)
                ax.set_ylim(low - 0.05 * (high - low), high + 0.4 * (high - low))
            ax.set_xlabel("step")
            ax.set_ylabel(chosen)
        return figure


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
    chosen = list(
        names or [name for name in known if any(np.ptp(f.get(name, [0])) > 0 for f in tracked.values())]
    )
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
            figure.legend(
                list(lines.values()), list(lines), loc="outside lower center", ncols=min(5, len(lines))
            )
        return figure


def _histories(evidence: Evidence) -> dict[str, np.ndarray]:
    """Tracked scalars by name, (step,), the mean over members; those with fewer than two finite values are left out."""
    found = {}
    for name in evidence.names(HISTORY):
        tracked = evidence.variable(HISTORY, name)
        values = np.atleast_1d(tracked.values).astype(float) if tracked is not None else np.zeros(0)
        values = values.reshape(values.shape[0], -1).mean(1) if values.size else values
        if np.isfinite(values).sum() > 1:
            found[name] = values[np.isfinite(values)]
    return found


def _steps_each(evidence: Evidence, values: np.ndarray) -> float:
    """Steps per tracked value: a fit may keep the means of blocks of steps, and says how many steps it took."""
    return max(1.0, evidence.number("num_steps", len(values)) / len(values))


def _smooth(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Centres and means of a window of 2 % of the steps, at most 300 of them."""
    window = max(1, len(values) // 50)
    smooth = np.convolve(values, np.ones(window) / window, mode="valid")
    kept = np.unique(np.linspace(0, len(smooth) - 1, min(len(smooth), MAX_STEPS)).round().astype(int))
    return kept + window / 2, smooth[kept]


def weight_norms(trees: Trees) -> Figure:
    """Posterior of each layer's weight norm: median, middle half and middle 90 %, one row per layer and
    method.

    Norms are invariant under permutations of hidden units and so, unlike single weights, comparable between
    chains and methods. A norm that stays at its prior in one method only hints at units that were switched
    off.

    Args:
        trees: one DataTree or a mapping from label to DataTree with ``function.layer_norm``.

    Returns:
        A figure with one axes; a legend names the methods.
    """
    found = {
        label: (norms, source)
        for label, evidence in gather(trees).items()
        if (norms := evidence.draws(FUNCTION, "layer_norm")) is not None
        and (source := evidence.variable(FUNCTION, "layer_norm")) is not None
        and norms.size
    }
    with style():
        if not found:
            figure, axes = panels(1, size=(4.6, 1.4))
            empty_panel(axes[0, 0], "no layer norms in these trees")
            return figure
        layers = max(norms.shape[-1] for norms, _ in found.values())
        figure, axes = panels(1, size=(4.2, 0.8 + 0.22 * layers * (len(found) + 1)))
        ax = axes[0, 0]
        names = [f"layer {i}" for i in range(layers)]
        for index, (label, (norms, source)) in enumerate(found.items()):
            colour = FITS[index % len(FITS)]
            if "layer" in source.coords and norms.shape[-1] == layers:
                names = [str(n) for n in source.coords["layer"].values]
                names = [f"layer {name}" if name.isdigit() else name for name in names]
            for layer in range(norms.shape[-1]):
                at = layer + 0.7 * ((index + 0.5) / len(found) - 0.5)
                finite = norms[..., layer][np.isfinite(norms[..., layer])]
                if not finite.size:
                    continue
                p5, p25, p50, p75, p95 = np.quantile(finite, (0.05, 0.25, 0.5, 0.75, 0.95))
                ax.hlines(at, p5, p95, color=colour, lw=1.0)
                ax.hlines(at, p25, p75, color=colour, lw=3.0)
                ax.plot(
                    p50, at, "o", color=colour, markersize=4, markeredgecolor="white", markeredgewidth=0.7
                )
            dropped = int(np.sum(~np.isfinite(norms)))
            ax.plot([], [], color=colour, lw=3, label=f"{label} ({dropped} not finite)" if dropped else label)
        ax.set_yticks(range(layers), names)
        ax.set_ylim(layers - 0.5, -0.5)
        ax.set_xlim(left=0)
        ax.grid(axis="y", visible=False)
        ax.set_xlabel("norm of the layer's weights")
        figure.legend(loc="outside upper right", ncols=min(4, len(found)))
        return figure
