"""A fitted posterior as a model of BoTorch; needs ``pip install 'pyrobnn[botorch]'``."""

from pyrobnn.bridges.botorch_model import BNNModel

__all__ = ["BNNModel"]
