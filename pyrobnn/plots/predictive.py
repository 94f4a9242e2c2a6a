"""Predictions: bands along a single input, outcomes, calibration, and the aleatoric and epistemic parts."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from pyrobnn.core.groups import CONSTANT_DATA, GRID, OBSERVED_DATA
from pyrobnn.diagnostics.class_points import ClassPoints, class_points
from pyrobnn.diagnostics.evidence import Evidence, Trees, gather, spread
from pyrobnn.diagnostics.gap import widest_gap
from pyrobnn.diagnostics.labels import feature_names, output_names, unit
from pyrobnn.diagnostics.points import COUNTS, Points, one_output, regression_points
from pyrobnn.diagnostics.prediction_metrics import expected_calibration_error
from pyrobnn.diagnostics.scores import num_outputs
from pyrobnn.plots.canvas import (
    bands,
    brief,
    empty_panel,
    grow_for_legend,
    legend_below,
    one_each,
    panels,
    reference_line,
)
from pyrobnn.plots.current import ink, legend_columns, muted, small_text
from pyrobnn.plots.look import ALEATORIC, ALERT, EPISTEMIC, fit_line, style

#: points of a panel that are drawn
MAX_POINTS = 400


def outcome_label(evidence: Evidence, output: int) -> str:
    """Name of an output, with its unit where the tree has one."""
    name = output_names(evidence, num_outputs(evidence))[output]
    unit_of_name = unit(evidence)
    return brief(f"{name} ({unit_of_name})" if unit_of_name else name, 16)


def predictive_bands(
    trees: Trees,
    *,
    output: int = 0,
    xlim: tuple[float, float] | None = None,
    ylim: tuple[float, float] | None = None,
) -> Figure:
    r"""Data, mean and 95 % bands against a single input, the two kinds of uncertainty apart.

    .. math:: \operatorname{Var}[y] = \underbrace{\mathbb E_s[\sigma_s^2]}_{\text{aleatoric}}
              + \underbrace{\operatorname{Var}_s[\mu_s]}_{\text{epistemic}}

    The blue inner band is mean ± 1.96 epistemic sd (uncertainty about the function), the sand outer band adds the
    noise, thin lines are eight posterior functions. The strip below shows both sds, and the ratio of the epistemic sd
    in the widest gap of the data to its median at the data. The bands take the predictive to be Gaussian; a skewed or
    bimodal one is not symmetric.

    Args:
        trees: one DataTree or a mapping from label to DataTree, with the groups ``grid`` and
            ``constant_data``.
        output: which output to draw.
        xlim, ylim: limits in original units; all panels share them either way.

    Returns:
        A figure with one panel per tree, at most three beside each other, so that it fits the width of a page.
    """
    evidences = gather(trees)
    with style():
        figure, axes = panels(
            len(evidences),
            rows_per_panel=(3.2, 1.0),
            size=(3.5, 3.4),
            sharex=True,
            sharey=True,
        )
        for (label, evidence), (main, strip) in zip(evidences.items(), axes, strict=True):
            main.set_title(brief(label))
            x = evidence.variable(GRID, "x")
            mean = evidence.variable(GRID, "mean")
            if x is None or mean is None or mean.size == 0:
                empty_panel(main, "no grid of predictions (1-D input only)")
                strip.set_axis_off()
                continue
            _draw_bands_and_strip(main, strip, evidence, x.values.reshape(-1), mean, output)
        # all panels share their limits, so the first sets them
        low, high = _outcome_range(evidences, output) if ylim is None else ylim
        if np.isfinite([low, high]).all() and low < high:
            axes[0, 0].set_ylim(low, high)
        if xlim is not None:
            axes[0, 0].set_xlim(*xlim)
        axes[0, 1].set_ylim(bottom=0)
        _common_legend(
            figure,
            axes,
            columns=min(4, 2 * len(evidences)),
        )
        return figure


def _common_legend(figure: Figure, axes: np.ndarray, columns: int) -> None:
    """One legend below the figure with each label once."""
    handles: dict[str, Artist] = {}
    for ax in axes.flat:
        drawn, labels = ax.get_legend_handles_labels()
        handles |= dict(zip(labels, drawn, strict=True))
    if handles:
        fitting = legend_columns(columns)
        if fitting < columns:
            # larger text: the panels keep their height
            grow_for_legend(figure, len(handles), fitting)
        values = list(handles.values())
        figure.legend(
            values,
            list(handles),
            loc="outside lower center",
            ncols=fitting,
        )


def _draw_bands_and_strip(
    main: Axes,
    strip: Axes,
    evidence: Evidence,
    x: np.ndarray,
    means: xr.DataArray,
    output: int,
) -> None:
    """Fill a panel: ``main`` with bands, functions, data and truth, ``strip`` with the two sds."""
    mean = one_output(means, output).values
    epistemic = _grid_sd(evidence, "epistemic", means, output)
    aleatoric = _grid_sd(evidence, "aleatoric", means, output)
    bands(main, x, mean, epistemic, np.hypot(epistemic, aleatoric))
    functions = evidence.variable(GRID, "f_draws")
    if functions is not None:
        for draw in one_output(functions, output).values[spread(functions.sizes["grid_draw"], 8)]:
            main.plot(
                x,
                draw,
                color=EPISTEMIC,
                alpha=0.45,
                linewidth=0.6,
            )
    _data_points(main, evidence, output)
    main.plot(
        x,
        mean,
        color=EPISTEMIC,
        linewidth=1.6,
        label="mean",
    )
    truth = evidence.variable(GRID, "true_f")
    if truth is not None:
        dashed: dict[str, Any] = {
            "color": ink(),
            "linewidth": 1.0,
            "linestyle": (0, (4, 2)),
        }
        main.plot(
            x,
            one_output(truth, output).values,
            label="true f",
            **dashed,
        )
    strip.plot(
        x,
        aleatoric,
        color=ALEATORIC,
        label="aleatoric sd",
    )
    strip.plot(
        x,
        epistemic,
        color=EPISTEMIC,
        label="epistemic sd",
    )
    _mark_gap(main, strip, evidence, output)
    main.set_ylabel(outcome_label(evidence, output))
    strip.set(xlabel=brief(feature_names(evidence, 1)[0]), ylabel="sd")


def _grid_sd(
    evidence: Evidence,
    kind: str,
    means: xr.DataArray,
    output: int,
) -> np.ndarray:
    """Standard deviation (point,) of a kind of uncertainty on the grid; zero where it is not stored."""
    variance = evidence.variable(GRID, f"{kind}_var")
    values = one_output(xr.zeros_like(means) if variance is None else variance, output).values
    return np.sqrt(np.maximum(values, 0))


def _data_points(ax: Axes, evidence: Evidence, output: int) -> None:
    inputs = evidence.variable(CONSTANT_DATA, "x")
    outcomes = evidence.variable(OBSERVED_DATA, "y")
    if inputs is not None and outcomes is not None:
        x = inputs.values.reshape(-1)
        y = one_output(outcomes, output).values.reshape(-1)
        at = spread(len(y), MAX_POINTS)
        ax.plot(
            x[at],
            y[at],
            ".",
            color=ink(),
            markersize=3,
            alpha=0.55,
            label="data",
        )


def _mark_gap(
    main: Axes,
    strip: Axes,
    evidence: Evidence,
    output: int,
) -> None:
    """Shade the widest gap of the data, and say how much the epistemic sd grows there."""
    gap = widest_gap(evidence, output)
    if gap is None:
        return
    look: dict[str, Any] = {
        "color": muted(),
        "alpha": 0.10,
        "linewidth": 0,
        "zorder": 0,
    }
    for ax in (main, strip):
        ax.axvspan(
            gap.low,
            gap.high,
            label="widest gap",
            **look,
        )
    text = "no epistemic sd" if gap.ratio is None else f"epistemic sd in the gap × {gap.ratio:.1f}"
    # between the two axes, where nothing is drawn
    strip.set_title(
        text,
        loc="right",
        fontsize=small_text(),
        fontweight="normal",
        pad=3,
    )


def _outcome_range(evidences: dict[str, Evidence], output: int) -> tuple[float, float]:
    """The range of the data and 40 % of it around: one wild method must not flatten the rest."""
    outcomes = (evidence.variable(OBSERVED_DATA, "y") for evidence in evidences.values())
    data = [one_output(y, output).values.ravel() for y in outcomes if y is not None and y.size]
    y = np.concatenate(data) if data else np.zeros(1)
    return float(y.min() - 0.4 * np.ptp(y)), float(y.max() + 0.4 * np.ptp(y))


def predicted_vs_observed(trees: Trees, *, output: int = 0) -> Figure:
    """Observed against predicted outcome, with each point's 95 % predictive interval as a thin bar.

    About one point in twenty should have a bar that misses the diagonal; more means overconfidence. At most
    400 evenly spaced points are drawn.

    Args:
        trees: one DataTree or a mapping from label to DataTree, with ``predictions`` and its constant data
            (or, in trees of other libraries, ``posterior_predictive`` and ``observed_data``; the panel says
            so).
        output: which output to draw.

    Returns:
        A figure with one panel per tree; both axes in the outcome's units.
    """

    def draw(ax: Axes, evidence: Evidence, points: Points) -> None:
        keep = spread(len(points.y), MAX_POINTS)
        ends = points.interval(0.95, whole=evidence.likelihood in COUNTS)
        mean, y, low, high = (values[keep] for values in (points.mean, points.y, *ends))
        missed = (y < low) | (y > high)
        ax.hlines(
            y,
            low,
            high,
            color=np.where(missed, ALERT, ALEATORIC),
            lw=0.7,
            alpha=0.55,
        )
        ax.plot(
            mean[~missed],
            y[~missed],
            ".",
            color=EPISTEMIC,
            markersize=4,
        )
        ax.plot(
            mean[missed],
            y[missed],
            "x",
            color=ALERT,
            markersize=4,
            markeredgewidth=1.1,
        )
        reference_line(ax)
        shown = f"{missed.mean():.0%} outside 95 %" + (
            "" if points.held_out else " (training data)"
        )
        ax.text(
            0.03,
            0.97,
            shown,
            transform=ax.transAxes,
            va="top",
            fontsize=small_text(),
        )
        ax.margins(y=0.12)  # room for it above the highest point
        name = outcome_label(evidence, output)
        ax.set(xlabel=f"predicted {name}", ylabel=f"observed {name}")

    read = partial(regression_points, output=output)
    missing = "no predictions with known outcomes"
    return one_each(
        trees,
        read,
        draw,
        missing,
        side=3.1,
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
    levels = np.linspace(0.0, 1.0, 41)
    with style():
        figure, axes = panels(1, size=(3.5, 3.1))
        ax = axes[0, 0]
        counts = []
        for index, (label, evidence) in enumerate(gather(trees).items()):
            points = regression_points(evidence, output)
            if points is not None and points.pit is not None:
                ax.plot(
                    levels,
                    _covered(points.pit, levels),
                    label=label,
                    **fit_line(index),
                )
                counts.append(len(points.pit))
        if not counts:
            empty_panel(ax, "no predictive draws with known outcomes")
            return figure
        _draw_calibrated(ax, levels, min(counts))
        legend_below(figure, ax)
        return figure


def _covered(pit: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """The share of outcomes, of these PITs (point,), in the central intervals of each level, (level,)."""
    return (np.abs(pit - 0.5)[:, None] <= 0.5 * levels + 1e-12).mean(0)


def _draw_calibrated(ax: Axes, levels: np.ndarray, num_points: int) -> None:
    """What a calibrated model covers: the diagonal, and the 95 % range of so many points."""
    low, high = (stats.binom.ppf(q, num_points, levels) / num_points for q in (0.025, 0.975))
    ax.fill_between(
        levels,
        low,
        high,
        label="calibrated, 95 % range",
        color=muted(),
        alpha=0.15,
        lw=0,
        zorder=0,
    )
    reference_line(ax)
    ax.set(
        xlim=(0, 1),
        ylim=(0, 1),
        xlabel="claimed coverage",
        ylabel="observed coverage",
    )
    ax.text(
        0.97,
        0.04,
        "below: overconfident",
        transform=ax.transAxes,
        ha="right",
        color=muted(),
        fontsize=small_text(),
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
        ax.hist(
            confidence,
            bins=np.linspace(0, 1, 21).tolist(),
            weights=shares,
            color=muted(),
            alpha=0.25,
        )
        reference_line(ax)
        ax.errorbar(
            claimed,
            accuracy,
            yerr=error,
            color=EPISTEMIC,
            marker="o",
            markersize=3.5,
            capsize=2,
        )
        ax.text(
            0.03,
            0.97,
            f"ECE {ece:.3f}",
            transform=ax.transAxes,
            va="top",
            fontsize=small_text(),
        )
        ax.set(
            xlim=(0, 1),
            ylim=(0, 1.02),
            xlabel="confidence",
            ylabel="accuracy",
        )

    missing = "no class probabilities with known labels"
    return one_each(
        trees,
        class_points,
        draw,
        missing,
        side=3.0,
    )


def decomposed(evidence: Evidence, output: int = 0) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Aleatoric and epistemic uncertainty (point,): entropies in nats of classes, else sds in the outcome's units."""
    labelled = class_points(evidence)
    points = regression_points(evidence, output)
    if labelled is not None:
        return labelled.aleatoric, labelled.epistemic
    return (None, None) if points is None else (points.aleatoric_sd, points.epistemic_sd)
