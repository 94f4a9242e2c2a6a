"""Which figures a report shows, in which order, each with a sentence on how to read it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from pyrobnn import plots
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.leave_one_out import leave_one_out, loo_pit
from pyrobnn.diagnostics.points import class_points, regression_points
from pyrobnn.diagnostics.verdict import said
from pyrobnn.groups import FUNCTION, GRID, HISTORY, SAMPLE_STATS
from pyrobnn.plots.style import ALEATORIC, EPISTEMIC, PALETTE
from pyrobnn.report.svg import inline_panels, inline_svg

Trees = Mapping[str, Evidence]

BAND_KEY = (
    (f"--fig-{PALETTE.index(EPISTEMIC)}", "line", "mean and single functions"),
    (f"--fig-{PALETTE.index(EPISTEMIC)}", "band", "95 % of the function (epistemic)"),
    (f"--fig-{PALETTE.index(ALEATORIC)}", "band", "95 % with noise (aleatoric added)"),
    ("--fig-ink", "dot", "data"),
    ("--fig-ink", "dash", "true function, where known"),
    ("--fig-muted", "band", "widest gap in the data"),
)


@dataclass(frozen=True)
class Block:
    """One figure, or a row of panels, with its heading.

    Args:
        title: heading. how: one sentence on how to read it. svgs: inline SVG elements. key: legend entries,
            (CSS variable, "line" | "band" | "dot" | "dash", words). wide: whether each SVG needs a row of its own.
        notes: what could not be drawn, and why.
    """

    title: str
    how: str
    svgs: tuple[str, ...]
    key: tuple[tuple[str, str, str], ...] = ()
    wide: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    """A heading with its blocks."""

    title: str
    anchor: str
    blocks: tuple[Block, ...]


Blocks = Callable[[Trees], list[Block]]


def build_sections(trees: Trees) -> list[Section]:
    """Every section that these trees have something for; a figure that no tree can fill is left out."""
    sections = [
        Section(title, anchor, tuple(_drawn(blocks, trees)))
        for title, anchor, blocks in (
            ("What it predicts", "predictions", _predictions),
            ("Is the uncertainty honest?", "calibration", _calibration),
            ("How the draws were made", "draws", _draws),
        )
    ]
    return [section for section in sections if section.blocks]


def _drawn(blocks: Blocks, trees: Trees) -> list[Block]:
    """The section's blocks; a tree that makes one raise is left out of the section, which says so."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            return blocks(trees)
        except Exception:
            alone = {label: _why_not(blocks, label, tree) for label, tree in trees.items()}
        rest = {label: tree for label, tree in trees.items() if alone[label] is None}
        notes = [f"{label} cannot be drawn: {why}." for label, why in alone.items() if why is not None]
        try:
            found = blocks(rest) if rest else []
        except Exception as error:
            found, notes = [], [*notes, f"The others cannot be drawn together: {said(error)}."]
    return [
        Block("Not drawn", "What a tree holds did not allow these figures.", (), notes=tuple(notes)),
        *found,
    ]


def _why_not(blocks: Blocks, label: str, tree: Evidence) -> str | None:
    try:
        blocks({label: tree})
    except Exception as error:
        return said(error)
    return None


def _panels(figure: Figure, prefix: str, what: str, *, stack: int = 1) -> tuple[str, ...]:
    """One SVG per panel, of one size and with the figure's shared limits; its title opens its alt text."""
    titles = [ax.get_title(loc="left") for ax in figure.axes[::stack]]
    return tuple(inline_panels(figure, alts=[f"{title}: {what}" for title in titles], prefix=prefix))


def _where(trees: Trees, test: Callable[[Evidence], bool]) -> dict[str, Evidence]:
    return {label: tree for label, tree in trees.items() if test(tree)}


def _predictions(trees: Trees) -> list[Block]:
    blocks = []
    gridded = _where(trees, lambda t: t.variable(GRID, "mean") is not None)
    if gridded:
        blocks.append(
            Block(
                "Predictive bands",
                "One panel per method, same axes. Between and beyond the data the blue band should open: "
                "there the function is unknown. Below each, the two sds against x.",
                _panels(
                    plots.predictive_bands(gridded),
                    "bands",
                    "data, predictive mean, 95 % bands and sds against x",
                    stack=2,
                ),
                BAND_KEY,
            )
        )
    observed = _where(trees, lambda t: regression_points(t) is not None)
    if observed and not gridded:
        blocks.append(
            Block(
                "Predicted against observed",
                "Each held-out point with its 95 % interval; orange crosses are points whose interval misses"
                " the diagonal. One in twenty should.",
                _panels(
                    plots.predicted_vs_observed(observed),
                    "observed",
                    "observed against predicted outcome with 95 % intervals",
                ),
            )
        )
    labelled = _where(trees, lambda t: class_points(t) is not None)
    if labelled:
        blocks.append(
            Block(
                "Most uncertain items",
                "The held-out items with the highest epistemic entropy: bars are class probabilities, the "
                "true class is outlined.",
                tuple(
                    inline_svg(
                        plots.most_uncertain({label: tree}),
                        alt=f"{label}: the most uncertain items with their class probabilities",
                        prefix=f"items-{index}",
                    )
                    for index, (label, tree) in enumerate(labelled.items())
                ),
                wide=True,
            )
        )
    return blocks


def _calibration(trees: Trees) -> list[Block]:
    blocks = []
    observed = _where(trees, lambda t: (p := regression_points(t)) is not None and p.draws is not None)
    if observed:
        blocks.append(
            Block(
                "Coverage",
                "A calibrated method stays in the grey range; below the diagonal it is overconfident.",
                (
                    inline_svg(
                        plots.calibration(observed),
                        alt="Observed against claimed coverage, one line per method",
                        prefix="coverage",
                    ),
                ),
            )
        )
        if any(loo_pit(t) is not None for t in trees.values()):
            blocks.append(
                Block(
                    "Leave-one-out PIT",
                    "On the training data. An S that rises, then falls, is overconfidence.",
                    (
                        inline_svg(
                            plots.loo_pit(trees),
                            alt="Leave-one-out PIT: its ECDF minus the uniform, one line per method",
                            prefix="loopit",
                        ),
                    ),
                )
            )
    labelled = _where(trees, lambda t: class_points(t) is not None)
    if labelled:
        blocks.append(
            Block(
                "Reliability",
                "Accuracy in bins of confidence; below the diagonal is overconfidence. Grey bars show where "
                "the confidences lie.",
                _panels(plots.reliability(labelled), "reliability", "accuracy against confidence"),
            )
        )
    blocks += _uncertainty(trees)
    if observed:
        blocks.append(
            Block(
                "Error against uncertainty",
                "Errors should grow along the dashed diagonal; a flat line says that the predicted sd knows "
                "nothing about where the errors are.",
                _panels(
                    plots.error_vs_uncertainty(observed),
                    "error",
                    "absolute error against predicted standard deviation",
                ),
            )
        )
    return blocks


def _uncertainty(trees: Trees) -> list[Block]:
    labelled = _where(trees, lambda t: (p := class_points(t)) is not None and p.epistemic is not None)
    blocks = []
    if labelled or any((p := regression_points(t)) and p.epistemic_sd is not None for t in trees.values()):
        blocks.append(
            Block(
                "Aleatoric and epistemic",
                "Sand is noise that stays however much data come; blue is doubt that data would remove. Dot:"
                " median over held-out points; thick line: middle half; thin line: middle 90 %.",
                (
                    inline_svg(
                        plots.uncertainty_decomposition(trees),
                        alt="Aleatoric and epistemic uncertainty of each method at the held-out points",
                        prefix="split",
                    ),
                ),
            )
        )
    if labelled:
        blocks.append(
            Block(
                "Entropy of right and wrong predictions",
                "A useful model has its wrong predictions (orange outline) further right than its right "
                "ones.",
                _panels(
                    plots.entropy_split(labelled),
                    "entropy",
                    "histograms of aleatoric and epistemic entropy, right and wrong predictions apart",
                    stack=2,
                ),
            )
        )
    return blocks


def _draws(trees: Trees) -> list[Block]:
    blocks = []
    chains = _where(trees, lambda t: not t.is_iid and t.draws_per_chain > 1)
    for index, (label, tree) in enumerate(chains.items()):
        one = {label: tree}
        svgs = _panels(plots.trace(one), f"trace-{index}", f"trace of every chain of {label}")
        if tree.num_chains > 1:
            svgs += _panels(plots.rank(one), f"rank-{index}", f"rank histograms of the chains of {label}")
        blocks.append(
            Block(
                f"{label}: chains",
                "Chains (one colour each) should overlap in the trace and have flat rank histograms inside "
                "the grey range. Shown are the log density, the function where the chains agree least, and "
                "the noise.",
                svgs,
            )
        )
    energetic = _where(chains, lambda t: t.variable(SAMPLE_STATS, "energy") is not None)
    if energetic:
        blocks.append(
            Block(
                "Energy",
                "The transitions (orange) should be about as wide as the marginal (blue); BFMI below 0.3 "
                "means that the tails are missed.",
                _panels(
                    plots.energy(energetic),
                    "energy",
                    "distributions of the energy and of its change between draws",
                ),
            )
        )
    smoothed = _where(trees, lambda t: leave_one_out(t) is not None)
    if smoothed:
        blocks.append(
            Block(
                "Pareto k-hat of leaving each datum out",
                "Above the dashed line a leave-one-out estimate cannot be trusted. All points high: the "
                "approximation is poor. A few: influential data.",
                _panels(plots.khat(smoothed), "khat", "Pareto k-hat of each datum"),
            )
        )
    learned = _where(trees, _was_optimised)
    if learned:
        blocks.append(
            Block(
                "Loss",
                "A loss that still falls at the end has not converged. The first tenth may lie above the "
                "frame.",
                _panels(plots.loss(learned), "loss", "loss against the step"),
            )
        )
    if any(t.variable(FUNCTION, "layer_norm") is not None for t in trees.values()):
        blocks.append(
            Block(
                "Norms of the layers",
                "Unlike single weights, norms do not change when hidden units swap places: methods can be "
                "compared.",
                (
                    inline_svg(
                        plots.weight_norms(trees), alt="Posterior of each layer's weight norm", prefix="norms"
                    ),
                ),
            )
        )
    return blocks


def _was_optimised(tree: Evidence) -> bool:
    """Whether the history tells more than how a sampler warmed up."""
    return any(not name.startswith("warmup_") for name in tree.names(HISTORY))
