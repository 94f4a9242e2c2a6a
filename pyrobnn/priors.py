"""Priors on the weights: those of TyXe (:mod:`tyxe.priors`), and a few more.

A prior is any ``tyxe.priors.Prior``: it says for each parameter of the network which distribution it has, and through
``hide``/``expose`` which parameters are Bayesian at all. The hidden ones stay point parameters.
"""

from tyxe.priors import Prior

from pyrobnn.model.weight_priors import (
    DictPrior,
    FanInNormal,
    IIDPrior,
    LambdaPrior,
    LayerwiseNormalPrior,
    ScaleMixture,
    SitePriors,
    move,
    site_priors,
)
from pyrobnn.model.weight_priors import Selective as Selective

__all__ = [
    "DictPrior",
    "FanInNormal",
    "IIDPrior",
    "LambdaPrior",
    "LayerwiseNormalPrior",
    "Prior",
    "ScaleMixture",
    "SitePriors",
    "move",
    "site_priors",
]
