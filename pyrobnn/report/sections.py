"""Which figures a report shows, in which order, each with a sentence on how to read it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pyrobnn import plots
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.leave_one_out import leave_one_out
from pyrobnn.diagnostics.verdict import said
from pyrobnn.groups import FUNCTION, HISTORY, SAMPLE_STATS
from pyrobnn.report.blocks import Block, Trees, panels, where
from pyrobnn.report.predictive_sections import calibration, predictions
from pyrobnn.report.svg import inline_svg


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
            ("What it predicts", "predictions", predictions),
            ("Is the uncertainty honest?", "calibration", calibration),
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


def _draws(trees: Trees) -> list[Block]:
    blocks = []
    chains = where(trees, lambda t: not t.is_iid and t.draws_per_chain > 1)
    for index, (label, tree) in enumerate(chains.items()):
        one = {label: tree}
        svgs = panels(plots.trace(one), f"trace-{index}", f"trace of every chain of {label}")
        columns = len(svgs)
        if tree.num_chains > 1:
            svgs += panels(plots.rank(one), f"rank-{index}", f"rank histograms of the chains of {label}")
        blocks.append(
            Block(
                f"{label}: chains",
                "Chains (one colour each) should overlap in the trace and have flat rank histograms inside "
                "the grey range. Shown are the log density, the function where the chains agree least, and "
                "the noise; of programs, the sites where they agree least.",
                svgs,
                columns=columns,
            )
        )
    energetic = where(chains, lambda t: t.variable(SAMPLE_STATS, "energy") is not None)
    if energetic:
        blocks.append(
            Block(
                "Energy",
                "The transitions (orange) should be about as wide as the marginal (blue); BFMI below 0.3 "
                "means that the tails are missed.",
                panels(
                    plots.energy(energetic),
                    "energy",
                    "distributions of the energy and of its change between draws",
                ),
            )
        )
    smoothed = where(trees, lambda t: leave_one_out(t) is not None)
    if smoothed:
        blocks.append(
            Block(
                "Pareto k-hat of leaving each datum out",
                "Above the dashed line a leave-one-out estimate cannot be trusted. All points high: the "
                "approximation is poor. A few: influential data.",
                panels(plots.khat(smoothed), "khat", "Pareto k-hat of each datum"),
            )
        )
    learned = where(trees, _was_optimised)
    if learned:
        blocks.append(
            Block(
                "Loss",
                "A loss that still falls at the end has not converged. The first tenth may lie above the "
                "frame.",
                panels(plots.loss(learned), "loss", "loss against the step"),
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
