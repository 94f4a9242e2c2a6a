"""One look for every figure: colour-blind safe, applied as a context, never as a global change.

The palette is Okabe and Ito's; two of its colours are reserved, everywhere in the project, for the two kinds
of uncertainty: sand for aleatoric (noise that stays) and blue for epistemic (what more data removes).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
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
#: points of small text on a page
SMALL_TEXT = 8.0
#: of what misses
ALERT = PALETTE[1]
#: of lines that stand for a fit each: the colours of an alert and of the two kinds of uncertainty come last
FITS = ("#009e73", "#cc79a7", "#56b4e9", "#8c6bb1", "#7f7f7f", "#d55e00", "#0072b2", "#e69f00")


@dataclass(frozen=True)
class _Kind:
    """What a figure is for: its colours of text, how much larger than a page's its text is, background and resolution.

    Attributes:
        ink, muted: of text and of what is less important than text.
        rule: of the grid.
        text_scale: size of the text over that on a page.
        saved: matplotlib's settings of the background and of ``savefig``.
    """

    ink: str = INK
    muted: str = MUTED
    rule: str = _RULE
    text_scale: float = 1.0
    saved: Mapping[str, float | bool | str] = field(default_factory=dict)


_ON_SLIDES: dict[str, float | bool | str] = {
    "savefig.dpi": 220,
    "savefig.transparent": True,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}
_KINDS = {
    "paper": _Kind(saved={"savefig.dpi": 300}),
    "slides": _Kind(text_scale=1.5, saved=_ON_SLIDES),
    "dark_slides": _Kind(
        ink="#f2f4f7",
        muted="#aab3bf",
        rule="#4a525d",
        text_scale=1.5,
        saved=_ON_SLIDES,
    ),
}
_ON_A_PAGE = _Kind()
#: of the block that surrounds another, which keeps it
_surrounding: ContextVar[_Kind] = ContextVar("surrounding", default=_ON_A_PAGE)


@contextmanager
def style(kind: str | None = None) -> Iterator[None]:
    """Apply the project's matplotlib style inside the block and restore every setting after it.

    Figures of :mod:`pyrobnn.plots` that are drawn inside the block have its look.

    Args:
        kind: what figures are for. ``"paper"``: saved at 300 dots per inch. ``"slides"``: text 1.5 times as large,
            saved at 220 dots per inch without a background. ``"dark_slides"``: the same with light text, axes and
            points, for a dark background. None: that of the block around this one, else the look of a page.

    Raises:
        ValueError: another kind.

    Caveat: matplotlib keeps its settings per process, so do not enter the block from two threads at once.

    Example:
        >>> with style("slides"):
        ...     matplotlib.rcParams["font.size"], matplotlib.rcParams["savefig.transparent"]
        (13.5, True)
    """
    if kind is None:
        chosen = _surrounding.get()
    else:
        chosen = _KINDS[check_choice("kind", kind, tuple(_KINDS))]
    entered = _surrounding.set(chosen)
    try:
        with matplotlib.rc_context(_settings(chosen)):
            yield
    finally:
        _surrounding.reset(entered)


def _settings(kind: _Kind) -> dict[str, Any]:
    """Matplotlib's settings for figures of a kind."""
    body = 9.0 * kind.text_scale
    small = SMALL_TEXT * kind.text_scale
    ticks = {
        "color": kind.muted,
        "labelcolor": kind.ink,
        "labelsize": small,
        "major.width": 0.7,
    }
    settings: dict[str, Any] = {
        "figure.dpi": 110,
        "font.size": body,
        "axes.edgecolor": kind.muted,
        "axes.linewidth": 0.7,
        "axes.labelcolor": kind.ink,
        "axes.labelsize": body,
        "axes.titlesize": 10.0 * kind.text_scale,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlecolor": kind.ink,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.prop_cycle": cycler(color=PALETTE),
        "grid.color": kind.rule,
        "grid.linewidth": 0.5,
        "text.color": kind.ink,
        # a label is the user's text: a dollar sign in it does not start a formula
        "text.parse_math": False,
        "legend.frameon": False,
        "legend.fontsize": small,
        "lines.linewidth": 1.4,
    }
    for name, value in ticks.items():
        settings |= {f"xtick.{name}": value, f"ytick.{name}": value}
    return settings | dict(kind.saved)


def fit_line(index: int) -> dict[str, Any]:
    """Colour and dashes of the line that stands for one fit of several: no two of the first 24 look the same."""
    return {"color": FITS[index % len(FITS)], "ls": ("-", "--", ":")[index // len(FITS) % 3]}
