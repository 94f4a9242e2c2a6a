"""Bayesian neural networks on Pyro: declare once, infer by any method, and know whether to trust the answer."""

from __future__ import annotations

from pyrobnn import callbacks, data, guides, likelihoods, metrics, networks, plots, priors
from pyrobnn.checks import Refused
from pyrobnn.density import Density
from pyrobnn.diagnostics import Verdict, diagnose
from pyrobnn.inference import distributed
from pyrobnn.inference.ensemble import DeepEnsemble
from pyrobnn.inference.laplace import Laplace
from pyrobnn.inference.map import MAP
from pyrobnn.inference.mc_dropout import MCDropout
from pyrobnn.inference.mle import MLE
from pyrobnn.inference.nuts import NUTS
from pyrobnn.inference.sgmcmc import SGHMC, SGLD
from pyrobnn.inference.svi import SVI
from pyrobnn.inference.swag import SWA, SWAG
from pyrobnn.model import BNN
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.datatree import to_datatree
from pyrobnn.posterior.predict import Prediction
from pyrobnn.report import write_report, write_summary

__all__ = [
    "BNN",
    "MAP",
    "MLE",
    "NUTS",
    "SGHMC",
    "SGLD",
    "SVI",
    "SWA",
    "SWAG",
    "DeepEnsemble",
    "Density",
    "Laplace",
    "MCDropout",
    "Posterior",
    "Prediction",
    "Refused",
    "Verdict",
    "callbacks",
    "data",
    "diagnose",
    "distributed",
    "guides",
    "likelihoods",
    "metrics",
    "networks",
    "plots",
    "priors",
    "to_datatree",
    "write_report",
    "write_summary",
]
