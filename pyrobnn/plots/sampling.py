"""The history of an optimisation: one curve per tracked scalar and fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from pyrobnn.core.groups import HISTORY
from pyrobnn.diagnostics.evidence import Evidence, Trees, gather, spread
from pyrobnn.plots.canvas import empty_panel, panels
from pyrobnn.plots.look import fit_line, style

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
    contents = _panels_of(evidences, tracked, _chosen_scalars(tracked, names))
    with style():
        figure, axes = panels(
            max(1, len(contents)),
            size=(3.4, 2.5),
            max_columns=3,
        )
        if not contents:
            empty_panel(axes[0, 0], "no history: nothing was optimised")
        for panel, ax in zip(contents, axes.flat, strict=False):
            _draw(panel, ax)
        _fits_legend(figure, contents)
        return figure


@dataclass(frozen=True, eq=False)
class _Curve:
    """A smoothed scalar of one fit: its label, the fit's number, the steps (step,) and the values (step,)."""

    label: str
    fit_index: int
    steps: np.ndarray
    values: np.ndarray


@dataclass(frozen=True, eq=False)
class _Panel:
    """One axes: its title, and a curve for each fit."""

    title: str
    curves: list[_Curve]


def _panels_of(
    evidences: Mapping[str, Evidence],
    tracked: Mapping[str, Mapping[str, np.ndarray]],
    scalars: Sequence[str],
) -> list[_Panel]:
    """One for each scalar and method, in the order of the scalars; the title names the method where there are more."""
    several_methods = len({evidence.text("method") for evidence in evidences.values()}) > 1
    curves: dict[tuple[str, str], list[_Curve]] = {}
    for scalar in scalars:
        for fit_index, (label, evidence) in enumerate(evidences.items()):
            if scalar in tracked[label]:
                steps, values = _smoothed(evidence, tracked[label][scalar])
                subject = (scalar, evidence.text("method"))
                curves.setdefault(subject, []).append(_Curve(label, fit_index, steps, values))
    contents = []
    for (scalar, method), of_subject in curves.items():
        suffix = f", {method}" if method and several_methods else ""
        contents.append(_Panel(scalar.replace("_", " ") + suffix, of_subject))
    return contents


def _draw(panel: _Panel, ax: Axes) -> None:
    for curve in panel.curves:
        at = spread(len(curve.values), MAX_POINTS)
        look = fit_line(curve.fit_index)
        ax.plot(
            curve.steps[at],
            curve.values[at],
            lw=1.3,
            label=curve.label,
            **look,
        )
    # the first tenth would flatten the rest
    later = [curve.values[len(curve.values) // 10 :] for curve in panel.curves]
    _set_range(ax, np.concatenate(later))
    ax.set(xlabel="step", title=panel.title)


def _fits_legend(figure: Figure, contents: Sequence[_Panel]) -> None:
    """A legend of all axes, where there are several fits."""
    lines: dict[str, Line2D] = {}
    for ax in figure.axes[: len(contents)]:
        for line in ax.get_lines():
            lines[str(line.get_label())] = line
    if len(lines) > 1:
        handles = list(lines.values())
        figure.legend(
            handles,
            list(lines),
            loc="outside lower center",
            ncols=min(5, len(lines)),
        )


def _chosen_scalars(
    tracked: Mapping[str, Mapping[str, np.ndarray]], names: Sequence[str] | None
) -> list[str]:
    """The scalars that are asked for, or else those that vary in one of the trees."""
    varies: dict[str, bool] = {}
    for scalars in tracked.values():
        for name, values in scalars.items():
            varies[name] = varies.get(name, False) or bool(np.ptp(values) > 0)
    if not names:
        return [name for name in varies if varies[name]]
    missing = [name for name in names if name not in varies]
    if missing:
        raise ValueError(f"'names' has {missing}, but the histories have {list(varies)}")
    return list(names)


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
    """Limits of the vertical axis: the values' range and 5 % more; as they are where the values are equal."""
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
