"""One look for every figure: colour-blind safe, applied as a context, never as a global change.

The palette is Okabe and Ito's; two of its colours are reserved, everywhere in the project, for the two kinds
of uncertainty: sand for aleatoric (noise that stays) and blue for epistemic (what more data removes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import AxLine
from numpy.typing import ArrayLike

from pyrobnn.core.checks import check_choice
from pyrobnn.diagnostics.evidence import Evidence, Trees, gather

Found = TypeVar("Found")

NORMAL_95 = 1.96
#: width of a page in inches
PAGE = 7.2
INK = "#1c2128"
MUTED = "#68717d"
RULE = "#d5dae1"
ALEATORIC = "#e69f00"
EPISTEMIC = "#0072b2"
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c6bb1")
#: of lines that stand for a fit each: the colours of an alert and of the two kinds of uncertainty come last
FITS = ("#009e73", "#cc79a7", "#56b4e9", "#8c6bb1", "#7f7f7f", "#d55e00", "#0072b2", "#e69f00")

#: how a figure is saved, by what it is for
KINDS: dict[str, dict[str, Any]] = {
    "paper": {"savefig.dpi": 300},
    "slides": {"savefig.dpi": 220, "savefig.transparent": True},
}


@contextmanager
def style(kind: str | None = None) -> Iterator[None]:
    """Apply the project's matplotlib style inside the block and restore every setting after it.

    Args:
        kind: how figures are saved: ``"paper"`` at 300 dots per inch, ``"slides"`` at 220 without a background; None
            for what is set outside of the block.

    Raises:
        ValueError: another kind.

    Caveat: matplotlib keeps its settings per process, so do not enter the block from two threads at once.

    Example:
        >>> with style("slides"):
        ...     matplotlib.rcParams["savefig.transparent"]
        True
    """
    chosen = {} if kind is None else KINDS[check_choice("kind", kind, tuple(KINDS))]
    ticks = {
        "color": MUTED,
        "labelcolor": INK,
        "labelsize": 8.0,
        "major.width": 0.7,
    }
    settings: dict[str, Any] = {
        "figure.dpi": 110,
        "font.size": 9.0,
        "axes.edgecolor": MUTED,
        "axes.linewidth": 0.7,
        "axes.labelcolor": INK,
        "axes.labelsize": 9.0,
        "axes.titlesize": 10.0,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlecolor": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.prop_cycle": cycler(color=PALETTE),
        "grid.color": RULE,
        "grid.linewidth": 0.5,
        "text.color": INK,
        # a label is the user's text: a dollar sign in it does not start a formula
        "text.parse_math": False,
        "legend.frameon": False,
        "legend.fontsize": 8.0,
        "lines.linewidth": 1.4,
    }
    for name, value in ticks.items():
        settings |= {f"xtick.{name}": value, f"ytick.{name}": value}
    with matplotlib.rc_context(settings | chosen):
        yield


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
        for level in range(stack):
            shared = axes[0, level] if panel else None
            x_of = shared if sharex else None
            axes[panel, level] = figure.add_subplot(
                spec[row * stack + level, column],
                sharex=axes[panel, 0] if level else x_of,
                sharey=shared if sharey else None,
            )
            if level < stack - 1:
                axes[panel, level].tick_params(labelbottom=False)
    return figure, axes


def bands(
    axes: Axes,
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
        axes.fill_between(
            x,
            *ends,
            color=ALEATORIC,
            alpha=0.35,
            lw=0,
            label=name,
        )
    if inner.any():
        ends = mean - inner, mean + inner
        axes.fill_between(
            x,
            *ends,
            color=EPISTEMIC,
            alpha=0.35,
            lw=0,
            label="95 % of the function",
        )


def fit_line(index: int) -> dict[str, Any]:
    """Colour and dashes of the line that stands for one fit of several: no two of the first 24 look the same."""
    return {"color": FITS[index % len(FITS)], "ls": ("-", "--", ":")[index // len(FITS) % 3]}


def legend_below(figure: Figure, axes: Axes) -> None:
    """The legend of one axes below the figure, which grows by it: many entries lie over no data."""
    handles, labels = axes.get_legend_handles_labels()
    columns = 2 if max(map(len, labels), default=0) > 18 else 3
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.17 * -(-len(labels) // columns))
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=columns,
    )


def brief(text: str, width: int = 22) -> str:
    """As much of a text as stands beside a panel."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def empty_panel(axes: Axes, message: str) -> None:
    """Show in the panel itself why there is nothing to draw."""
    axes.set_axis_off()
    axes.text(
        0.5,
        0.5,
        message,
        ha="center",
        va="center",
        color=MUTED,
        transform=axes.transAxes,
        wrap=True,
    )


def one_each(
    trees: Trees,
    read: Callable[[Evidence], Found | None],
    draw: Callable[..., None],
    missing: str,
    **options: Any,
) -> Figure:
    """A figure with one panel per tree: what ``read`` finds, drawn, or in words that it is ``missing``.

    Args:
        trees: one tree or several by label.
        read: what a panel shows; None where the tree does not hold it.
        draw: fills an axes.
        missing: text of an empty panel.
        options: of :func:`panels`.
    """
    evidences = gather(trees)
    with style():
        figure, axes = panels(len(evidences), **options)
        for (label, evidence), (ax,) in zip(evidences.items(), axes, strict=True):
            ax.set_title(brief(label))
            content = read(evidence)
            if content is None:
                empty_panel(ax, missing)
            else:
                draw(ax, evidence, content)
        return figure


def reference_line(axes: Axes, level: float | None = None) -> None:
    """The dashed line of what is right: a level, else the diagonal."""
    look: dict[str, Any] = {"color": INK, "lw": 0.9, "ls": (0, (4, 2))}
    if level is None:
        # unlike axline it leaves the limits to the data
        axes.add_artist(AxLine((0, 0), None, 1, **look))
    else:
        axes.axhline(level, **look)
