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
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from pyrobnn import plots
from pyrobnn.core.groups import GRID
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.points import class_points, output_names, regression_points, replicates
from pyrobnn.diagnostics.scores import num_outputs
from pyrobnn.diagnostics.verdict import said
from pyrobnn.plots.predictive import standardised_residuals
from pyrobnn.plots.sampling import histories
from pyrobnn.plots.style import ALEATORIC, EPISTEMIC, FITS, INK, MUTED, PALETTE, RULE
from pyrobnn.plots.uncertainty import decomposed

Trees = Mapping[str, Evidence]
SECTIONS = {
    "predictions": "Predictions",
    "calibration": "Is the uncertainty honest?",
    "draws": "How the draws were made",
}
#: legend entries: CSS variable, kind of mark, words
Key = tuple[tuple[str, str, str], ...]
_BLUE, _SAND = f"--fig-{PALETTE.index(EPISTEMIC)}", f"--fig-{PALETTE.index(ALEATORIC)}"
BAND_KEY: Key = (
    (_BLUE, "line", "mean and single functions"),
    (_BLUE, "band", "95 % of the function (epistemic)"),
    (_SAND, "band", "95 % with noise (aleatoric added)"),
    ("--fig-ink", "dot", "data"),
    ("--fig-ink", "dash", "true function, where known"),
    ("--fig-muted", "band", "widest gap in the data"),
)


@dataclass(frozen=True)
class Block:
    """Inline SVG elements under a heading: how to read them, legend entries, and what could not be drawn, and why."""

    title: str
    how: str
    svgs: tuple[str, ...]
    key: Key = ()
    note: str = ""


@dataclass(frozen=True)
class Spec:
    """One kind of figure: of which trees it can be drawn, by what, and how it is read.

    Args:
        section: key of `SECTIONS`. title: heading. how: one sentence on how to read it, also its text alternative.
        draw: the figure of some trees; of one output where ``outputs``. has: whether a tree can be drawn.
        stack: one SVG per panel, of so many axes each; 0 for the whole figure as one.
        key: legend entries of these trees.
    """

    section: str
    title: str
    how: str
    draw: Callable[..., Figure]
    has: Callable[[Evidence], Any]
    stack: int = 1
    outputs: bool = False
    key: Callable[[Trees], Key] = lambda trees: ()

    def blocks(self, trees: Trees) -> list[Block]:
        """A block, or one per output, of the trees that it can be drawn of; why not, where it cannot."""
        try:
            have = {label: tree for label, tree in trees.items() if self.has(tree)}
            outputs = output_labels(have) if have and self.outputs else [""][: len(have)]
            return [self._block(have, output, name) for output, name in enumerate(outputs)]
        except Exception as error:
            if len(trees) > 1:  # those that can be drawn are, each beside the others' reasons
                return [block for label, tree in trees.items() for block in self.blocks({label: tree})]
            return [Block(f"{', '.join(trees)}: {self.title}", "", (), note=f"Not drawn: {said(error)}.")]

    def _block(self, trees: Trees, output: int, name: str) -> Block:
        of = f": {name}" if name else ""
        figure = self.draw(trees, output=output) if self.outputs else self.draw(trees)
        prefix = "".join(
            c if c.isalnum() else "-" for c in f"{self.title}-{'-'.join(trees)}-{output}".lower()
        )
        alt = f"{self.title}{of}. {self.how}"
        if self.stack:
            titles = [ax.get_title(loc="left") for ax in figure.axes[:: self.stack]]
            svgs = inline_panels(figure, alts=[f"{each}: {alt}" for each in titles], prefix=prefix)
        else:
            svgs = [inline_svg(figure, alt=alt, prefix=prefix)]
        return Block(self.title + of, self.how, tuple(svgs), self.key(trees))


def output_labels(trees: Trees) -> list[str]:
    """Names of the outputs that all trees have where there are several; one empty name for a single one."""
    count = min(num_outputs(each) for each in trees.values())
    return output_names(next(iter(trees.values())), count) if count > 1 else [""]


def line_key(trees: Trees) -> Key:
    """Legend of a figure of `trees` with one line per method."""
    return tuple(
        (f"--fig-{PALETTE.index(FITS[index % len(FITS)])}", "line" if index < len(FITS) else "dash", label)
        for index, label in enumerate(trees)
    )


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
        "unknown. Below each, the two sds against the input.",
        plots.predictive_bands,
        lambda tree: tree.variable(GRID, "mean") is not None,
        stack=2,
        outputs=True,
        key=lambda trees: BAND_KEY,
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
        "predictions",
        "Posterior predictive check",
        "Blue: data sets that the posterior makes; dark: the observed data. They should look alike: skew, tails, "
        "bounds, number of modes. Of classes and small counts, the share of each value, with 50 and 95 % of the data "
        "sets.",
        plots.posterior_predictive,
        lambda tree: replicates(tree, whole=True) is not None,
        outputs=True,
    ),
    Spec(
        "predictions",
        "Residuals against each input",
        "Mean of (observed − predicted) / predicted sd in bins, one line per method; it should stay in the grey "
        "range. A slope or a bend is missing from the mean function. Of many inputs, the twelve with the largest "
        "differences.",
        plots.residuals,
        lambda tree: standardised_residuals(tree, 0) is not None,
        outputs=True,
        key=line_key,
    ),
    Spec(
        "calibration",
        "Coverage",
        "A calibrated method stays in the grey range; below the diagonal it is overconfident.",
        plots.calibration,
        _has_draws,
        stack=0,
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
        stack=0,
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
        stack=0,
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
    """The whole figure as one ``<svg>`` element with a text alternative; `prefix` is unique within the page."""
    body, (width, height) = _drawn(figure)
    return _element(_themed(body, prefix), (0.0, 0.0, width, height), alt)


def inline_panels(figure: Figure, *, alts: list[str], prefix: str) -> list[str]:
    """Each panel of a figure as an ``<svg>`` of its own, all of one size, so that a phone can stack them.

    The page has the legends of the figure, which is of no use afterwards. Its axes come panel by panel, the same
    number in each; `alts` has a text alternative per panel, and `prefix` is unique within the page.
    """
    axes = list(figure.axes)
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
    # in points of a 72nd of an inch, with three around
    boxes = 72 * (frames + margins) / figure.dpi + 3 * np.array([-1, -1, 1, 1])
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
    return (
        f'<svg role="img" aria-label="{words}" viewBox="{box}" style="max-width: {view[2]:.0f}pt">'
        f"<title>{words}</title>{body}</svg>"
    )


def _rounded(path: str) -> str:
    return re.sub(r"\d+\.\d\d+", lambda number: f"{float(number.group()):.1f}", path).replace("\n", "")
