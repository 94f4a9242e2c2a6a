"""Draws of the function one at a time: what a posterior takes to be possible, where a band shows only its width."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pyrobnn.checks import check_count
from pyrobnn.diagnostics.evidence import Evidence, Trees, gather
from pyrobnn.diagnostics.names import feature_names
from pyrobnn.groups import CONSTANT_DATA, GRID, OBSERVED_DATA
from pyrobnn.plots.predictive import _outcome, _outcome_range, _output, _thin
from pyrobnn.plots.style import ALEATORIC, EPISTEMIC, INK, NORMAL_95, empty_panel, panels, style


def functions(trees: Trees, *, num_functions: int = 3, output: int = 0) -> Figure:
    r"""Some draws of the function apart, each with its noise, and then all of them in one panel.

    Every draw is one curve that the data may have come from: its sand band, :math:`f_s(x) \pm 1.96\,\sigma(x)` with
    the posterior's mean noise variance, holds about 95 % of the data if the draw is the truth. Where the draws of the
    last panel part, the function is not known.

    Args:
        trees: one DataTree or a mapping from label to DataTree, with the groups ``grid`` and ``constant_data``.
        num_functions: how many draws to show apart, evenly spaced among those of the tree.
        output: which output to draw.

    Returns:
        A figure with one row per tree: ``num_functions`` panels, and one of all draws that the tree holds.
    """
    check_count("num_functions", num_functions)
    found = gather(trees)
    with style():
        columns = num_functions + 1
        figure, axes = panels(
            columns * len(found), size=(2.5, 2.3), max_columns=columns, sharex=True, sharey=True
        )
        for row, (label, evidence) in enumerate(found.items()):
            cells = axes[row * columns : (row + 1) * columns, 0]
            cells[0].set_title(label)
            draws, x = evidence.variable(GRID, "f_draws"), evidence.variable(GRID, "x")
            if draws is None or x is None or draws.size == 0:
                empty_panel(cells[0], "no grid of predictions (1-D input only)")
                for ax in cells[1:]:
                    ax.set_axis_off()
                continue
            _row(cells, evidence, x.values.reshape(-1), _output(draws, output), output)
        low, high = _outcome_range(found, output)
        if low < high:
            axes[0, 0].set_ylim(low, high)
        handles = {
            name: handle
            for ax in axes.flat
            for handle, name in zip(*ax.get_legend_handles_labels(), strict=True)
        }
        if handles:
            figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=4)
        return figure


def _row(cells: np.ndarray, evidence: Evidence, x: np.ndarray, draws: np.ndarray, output: int) -> None:
    variance = evidence.variable(GRID, "aleatoric_var")
    sd = np.zeros(len(x)) if variance is None else np.sqrt(np.maximum(_output(variance, output), 0))
    chosen = _thin(len(draws), len(cells) - 1)
    for number, (ax, draw) in enumerate(zip(cells, draws[chosen], strict=False), 1):
        ax.fill_between(
            x,
            draw - NORMAL_95 * sd,
            draw + NORMAL_95 * sd,
            color=ALEATORIC,
            alpha=0.3,
            lw=0,
            label="95 % noise",
        )
        _data(ax, evidence, output)
        ax.plot(x, draw, color=EPISTEMIC, lw=1.6, label="a draw of the function")
        if number > 1:
            ax.set_title(f"draw {number}", fontweight="normal", fontsize=9)
    for ax in cells[len(chosen) : -1]:  # fewer draws than panels
        ax.set_axis_off()
    _data(cells[-1], evidence, output)
    cells[-1].plot(x, draws.T, color=EPISTEMIC, lw=0.5, alpha=max(0.15, min(1.0, 8 / len(draws))))
    cells[-1].set_title(f"all {len(draws)} draws", fontweight="normal", fontsize=9)
    truth = evidence.variable(GRID, "true_f")
    if truth is not None:
        for ax in (*cells[: len(chosen)], cells[-1]):
            ax.plot(x, _output(truth, output), color=INK, lw=1.0, ls=(0, (4, 2)), label="true f")
    cells[0].set_ylabel(_outcome(evidence, output))
    for ax in cells:
        ax.set_xlabel(feature_names(evidence, 1)[0])


def _data(ax: Axes, evidence: Evidence, output: int) -> None:
    inputs, outcomes = evidence.variable(CONSTANT_DATA, "x"), evidence.variable(OBSERVED_DATA, "y")
    if inputs is None or outcomes is None:
        return
    y = _output(outcomes, output).reshape(-1)
    keep = _thin(len(y))
    ax.plot(inputs.values.reshape(-1)[keep], y[keep], ".", color=INK, markersize=3, alpha=0.55, label="data")
