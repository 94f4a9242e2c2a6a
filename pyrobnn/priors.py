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

__all__ = [
    "DictPrior",
    "FanInNormal",
    "IIDPrior",
    "LambdaPrior",
    "LayerwiseNormalPrior",
    "Prior",
    "ScaleMixture",
]
