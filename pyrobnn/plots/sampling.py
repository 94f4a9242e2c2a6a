"""Draws and their origin: chains, their mixing and energy, the loss of an optimisation, and the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import xarray as xr
from arviz_stats import bfmi
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from pyrobnn.core.checks import check_choice
from pyrobnn.core.groups import FUNCTION, HISTORY, POSTERIOR, SAMPLE_DIMS, SAMPLE_STATS
from pyrobnn.diagnostics.convergence import F_AT, convergence, quantities
from pyrobnn.diagnostics.evidence import Evidence, Trees, gather
from pyrobnn.plots.style import (
    FITS,
    INK,
    MUTED,
    PALETTE,
    empty_panel,
    evenly,
    fit_line,
    interval_row,
    name_rows,
    one_each,
    panels,
    reference_line,
    style,
)


class Drawn(Protocol):
    """The parts of a :class:`pyrobnn.Posterior` that are drawn."""

    draws: Any
    meta: Mapping[str, Any]
    approximation: Any


Source = Drawn | xr.DataTree | Evidence
Matrix = Literal["correlation", "covariance", "precision"]
#: weights whose matrix can be seen, and names that fit beside it
MAX_WEIGHTS, MAX_NAMES = 1000, 12
#: chains and points of a line that are drawn: more cannot be distinguished
MAX_CHAINS, MAX_POINTS = 8, 300


def _watched(evidence: Evidence) -> dict[str, np.ndarray]:
    """Quantities to draw, name → (chain, draw), four at most; weights only where a tree holds nothing else."""
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
    prediction. At most 8 chains and 300 evenly spaced draws of each are drawn; independent draws are not.

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
    a chain sits too high or low. U-shaped: it is too wide. Independent draws, and single chains, are not
    drawn. Vehtari et al., Rank-Normalization, Folding, and Localization: An Improved R-hat (2021),
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
    """Tracked scalars by name, (step,), the mean over members; those with at least two finite values."""
    found = {}
    for name in evidence.names(HISTORY):
        values = np.atleast_1d(evidence.tree[HISTORY].dataset[name].values).astype(float)
        values = values.reshape(values.shape[0], -1).mean(1) if values.size else values
        if np.isfinite(values).sum() > 1:
            found[name] = values[np.isfinite(values)]
    return found


def _steps_each(evidence: Evidence, values: np.ndarray) -> float:
    """Steps per tracked value: a fit may keep the means of blocks of steps."""
    return max(1.0, evidence.number("num_steps", len(values)) / len(values))


def _smooth(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Centres and means of a window of 2 % of the steps."""
    window = max(1, len(values) // 50)
    smooth = np.convolve(values, np.ones(window) / window, mode="valid")
    kept = evenly(len(smooth), MAX_POINTS)
    return kept + window / 2, smooth[kept]


class _Picture(NamedTuple):
    """A matrix (weight, weight), its sites with their numbers of weights, and how it was computed."""

    matrix: np.ndarray
    sizes: dict[str, int]
    source: str


def covariance(
    posteriors: Source | Mapping[str, Source],
    *,
    matrix: Matrix = "correlation",
    sites: list[str] | None = None,
) -> Figure:
    r"""Which weights vary together: the matrix of an approximation, or of the draws, as a picture.

    A :class:`pyrobnn.Posterior` of SVI, Laplace or SWAG shows its own covariance in unconstrained space, without
    noise; other posteriors, and trees, show that of their draws. The precision of a Laplace approximation is its
    Hessian, prior included; with Kronecker factors every layer is one block, the product of two small matrices.
    Lines part the sites. Weights that were held fixed have no variance and stay white.

    Args:
        posteriors: a Posterior or a DataTree, or a mapping from label to either.
        matrix: ``"correlation"`` (colours from −1 to 1), ``"covariance"``, or ``"precision"``, the inverse of the
            covariance. Colours of the last two end at the largest off-diagonal entry, or at the largest entry of a
            diagonal matrix.
        sites: which sites to show; None shows all.

    Returns:
        A figure with one panel per posterior.

    Raises:
        ValueError: unknown ``matrix`` or site; more than 1000 weights.

    Caveat: n draws determine a covariance of d weights poorly unless n is several times d, and their precision only
    where n exceeds d.
    """
    check_choice("matrix", matrix, ("correlation", "covariance", "precision"))
    if isinstance(posteriors, Mapping) and not isinstance(posteriors, xr.DataTree):
        named = posteriors
    else:
        one: Any = posteriors
        is_tree = isinstance(one, xr.DataTree | Evidence)
        named = {next(iter(gather(one))) if is_tree else str(one.meta["method"]): one}
    with style():
        figure, axes = panels(max(1, len(named)), size=(3.6, 3.3), max_columns=2)
        for (label, source), (ax,) in zip(named.items(), axes, strict=False):
            ax.set_title(label)
            found = _picture(label, source, sites)
            if found is None:
                empty_panel(ax, "no draws of several weights")
            else:
                _show(figure, ax, found, matrix)
        return figure


def _picture(label: str, source: Source, sites: list[str] | None) -> _Picture | None:
    if isinstance(source, xr.DataTree | Evidence):
        evidence = next(iter(gather({label: source}).values()))
        stored = {name: evidence.draws(POSTERIOR, name) for name in evidence.names(POSTERIOR)}
        values = {name: draws for name, draws in stored.items() if draws is not None}
    else:
        approximation = source.approximation
        if hasattr(approximation, "covariance"):
            spans = {s.name: (s.start, s.stop) for s in approximation.layout.sites if s.kind == "latent"}
            chosen = _chosen(label, {name: stop - start for name, (start, stop) in spans.items()}, sites)
            index = np.concatenate([np.arange(*spans[name]) for name in chosen])
            return _Picture(approximation.covariance(index).cpu().numpy(), chosen, "of the approximation")
        values = {name: draws.detach().cpu().double().numpy() for name, draws in source.draws.items()}
    flat = {name: v.reshape(v.shape[0] * v.shape[1], math.prod(v.shape[2:])) for name, v in values.items()}
    chosen = _chosen(label, {name: v.shape[1] for name, v in flat.items()}, sites)
    draws = np.concatenate([flat[name] for name in chosen], 1) if chosen else np.zeros((0, 0))
    if min(draws.shape) < 2:
        return None
    return _Picture(np.cov(draws.T), chosen, f"of {len(draws)} draws")


def _chosen(label: str, sizes: dict[str, int], sites: list[str] | None) -> dict[str, int]:
    if unknown := sorted(set(sites or ()) - set(sizes)):
        raise ValueError(f"'sites' has {unknown}, but {label} has {sorted(sizes)}")
    chosen = {name: size for name, size in sizes.items() if sites is None or name in sites}
    if (total := sum(chosen.values())) > MAX_WEIGHTS:
        raise ValueError(
            f"{label} has {total} weights, and a picture shows at most {MAX_WEIGHTS}: choose with 'sites', "
            f"of {sorted(sizes)}"
        )
    return chosen


def _show(figure: Figure, ax: Axes, found: _Picture, matrix: Matrix) -> None:
    values = _transformed(found.matrix, matrix)
    off = np.abs(values - np.diag(np.diag(values)))
    most = 1.0 if matrix == "correlation" else float(np.nanmax(off)) or float(np.nanmax(np.abs(values)))
    image = ax.imshow(values, cmap="RdBu_r", vmin=-most, vmax=most, interpolation="nearest")
    ends = np.cumsum(list(found.sizes.values()))
    for end in ends[:-1]:
        ax.axhline(end - 0.5, color=INK, lw=0.4)
        ax.axvline(end - 0.5, color=INK, lw=0.4)
    ax.grid(visible=False)
    centres = ends - (np.array(list(found.sizes.values())) + 1) / 2
    names = [name.removeprefix("net.") for name in found.sizes]
    shown: list[int] = []
    for i, centre in enumerate(centres):  # names that would overlap are dropped
        if not shown or centre - centres[shown[-1]] >= ends[-1] / MAX_NAMES:
            shown.append(i)
    ax.set_yticks(centres[shown], [names[i] for i in shown])
    ax.set_xticks([])
    ax.set_xlabel(f"{matrix} {found.source}")
    figure.colorbar(image, ax=ax, shrink=0.6)


def _transformed(cov: np.ndarray, matrix: Matrix) -> np.ndarray:
    """The matrix asked for; not a number in rows of weights that do not vary."""
    varies = np.diag(cov) > 0
    both = np.ix_(varies, varies)
    values = np.full_like(cov, np.nan)
    if matrix == "covariance":
        values[both] = cov[both]
    elif matrix == "correlation":
        sd = np.sqrt(np.diag(cov)[varies])
        values[both] = cov[both] / np.outer(sd, sd)
    elif varies.any():
        values[both] = np.linalg.pinv(cov[both], hermitian=True)
    return values


def weight_norms(trees: Trees) -> Figure:
    """Posterior of each layer's weight norm: median, middle half and middle 90 %, one row per layer and method.

    Norms are invariant under permutations of hidden units and so, unlike single weights, comparable between
    chains and methods. A norm that stays at its prior in one method only hints at units switched off.

    Args:
        trees: one DataTree or a mapping from label to DataTree with ``function.layer_norm``.

    Returns:
        A figure with one axes; a legend names the methods.
    """
    stored = {label: evidence.variable(FUNCTION, "layer_norm") for label, evidence in gather(trees).items()}
    found = {label: norms for label, norms in stored.items() if norms is not None and norms.size}
    with style():
        if not found:
            figure, axes = panels(1, size=(4.6, 1.4))
            empty_panel(axes[0, 0], "no layer norms in these trees")
            return figure
        widest = max(found.values(), key=lambda norms: norms.sizes["layer"])
        layers = widest.sizes["layer"]
        figure, axes = panels(1, size=(4.2, 0.8 + 0.22 * layers * (len(found) + 1)))
        ax = axes[0, 0]
        for index, (label, norms) in enumerate(found.items()):
            colour = FITS[index % len(FITS)]
            values = norms.transpose(..., "layer").values.astype(np.float64)
            for layer in range(values.shape[-1]):
                interval_row(ax, layer + 0.7 * ((index + 0.5) / len(found) - 0.5), values[..., layer], colour)
            dropped = int(np.sum(~np.isfinite(values)))
            ax.plot([], [], color=colour, lw=3, label=f"{label} ({dropped} not finite)" if dropped else label)
        names = map(str, widest["layer"].values if "layer" in widest.coords else range(layers))
        ax.set_xlabel("norm of the layer's weights")
        name_rows(figure, ax, [f"layer {name}" if name.isdigit() else name for name in names])
        return figure
