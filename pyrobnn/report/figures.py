"""The figures of a report, each with a sentence on how to read it, as SVG whose colours follow the page."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from pyrobnn import plots
from pyrobnn.core.groups import GRID
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.points import class_points, output_names, regression_points
from pyrobnn.diagnostics.scores import num_outputs
from pyrobnn.diagnostics.verdict import said
from pyrobnn.plots.predictive import decomposed
from pyrobnn.plots.sampling import histories
from pyrobnn.plots.style import INK, MUTED, PALETTE, RULE

Trees = Mapping[str, Evidence]
SECTIONS = {
    "predictions": "Predictions",
    "calibration": "Is the uncertainty honest?",
    "draws": "How the draws were made",
}


@dataclass(frozen=True)
class Block:
    """A figure, as inline SVG, under a heading: how to read it, how many panels wide; or why it was not drawn."""

    title: str
    how: str
    svg: str = ""
    columns: int = 1
    note: str = ""


@dataclass(frozen=True)
class Spec:
    """One kind of figure: of which trees it can be drawn, by what, and how it is read.

    Args:
        section: key of `SECTIONS`. title: heading. how: one sentence on how to read it, also its text alternative.
        draw: the figure of some trees; of one output where ``outputs``. has: whether a tree can be drawn.
    """

    section: str
    title: str
    how: str
    draw: Callable[..., Figure]
    has: Callable[[Evidence], Any]
    outputs: bool = False

    def blocks(self, trees: Trees) -> list[Block]:
        """A block, or one per output, of the trees that it can be drawn of; why not, where it cannot."""
        try:
            have = {label: tree for label, tree in trees.items() if self.has(tree)}
            outputs = output_labels(have) if have and self.outputs else [""][: len(have)]
            return [self._block(have, output, name) for output, name in enumerate(outputs)]
        except Exception as error:
            if len(trees) > 1:  # those that can be drawn are, each beside the others' reasons
                return [block for label, tree in trees.items() for block in self.blocks({label: tree})]
            return [Block(f"{', '.join(trees)}: {self.title}", "", note=f"Not drawn: {said(error)}.")]

    def _block(self, trees: Trees, output: int, name: str) -> Block:
        title = f"{self.title}: {name}" if name else self.title
        figure = self.draw(trees, output=output) if self.outputs else self.draw(trees)
        prefix = re.sub(r"\W", "-", f"{self.title}-{'-'.join(trees)}-{output}".lower())
        svg = inline_svg(figure, alt=f"{title}. {self.how}", prefix=prefix)
        return Block(title, self.how, svg, max(1, round(figure.get_figwidth() / 3.6)))


def output_labels(trees: Trees) -> list[str]:
    """Names of the outputs that all trees have where there are several; one empty name for a single one."""
    count = min(num_outputs(each) for each in trees.values())
    return output_names(next(iter(trees.values())), count) if count > 1 else [""]


def build_sections(trees: Trees) -> dict[str, list[Block]]:
    """Key of `SECTIONS` → the figures, where there is one of at least one of the trees."""
    found: dict[str, list[Block]] = {section: [] for section in SECTIONS}
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        for spec in SPECS:
            found[spec.section] += spec.blocks(trees)
    return {section: blocks for section, blocks in found.items() if blocks}


def _has_draws(tree: Evidence) -> bool:
    points = regression_points(tree)
    return points is not None and points.draws is not None


def _loss(trees: Trees) -> Figure:
    """The loss, else the first tracked scalar, of the trees that have it."""
    tracked = [name for tree in trees.values() for name in histories(tree)]
    return plots.training(trees, names=["loss" if "loss" in tracked else tracked[0]])


SPECS = (
    Spec(
        "predictions",
        "Predictive bands",
        "One panel per method, same axes. Between and beyond the data the blue band should open: there the function is "
        "unknown. Below each, the two sds against the input; grey is the widest gap in the data.",
        plots.predictive_bands,
        lambda tree: tree.variable(GRID, "mean") is not None,
        outputs=True,
    ),
    Spec(
        "predictions",
        "Predicted against observed",
        "Each held-out point (of the training data where none were held out) with its 95 % interval; orange crosses "
        "are points whose interval misses the diagonal. One in twenty should.",
        plots.predicted_vs_observed,
        lambda tree: tree.variable(GRID, "mean") is None and regression_points(tree) is not None,
        outputs=True,
    ),
    Spec(
        "calibration",
        "Coverage",
        "A calibrated method stays in the grey range; below the diagonal it is overconfident.",
        plots.calibration,
        _has_draws,
        outputs=True,
    ),
    Spec(
        "calibration",
        "Reliability",
        "Accuracy in bins of confidence; below the diagonal is overconfidence. Grey bars show where the confidences "
        "lie.",
        plots.reliability,
        lambda tree: class_points(tree) is not None,
    ),
    Spec(
        "calibration",
        "Aleatoric and epistemic",
        "Sand is noise that stays, however many data there are; blue is doubt that more data would remove. Dot: median "
        "over held-out points; thick line: middle half; thin line: middle 90 %.",
        plots.uncertainty_decomposition,
        lambda tree: decomposed(tree)[1] is not None,
        outputs=True,
    ),
    Spec(
        "draws",
        "Chains",
        "Chains (one colour each) should overlap like one band. Shown are the log density, the function where the "
        "chains agree least, and the noise; of programs, the sites where they agree least.",
        plots.trace,
        lambda tree: not tree.is_iid and tree.draws_per_chain > 1,
    ),
    Spec(
        "draws",
        "Loss",
        "A loss that still falls at the end has not converged. The first tenth may lie above the frame.",
        _loss,
        lambda tree: any(not name.startswith("warmup_") for name in histories(tree)),
    ),
)


# name of the CSS variable → colour that matplotlib writes; page.css gives each a light and a dark value
VARIABLES = {
    "--fig-ink": INK,
    "--fig-muted": MUTED,
    "--fig-rule": RULE,
    "--fig-paper": "#ffffff",
    **{f"--fig-{index}": colour for index, colour in enumerate(PALETTE)},
}


def inline_svg(figure: Figure, *, alt: str, prefix: str) -> str:
    """The figure as one ``<svg>`` element with a text alternative; `prefix` is unique within the page."""
    buffer, words = io.StringIO(), escape(alt, quote=True)
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "pyrobnn"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    head, _, body = buffer.getvalue().partition("<svg")[2].partition(">")
    box = head.partition('viewBox="')[2].partition('"')[0]
    body = _themed(body[: body.rindex("</svg>")], prefix)
    width = f"{float(box.split()[2]):.0f}pt"
    return (
        f'<svg role="img" aria-label="{words}" viewBox="{box}" style="width: {width}">'
        f"<title>{words}</title>{body}</svg>"
    )


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


def _rounded(path: str) -> str:
    return re.sub(r"\d+\.\d\d+", lambda number: f"{float(number.group()):.1f}", path).replace("\n", "")
