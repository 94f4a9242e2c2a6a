"""A matplotlib figure as inline SVG that follows the page: its colours are CSS variables, its letters real text."""

from __future__ import annotations

import io
import re
from html import escape

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from pyrobnn.plots.style import INK, MUTED, PALETTE, RULE

POINTS_PER_INCH = 72
PIXELS_PER_INCH = 96
MARGIN_INCHES = 0.04

# name of the CSS variable → colour that matplotlib writes; page.css gives each a light and a dark value
VARIABLES = {
    "--fig-ink": INK,
    "--fig-muted": MUTED,
    "--fig-rule": RULE,
    "--fig-paper": "#ffffff",
    **{f"--fig-{index}": colour for index, colour in enumerate(PALETTE)},
}


def inline_svg(figure: Figure, *, alt: str, prefix: str) -> str:
    """The whole figure as one ``<svg>`` element with a text alternative.

    Args:
        figure: any figure of ``pyrobnn.plots``.
        alt: what the figure shows, for readers who cannot see it.
        prefix: unique within the page; keeps the ids of two figures apart.
    """
    body, (width, height) = _drawn(figure)
    return _element(_themed(body, prefix), (0.0, 0.0, width, height), alt)


def inline_panels(figure: Figure, *, alts: list[str], prefix: str) -> list[str]:
    """Each panel of a figure as an ``<svg>`` of its own, all of one size, so that a phone can stack them.

    Figure-level legends are left to the page. The figure is changed on the way: do not use it afterwards.

    Args:
        figure: a figure whose axes come panel by panel, the same number in each.
        alts: one text alternative per panel.
        prefix: unique within the page.

    Raises:
        ValueError: if the axes cannot be divided among the panels.
    """
    axes = list(figure.axes)
    if not alts or len(axes) % len(alts):
        raise ValueError(f"'alts' has {len(alts)} entries, which cannot divide {len(axes)} axes")
    for legend in list(figure.legends):
        legend.remove()
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    stack = len(axes) // len(alts)
    panels = [axes[stack * i : stack * (i + 1)] for i in range(len(alts))]
    for index, ax in enumerate(axes):
        ax.set_gid(f"panel{index}")
    frames = np.array([_frame(panel, tight=False) for panel in panels])
    outer = np.array([_frame(panel, tight=True) for panel in panels])
    # the same margins for every panel: equal sizes, aligned axes
    margins = np.concatenate([(outer - frames)[:, :2].min(0), (outer - frames)[:, 2:].max(0)])
    boxes = POINTS_PER_INCH * ((frames + margins) / figure.dpi + MARGIN_INCHES * np.array([-1, -1, 1, 1]))
    # drawn once, then cut: markers and clip paths that panels share stay with the first, which the page always holds
    body, (_, height) = _drawn(figure)
    groups = dict(
        re.findall(r'^  (<g id="(?:panel\d+)">)$(.*?)^  </g>$', body, flags=re.DOTALL | re.MULTILINE)
    )
    cut = [f"{head}{rest}</g>" for head, rest in groups.items()]
    clips = body[body.rindex("<defs>") :]
    found = []
    for index, ((left, bottom, right, top), alt) in enumerate(zip(boxes, alts, strict=True)):
        inside = "".join(cut[stack * index : stack * (index + 1)]) + (clips if index == 0 else "")
        view = (left, height - top, right - left, top - bottom)
        found.append(_element(_themed(inside, prefix), view, alt))
    return found


def _frame(panel: list[Axes], *, tight: bool) -> np.ndarray:
    """Union of the axes' boxes, left bottom right top in pixels, with labels (tight) or without."""
    boxes = [ax.get_tightbbox() if tight else ax.get_window_extent() for ax in panel]
    return np.array(Bbox.union([box for box in boxes if box is not None]).extents)


def _drawn(figure: Figure) -> tuple[str, tuple[float, float]]:
    """The inside of matplotlib's ``<svg>``, and its width and height in points."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "pyrobnn"}):
        figure.savefig(
            buffer,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    body = svg[svg.index(">") + 1 : svg.rindex("</svg>")]
    _, _, width, height = map(float, svg.partition('viewBox="')[2].partition('"')[0].split())
    return body, (width, height)


def _themed(body: str, prefix: str) -> str:
    """Colours as CSS variables, the page's font, ids of this figure alone, no more digits than needed."""
    body = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", body)
    body = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{prefix}-\1"', body).replace("xlink:href=", "href=")
    for name, colour in VARIABLES.items():
        body = re.sub(colour, f"var({name})", body, flags=re.IGNORECASE)
    body = re.sub(r"(font: [^'\";]*)'[^;\"]*", r"\1var(--sans)", body)
    body = re.sub(r"font-family: [^;\"]*", "font-family: var(--sans)", body)
    # a tenth of a point is finer than any screen, and halves the size of the page
    body = re.sub(r'\b(d|x|y)="([^"]*)"', lambda found: f'{found[1]}="{_rounded(found[2])}"', body)
    return re.sub(r"\n\s*", "\n", body).strip()


def _element(body: str, view: tuple[float, float, float, float], alt: str) -> str:
    box = " ".join(f"{number:.1f}" for number in view)
    words = escape(alt, quote=True)
    width = view[2] * PIXELS_PER_INCH / POINTS_PER_INCH
    return (
        f'<svg role="img" aria-label="{words}" viewBox="{box}" style="max-width: {width:.0f}px">'
        f"<title>{words}</title>{body}</svg>"
    )


def _rounded(path: str) -> str:
    return re.sub(r"\d+\.\d\d+", lambda number: f"{float(number.group()):.1f}", path).replace("\n", "")
