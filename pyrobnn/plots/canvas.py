"""Panels on a page, and what is drawn in them: bands, reference lines, legends, words where there is nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import AxLine
from numpy.typing import ArrayLike

from pyrobnn.diagnostics.evidence import Evidence, Trees, gather
from pyrobnn.plots.current import ink, legend_columns, muted, small_text

# FITS and PALETTE are for figures of a user's own: a page of panels and its look come from one module
from pyrobnn.plots.look import ALEATORIC, EPISTEMIC, FITS, INK, MUTED, PALETTE, style  # noqa: F401

_Content = TypeVar("_Content")

NORMAL_95 = 1.96
#: width of a page in inches
PAGE = 7.2


def panels(
    num_panels: int,
    *,
    rows_per_panel: tuple[float, ...] = (1.0,),
    max_columns: int = 3,
    size: tuple[float, float] = (3.4, 2.7),
    sharex: bool = False,
    sharey: bool = False,
) -> tuple[Figure, np.ndarray]:
    """Make an empty figure of equal panels, at most a page wide, outside pyplot, so nothing has to be closed.

    Args:
        num_panels: how many panels; they fill rows of at most ``max_columns``, as evenly as they can.
        rows_per_panel: height ratios of the axes stacked inside each panel, which share x and the lowest's tick labels.
        max_columns: the widest row.
        size: width and height of one panel in inches; a row that would be wider than a page has narrower panels.
        sharex, sharey: share limits between corresponding axes of all panels.

    Returns:
        The figure and its axes, shape (num_panels, len(rows_per_panel)).
    """
    rows = -(-max(num_panels, 1) // max_columns)
    columns = -(-max(num_panels, 1) // rows)
    figure = Figure(figsize=(min(size[0] * columns, PAGE), size[1] * rows), layout="constrained")
    stack = len(rows_per_panel)
    axes = np.empty((num_panels, stack), dtype=object)
    spec = figure.add_gridspec(
        rows * stack,
        columns,
        height_ratios=list(rows_per_panel) * rows,
    )
    for panel in range(num_panels):
        row, column = divmod(panel, columns)
        for row_in_panel in range(stack):
            # axes of a panel share x with its top one; top ones share it only if ``sharex``
            first_panel = axes[0, row_in_panel] if panel else None
            x_partner = first_panel if sharex else None
            axes[panel, row_in_panel] = figure.add_subplot(
                spec[row * stack + row_in_panel, column],
                sharex=axes[panel, 0] if row_in_panel else x_partner,
                sharey=first_panel if sharey else None,
            )
            if row_in_panel < stack - 1:
                axes[panel, row_in_panel].tick_params(labelbottom=False)
    return figure, axes


def bands(
    ax: Axes,
    x: ArrayLike,
    mean: ArrayLike,
    function: ArrayLike,
    total: ArrayLike,
) -> None:
    """Mean ± 1.96 sd of the function in blue and, outside of it alone, ± 1.96 sd with noise in sand.

    No colour lies over another, so that what one sees is what the legend shows; a function that is certain has no
    blue band, and none in the legend.

    Args:
        x, mean: (point,).
        function, total: standard deviations (point,).
    """
    mean = np.asarray(mean)
    inner = NORMAL_95 * np.asarray(function)
    outer = NORMAL_95 * np.asarray(total)
    for sign, name in ((1.0, "95 % with noise"), (-1.0, None)):
        ends = mean + sign * inner, mean + sign * outer
        ax.fill_between(
            x,
            *ends,
            color=ALEATORIC,
            alpha=0.35,
            lw=0,
            label=name,
        )
    if inner.any():
        ends = mean - inner, mean + inner
        ax.fill_between(
            x,
            *ends,
            color=EPISTEMIC,
            alpha=0.35,
            lw=0,
            label="95 % of the function",
        )


def legend_below(figure: Figure, ax: Axes) -> None:
    """The legend of one axes below the figure, which grows by it: many entries lie over no data."""
    handles, labels = ax.get_legend_handles_labels()
    columns = legend_columns(2 if max(map(len, labels), default=0) > 18 else 3)
    grow_for_legend(figure, len(labels), columns)
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=columns,
    )


def grow_for_legend(figure: Figure, num_labels: int, columns: int) -> None:
    """Make the figure as much higher as a legend below it takes."""
    line_height = 1.53 * small_text() / 72  # inches
    num_lines = -(-num_labels // columns)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + line_height * num_lines)


def brief(text: str, width: int = 22) -> str:
    """As much of a text as stands beside a panel."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def empty_panel(ax: Axes, message: str) -> None:
    """Show in the panel itself why there is nothing to draw."""
    ax.set_axis_off()
    ax.text(
        0.5,
        0.5,
        message,
        ha="center",
        va="center",
        color=muted(),
        transform=ax.transAxes,
        wrap=True,
    )


def one_each(
    trees: Trees,
    read: Callable[[Evidence], _Content | None],
    draw: Callable[[Axes, Evidence, _Content], None],
    missing: str,
    side: float,
) -> Figure:
    """A figure with one panel per tree: what ``read`` finds, drawn, or in words that it is ``missing``.

    Args:
        trees: one tree or several by label.
        read: what a panel shows; None where the tree does not hold it.
        draw: fills an axes.
        missing: text of an empty panel.
        side: of the square panels, which share their limits, in inches.
    """
    evidences = gather(trees)
    with style():
        figure, axes = panels(
            len(evidences),
            size=(side, side),
            sharex=True,
            sharey=True,
        )
        for (label, evidence), (ax,) in zip(evidences.items(), axes, strict=True):
            ax.set_title(brief(label))
            content = read(evidence)
            if content is None:
                empty_panel(ax, missing)
            else:
                draw(ax, evidence, content)
        return figure


def reference_line(ax: Axes, level: float | None = None) -> None:
    """The dashed line of what is right: a level, else the diagonal."""
    look: dict[str, Any] = {"color": ink(), "lw": 0.9, "ls": (0, (4, 2))}
    if level is None:
        # unlike axline it leaves the limits to the data
        ax.add_artist(AxLine((0, 0), None, 1, **look))
    else:
        ax.axhline(level, **look)
