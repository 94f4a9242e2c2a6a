"""Leave-one-out: which data the draws cannot do without, and whether left-out data look as predicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from pyrobnn.diagnostics.loo import loo_weights
from pyrobnn.diagnostics.reading import log_likelihood, num_draws
from pyrobnn.diagnostics.thresholds import good_k
from pyrobnn.plots.reading import Trees, as_trees, outcome_draws
from pyrobnn.plots.style import ALERT, EPISTEMIC, INK, MUTED, PALETTE, empty_panel, panels, style

MAX_DATA = 1000
MAX_KHAT = 2.0


@dataclass(frozen=True)
class LeaveOneOut:
    """Pareto-smoothed leave-one-out weights of one tree, for at most `MAX_DATA` evenly spaced data.

    Args:
        index: which data, shape (obs,).
        khat: tail index of each datum's importance ratios, shape (obs,).
        weights: normalised, shape (sample, obs).
    """

    index: np.ndarray
    khat: np.ndarray
    weights: np.ndarray


def leave_one_out(tree: xr.DataTree) -> LeaveOneOut | None:
    r"""Smooth the ratios that turn the draws into draws of every leave-one-out posterior.

    .. math:: r_{is} \propto \frac{1}{p(y_i \mid \theta_s)} \cdot \frac{p(\theta_s, y)}{q(\theta_s)}

    where the second factor is 1 for MCMC and needs ``log_p`` and ``log_q`` otherwise. None where the tree
    lacks what this needs, or has too few draws.
    Magnusson et al., Bayesian Leave-One-Out Cross-Validation for Large Data (2019),
    https://arxiv.org/abs/1904.10679
    """
    terms = log_likelihood(tree)
    if terms is None or terms.shape[-1] == 0:
        return None
    index = np.unique(np.linspace(0, terms.shape[-1] - 1, min(terms.shape[-1], MAX_DATA)).round().astype(int))
    smoothed = loo_weights(tree, index)
    if smoothed is None:
        return None
    log_weights, tail = smoothed
    flat = log_weights.reshape(len(index), -1).T
    weights = np.exp(flat - flat.max(0))
    return LeaveOneOut(index, tail, weights / weights.sum(0))


def _fits(trees: dict[str, xr.DataTree], fits: Mapping[str, LeaveOneOut | None] | None):
    if fits is None:
        fits = {label: leave_one_out(tree) for label, tree in trees.items()}
    return {label: fit for label in trees if (fit := fits.get(label)) is not None}


def khat(trees: Trees, *, fits: Mapping[str, LeaveOneOut | None] | None = None) -> Figure:
    """Pareto k-hat of leaving out each datum, with the threshold above which that estimate cannot be trusted.

    For an approximation (SVI, Laplace, SWAG) the ratios include p/q, so a poor approximation lifts all
    points at once; for MCMC a few high points are influential data, to be refitted without.
    Vehtari et al., Pareto Smoothed Importance Sampling (2024), https://jmlr.org/papers/v25/19-556.html

    Args:
        trees: one DataTree or a mapping from label to DataTree, with ``log_likelihood``.
        fits: `leave_one_out` of each tree where it is at hand; computed otherwise.

    Returns:
        A figure with one panel per tree that allows leave-one-out.
    """
    trees = as_trees(trees)
    found = _fits(trees, fits)
    with style():
        figure, axes = panels(max(1, len(found)), size=(3.1, 2.1), sharey=True)
        if not found:
            empty_panel(axes[0, 0], "no log-likelihood per datum, or too few draws")
        for (label, fit), (ax,) in zip(found.items(), axes, strict=False):
            limit = good_k(num_draws(trees[label]))
            high = fit.khat > limit
            # a tail that underflows has an infinite k-hat: it is drawn at the top
            tail = np.clip(fit.khat, -1.0, MAX_KHAT)
            ax.set_title(label)
            ax.axhline(limit, color=INK, lw=0.9, ls=(0, (4, 2)))
            ax.plot(fit.index[~high], tail[~high], ".", color=EPISTEMIC, markersize=3)
            ax.plot(fit.index[high], tail[high], "x", color=ALERT, markersize=4, markeredgewidth=1.1)
            note = f"{int(high.sum())} of {len(high)} above {limit:.2f}"
            ax.text(0.02, 0.97, note, transform=ax.transAxes, va="top", fontsize=8)
            ax.set(xlabel="datum", ylabel="k-hat")
            top = max(1.0, float(tail.max()))
            ax.set_ylim(min(-0.2, float(tail.min()) - 0.05), top + 0.35)
        return figure


def loo_pit(trees: Trees, *, fits: Mapping[str, LeaveOneOut | None] | None = None) -> Figure:
    r"""Leave-one-out PIT: the ECDF of :math:`P(\tilde y_i \le y_i \mid y_{-i})` minus the diagonal.

    A calibrated model stays in the grey band, which is simultaneous at 99 % (Dvoretzky, Kiefer, Wolfowitz;
    Massart 1990). An S shape, up then down, means too narrow; down then up, too wide; all on one side,
    biased. It inherits any error of the leave-one-out weights: read it with the k-hat figure.
    Gabry et al., Visualization in Bayesian Workflow (2019), https://doi.org/10.1111/rssa.12378

    Args:
        trees: one DataTree or a mapping from label to DataTree, with ``log_likelihood``,
            ``posterior_predictive`` and ``observed_data``.
        fits: `leave_one_out` of each tree where it is at hand; computed otherwise.

    Returns:
        A figure with one line per tree that allows it.
    """
    trees = as_trees(trees)
    lines = {}
    for label, fit in _fits(trees, fits).items():
        outcome = outcome_draws(trees[label])
        if outcome is None or outcome[1].shape[0] != fit.weights.shape[0] or len(outcome[0]) <= fit.index[-1]:
            continue
        y, draws = outcome[0][fit.index], outcome[1][:, fit.index]
        lines[label] = np.sort((fit.weights * (draws <= y)).sum(0))
    with style():
        figure, axes = panels(1, size=(4.2, 3.6))
        ax = axes[0, 0]
        if not lines:
            empty_panel(ax, "needs log-likelihood, posterior predictive and data of a regression")
            return figure
        labels = list(trees)
        fewest = min(len(pit) for pit in lines.values())
        half = np.sqrt(np.log(2 / 0.01) / (2 * fewest))
        ax.axhspan(-half, half, color=MUTED, alpha=0.15, lw=0, label="calibrated, 99 % range")
        ax.axhline(0, color=INK, lw=0.9, ls=(0, (4, 2)))
        at = np.linspace(0, 1, 201)
        for label, pit in lines.items():
            difference = np.searchsorted(pit, at, side="right") / len(pit) - at
            ax.plot(at, difference, color=PALETTE[labels.index(label) % len(PALETTE)], label=label)
        ax.set(xlim=(0, 1), xlabel="LOO-PIT", ylabel="ECDF − uniform")
        reach = max(abs(limit) for limit in ax.get_ylim())
        ax.set_ylim(-1.5 * reach, 1.2 * reach)
        ax.legend(loc="lower left", ncols=2)
        return figure
