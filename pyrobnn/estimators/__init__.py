"""Estimators for scikit-learn: a table in, predictions with their uncertainty out, by any method of the package."""

from pyrobnn.estimators.classifier import BNNClassifier
from pyrobnn.estimators.regressor import BNNRegressor

__all__ = ["BNNClassifier", "BNNRegressor"]
