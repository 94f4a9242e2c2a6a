r"""How good are predictions? Scores of point forecasts, densities, draws, intervals and probabilities.

Every function takes tensors on any device, one entry per held-out point. Draws are of the predictive, chains flattened:
(draw, point[, output]). Outputs have units of their own: a score in the units of y is of one output, or of several each
in its ``scale``. Of classes scikit-learn's ``sklearn.metrics`` has more.
"""

from pyrobnn.diagnostics.prediction_metrics import (
    accuracy,
    brier,
    crps,
    ece,
    log_predictive_density,
    nll,
    pit,
    rmse,
)

__all__ = ["accuracy", "brier", "crps", "ece", "log_predictive_density", "nll", "pit", "rmse"]
