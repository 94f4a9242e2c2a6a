"""Uncertainty: whether it is calibrated, and its two kinds."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from pyrobnn.diagnostics.evidence import Evidence, Trees, gather
from pyrobnn.diagnostics.points import ClassPoints, class_points, regression_points
from pyrobnn.diagnostics.scores import expected_calibration_error
from pyrobnn.plots.predictive import outcome_label
from pyrobnn.plots.style import (
    ALEATORIC,
    EPISTEMIC,
    MUTED,
    empty_panel,
    fit_line,
    interval_row,
    legend_below,
    one_each,
    panels,
    reference_line,
    style,
)


def calibration(trees: Trees, *, output: int = 0) -> Figure:
    r"""Share of outcomes inside central predictive intervals against the level that the intervals claim.

    .. math:: \hat c(\alpha) = \tfrac1n \#\{i : |\mathrm{PIT}_i - \tfrac12| \le \alpha/2\}

    Below the diagonal: overconfident. The grey band is the pointwise 95 % binomial range of a calibrated
    model with as many points. A curve on the diagonal does not prove calibration everywhere in x: errors of
    opposite sign in two regions can cancel.

    Args:
        trees: one DataTree or a mapping from label to DataTree, with predictive draws of y.
        output: which output to judge.

    Returns:
        A figure with one line per tree.
    """
    trees = gather(trees)
    levels = np.linspace(0.0, 1.0, 41)
    with style():
        figure, axes = panels(1, size=(4.2, 3.6))
        ax = axes[0, 0]
        counts = []
        for index, (label, evidence) in enumerate(trees.items()):
            points = regression_points(evidence, output)
            if points is not None and points.pit is not None:
                covered = (np.abs(points.pit - 0.5)[:, None] <= 0.5 * levels + 1e-12).mean(0)
                ax.plot(levels, covered, label=label, **fit_line(index))
                counts.append(len(points.pit))
        if not counts:
            empty_panel(ax, "no predictive draws with known outcomes")
            return figure
        fewest = min(counts)
        low, high = (stats.binom.ppf(q, fewest, levels) / fewest for q in (0.025, 0.975))
        grey: dict[str, Any] = {"color": MUTED, "alpha": 0.15, "lw": 0, "zorder": 0}
        ax.fill_between(levels, low, high, label="calibrated, 95 % range", **grey)
        reference_line(ax)
        ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="claimed coverage", ylabel="observed coverage")
        look: dict[str, Any] = {"ha": "right", "color": MUTED, "fontsize": 8}
        ax.text(0.97, 0.04, "below: overconfident", transform=ax.transAxes, **look)
        legend_below(figure, ax)
        return figure


def uncertainty_decomposition(trees: Trees, *, output: int = 0) -> Figure:
    """Noise that stays (aleatoric) and uncertainty of the function (epistemic), of each method.

    One row per method and kind: the dot is the median over the held-out points, the thick line their middle
    half, the thin line their middle 90 %. Regression shows standard deviations in the outcome's units;
    classification shows entropies in nats (expected entropy, and mutual information of label and weights).

    Args:
        trees: one DataTree or a mapping from label to DataTree.
        output: which output to show in a regression.

    Returns:
        A figure with one axes.
    """
    trees = gather(trees)
    rows = {label: decomposed(evidence, output) for label, evidence in trees.items()}
    rows = {label: pair for label, pair in rows.items() if any(each is not None for each in pair)}
    classes = any(class_points(trees[label]) is not None for label in rows)
    with style():
        figure, axes = panels(1, size=(4.2, 1.0 + 0.5 * max(2, len(rows))))
        ax = axes[0, 0]
        if not rows:
            empty_panel(ax, "no decomposed uncertainty in these trees")
            return figure
        for row, pair in enumerate(rows.values()):
            for shift, values, colour in zip((-0.14, 0.14), pair, (ALEATORIC, EPISTEMIC), strict=True):
                if values is not None:
                    interval_row(ax, row + shift, values, colour)
        ax.plot([], [], color=ALEATORIC, lw=3, label="aleatoric")
        ax.plot([], [], color=EPISTEMIC, lw=3, label="epistemic")
        of = outcome_label(next(iter(trees.values())), output)
        ax.set_xlabel("entropy (nats)" if classes else f"sd of {of} at the held-out points")
        ax.set_yticks(range(len(rows)), list(rows))
        ax.set(xlim=(0, None), ylim=(len(rows) - 0.5, -0.5))
        ax.grid(axis="y", visible=False)
        figure.legend(loc="outside upper right", ncols=2)
        return figure


def decomposed(evidence: Evidence, output: int = 0) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Aleatoric and epistemic uncertainty (point,): entropies in nats of classes, else sds in the outcome's units."""
    labelled, points = class_points(evidence), regression_points(evidence, output)
    if labelled is not None:
        return labelled.aleatoric, labelled.epistemic
    return (None, None) if points is None else (points.aleatoric_sd, points.epistemic_sd)


def reliability(trees: Trees) -> Figure:
    r"""Accuracy against confidence in ten bins of equal count, with ±2 binomial standard errors, and the ECE.

    .. math:: \mathrm{ECE} = \sum_b \tfrac{n_b}{n} \, |\mathrm{acc}_b - \mathrm{conf}_b|

    Below the diagonal: overconfident. Grey bars show how the confidences are spread. ECE is biased upwards in
    small samples and depends on the binning; compare methods on the same data only.
    Guo et al., On Calibration of Modern Neural Networks (2017), https://arxiv.org/abs/1706.04599

    Args:
        trees: one DataTree or a mapping from label to DataTree, with ``predictions.probs`` and labels.

    Returns:
        A figure with one panel per tree.
    """

    def draw(ax: Axes, evidence: Evidence, points: ClassPoints) -> None:
        confidence = points.probs.max(1)
        ece, table = expected_calibration_error(confidence, points.correct)
        claimed, accuracy, count = table.T
        # the standard error of a calibrated bin, so that a bin without errors does not claim certainty
        error = 2 * np.sqrt(claimed * (1 - claimed) / count)
        shares = np.full(len(confidence), 1 / len(confidence))
        ax.hist(confidence, bins=np.linspace(0, 1, 21).tolist(), weights=shares, color=MUTED, alpha=0.25)
        reference_line(ax)
        ax.errorbar(claimed, accuracy, yerr=error, color=EPISTEMIC, marker="o", markersize=3.5, capsize=2)
        ax.text(0.03, 0.97, f"ECE {ece:.3f}", transform=ax.transAxes, va="top", fontsize=8)
        ax.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="confidence", ylabel="accuracy")

    missing = "no class probabilities with known labels"
    return one_each(trees, class_points, draw, missing, size=(3.0, 3.0), sharex=True, sharey=True)
