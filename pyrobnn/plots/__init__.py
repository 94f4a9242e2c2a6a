"""Every figure of the report on its own: one DataTree, or several by label, in; a matplotlib Figure out.

No figure touches pyplot, so nothing has to be closed and no setting outlives the call. In a notebook the
figure shows itself as the cell's last value once ``%matplotlib inline`` or ``import matplotlib.pyplot`` has
run.

Each function draws one panel per method (or one line per method where lines can share a panel). A tree that
lacks what a figure needs gets a panel that says so, never an error.
"""

from __future__ import annotations

from pyrobnn.plots.chains import energy, loss, rank, trace, training, weight_norms
from pyrobnn.plots.checks import posterior_predictive, prior_and_posterior, residuals
from pyrobnn.plots.classes import entropy_split, most_uncertain, reliability
from pyrobnn.plots.functions import functions
from pyrobnn.plots.importance import khat, loo_pit
from pyrobnn.plots.predictive import (
    calibration,
    error_vs_uncertainty,
    predicted_vs_observed,
    predictive_bands,
    uncertainty_decomposition,
)
from pyrobnn.plots.weights import covariance

__all__ = [
    "calibration",
    "covariance",
    "energy",
    "entropy_split",
    "error_vs_uncertainty",
    "functions",
    "khat",
    "loo_pit",
    "loss",
    "most_uncertain",
    "posterior_predictive",
    "predicted_vs_observed",
    "predictive_bands",
    "prior_and_posterior",
    "rank",
    "reliability",
    "residuals",
    "trace",
    "training",
    "uncertainty_decomposition",
    "weight_norms",
]
