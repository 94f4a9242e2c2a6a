"""scikit-learn estimators, and conformal sets of their predictions."""

from __future__ import annotations

from pyrobnn.estimators import conformal
from pyrobnn.estimators.classifier import BNNClassifier
from pyrobnn.estimators.pyro_program import PyroClassifier, PyroRegressor
from pyrobnn.estimators.regressor import BNNRegressor

__all__ = ["BNNClassifier", "BNNRegressor", "PyroClassifier", "PyroRegressor", "conformal"]
