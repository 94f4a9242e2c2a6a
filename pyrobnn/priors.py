"""Priors on the weights: those of TyXe (:mod:`tyxe.priors`), and a few more.

A prior is any ``tyxe.priors.Prior``: it says for each parameter of the network which distribution it has, and through
``hide``/``expose`` which parameters are Bayesian at all. The hidden ones stay point parameters.
"""

from pyrobnn.model.weight_priors import (
    DictPrior,
    FanInNormal,
    IIDPrior,
    LambdaPrior,
    LayerwiseNormalPrior,
    Prior,
    ScaleMixture,
)
from pyrobnn.model.weight_priors import Selective as Selective
from pyrobnn.model.weight_priors import SitePriors as SitePriors
from pyrobnn.model.weight_priors import move as move
from pyrobnn.model.weight_priors import site_priors as site_priors

__all__ = [
    "DictPrior",
    "FanInNormal",
    "IIDPrior",
    "LambdaPrior",
    "LayerwiseNormalPrior",
    "Prior",
    "ScaleMixture",
]
