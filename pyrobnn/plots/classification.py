"""Classification: are the stated probabilities right, and does it know which items it does not?"""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pyrobnn.diagnostics.evidence import Evidence, Trees, gather
from pyrobnn.diagnostics.points import ClassPoints, class_names, class_points
from pyrobnn.diagnostics.scores import expected_calibration_error
from pyrobnn.plots.style import (
    ALEATORIC,
    ALERT,
    EPISTEMIC,
    INK,
    MUTED,
    PALETTE,
    empty_panel,
    one_each,
    panels,
    reference_line,
    style,
)


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


def entropy_split(trees: Trees) -> Figure:
    r"""Histograms of aleatoric and epistemic entropy, right and wrong predictions apart.

    .. math:: \mathbb H[\mathbb E_s p_s] = \mathbb E_s \mathbb H[p_s] + \mathbb I[y; \theta]

    A useful model has its wrong predictions to the right of its correct ones. One draw gives zero epistemic
    entropy.

    Args:
        trees: one DataTree or a mapping from label to DataTree, with the entropies of a classification.

    Returns:
        A figure with one panel per tree, aleatoric above epistemic, in nats.
    """
    trees = gather(trees)
    with style():
        figure, axes = panels(len(trees), rows_per_panel=(1.0, 1.0), size=(3.2, 3.6), share_stack=False)
        for (label, evidence), pair in zip(trees.items(), axes, strict=True):
            pair[0].set_title(label)
            points = class_points(evidence)
            if points is None or points.aleatoric is None or points.epistemic is None:
                empty_panel(pair[0], "no entropies in this tree")
                pair[1].set_axis_off()
                continue
            kinds = (("aleatoric", points.aleatoric, ALEATORIC), ("epistemic", points.epistemic, EPISTEMIC))
            for ax, (name, values, colour) in zip(pair, kinds, strict=True):
                # a hundredth of a nat at least: the epistemic entropy of a point is zero but for rounding
                edges = np.linspace(0, max(float(values.max()), 1e-2) * 1.02, 25)
                right, wrong = values[points.correct], values[~points.correct]
                for some, label, look in (
                    (right, "right", {"color": colour, "alpha": 0.45, "histtype": "stepfilled"}),
                    (wrong, "wrong", {"color": ALERT, "lw": 1.3, "histtype": "step"}),
                ):
                    if some.size:
                        ax.hist(some, edges, density=True, label=f"{label} ({some.size})", **look)
                ax.set(yticks=[], ylabel=name, ylim=(0, 1.45 * ax.get_ylim()[1]))  # the legend lies above
                ax.legend(loc="upper right")
            pair[1].set_xlabel("entropy (nats)")
        return figure


def most_uncertain(trees: Trees) -> Figure:
    """The eight items that a model is least sure about: class probabilities as bars, and the image where x is one.

    Ordered by epistemic entropy (or by the entropy of the mean prediction where that is missing or next to nothing).
    The true class has a dark outline. Inputs with a square number of features, 64 or more, are shown as images.

    Args:
        trees: one DataTree or a mapping from label to DataTree, with ``predictions.probs`` and labels; only
            the first tree that has them is drawn.

    Returns:
        A figure with one row of bars, and a row of images above it where x is one.
    """
    found = next(((k, p) for k, t in gather(trees).items() if (p := class_points(t)) is not None), None)
    with style():
        if found is None:
            figure, axes = panels(1)
            empty_panel(axes[0, 0], "no class probabilities with known labels")
            return figure
        label, points = found
        order = _by_doubt(points)[:8]
        names = class_names(gather(trees)[label], points.probs.shape[1])
        images = _as_images(points)
        figure, axes = panels(
            len(order),
            rows_per_panel=(1.0,) if images is None else (1.0, 0.8),
            max_columns=len(order),
            size=(1.3, 1.2 if images is None else 1.9),
        )
        for item, column in zip(order, axes, strict=True):
            if images is not None:
                column[0].imshow(images[item], cmap="gray_r", interpolation="nearest")
                column[0].set_axis_off()
            bars = column[-1]
            classes = np.arange(points.probs.shape[1])
            bars.bar(classes, points.probs[item], color=PALETTE[5], width=0.85)
            truth = points.y[item]
            bars.bar(truth, points.probs[item, truth], color="none", edgecolor=INK, linewidth=1.2, width=0.85)
            bars.set_title(f"is {names[truth]}", fontsize=8)
            shown = classes if len(classes) <= 10 else np.array([truth])
            bars.set(ylim=(0, 1), yticks=[])
            room = max(1, 18 // len(shown))  # characters below a bar; the title has the truth's whole name
            bars.set_xticks(shown, [names[each][:room] for each in shown])
            bars.tick_params(labelsize=7)
            bars.grid(visible=False)
        figure.suptitle(f"{label}: most uncertain items", fontsize=9, x=0.01, ha="left")
        return figure


def _as_images(points: ClassPoints) -> np.ndarray | None:
    """The inputs as (point, side, side), where their number looks like that of the pixels of a square."""
    if points.x is None:
        return None
    side = math.isqrt(points.x.shape[1])
    return points.x.reshape(-1, side, side) if side >= 8 and side * side == points.x.shape[1] else None


def _by_doubt(points: ClassPoints) -> np.ndarray:
    """Indices of the points, most doubtful first."""
    entropy = -(points.probs * np.log(np.maximum(points.probs, 1e-300))).sum(1)
    # members that all but agree tell no item from another
    if points.epistemic is not None and points.epistemic.max() > 1e-3 * entropy.max():
        return np.argsort(-points.epistemic, kind="stable")
    return np.argsort(-entropy, kind="stable")
