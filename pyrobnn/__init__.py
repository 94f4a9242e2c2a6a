"""Bayesian neural networks on Pyro: declare once, infer by any method, and know whether to trust the answer."""

from __future__ import annotations

from pyrobnn import data, likelihoods, metrics, networks, priors
from pyrobnn.datatree import to_datatree
from pyrobnn.density import Density
from pyrobnn.inference.ensemble import DeepEnsemble
from pyrobnn.inference.map import MAP
from pyrobnn.inference.mle import MLE
from pyrobnn.model import BNN
from pyrobnn.posterior import Posterior
from pyrobnn.predict import Prediction

__all__ = [
    "BNN",
    "MAP",
    "MLE",
    "DeepEnsemble",
    "Density",
    "Posterior",
    "Prediction",
    "data",
    "likelihoods",
    "metrics",
    "networks",
    "priors",
    "to_datatree",
]
