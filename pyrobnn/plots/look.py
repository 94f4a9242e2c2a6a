"""One look for every figure: colour-blind safe, applied as a context, never as a global change.

The palette is Okabe and Ito's; two of its colours are reserved, everywhere in the project, for the two kinds
of uncertainty: sand for aleatoric (noise that stays) and blue for epistemic (what more data removes).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
from cycler import cycler

from pyrobnn.core.checks import check_choice

INK = "#1c2128"
MUTED = "#68717d"
_RULE = "#d5dae1"
ALEATORIC = "#e69f00"
EPISTEMIC = "#0072b2"
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c6bb1")
#: of what misses
ALERT = PALETTE[1]
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
        "grid.color": _RULE,
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


def fit_line(index: int) -> dict[str, Any]:
    """Colour and dashes of the line that stands for one fit of several: no two of the first 24 look the same."""
    return {"color": FITS[index % len(FITS)], "ls": ("-", "--", ":")[index // len(FITS) % 3]}
