"""A posterior as a model of BoTorch, and BoTorch's own processes by NUTS; needs ``pip install 'pyrobnn[botorch]'``."""

from pyrobnn.bridges.botorch_fully_bayesian import fit_fully_bayesian_model_nuts
from pyrobnn.bridges.botorch_model import BNNModel

__all__ = ["BNNModel", "fit_fully_bayesian_model_nuts"]
