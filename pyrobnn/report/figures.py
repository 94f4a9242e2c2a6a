"""Which figures a report shows, in which order, each with a sentence on how to read it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from pyrobnn import plots
from pyrobnn.core.groups import FUNCTION, GRID, HISTORY, SAMPLE_STATS
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.leave_one_out import leave_one_out, loo_pit
from pyrobnn.diagnostics.points import class_points, output_names, regression_points, replicates
from pyrobnn.diagnostics.scores import num_outputs
from pyrobnn.diagnostics.verdict import said
from pyrobnn.plots.data_checks import expected, num_inputs
from pyrobnn.plots.style import ALEATORIC, EPISTEMIC, FITS, PALETTE
from pyrobnn.plots.uncertainty import decomposed
from pyrobnn.report.svg import inline_panels, inline_svg

Trees = Mapping[str, Evidence]
SECTIONS = {
    "predictions": "What it predicts",
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
    """Inline SVG elements under a heading.

    Args:
        title: heading. how: one sentence on how to read it. svgs: inline SVG elements. key: legend entries. wide:
            whether each SVG needs a row of its own. notes: what could not be drawn, and why. columns: how many SVGs
            stand side by side where there is room; 0 for as many as fit.
    """

    title: str
    how: str
    svgs: tuple[str, ...]
    key: Key = ()
    wide: bool = False
    notes: tuple[str, ...] = ()
    columns: int = 0


@dataclass(frozen=True)
class Section:
    """A heading with its blocks."""

    title: str
    anchor: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Spec:
    """One kind of figure: of which trees it can be drawn, by what, and how it is read.

    Args:
        section: key of `SECTIONS`. title: heading. how: one sentence on how to read it.
        draw: figures of some trees; of one output where ``outputs``. has: whether a tree can be drawn.
        alt: what a reader who cannot see it is told.
        split: one SVG per panel, of ``stack`` axes each; else the whole figure is one.
        outputs: a figure for each output. each: a row of figures for each tree. lines: a legend of one line per tree.
    """

    section: str
    title: str
    how: str
    draw: tuple[Callable[..., Figure], ...]
    has: Callable[[Evidence], Any]
    alt: str
    split: bool = True
    stack: int = 1
    outputs: bool = False
    each: bool = False
    lines: bool = False
    key: Key = field(default=())

    def blocks(self, trees: Trees) -> list[Block]:
        """Its blocks of those trees that it can be drawn of; one that makes it raise is left out, and named."""
        try:
            have = {label: tree for label, tree in trees.items() if self.has(tree)}
            return self._drawn(have) if have else []
        except Exception as error:
            why = f"{', '.join(trees)} cannot be drawn{' together' if len(trees) > 1 else ''}: {said(error)}."
        failed = [Block(f"{self.title}: not drawn", "", (), notes=(why,))]
        if len(trees) == 1:
            return failed
        alone = {label: self.blocks({label: tree}) for label, tree in trees.items()}
        rest = {label: tree for label, tree in trees.items() if all(block.svgs for block in alone[label])}
        if len(rest) == len(trees):
            return failed
        return [
            *self.blocks(rest),
            *(block for label in alone if label not in rest for block in alone[label]),
        ]

    def _drawn(self, trees: Trees) -> list[Block]:
        found = []
        for number, label in enumerate(trees if self.each else [""]):
            some = {label: trees[label]} if self.each else trees
            title = f"{label}: {self.title}" if self.each else self.title
            for output, name in enumerate(output_labels(some) if self.outputs else [""]):
                of = f": {name}" if name else ""
                options = {"output": output} if self.outputs else {}
                rows = [
                    self._svgs(draw(some, **options), f"{self.title}-{number}-{output}-{row}", of)
                    for row, draw in enumerate(self.draw)
                ]
                columns = len(rows[0]) if len(rows) > 1 else 0
                wide = self.each and not columns
                key = line_key(some) if self.lines else self.key
                svgs = tuple(svg for row in rows for svg in row)
                found.append(Block(title + of, self.how, svgs, key, wide, columns=columns))
        return found

    def _svgs(self, figure: Figure, prefix: str, of: str) -> tuple[str, ...]:
        prefix = "".join(letter if letter.isalnum() else "-" for letter in prefix.lower())
        if not figure.axes or not any(ax.axison for ax in figure.axes):
            return ()
        if not self.split:
            return (inline_svg(figure, alt=f"{self.alt}{of}", prefix=prefix),)
        titles = [ax.get_title(loc="left") for ax in figure.axes[:: self.stack]]
        alts = [f"{title}: {self.alt}{of}" for title in titles]
        return tuple(inline_panels(figure, alts=alts, prefix=prefix))


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


def build_sections(trees: Trees) -> list[Section]:
    """Every section that these trees have something for; a figure that no tree can fill is left out."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        found: dict[str, list[Block]] = {anchor: [] for anchor in SECTIONS}
        for spec in SPECS:
            some = trees
            if (
                spec.has is _has_prior
            ):  # of the model, whatever the method: beside chains, where there are any
                have = [label for label, tree in trees.items() if _has_prior(tree)]
                some = {label: trees[label] for label in sorted(have, key=lambda k: trees[k].is_iid)[:1]}
            found[spec.section] += spec.blocks(some)
    return [Section(SECTIONS[anchor], anchor, tuple(blocks)) for anchor, blocks in found.items() if blocks]


def _is_chains(tree: Evidence) -> bool:
    return not tree.is_iid and tree.draws_per_chain > 1


def _has_prior(tree: Evidence) -> bool:
    return expected(tree) is not None and tree.likelihood != "ordinal" and not tree.is_point


def _has_draws(tree: Evidence) -> bool:
    points = regression_points(tree)
    return points is not None and points.draws is not None


SPECS = (
    Spec(
        "predictions",
        "Predictive bands",
        "One panel per method, same axes. Between and beyond the data the blue band should open: there the function is "
        "unknown. Below each, the two sds against the input.",
        (plots.predictive_bands,),
        lambda tree: tree.variable(GRID, "mean") is not None,
        "data, predictive mean, 95 % bands and sds against the input",
        stack=2,
        outputs=True,
        key=BAND_KEY,
    ),
    Spec(
        "predictions",
        "Predicted against observed",
        "Each held-out point (of the training data where none were held out) with its 95 % interval; orange crosses "
        "are points whose interval misses the diagonal. One in twenty should.",
        (plots.predicted_vs_observed,),
        lambda tree: tree.variable(GRID, "mean") is None and regression_points(tree) is not None,
        "observed against predicted outcome with 95 % intervals",
        outputs=True,
    ),
    Spec(
        "predictions",
        "most uncertain items",
        "The held-out items with the highest epistemic entropy: bars are class probabilities, the true class is "
        "outlined.",
        (plots.most_uncertain,),
        lambda tree: class_points(tree) is not None,
        "the most uncertain items with their class probabilities",
        split=False,
        each=True,
    ),
    Spec(
        "predictions",
        "Posterior predictive check",
        "Blue: data sets that the posterior makes; dark: the observed data. They should look alike: skew, tails, "
        "bounds, number of modes. Of classes and small counts, the share of each value, with 50 and 95 % of the data "
        "sets.",
        (plots.posterior_predictive,),
        lambda tree: replicates(tree, whole=True) is not None,
        "observed and replicated data",
        outputs=True,
    ),
    Spec(
        "predictions",
        "Prior and posterior",
        "Grey: 50 and 90 % of what the prior expects of the function at the probes (or of the outcome at the data); "
        "blue: of the posterior; dashed: the range of the data. A prior far beyond the data, or inside them, is the "
        "wrong one. Of classes, the probability of the likeliest: a prior near 1 is sure before it has seen data.",
        (plots.prior_and_posterior,),
        _has_prior,
        "prior and posterior of the function or the outcome",
        outputs=True,
    ),
    Spec(
        "predictions",
        "Residuals against each input",
        "Mean of (observed − predicted) / predicted sd in bins, one line per method; it should stay in the grey "
        "range. A slope or a bend is what the mean function misses. Of many inputs, the twelve with the largest "
        "differences.",
        (plots.residuals,),
        num_inputs,
        "standardised residuals of each method",
        outputs=True,
        lines=True,
    ),
    Spec(
        "calibration",
        "Coverage",
        "A calibrated method stays in the grey range; below the diagonal it is overconfident.",
        (plots.calibration,),
        _has_draws,
        "Observed against claimed coverage, one line per method",
        split=False,
        outputs=True,
    ),
    Spec(
        "calibration",
        "Leave-one-out PIT",
        "On the training data. An S that rises, then falls, is overconfidence. Methods whose leave-one-out weights "
        "(k-hat) are unreliable are not drawn: their lines would mislead.",
        (plots.loo_pit,),
        lambda tree: _has_draws(tree) and loo_pit(tree) is not None,
        "Leave-one-out PIT: its ECDF minus the uniform, one line per method",
        split=False,
    ),
    Spec(
        "calibration",
        "Reliability",
        "Accuracy in bins of confidence; below the diagonal is overconfidence. Grey bars show where the confidences "
        "lie.",
        (plots.reliability,),
        lambda tree: class_points(tree) is not None,
        "accuracy against confidence",
    ),
    Spec(
        "calibration",
        "Aleatoric and epistemic",
        "Sand is noise that stays, however many data there are; blue is doubt that more data would remove. Dot: median "
        "over held-out points; thick line: middle half; thin line: middle 90 %.",
        (plots.uncertainty_decomposition,),
        lambda tree: decomposed(tree)[1] is not None,
        "Aleatoric and epistemic uncertainty of each method at the held-out points",
        split=False,
        outputs=True,
    ),
    Spec(
        "calibration",
        "Entropy of right and wrong predictions",
        "A useful model has its wrong predictions (orange outline) further right than its right ones.",
        (plots.entropy_split,),
        lambda tree: class_points(tree) is not None and decomposed(tree)[1] is not None,
        "histograms of aleatoric and epistemic entropy, right and wrong predictions apart",
        stack=2,
    ),
    Spec(
        "calibration",
        "Error against uncertainty",
        "Errors should grow along the dashed diagonal; a flat line says that the predicted sd knows nothing about "
        "where the errors are.",
        (plots.error_vs_uncertainty,),
        _has_draws,
        "absolute error against predicted standard deviation",
        outputs=True,
    ),
    Spec(
        "draws",
        "chains",
        "Chains (one colour each) should overlap in the trace and have flat rank histograms inside the grey range. "
        "Shown are the log density, the function where the chains agree least, and the noise; of programs, the sites "
        "where they agree least.",
        (plots.trace, plots.rank),
        _is_chains,
        "trace and rank histograms of every chain",
        each=True,
    ),
    Spec(
        "draws",
        "Energy",
        "The transitions (orange) should be about as wide as the marginal (blue); BFMI below 0.3 means that the tails"
        " are missed.",
        (plots.energy,),
        lambda tree: _is_chains(tree) and tree.variable(SAMPLE_STATS, "energy") is not None,
        "distributions of the energy and of its change between draws",
    ),
    Spec(
        "draws",
        "Pareto k-hat of leaving each datum out",
        "Above the dashed line a leave-one-out estimate cannot be trusted. All points high: the approximation is "
        "poor. A few: influential data.",
        (plots.khat,),
        lambda tree: leave_one_out(tree) is not None,
        "Pareto k-hat of each datum",
    ),
    Spec(
        "draws",
        "Loss",
        "A loss that still falls at the end has not converged. The first tenth may lie above the frame.",
        (plots.loss,),
        lambda tree: any(not name.startswith("warmup_") for name in tree.names(HISTORY)),
        "loss against the step",
    ),
    Spec(
        "draws",
        "Norms of the layers",
        "Unlike single weights, norms do not change when hidden units swap places: methods can be compared.",
        (plots.weight_norms,),
        lambda tree: tree.variable(FUNCTION, "layer_norm") is not None,
        "Posterior of each layer's weight norm",
        split=False,
    ),
)
