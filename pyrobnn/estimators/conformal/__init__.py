"""Conformal prediction from the draws of a posterior: sets that hold a new outcome as often as they say.

Where the model is wrong, its own intervals hold too few outcomes, or too many. A conformal set asks of each candidate
outcome only whether it fits the model at least as well as a share α of the rows does; if rows and new points are
exchangeable, it holds the outcome with probability 1 − α, whatever the model.
"""

from __future__ import annotations

from pyrobnn.estimators.conformal.sets import (
    ConformalInterval,
    ConformalSet,
    conformal_interval,
    conformal_set,
)

__all__ = ["ConformalInterval", "ConformalSet", "conformal_interval", "conformal_set"]
