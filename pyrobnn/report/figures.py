"""The figures of a report, each with a sentence on how to read it."""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from pyrobnn import plots
from pyrobnn.core.groups import GRID
from pyrobnn.diagnostics.class_points import class_points
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.labels import output_names
from pyrobnn.diagnostics.points import regression_points
from pyrobnn.diagnostics.scores import num_outputs
from pyrobnn.diagnostics.verdict import said
from pyrobnn.plots.sampling import histories

Trees = Mapping[str, Evidence]
SECTIONS = {
    "predictions": "Predictions",
    "calibration": "Is the uncertainty honest?",
    "draws": "How the draws were made",
}


@dataclass(frozen=True)
class Block:
    """A figure under its heading, or why it was not drawn.

    Args:
        title: heading.
        how: how to read it.
        image: the figure itself, in a ``data:`` address; empty where it was not drawn.
        width: in inches.
        note: why it was not drawn.
    """

    title: str
    how: str
    image: str = ""
    width: float = 0.0
    note: str = ""

    @property
    def panels(self) -> int:
        """How many panels beside each other it is about as wide as."""
        return max(1, round(self.width / 3.6))


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
            if not have:
                return []
            names = output_labels(have) if self.outputs else [""]
            return [self._block(have, output, name) for output, name in enumerate(names)]
        except Exception as error:
            if len(trees) > 1:  # those that can be drawn are, each beside the others' reasons
                alone = [self.blocks({label: tree}) for label, tree in trees.items()]
                return list(itertools.chain.from_iterable(alone))
            return [
                Block(
                    f"{', '.join(trees)}: {self.title}",
                    "",
                    note=f"Not drawn: {said(error)}.",
                )
            ]

    def _block(self, trees: Trees, output: int, name: str) -> Block:
        title = f"{self.title}: {name}" if name else self.title
        figure = self.draw(trees, output=output) if self.outputs else self.draw(trees)
        return Block(title, self.how, as_image(figure), figure.get_figwidth())


def output_labels(trees: Trees) -> list[str]:
    """Names of the outputs that all trees have where there are several; one empty name for a single one."""
    count = min(map(num_outputs, trees.values()))
    return output_names(next(iter(trees.values())), count) if count > 1 else [""]


def build_sections(trees: Trees) -> dict[str, list[Block]]:
    """Key of `SECTIONS` → the figures, where there is one of at least one of the trees."""
    sections: dict[str, list[Block]] = {section: [] for section in SECTIONS}
    with (
        warnings.catch_warnings(action="ignore", category=RuntimeWarning),
        np.errstate(all="ignore"),
    ):
        for spec in SPECS:
            sections[spec.section] += spec.blocks(trees)
    return {section: blocks for section, blocks in sections.items() if blocks}


def _loss(trees: Trees) -> Figure:
    """The loss, else the first tracked scalar, of the trees that have it."""
    tracked = list(itertools.chain.from_iterable(map(histories, trees.values())))
    return plots.training(trees, names=["loss" if "loss" in tracked else tracked[0]])


def _has_draws(tree: Evidence) -> bool:
    """Whether there are predictive draws of known outcomes."""
    points = regression_points(tree)
    return points is not None and points.draws is not None


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
        "draws",
        "Loss",
        "A loss that still falls at the end has not converged. The first tenth may lie above the frame.",
        _loss,
        lambda tree: any(not name.startswith("warmup_") for name in histories(tree)),
    ),
)


def as_image(figure: Figure) -> str:
    """The figure as SVG in the address of an image; a page that holds it refers to nothing outside itself."""
    buffer = io.BytesIO()
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "pyrobnn"}):
        lay_out(figure)
        figure.savefig(
            buffer,
            format="svg",
            metadata=no_metadata,
        )
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def lay_out(figure: Figure) -> None:
    """Give every part of a figure its place in an SVG by its layout engine, which it loses: its parts stay there.

    ``savefig`` draws a figure that has an engine twice, the first time for the sake of the layout alone.
    """
    engine = figure.get_layout_engine()
    if engine is None:
        return
    FigureCanvasSVG(figure)
    dpi = figure.dpi
    figure.dpi = 72  # an SVG is measured in points
    # a layout that cannot be computed is left out, as where matplotlib draws
    with contextlib.suppress(ValueError):
        engine.execute(figure)
    figure.dpi = dpi
    with matplotlib.rc_context(
        {"figure.autolayout": False, "figure.constrained_layout.use": False}
    ):
        figure.set_layout_engine(None)
