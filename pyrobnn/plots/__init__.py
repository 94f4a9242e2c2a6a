"""The figures of the report: one DataTree, or several by label, in; a matplotlib Figure out.

No figure touches pyplot, so nothing has to be closed and no setting outlives the call. In a notebook the figure shows
itself as the cell's last value once ``%matplotlib inline`` or ``import matplotlib.pyplot`` has run. Each function draws
one panel per method (or one line per method where lines can share a panel). A tree that lacks the groups of a figure
gets a panel that names them, never an error. Traces, ranks, energies, Pareto k-hat, LOO-PIT, replicates beside the data
(``plot_ppc_dist``) and the prior beside the posterior are ``arviz_plots``'s, which takes the same trees.
``with pb.plots.style("slides"):`` gives figures of your own the same look, and says how they are saved; ``panels``
makes a page of axes, ``bands`` draws mean and 95 % with and without noise, ``legend_below`` sets a legend under them,
in the colours ``EPISTEMIC``, ``ALEATORIC``, ``INK``, ``MUTED``, ``PALETTE`` and ``FITS`` (a line a fit).
"""

from __future__ import annotations

from pyrobnn.plots.canvas import NORMAL_95, bands, legend_below, panels
from pyrobnn.plots.look import ALEATORIC, EPISTEMIC, FITS, INK, MUTED, PALETTE, style
from pyrobnn.plots.predictive import (
    calibration,
    predicted_vs_observed,
    predictive_bands,
    reliability,
)
from pyrobnn.plots.sampling import training

__all__ = [
    "ALEATORIC",
    "EPISTEMIC",
    "FITS",
    "INK",
    "MUTED",
    "NORMAL_95",
    "PALETTE",
    "bands",
    "calibration",
    "legend_below",
    "panels",
    "predicted_vs_observed",
    "predictive_bands",
    "reliability",
    "style",
    "training",
]
