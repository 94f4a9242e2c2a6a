"""Calibration of uncertainty: coverage, errors beside their predicted size, its two kinds, leave-one-out, classes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from pyrobnn.diagnostics import leave_one_out as elpd
from pyrobnn.diagnostics.evidence import Evidence, Trees, gather
from pyrobnn.diagnostics.importance import good_k
from pyrobnn.diagnostics.points import ClassPoints, Points, class_names, class_points, regression_points
from pyrobnn.diagnostics.scores import expected_calibration_error
from pyrobnn.plots.predictive import MAX_POINTS, outcome_label, points_each
from pyrobnn.plots.style import (
    ALEATORIC,
    ALERT,
    EPISTEMIC,
    INK,
    MUTED,
    PALETTE,
    empty_panel,
    evenly,
    fit_line,
    interval_row,
    legend_below,
    name_rows,
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


def error_vs_uncertainty(trees: Trees, *, output: int = 0) -> Figure:
    """Absolute error against predicted sd: does the model know where it is wrong?

    Grey points are single errors; the line joins the root mean squared error in at most eight bins of equal count, with
    the range of ±2 standard errors. On the dashed diagonal the claimed sd is the sd of the error; a flat
    line means that the predicted sd does not show where the errors are.

    Args:
        trees: one DataTree or a mapping from label to DataTree, with predictions at points with known
            outcomes.
        output: which output to judge.

    Returns:
        A figure with one panel per tree; both axes in the outcome's units.
    """
    shown = []

    def draw(ax: Axes, evidence: Evidence, points: Points) -> None:
        error, sd = np.abs(points.y - points.mean), points.total_sd
        shown.append(np.stack([sd, error], axis=1))
        keep = evenly(len(error), MAX_POINTS)
        ax.plot(sd[keep], error[keep], ".", color=MUTED, markersize=3, alpha=0.45)
        bins = [b for b in np.array_split(np.argsort(sd), min(8, max(2, len(sd) // 8))) if len(b) > 1]
        squared = [error[b] ** 2 for b in bins]
        rmse = np.sqrt([s.mean() for s in squared])
        # delta method: se(√m) = se(m) / (2√m)
        half = np.array([s.std() / np.sqrt(len(s)) for s in squared]) / np.maximum(rmse, 1e-300)
        look: dict[str, Any] = {"color": EPISTEMIC, "marker": "o", "markersize": 3.5, "capsize": 2}
        ax.errorbar([sd[b].mean() for b in bins], rmse, yerr=np.minimum(half, rmse), **look)
        reference_line(ax)
        ranks = stats.spearmanr(sd, error).statistic if len(error) > 20 and np.ptp(sd) > 0 else np.nan
        shown_rank = f" (rank correlation {ranks:.2f})".replace("-", "−") if np.isfinite(ranks) else ""
        ax.set(xlabel=f"predicted sd{shown_rank}", ylabel="|error|")

    figure = points_each(trees, output, draw, size=(3.1, 2.9))
    if shown and np.ptp(reach := np.concatenate(shown), axis=0)[0] > 0:
        # a few far points would squeeze the rest; they stay in the rank correlation
        (low, _), (right, top) = reach.min(0), np.quantile(reach, 0.99, axis=0)
        margin = 0.06 * (right - low)
        figure.axes[0].set(xlim=(low - margin, right + margin), ylim=(0, 1.2 * top))
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
        name_rows(figure, ax, list(rows))
        return figure


def decomposed(evidence: Evidence, output: int = 0) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Aleatoric and epistemic uncertainty (point,): entropies in nats of classes, else sds in the outcome's units."""
    labelled, points = class_points(evidence), regression_points(evidence, output)
    if labelled is not None:
        return labelled.aleatoric, labelled.epistemic
    return (None, None) if points is None else (points.aleatoric_sd, points.epistemic_sd)


def khat(trees: Trees) -> Figure:
    """Pareto k-hat of leaving out each datum, with the threshold above which that estimate cannot be trusted.

    For an approximation (SVI, Laplace, SWAG) the ratios include p/q, so a poor approximation lifts all
    points at once; for MCMC a few high points are influential data, to be refitted without.
    Vehtari et al., Pareto Smoothed Importance Sampling (2024), https://jmlr.org/papers/v25/19-556.html

    Args:
        trees: one DataTree or a mapping from label to DataTree, with ``log_likelihood``.

    Returns:
        A figure with one panel per tree.
    """
    tails = []

    def draw(ax: Axes, evidence: Evidence, fit: elpd.LeaveOneOut) -> None:
        limit = good_k(evidence.num_draws)
        keep = evenly(len(fit.k), MAX_POINTS)
        # a tail that underflows has an infinite k-hat: it is drawn at the top
        index, tail, bad = fit.points[keep], np.clip(fit.k[keep], -1.0, 2.0), fit.k[keep] > limit
        tails.append(tail)
        reference_line(ax, limit)
        ax.plot(index[~bad], tail[~bad], ".", color=EPISTEMIC, markersize=3)
        ax.plot(index[bad], tail[bad], "x", color=ALERT, markersize=4, markeredgewidth=1.1)
        note = f"{int((fit.k > limit).sum())} of {len(fit.k)} above {limit:.2f}"
        ax.text(0.02, 0.97, note, transform=ax.transAxes, va="top", fontsize=8)
        ax.set(xlabel="datum", ylabel="k-hat")

    missing = "no log-likelihood per datum, or too few draws"
    figure = one_each(trees, elpd.leave_one_out, draw, missing, size=(3.1, 2.1), sharey=True)
    if tails:
        # the note stands in the upper tenth, and no mark does
        low = min(-0.2, *(tail.min() - 0.05 for tail in tails))
        high = max(1.0, *(tail.max() for tail in tails))
        figure.axes[0].set_ylim(low, high + 0.25 * (high - low))
    return figure


def loo_pit(trees: Trees) -> Figure:
    r"""Leave-one-out PIT: the ECDF of :math:`P(\tilde y_i \le y_i \mid y_{-i})` minus the diagonal.

    A calibrated model stays in the grey band, which is simultaneous at 99 % (Dvoretzky, Kiefer, Wolfowitz;
    Massart 1990). An S shape, up then down, means too narrow; down then up, too wide; all on one side,
    biased. It inherits any error of the leave-one-out weights: read it with the k-hat figure. Where those are
    unreliable for more than a tenth of the data there is no line.
    Gabry et al., Visualization in Bayesian Workflow (2019), https://doi.org/10.1111/rssa.12378

    Args:
        trees: one DataTree or a mapping from label to DataTree, with ``log_likelihood``,
            ``posterior_predictive`` and ``observed_data``.

    Returns:
        A figure with one line per tree that allows it.
    """
    trees = gather(trees)
    found = {label: elpd.loo_pit(evidence) for label, evidence in trees.items()}
    lines = {label: np.sort(pit[1][:, 0]) for label, pit in found.items() if pit is not None}
    with style():
        figure, axes = panels(1, size=(4.2, 3.6))
        ax = axes[0, 0]
        if not lines:
            empty_panel(ax, "needs a reliable leave-one-out and replicates of a regression")
            return figure
        labels = list(trees)
        fewest = min(len(pit) for pit in lines.values())
        half = np.sqrt(np.log(2 / 0.01) / (2 * fewest))
        ax.axhspan(-half, half, color=MUTED, alpha=0.15, lw=0, label="calibrated, 99 % range")
        reference_line(ax, 0.0)
        at = np.linspace(0, 1, 201)
        for label, pit in lines.items():
            difference = np.searchsorted(pit, at, side="right") / len(pit) - at
            ax.plot(at, difference, label=label, **fit_line(labels.index(label)))
        ax.set(xlim=(0, 1), xlabel="LOO-PIT", ylabel="ECDF − uniform")
        legend_below(figure, ax)
        return figure


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
    """Indices of the points, most uncertain first."""
    entropy = -(points.probs * np.log(np.maximum(points.probs, 1e-300))).sum(1)
    # members that all but agree do not order the items
    if points.epistemic is not None and points.epistemic.max() > 1e-3 * entropy.max():
        return np.argsort(-points.epistemic, kind="stable")
    return np.argsort(-entropy, kind="stable")
