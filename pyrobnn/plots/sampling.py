"""What an optimisation tracked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from pyrobnn.core.groups import HISTORY
from pyrobnn.diagnostics.evidence import Evidence, Trees, gather, spread
from pyrobnn.plots.canvas import empty_panel, fit_line, panels, style

#: points of a line that are drawn: more cannot be distinguished
MAX_POINTS = 300


def training(trees: Trees, *, names: Sequence[str] | None = None) -> Figure:
    """Every tracked scalar of a method in one axes, one line per fit: to see what an option changes on the way.

    Lines are smoothed over 2 % of the steps. The vertical axis leaves out the first tenth of the steps, which would
    flatten the rest. A loss that still falls at the end has not converged.

    Args:
        trees: one DataTree or a mapping from label to DataTree with a ``history`` group.
        names: which scalars, ``["kl", "loss"]`` for instance; None takes all that vary in one of the trees.

    Returns:
        A figure with one axes per scalar and method, whose losses are on scales of their own; a legend names the fits.

    Raises:
        ValueError: a scalar that no tree has.
    """
    evidences = gather(trees)
    tracked = {label: histories(evidence) for label, evidence in evidences.items()}
    known = list(dict.fromkeys(name for found in tracked.values() for name in found))
    if missing := [name for name in names or () if name not in known]:
        raise ValueError(f"'names' has {missing}, but the histories have {known}")
    varying = [
        name for name in known if any(np.ptp(f.get(name, [0])) > 0 for f in tracked.values())
    ]
    of = {label: evidence.text("method") for label, evidence in evidences.items()}
    wanted = [
        (name, of[label])
        for name in names or varying
        for label, found in tracked.items()
        if name in found
    ]
    chosen = list(dict.fromkeys(wanted))
    with style():
        figure, axes = panels(max(1, len(chosen)), size=(3.4, 2.5), max_columns=3)
        if not chosen:
            empty_panel(axes[0, 0], "no history: nothing was optimised")
        lines = {}
        for (name, which), ax in zip(chosen, axes.flat, strict=False):
            late = []
            for index, (label, found) in enumerate(tracked.items()):
                if name not in found or of[label] != which:
                    continue
                window = max(1, len(found[name]) // 50)
                values = np.convolve(found[name], np.ones(window) / window, mode="valid")
                at = spread(len(values), MAX_POINTS)
                # a fit may keep the means of blocks of steps
                each = max(
                    1.0, evidences[label].number("num_steps", len(found[name])) / len(found[name])
                )
                (lines[label],) = ax.plot(
                    (at + window / 2) * each, values[at], lw=1.3, **fit_line(index)
                )
                late.append(values[len(values) // 10 :])
            low = np.concatenate(late).min()
            high = np.concatenate(late).max()
            if low < high:
                ax.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
            title = name.replace("_", " ") + f", {which}" * (
                which != "" and len(set(of.values())) > 1
            )
            ax.set(xlabel="step", title=title)
        if len(lines) > 1:
            figure.legend(
                list(lines.values()),
                list(lines),
                loc="outside lower center",
                ncols=min(5, len(lines)),
            )
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
