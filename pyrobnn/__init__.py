"""Bayesian neural networks on Pyro: declare once, infer by any method, and know whether to trust the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyrobnn.lazy import late_names

__version__ = "0.3.0"

if TYPE_CHECKING:
    from pyrobnn import callbacks as callbacks
    from pyrobnn import conformal as conformal
    from pyrobnn import data as data
    from pyrobnn import diagnostics as diagnostics
    from pyrobnn import guides as guides
    from pyrobnn import inference as inference
    from pyrobnn import likelihoods as likelihoods
    from pyrobnn import metrics as metrics
    from pyrobnn import networks as networks
    from pyrobnn import plots as plots
    from pyrobnn import priors as priors
    from pyrobnn import references as references
    from pyrobnn import report as report
    from pyrobnn.checks import Refused as Refused
    from pyrobnn.conformal import conformal_interval as conformal_interval
    from pyrobnn.conformal import conformal_set as conformal_set
    from pyrobnn.density import Density as Density
    from pyrobnn.diagnostics import Verdict as Verdict
    from pyrobnn.diagnostics import audit as audit
    from pyrobnn.diagnostics import diagnose as diagnose
    from pyrobnn.estimators import BNNClassifier as BNNClassifier
    from pyrobnn.estimators import BNNRegressor as BNNRegressor
    from pyrobnn.inference import *  # noqa: F403
    from pyrobnn.model import BNN as BNN
    from pyrobnn.posterior import Posterior as Posterior
    from pyrobnn.posterior.datatree import to_datatree as to_datatree
    from pyrobnn.posterior.prediction import Prediction as Prediction
    from pyrobnn.report import write_report as write_report
    from pyrobnn.report import write_summary as write_summary
else:
    # torch and Pyro take two seconds to import, ArviZ, matplotlib and scikit-learn two more: the command line's help
    # needs none of them, a fit the first two
    __getattr__, __dir__ = late_names(
        __name__,
        {
            "BNN": "pyrobnn.model",
            "BNNClassifier": "pyrobnn.estimators",
            "BNNRegressor": "pyrobnn.estimators",
            "Density": "pyrobnn.density",
            "Posterior": "pyrobnn.posterior",
            "Prediction": "pyrobnn.posterior.prediction",
            "Refused": "pyrobnn.checks",
            "Verdict": "pyrobnn.diagnostics",
            "audit": "pyrobnn.diagnostics",
            "callbacks": "pyrobnn.callbacks",
            "conformal": "pyrobnn.conformal",
            "conformal_interval": "pyrobnn.conformal",
            "conformal_set": "pyrobnn.conformal",
            "data": "pyrobnn.data",
            "diagnose": "pyrobnn.diagnostics",
            "diagnostics": "pyrobnn.diagnostics",
            "guides": "pyrobnn.guides",
            "inference": "pyrobnn.inference",
            "likelihoods": "pyrobnn.likelihoods",
            "metrics": "pyrobnn.metrics",
            "networks": "pyrobnn.networks",
            "plots": "pyrobnn.plots",
            "priors": "pyrobnn.priors",
            "references": "pyrobnn.references",
            "report": "pyrobnn.report",
            "to_datatree": "pyrobnn.posterior.datatree",
            "write_report": "pyrobnn.report",
            "write_summary": "pyrobnn.report",
        },
        rest="pyrobnn.inference",
    )
