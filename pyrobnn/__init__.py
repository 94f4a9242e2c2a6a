"""Bayesian neural networks on Pyro: declare once, infer by any method, and know whether to trust the answer."""

from __future__ import annotations

from pyrobnn import callbacks, data, guides, inference, likelihoods, metrics, networks, plots, priors
from pyrobnn.checks import Refused
from pyrobnn.density import Density
from pyrobnn.diagnostics import Verdict, diagnose
from pyrobnn.inference import *  # noqa: F403
from pyrobnn.model import BNN
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.datatree import to_datatree
from pyrobnn.posterior.predict import Prediction
from pyrobnn.report import write_report, write_summary

__version__ = "0.1.0"

__all__ = [
    "BNN",
    "Density",
    "Posterior",
    "Prediction",
    "Refused",
    "Verdict",
    "callbacks",
    "data",
    "diagnose",
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
__all__ += inference.__all__
