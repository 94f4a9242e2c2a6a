"""One figure of a report with its heading, and how a figure of several panels becomes inline SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from matplotlib.figure import Figure

from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.names import output_names
from pyrobnn.diagnostics.scores import num_outputs
from pyrobnn.plots.style import FITS, PALETTE
from pyrobnn.report.svg import inline_panels

Trees = Mapping[str, Evidence]


@dataclass(frozen=True)
class Block:
    """One figure, or a row of panels, with its heading.

    Args:
        title: heading. how: one sentence on how to read it. svgs: inline SVG elements. key: legend entries,
            (CSS variable, "line" | "band" | "dot" | "dash", words). wide: whether each SVG needs a row of its own.
        notes: what could not be drawn, and why. columns: how many SVGs stand side by side where there is room; 0 for
            as many as fit.
    """

    title: str
    how: str
    svgs: tuple[str, ...]
    key: tuple[tuple[str, str, str], ...] = ()
    wide: bool = False
    notes: tuple[str, ...] = ()
    columns: int = 0


def panels(figure: Figure, prefix: str, what: str, *, stack: int = 1) -> tuple[str, ...]:
    """One SVG per panel, of one size and with the figure's shared limits; its title opens its alt text."""
    titles = [ax.get_title(loc="left") for ax in figure.axes[::stack]]
    return tuple(inline_panels(figure, alts=[f"{title}: {what}" for title in titles], prefix=prefix))


def where(trees: Trees, test: Callable[[Evidence], bool]) -> dict[str, Evidence]:
    """The trees of which a test holds."""
    return {label: tree for label, tree in trees.items() if test(tree)}


def output_labels(trees: Trees) -> list[str]:
    """Names of the outputs that all trees have where there are several; none where there is a single one."""
    count = min((num_outputs(each) for each in trees.values()), default=1)
    return output_names(next(iter(trees.values())), count) if count > 1 else []


def outputs(trees: Trees) -> list[tuple[int, str, str]]:
    """Number, words for a heading, and prefix of ids of each output of all trees; a single one needs no words."""
    named = [(output, f": {name}", f"-{output}") for output, name in enumerate(output_labels(trees))]
    return named or [(0, "", "")] if trees else []


def line_key(trees: Trees) -> tuple[tuple[str, str, str], ...]:
    """Legend of a figure of `trees` with one line per method."""
    return tuple(
        (f"--fig-{PALETTE.index(FITS[index % len(FITS)])}", "line" if index < len(FITS) else "dash", label)
        for index, label in enumerate(trees)
    )
