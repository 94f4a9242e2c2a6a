"""Leave-one-out: which data the draws cannot do without, and whether left-out data look as predicted."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from pyrobnn.diagnostics import leave_one_out as left_out
from pyrobnn.diagnostics.evidence import Trees, gather
from pyrobnn.diagnostics.thresholds import good_k
from pyrobnn.plots.style import (
    ALERT,
    EPISTEMIC,
    INK,
    MUTED,
    empty_panel,
    fit_line,
    legend_below,
    panels,
    style,
)

MAX_DATA = 1000
MAX_KHAT = 2.0


def khat(trees: Trees) -> Figure:
    """Pareto k-hat of leaving out each datum, with the threshold above which that estimate cannot be trusted.

    For an approximation (SVI, Laplace, SWAG) the ratios include p/q, so a poor approximation lifts all
    points at once; for MCMC a few high points are influential data, to be refitted without.
    Vehtari et al., Pareto Smoothed Importance Sampling (2024), https://jmlr.org/papers/v25/19-556.html

    Args:
        trees: one DataTree or a mapping from label to DataTree, with ``log_likelihood``.

    Returns:
        A figure with one panel per tree that allows leave-one-out.
    """
    trees = gather(trees)
    found = {k: fit for k, each in trees.items() if (fit := left_out.leave_one_out(each)) is not None}
    with style():
        figure, axes = panels(max(1, len(found)), size=(3.1, 2.1), sharey=True)
        if not found:
            empty_panel(axes[0, 0], "no log-likelihood per datum, or too few draws")
        low, high = -0.2, 1.0
        for (label, fit), (ax,) in zip(found.items(), axes, strict=False):
            limit = good_k(trees[label].num_draws)
            keep = np.linspace(0, len(fit.k) - 1, min(len(fit.k), MAX_DATA)).round().astype(int)
            bad = fit.k[keep] > limit
            # a tail that underflows has an infinite k-hat: it is drawn at the top
            index, tail = fit.points[keep], np.clip(fit.k[keep], -1.0, MAX_KHAT)
            ax.set_title(label)
            ax.axhline(limit, color=INK, lw=0.9, ls=(0, (4, 2)))
            ax.plot(index[~bad], tail[~bad], ".", color=EPISTEMIC, markersize=3)
            ax.plot(index[bad], tail[bad], "x", color=ALERT, markersize=4, markeredgewidth=1.1)
            note = f"{int((fit.k > limit).sum())} of {len(fit.k)} above {limit:.2f}"
            ax.text(0.02, 0.97, note, transform=ax.transAxes, va="top", fontsize=8)
            ax.set(xlabel="datum", ylabel="k-hat")
            low, high = min(low, float(tail.min()) - 0.05), max(high, float(tail.max()))
        # the panels share the axis: its limits are those of all, not of the last
        # the note stands in the upper tenth, and no mark does
        axes[0, 0].set_ylim(low, high + 0.25 * (high - low))
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
    found = {label: left_out.loo_pit(evidence) for label, evidence in trees.items()}
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
        ax.axhline(0, color=INK, lw=0.9, ls=(0, (4, 2)))
        at = np.linspace(0, 1, 201)
        for label, pit in lines.items():
            difference = np.searchsorted(pit, at, side="right") / len(pit) - at
            ax.plot(at, difference, label=label, **fit_line(labels.index(label)))
        ax.set(xlim=(0, 1), xlabel="LOO-PIT", ylabel="ECDF − uniform")
        legend_below(figure, ax)
        return figure
