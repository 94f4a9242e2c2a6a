"""Every figure of the report on its own: one DataTree, or several by label, in; a matplotlib Figure out.

No figure touches pyplot, so nothing has to be closed and no setting outlives the call. In a notebook the
figure shows itself as the cell's last value once ``%matplotlib inline`` or ``import matplotlib.pyplot`` has
run.

Each function draws one panel per method (or one line per method where lines can share a panel). A tree that
lacks the groups of a figure gets a panel that names them, never an error.
"""

from __future__ import annotations

from pyrobnn.plots.predictive import (
    posterior_predictive,
    predicted_vs_observed,
    predictive_bands,
    prior_and_posterior,
    residuals,
)
from pyrobnn.plots.sampling import covariance, energy, loss, rank, trace, training, weight_norms
from pyrobnn.plots.uncertainty import (
    calibration,
    entropy_split,
    error_vs_uncertainty,
    khat,
    loo_pit,
    most_uncertain,
    reliability,
    uncertainty_decomposition,
)

__all__ = [
    "calibration",
    "covariance",
    "energy",
    "entropy_split",
    "error_vs_uncertainty",
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
