"""Bayesian neural networks on Pyro: declare once, infer by any method, and know whether to trust the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyrobnn import callbacks, data, guides, inference, likelihoods, metrics, networks, priors
from pyrobnn.checks import Refused
from pyrobnn.density import Density
from pyrobnn.inference import *  # noqa: F403
from pyrobnn.lazy import late_names
from pyrobnn.model import BNN
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.predict import Prediction

if TYPE_CHECKING:
    from pyrobnn import conformal as conformal
    from pyrobnn import diagnostics as diagnostics
    from pyrobnn import plots
    from pyrobnn import references as references
    from pyrobnn import report as report
    from pyrobnn.conformal import conformal_interval, conformal_set
    from pyrobnn.diagnostics import Verdict, diagnose
    from pyrobnn.estimators import BNNClassifier, BNNRegressor
    from pyrobnn.posterior.datatree import to_datatree
    from pyrobnn.report import write_report, write_summary
else:
    # a fit needs neither ArviZ nor matplotlib nor scikit-learn: they cost as much time to import as torch and Pyro
    __getattr__, __dir__ = late_names(
        __name__,
        {
            "BNNClassifier": "pyrobnn.estimators",
            "BNNRegressor": "pyrobnn.estimators",
            "Verdict": "pyrobnn.diagnostics",
            "conformal": "pyrobnn.conformal",
            "conformal_interval": "pyrobnn.conformal",
            "conformal_set": "pyrobnn.conformal",
            "diagnose": "pyrobnn.diagnostics",
            "diagnostics": "pyrobnn.diagnostics",
            "plots": "pyrobnn.plots",
            "references": "pyrobnn.references",
            "report": "pyrobnn.report",
            "to_datatree": "pyrobnn.posterior.datatree",
            "write_report": "pyrobnn.report",
            "write_summary": "pyrobnn.report",
        },
    )

__version__ = "0.1.0"

__all__ = [
    "BNN",
    "BNNClassifier",
    "BNNRegressor",
    "Density",
    "Posterior",
    "Prediction",
    "Refused",
    "Verdict",
    "callbacks",
    "conformal_interval",
    "conformal_set",
    "data",
    "diagnose",
    "guides",
    "likelihoods",
    "metrics",
    "networks",
    "plots",
    "priors",
    "references",
    "to_datatree",
    "write_report",
    "write_summary",
]
__all__ += inference.__all__
