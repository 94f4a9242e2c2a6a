"""Predictions: bands along a single input, outcomes, replicates, residuals along each input."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from arviz_stats.base import array_stats
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy.stats import norm

from pyrobnn.core.groups import (
    CONSTANT_DATA,
    GRID,
    HELD_OUT,
    OBSERVED_DATA,
)
from pyrobnn.diagnostics.evidence import Evidence, Trees, gather
from pyrobnn.diagnostics.points import (
    COUNTS,
    Points,
    class_names,
    feature_names,
    has_classes,
    output_names,
    regression_points,
    replicates,
    unit,
    widest_gap,
)
from pyrobnn.diagnostics.scores import num_outputs
from pyrobnn.plots.style import (
    ALEATORIC,
    EPISTEMIC,
    INK,
    MUTED,
    NORMAL_95,
    PALETTE,
    bands,
    empty_panel,
    evenly,
    fit_line,
    one_each,
    panels,
    reference_line,
    style,
)

#: rows of a density, places of a row of intervals, panels of inputs, values of a figure of shares: what can be seen
MAX_DATA, MAX_PLACES, MAX_INPUTS, MAX_CLASSES, MAX_COUNTS = 2000, 60, 12, 100, 25
MAX_POINTS = 400


def outcome_label(evidence: Evidence, output: int) -> str:
    """Name of an output, with its unit where the tree has one."""
    name, of = output_names(evidence, num_outputs(evidence))[output], unit(evidence)
    return f"{name} ({of})" if of else name


def _output(values: xr.DataArray, output: int) -> np.ndarray:
    return (values.isel(output=output) if "output" in values.dims else values).values


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

    The blue inner band is mean ± 1.96 epistemic sd (doubt about the function), the sand outer band adds the
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
    trees = gather(trees)
    with style():
        figure, axes = panels(
            len(trees), rows_per_panel=(3.2, 1.0), size=(3.5, 3.4), sharex=True, sharey=True
        )
        for (label, evidence), (main, strip) in zip(trees.items(), axes, strict=True):
            main.set_title(label)
            x, mean = evidence.variable(GRID, "x"), evidence.variable(GRID, "mean")
            if x is None or mean is None or mean.size == 0:
                empty_panel(main, "no grid of predictions (1-D input only)")
                strip.set_axis_off()
                continue
            _bands(main, strip, evidence, x.values.reshape(-1), mean, output)
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
            columns = min(4, 2 * len(trees))
            figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=columns)
        return figure


def _bands(
    main: Axes, strip: Axes, evidence: Evidence, x: np.ndarray, means: xr.DataArray, output: int
) -> None:
    mean, zero = _output(means, output), xr.zeros_like(means)
    sds = []
    for kind in ("epistemic", "aleatoric"):
        variance = evidence.variable(GRID, f"{kind}_var")
        sds.append(np.sqrt(np.maximum(_output(zero if variance is None else variance, output), 0)))
    epistemic, aleatoric = sds
    bands(main, x, mean, epistemic, np.hypot(*sds))
    functions = evidence.variable(GRID, "f_draws")
    if functions is not None:
        for draw in _output(functions, output)[evenly(functions.sizes["grid_draw"], 8)]:
            main.plot(x, draw, color=EPISTEMIC, alpha=0.45, linewidth=0.6)
    inputs, outcomes = evidence.variable(CONSTANT_DATA, "x"), evidence.variable(OBSERVED_DATA, "y")
    if inputs is not None and outcomes is not None:
        at, y = inputs.values.reshape(-1), _output(outcomes, output).reshape(-1)
        keep = evenly(len(y), MAX_POINTS)
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
    main.set_ylabel(outcome_label(evidence, output))
    strip.set(xlabel=feature_names(evidence, 1)[0], ylabel="sd")


def _outcome_range(trees: dict[str, Evidence], output: int) -> tuple[float, float]:
    """Limits that hold the data and most of each band: one wild method must not flatten the rest."""
    ends, data = [], []
    for evidence in trees.values():
        mean, y = evidence.variable(GRID, "mean"), evidence.variable(OBSERVED_DATA, "y")
        variances = [evidence.variable(GRID, f"{kind}_var") for kind in ("aleatoric", "epistemic")]
        if mean is None or mean.size == 0 or y is None or y.size == 0:
            continue
        sd = np.sqrt(sum(np.maximum(_output(v, output), 0) for v in variances if v is not None))
        ends += [np.quantile(_output(mean, output) + sign * NORMAL_95 * sd, (0.02, 0.98)) for sign in (-1, 1)]
        data += [_output(y, output).min(), _output(y, output).max()]
    if not data:
        return 0.0, 0.0
    low, high = min(data), max(data)
    reach = high - low
    bottom, top = (
        max(min(low, np.min(ends)), low - 0.8 * reach),
        min(max(high, np.max(ends)), high + 0.8 * reach),
    )
    return float(bottom - 0.03 * reach), float(top + 0.1 * reach)


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
        keep = evenly(len(points.y), MAX_POINTS)
        ends = points.interval(0.95, whole=evidence.likelihood in COUNTS)
        mean, y, low, high = (each[keep] for each in (points.mean, points.y, *ends))
        missed = (y < low) | (y > high)
        ax.hlines(y, low, high, color=np.where(missed, PALETTE[1], ALEATORIC), lw=0.7, alpha=0.55)
        ax.plot(mean[~missed], y[~missed], ".", color=EPISTEMIC, markersize=4)
        ax.plot(mean[missed], y[missed], "x", color=PALETTE[1], markersize=4, markeredgewidth=1.1)
        reference_line(ax)
        shown = f"{missed.mean():.0%} outside 95 %" + ("" if points.held_out else " (training data)")
        ax.text(0.03, 0.97, shown, transform=ax.transAxes, va="top", fontsize=8)
        ax.margins(y=0.12)  # room for it above the highest point
        name = outcome_label(evidence, output)
        ax.set(xlabel=f"predicted {name}", ylabel=f"observed {name}")

    read, missing = partial(regression_points, output=output), "no predictions with known outcomes"
    return one_each(trees, read, draw, missing, size=(3.1, 3.1), sharex=True, sharey=True)


def posterior_predictive(trees: Trees, *, output: int = 0) -> Figure:
    """Density of the observed outcomes (dark) beside that of twelve data sets that the posterior makes (blue).

    Kernel densities by ArviZ, of at most 2000 evenly spaced data; limits hold 99 % of all replicates. Of classes,
    and of counts with few values, the share of each value: 50 and 95 % of the data sets that the posterior makes. It
    uses the data twice, so that only gross misfits show: skew, tails, a second mode, a bound, too few zeros.

    Args:
        trees: one DataTree or a mapping from label to DataTree, with ``posterior_predictive`` and ``observed_data``.
        output: which output to draw.

    Returns:
        A figure with one panel per tree.
    """

    def draw(ax: Axes, evidence: Evidence, found: tuple[np.ndarray, np.ndarray]) -> None:
        draws, y = (each[..., output] for each in found)
        ax.set_xlabel(output_names(evidence, found[1].shape[1])[output])
        if _frequencies(ax, draws, y, evidence):
            return
        keep = evenly(len(y), MAX_DATA)
        for replicate in draws[np.ix_(evenly(len(draws), 12), keep)]:
            _density(ax, replicate, color=EPISTEMIC, lw=0.6, alpha=0.45)
        _density(ax, y[keep], color=INK, lw=1.6)
        low, high = np.quantile(draws[:, keep], (0.005, 0.995))
        margin = 0.1 * (high - low)
        ax.set(xlim=(min(low, y.min()) - margin, max(high, y.max()) + margin), yticks=[])
        ax.set_ylim(bottom=0)

    missing, read = "no replicates of the training data", partial(replicates, whole=True)
    return one_each(trees, read, draw, missing, size=(3.0, 2.2), sharex=True)


def _frequencies(ax: Axes, draws: np.ndarray, y: np.ndarray, evidence: Evidence) -> bool:
    """Draw the share of each value in (draw, obs) beside that in (obs,); not where they are not few whole numbers."""
    if not (np.isfinite(draws).all() and np.isfinite(y).all() and (draws == np.rint(draws)).all()):
        return False
    labels = has_classes(evidence)
    largest = int(max(y.max(), draws.max() if labels else np.quantile(draws, 0.995)))
    if min(y.min(), draws.min()) < 0 or largest >= (MAX_CLASSES if labels else MAX_COUNTS):
        return False
    values = np.arange(largest + 1)
    made = np.stack([(draws == value).mean(1) for value in values])
    for levels, width in (((0.025, 0.975), 0.9), ((0.25, 0.75), 2.6)):
        ax.vlines(values, *np.quantile(made, levels, axis=1), color=EPISTEMIC, lw=width)
    ax.plot(values, [(y == value).mean() for value in values], "_", color=INK, ms=9, mew=1.6)
    ax.set(ylim=(0, None), ylabel="share", xlim=(-0.6, largest + 0.6))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if labels:
        shown = values[:: -(-len(values) // 12)]
        names = class_names(evidence, len(values))
        ax.set_xticks(shown, [names[value][: max(3, 40 // len(shown))] for value in shown])
    return True


def _density(ax: Axes, values: np.ndarray, **line: Any) -> None:
    finite = values[np.isfinite(values)]
    if len(finite) > 2 and np.ptp(finite) > 0:
        grid, density, _ = array_stats.kde(finite)
        ax.plot(grid[::8], density[::8], **line)


def residuals(trees: Trees, *, output: int = 0) -> Figure:
    """Standardised residuals against each input: mean in bins of equal count or of each value, one line per method.

    The residual of a point is (y − mean) / sd of its predictive, or where that is not near normal (counts, heavy tails,
    censored rows) the normal quantile of its randomised transform; grey points are the first method's. Where the
    predictive is right, bin means stay in the grey range (±2 standard errors); a line that leaves it shows a mean
    function that misses how y depends on that input. Held-out points, or the training data of trees without any; at
    most twelve inputs, those whose bins differ most.

    Args:
        trees: one DataTree or a mapping from label to DataTree, with predictions at points with known outcomes.
        output: which output to judge.

    Returns:
        A figure with one panel per input, one axes where there is nothing to draw.
    """
    trees = gather(trees)
    found = {
        label: pair
        for label, each in trees.items()
        if (pair := standardised_residuals(each, output)) is not None
    }
    with style():
        if not found:
            figure, axes = panels(1)
            empty_panel(axes[0, 0], "no residuals with their inputs")
            return figure
        x, first = next(iter(found.values()))
        same = {label: z for label, (inputs, z) in found.items() if np.array_equal(inputs, x)}
        names = feature_names(trees[next(iter(found))], x.shape[1])
        count = min(8, max(2, len(first) // 8))
        bins = [_bins(column, count) for column in x.T]
        spread = [max(np.ptp([z[b].mean() for b in parts]) for z in same.values()) for parts in bins]
        chosen = sorted(np.argsort(spread)[::-1][:MAX_INPUTS])
        figure, axes = panels(len(chosen), size=(3.0, 2.2), sharey=True)
        for feature, (ax,) in zip(chosen, axes, strict=True):
            parts = bins[feature]
            at = [x[b, feature].mean() for b in parts]
            half = 2 / np.sqrt([len(b) for b in parts])
            ax.fill_between(at, -half, half, color=MUTED, alpha=0.15, lw=0)
            reference_line(ax, 0.0)
            keep = evenly(len(first), 300)
            ax.plot(x[keep, feature], first[keep], ".", color=MUTED, markersize=3, alpha=0.4)
            for label, z in same.items():
                means, look = [z[b].mean() for b in parts], fit_line(list(trees).index(label))
                ax.plot(at, means, marker="o", markersize=2.5, label=label, **look)
            ax.set_title(names[feature])
            ax.set(xlabel=names[feature], ylabel="residual / sd")
        axes[0, 0].set_ylim(-3, 3)
        return figure


def _bins(column: np.ndarray, count: int) -> list[np.ndarray]:
    """Rows in bins of equal count; of few values, those of each value."""
    values, of = np.unique(column, return_inverse=True)
    if len(values) <= count:
        return [np.flatnonzero(of == number) for number in range(len(values))]
    return np.array_split(np.argsort(column, kind="stable"), count)


def standardised_residuals(evidence: Evidence, output: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Inputs (point, feature) and standardised residuals (point,)."""
    points = regression_points(evidence, output)
    if points is None:
        return None
    x = evidence.values(HELD_OUT if points.held_out else CONSTANT_DATA, "x")
    if x is None or x.ndim != 2 or len(x) != len(points.y) or len(x) < 8 or not (points.total_sd > 0).all():
        return None
    z = (points.y - points.mean) / points.total_sd
    if evidence.likelihood not in ("", "gaussian") and points.pit is not None:
        z = norm.ppf(points.pit)  # of counts, bounds, heavy tails and censored rows
    return (x.astype(np.float64), z) if np.isfinite(z).all() and np.isfinite(x).all() else None
