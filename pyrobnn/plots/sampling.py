"""Draws and their origin: the paths of chains, and what an optimisation tracked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from pyrobnn.core.groups import HISTORY, POSTERIOR
from pyrobnn.diagnostics.convergence import F_AT, convergence, quantities
from pyrobnn.diagnostics.evidence import Evidence, Trees, gather
from pyrobnn.plots.style import PALETTE, empty_panel, evenly, fit_line, panels, style

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


def trace(trees: Trees) -> Figure:
    """Every chain's path: log density, the function (of programs, the sites) where they agree least, the noise.

    Healthy chains overlap like one band. Weights are shown only where a tree holds nothing better: they are
    not identified in a neural network, and chains may disagree about them while agreeing about every
    prediction. At most 8 chains and 300 evenly spaced draws of each are drawn; independent draws are not.
    ``arviz_plots`` has more figures of chains (ranks, energies, autocorrelations) and takes the same trees.

    Args:
        trees: one DataTree or a mapping from label to DataTree.

    Returns:
        A figure with one panel per tree and quantity, at most four quantities.
    """
    chains = {label: each for label, each in gather(trees).items() if not each.is_iid and each.num_draws}
    cells = [
        (f"{label}: {name}" if len(chains) > 1 else name, path)
        for label, each in chains.items()
        for name, path in _watched(each).items()
    ]
    with style():
        figure, axes = panels(max(1, len(cells)), size=(3.0, 1.9), max_columns=2)
        if not cells:
            empty_panel(axes[0, 0], "no chains: independent draws of an approximation have no trace")
        for (title, path), (ax,) in zip(cells, axes, strict=False):
            # a probe is named by its inputs, whose names may be long
            ax.set_title(title if len(title) < 33 else f"{title[:31]}…", fontsize=9)
            at = evenly(path.shape[1], MAX_POINTS)
            for chain, colour in zip(path[:MAX_CHAINS], PALETTE, strict=False):
                ax.plot(at, chain[at], color=colour, lw=0.6, alpha=0.75)
            ax.set_xlabel("draw")
        return figure


def training(trees: Trees, *, names: Sequence[str] | None = None) -> Figure:
    """Every tracked scalar in one axes, one line per fit: to see what an option changes on the way.

    Lines are smoothed over 2 % of the steps. The vertical axis leaves out the first tenth of the steps, which would
    flatten the rest. A loss that still falls at the end has not converged.

    Args:
        trees: one DataTree or a mapping from label to DataTree with a ``history`` group.
        names: which scalars, ``["kl", "loss"]`` for instance; None takes all that vary in one of the trees.

    Returns:
        A figure with one axes per scalar; a legend names the fits.

    Raises:
        ValueError: a scalar that no tree has.
    """
    evidences = gather(trees)
    tracked = {label: histories(evidence) for label, evidence in evidences.items()}
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
                window = max(1, len(found[name]) // 50)
                values = np.convolve(found[name], np.ones(window) / window, mode="valid")
                at = evenly(len(values), MAX_POINTS)
                # a fit may keep the means of blocks of steps
                each = max(1.0, evidences[label].number("num_steps", len(found[name])) / len(found[name]))
                (lines[label],) = ax.plot((at + window / 2) * each, values[at], lw=1.3, **fit_line(index))
                late.append(values[len(values) // 10 :])
            low, high = np.concatenate(late).min(), np.concatenate(late).max()
            if low < high:
                ax.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
            ax.set(xlabel="step", title=name.replace("_", " "))
        if len(lines) > 1:
            columns = min(5, len(lines))
            figure.legend(list(lines.values()), list(lines), loc="outside lower center", ncols=columns)
        return figure


def histories(evidence: Evidence) -> dict[str, np.ndarray]:
    """Tracked scalars by name, (step,), the mean over members; those with at least two finite values."""
    found = {}
    for name in evidence.names(HISTORY):
        values = np.atleast_1d(evidence.tree[HISTORY].dataset[name].values).astype(float)
        values = values.reshape(values.shape[0], -1).mean(1) if values.size else values
        if np.isfinite(values).sum() > 1:
            found[name] = values[np.isfinite(values)]
    return found
