"""What a regression predicts, how unsure it says it is, and whether that is honest."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from pyrobnn.diagnostics.evidence import Evidence, Trees, gather
from pyrobnn.diagnostics.names import feature_names, output_names, unit
from pyrobnn.diagnostics.points import COUNTS, Points, class_points, regression_points, widest_gap
from pyrobnn.diagnostics.scores import num_outputs
from pyrobnn.groups import CONSTANT_DATA, GRID, OBSERVED_DATA
from pyrobnn.plots.style import (
    ALEATORIC,
    EPISTEMIC,
    INK,
    MUTED,
    NORMAL_95,
    PALETTE,
    bands,
    empty_panel,
    fit_line,
    legend_below,
    panels,
    style,
)

MAX_POINTS = 400


def _thin(num_points: int, most: int = MAX_POINTS) -> np.ndarray:
    """At most `most` evenly spaced indices: figures stay light, tables use every point."""
    return np.unique(np.linspace(0, num_points - 1, min(num_points, most)).round().astype(int))


def _outcome(evidence: Evidence, output: int) -> str:
    """Name of an output, with its unit where the tree says it."""
    name, of = output_names(evidence, num_outputs(evidence))[output], unit(evidence)
    return f"{name} ({of})" if of else name


def _output(values: xr.DataArray, output: int) -> np.ndarray:
    return (values.isel(output=output) if "output" in values.dims else values).values


def predictive_bands(
    trees: Trees,
    *,
    output: int = 0,
    num_functions: int = 8,
    xlim: tuple[float, float] | None = None,
    ylim: tuple[float, float] | None = None,
) -> Figure:
    r"""Data, mean and 95 % bands against a single input, the two kinds of uncertainty apart.

    .. math:: \operatorname{Var}[y] = \underbrace{\mathbb E_s[\sigma_s^2]}_{\text{aleatoric}}
              + \underbrace{\operatorname{Var}_s[\mu_s]}_{\text{epistemic}}

    The blue inner band is mean ± 1.96 epistemic sd (doubt about the function), the sand outer band adds the
    noise; the strip below shows both sds, and the ratio of the epistemic sd in the widest gap of the data to
    its median at the data. The bands take the predictive to be Gaussian; a skewed or bimodal one is not
    symmetric.

    Args:
        trees: one DataTree or a mapping from label to DataTree, with the groups ``grid`` and
            ``constant_data``.
        output: which output to draw.
        num_functions: how many posterior functions to draw as thin lines.
        xlim, ylim: limits in original units; all panels share them either way.

    Returns:
        A figure with one panel per tree, at most three beside each other, so that it fits the width of a page.
    """
    trees = gather(trees)
    with style():
        figure, axes = panels(
            len(trees),
            rows_per_panel=(3.2, 1.0),
            size=(3.5, 3.4),
            sharex=True,
            sharey=True,
        )
        for (label, evidence), (main, strip) in zip(trees.items(), axes, strict=True):
            main.set_title(label)
            x, mean = evidence.variable(GRID, "x"), evidence.variable(GRID, "mean")
            if x is None or mean is None or mean.size == 0:
                empty_panel(main, "no grid of predictions (1-D input only)")
                strip.set_axis_off()
                continue
            _bands(main, strip, evidence, x.values.reshape(-1), mean, output, num_functions)
        low, high = _outcome_range(trees, output) if ylim is None else ylim
        if np.isfinite([low, high]).all() and low < high:
            axes[0, 0].set_ylim(low, high)
        if xlim is not None:
            axes[0, 0].set_xlim(*xlim)
        axes[0, 1].set_ylim(bottom=0)
        handles: dict[str, Any] = {}
        for ax in axes.flat:
            handles |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
        if handles:
            figure.legend(
                list(handles.values()),
                list(handles),
                loc="outside lower center",
                ncols=min(4, 2 * len(trees)),
            )
        return figure


def _bands(
    main: Axes,
    strip: Axes,
    evidence: Evidence,
    x: np.ndarray,
    means: xr.DataArray,
    output: int,
    num_functions: int,
) -> None:
    mean, zero = _output(means, output), xr.zeros_like(means)
    sds = []
    for kind in ("epistemic", "aleatoric"):
        variance = evidence.variable(GRID, f"{kind}_var")
        sds.append(np.sqrt(np.maximum(_output(zero if variance is None else variance, output), 0)))
    epistemic, aleatoric = sds
    bands(main, x, mean, epistemic, np.hypot(*sds))
    functions = evidence.variable(GRID, "f_draws")
    if functions is not None and num_functions > 0:
        chosen = _thin(functions.sizes["grid_draw"], num_functions)
        for draw in _output(functions, output)[chosen]:
            main.plot(x, draw, color=EPISTEMIC, alpha=0.45, linewidth=0.6)
    inputs, outcomes = evidence.variable(CONSTANT_DATA, "x"), evidence.variable(OBSERVED_DATA, "y")
    if inputs is not None and outcomes is not None:
        at, y = inputs.values.reshape(-1), _output(outcomes, output).reshape(-1)
        keep = _thin(len(y))
        main.plot(at[keep], y[keep], ".", color=INK, markersize=3, alpha=0.55, label="data")
    main.plot(x, mean, color=EPISTEMIC, linewidth=1.6, label="mean")
    truth = evidence.variable(GRID, "true_f")
    if truth is not None:
        main.plot(x, _output(truth, output), color=INK, linewidth=1.0, linestyle=(0, (4, 2)), label="true f")
    strip.plot(x, aleatoric, color=ALEATORIC, label="aleatoric sd")
    strip.plot(x, epistemic, color=EPISTEMIC, label="epistemic sd")
    gap = widest_gap(evidence, output)
    if gap is not None:
        for ax in (main, strip):
            ax.axvspan(gap.low, gap.high, color=MUTED, alpha=0.10, linewidth=0, zorder=0)
        shown = "no epistemic sd" if gap.ratio is None else f"epistemic sd in the gap × {gap.ratio:.1f}"
        # between the two axes, where nothing is drawn
        strip.set_title(shown, loc="right", fontsize=8, fontweight="normal", pad=3)
    main.set_ylabel(_outcome(evidence, output))
    strip.set(xlabel=feature_names(evidence, 1)[0], ylabel="sd")


def _outcome_range(trees: dict[str, Evidence], output: int) -> tuple[float, float]:
    """Limits that hold data, truth and most of each band: one wild method must not flatten the rest."""
    low, high, data = [], [], []
    for evidence in trees.values():
        mean, variances = (
            evidence.variable(GRID, "mean"),
            [evidence.variable(GRID, f"{k}_var") for k in ("aleatoric", "epistemic")],
        )
        if mean is None or mean.size == 0:
            continue
        sd = np.sqrt(sum(np.maximum(_output(v, output), 0) for v in variances if v is not None))
        low.append(np.quantile(_output(mean, output) - NORMAL_95 * sd, 0.02))
        high.append(np.quantile(_output(mean, output) + NORMAL_95 * sd, 0.98))
        for known in (evidence.variable(OBSERVED_DATA, "y"), evidence.variable(GRID, "true_f")):
            if known is not None and known.size:
                values = _output(known, output)
                data += [float(values.min()), float(values.max())]
    if not low:
        return 0.0, 0.0
    if not data:
        return float(min(low)), float(max(high))
    reach = max(data) - min(data)
    bottom = max(min(*low, *data), min(data) - 0.8 * reach)
    top = min(max(*high, *data), max(data) + 0.8 * reach)
    return bottom - 0.03 * reach, top + 0.1 * reach


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
    trees = gather(trees)
    with style():
        figure, axes = panels(len(trees), size=(3.1, 3.1), sharex=True, sharey=True)
        for (label, evidence), (ax,) in zip(trees.items(), axes, strict=True):
            points = regression_points(evidence, output)
            ax.set_title(label)
            if points is None:
                empty_panel(ax, "no predictions with known outcomes")
                continue
            keep = _thin(len(points.y))
            ends = points.interval(0.95, whole=evidence.likelihood in COUNTS)
            mean, y, low, high = (each[keep] for each in (points.mean, points.y, *ends))
            missed = (y < low) | (y > high)
            ax.hlines(y, low, high, color=np.where(missed, PALETTE[1], ALEATORIC), lw=0.7, alpha=0.55)
            ax.plot(mean[~missed], y[~missed], ".", color=EPISTEMIC, markersize=4)
            ax.plot(mean[missed], y[missed], "x", color=PALETTE[1], markersize=4, markeredgewidth=1.1)
            ax.axline((float(y.mean()), float(y.mean())), slope=1, color=INK, lw=0.9, ls=(0, (4, 2)))
            shown = f"{missed.mean():.0%} outside 95 %" + ("" if points.held_out else " (training data)")
            ax.text(0.03, 0.97, shown, transform=ax.transAxes, va="top", fontsize=8)
            ax.margins(y=0.12)  # room for it above the highest point
            name = _outcome(evidence, output)
            ax.set(xlabel=f"predicted {name}", ylabel=f"observed {name}")
        return figure


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
        fewest = None
        for index, (label, evidence) in enumerate(trees.items()):
            points = regression_points(evidence, output)
            pit = None if points is None else points.pit
            if pit is None:
                continue
            covered = (np.abs(pit - 0.5)[:, None] <= 0.5 * levels + 1e-12).mean(0)
            ax.plot(levels, covered, label=label, **fit_line(index))
            fewest = len(pit) if fewest is None else min(fewest, len(pit))
        if fewest is None:
            empty_panel(ax, "no predictive draws with known outcomes")
            return figure
        low, high = (stats.binom.ppf(q, fewest, levels) / fewest for q in (0.025, 0.975))
        ax.fill_between(
            levels, low, high, color=MUTED, alpha=0.15, lw=0, label="calibrated, 95 % range", zorder=0
        )
        ax.plot([0, 1], [0, 1], color=INK, lw=0.9, ls=(0, (4, 2)))
        ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="claimed coverage", ylabel="observed coverage")
        ax.text(
            0.97, 0.04, "below: overconfident", transform=ax.transAxes, ha="right", color=MUTED, fontsize=8
        )
        legend_below(figure, ax)
        return figure


def error_vs_uncertainty(trees: Trees, *, output: int = 0, num_bins: int = 8) -> Figure:
    """Absolute error against predicted sd: does the model know where it is wrong?

    Grey points are single errors; the line joins the root mean squared error in bins of equal count, with
    the range of ±2 standard errors. On the dashed diagonal the claimed sd is the sd of the error; a flat
    line means that the predicted sd says nothing about where the errors are.

    Args:
        trees: one DataTree or a mapping from label to DataTree, with predictions at points with known
            outcomes.
        output: which output to judge.
        num_bins: how many bins of equal count, at least 2.

    Returns:
        A figure with one panel per tree; both axes in the outcome's units.

    Raises:
        ValueError: if ``num_bins`` is below 2.
    """
    if num_bins < 2:
        raise ValueError(f"'num_bins' is {num_bins}; expected at least 2: a single bin shows no relation.")
    trees = gather(trees)
    with style():
        figure, axes = panels(len(trees), size=(3.1, 2.9), sharex=True, sharey=True)
        reach = np.zeros((0, 2))
        for (label, evidence), (ax,) in zip(trees.items(), axes, strict=True):
            ax.set_title(label)
            points = regression_points(evidence, output)
            if points is None:
                empty_panel(ax, "no predictions with known outcomes")
                continue
            _error_panel(ax, points, num_bins)
            reach = np.vstack([reach, np.stack([points.total_sd, np.abs(points.y - points.mean)], axis=1)])
        if len(reach) and np.ptp(reach[:, 0]) > 0:
            # a few far points would squeeze the rest; they stay in the rank correlation
            top = np.quantile(reach, 0.99, axis=0)
            low = float(reach[:, 0].min())
            axes[0, 0].set(
                xlim=(low - 0.06 * (top[0] - low), top[0] + 0.06 * (top[0] - low)), ylim=(0, 1.2 * top[1])
            )
        return figure


def _error_panel(ax: Axes, points: Points, num_bins: int) -> None:
    error, sd = np.abs(points.y - points.mean), points.total_sd
    keep = _thin(len(error))
    ax.plot(sd[keep], error[keep], ".", color=MUTED, markersize=3, alpha=0.45)
    bins = [b for b in np.array_split(np.argsort(sd), min(num_bins, max(2, len(sd) // 8))) if len(b) > 1]
    centre = np.array([sd[b].mean() for b in bins])
    squared = [error[b] ** 2 for b in bins]
    rmse = np.sqrt([s.mean() for s in squared])
    # delta method: se(√m) = se(m) / (2√m)
    half = np.array([s.std() / np.sqrt(len(s)) for s in squared]) / np.maximum(rmse, 1e-300)
    ax.errorbar(
        centre, rmse, yerr=np.minimum(half, rmse), color=EPISTEMIC, marker="o", markersize=3.5, capsize=2
    )
    ax.axline((0, 0), slope=1, color=INK, lw=0.9, ls=(0, (4, 2)))
    ax.set(xlabel="predicted sd", ylabel="|error|")
    if len(error) > 20:
        rank_correlation = stats.spearmanr(sd, error).statistic if np.ptp(sd) > 0 else float("nan")
        if np.isfinite(rank_correlation):
            said = f"rank correlation {rank_correlation:.2f}".replace("-", "−")
            ax.set_xlabel(f"predicted sd ({said})")


def uncertainty_decomposition(trees: Trees, *, output: int = 0) -> Figure:
    """How much of each method's uncertainty is noise that stays (aleatoric) and how much is doubt
    (epistemic).

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
    rows: list[tuple[str, np.ndarray | None, np.ndarray | None]] = []
    classes = False
    for label, evidence in trees.items():
        labelled, points = class_points(evidence), regression_points(evidence, output)
        if labelled is not None:
            classes = True
            rows.append((label, labelled.aleatoric, labelled.epistemic))
        elif points is not None:
            rows.append((label, points.aleatoric_sd, points.epistemic_sd))
    rows = [row for row in rows if row[1] is not None or row[2] is not None]
    with style():
        figure, axes = panels(1, size=(4.2, 1.0 + 0.5 * max(2, len(rows))))
        ax = axes[0, 0]
        if not rows:
            empty_panel(ax, "no decomposed uncertainty in these trees")
            return figure
        for row, (_, aleatoric, epistemic) in enumerate(rows):
            for shift, values, colour in ((-0.14, aleatoric, ALEATORIC), (0.14, epistemic, EPISTEMIC)):
                if values is None:
                    continue
                at = row + shift
                p5, p25, p50, p75, p95 = np.quantile(values, (0.05, 0.25, 0.5, 0.75, 0.95))
                ax.hlines(at, p5, p95, color=colour, lw=1.0)
                ax.hlines(at, p25, p75, color=colour, lw=3.5)
                ax.plot(
                    p50, at, "o", color=colour, markersize=5, markeredgecolor="white", markeredgewidth=0.8
                )
        ax.plot([], [], color=ALEATORIC, lw=3, label="aleatoric")
        ax.plot([], [], color=EPISTEMIC, lw=3, label="epistemic")
        ax.set_yticks(range(len(rows)), [row[0] for row in rows])
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.set_xlim(left=0)
        ax.grid(axis="y", visible=False)
        first = next(iter(trees.values()))
        ax.set_xlabel(
            "entropy (nats)" if classes else f"sd of {_outcome(first, output)} at the held-out points"
        )
        figure.legend(loc="outside upper right", ncols=2)
        return figure
