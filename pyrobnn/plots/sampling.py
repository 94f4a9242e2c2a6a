"""What an optimisation tracked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

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
    methods = {label: evidence.text("method") for label, evidence in evidences.items()}
    scalars = _chosen_scalars(tracked, names)
    # one axes per scalar and method, in the order of the scalars
    subjects: dict[tuple[str, str], list[str]] = {}
    for name in scalars:
        for label in tracked:
            if name in tracked[label]:
                subjects.setdefault((name, methods[label]), []).append(label)
    names_methods = len(set(methods.values())) > 1
    order = {label: index for index, label in enumerate(tracked)}
    with style():
        figure, axes = panels(
            max(1, len(subjects)),
            size=(3.4, 2.5),
            max_columns=3,
        )
        if not subjects:
            empty_panel(axes[0, 0], "no history: nothing was optimised")
        lines: dict[str, Line2D] = {}
        for ((name, method), labels), ax in zip(subjects.items(), axes.flat, strict=False):
            curves = [_smoothed(evidences[label], tracked[label][name]) for label in labels]
            for label, (steps, values) in zip(labels, curves, strict=True):
                at = spread(len(values), MAX_POINTS)
                look = fit_line(order[label])
                (lines[label],) = ax.plot(steps[at], values[at], lw=1.3, **look)
            # the first tenth would flatten the rest
            _set_range(ax, np.concatenate([values[len(values) // 10 :] for _, values in curves]))
            suffix = f", {method}" if method and names_methods else ""
            ax.set(xlabel="step", title=name.replace("_", " ") + suffix)
        if len(lines) > 1:
            columns = min(5, len(lines))
            handles = list(lines.values())
            figure.legend(
                handles,
                list(lines),
                loc="outside lower center",
                ncols=columns,
            )
        return figure


def _chosen_scalars(
    tracked: Mapping[str, Mapping[str, np.ndarray]], names: Sequence[str] | None
) -> list[str]:
    """The scalars that are asked for, or else those that vary in one of the trees."""
    known: dict[str, bool] = {}
    for scalars in tracked.values():
        for name, values in scalars.items():
            known[name] = known.get(name, False) or bool(np.ptp(values) > 0)
    missing = [name for name in names or () if name not in known]
    if missing:
        raise ValueError(f"'names' has {missing}, but the histories have {list(known)}")
    return list(names or [name for name, varies in known.items() if varies])


def _smoothed(evidence: Evidence, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Steps and means over a window of 2 % of them; a fit may have stored means of blocks of steps."""
    window = max(1, len(values) // 50)
    means = np.convolve(
        values,
        np.ones(window) / window,
        mode="valid",
    )
    block = max(1.0, evidence.number("num_steps", len(values)) / len(values))
    return (np.arange(len(means)) + window / 2) * block, means


def _set_range(ax: Axes, values: np.ndarray) -> None:
    low = values.min()
    high = values.max()
    if low < high:
        margin = 0.05 * (high - low)
        ax.set_ylim(low - margin, high + margin)


def histories(evidence: Evidence) -> dict[str, np.ndarray]:
    """Tracked scalars by name, (step,), the mean over members; those with at least two finite values."""
    scalars = {}
    for name in evidence.names(HISTORY):
        values = np.atleast_1d(evidence.tree[HISTORY].dataset[name].values).astype(float)
        values = values.reshape(values.shape[0], -1).mean(1) if values.size else values
        if np.isfinite(values).sum() > 1:
            scalars[name] = values[np.isfinite(values)]
    return scalars
