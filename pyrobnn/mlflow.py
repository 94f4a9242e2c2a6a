"""A fitted posterior as a model of MLflow; needs ``pip install 'pyrobnn[mlflow]'``."""

from pyrobnn.bridges.mlflow_flavour import ServedPosterior, log_model

__all__ = ["ServedPosterior", "log_model"]
