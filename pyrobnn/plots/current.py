"""Colours and sizes of text of the block of :func:`pyrobnn.plots.style` that is entered."""

from __future__ import annotations

import matplotlib

from pyrobnn.plots.look import SMALL_TEXT


def ink() -> str:
    """The colour of text and data: ``INK`` but on dark slides."""
    return matplotlib.rcParams["text.color"]


def muted() -> str:
    """The colour of what is less important than text: ``MUTED`` but on dark slides."""
    return matplotlib.rcParams["xtick.color"]


def small_text() -> float:
    """Points of the text of legends and of words inside a panel."""
    return matplotlib.rcParams["legend.fontsize"]


def legend_columns(num_columns: int) -> int:
    """How many columns of a legend there is room for where text is larger than on a page."""
    return max(1, int(num_columns * SMALL_TEXT / small_text()))
