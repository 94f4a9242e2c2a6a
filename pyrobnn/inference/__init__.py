"""The methods, a file each or a family; the parts they share lie in folders by family.

=============== ================================================ =========================
method          file                                             parts
=============== ================================================ =========================
MLE, MAP        ``point_methods``                                ``optim``
DeepEnsemble    ``point_methods``                                ``optim``
SVI             ``svi``                                          ``vi``, ``optim``
NUTS            ``nuts``                                         ``hmc``
SMC             ``smc``                                          ``tempering``, ``exchange``, ``hmc``
SGLD, SGHMC     ``sgmcmc``                                       ``langevin``, ``chain_steps``
Laplace         ``laplace``                                      ``curvature``, ``optim``
SWA, SWAG       ``swag``                                         ``batch_norm``, ``optim``
MCDropout       ``mc_dropout``                                   ``batch_norm``, ``optim``
=============== ================================================ =========================

What is no method of its own:

================================= =================== ==============================
what                              file                parts
================================= =================== ==============================
LogDensity                        ``log_density``
posthoc                           ``posthoc``         ``curvature``
Posterior.update, .remove         ``update``          ``tempering``, ``curvature``
Posterior.refine                  ``refine``          ``optim``
fits on several processes         ``distributed``
nets in training mode             ``training_mode``   ``batch_norm``
================================= =================== ==============================

What all begin and end with is in ``fitting``; ``method`` says what a method is.
"""

from __future__ import annotations

from pyrobnn.inference import distributed
from pyrobnn.inference import refine as refine
from pyrobnn.inference import update as update
from pyrobnn.inference.laplace import Laplace
from pyrobnn.inference.mc_dropout import MCDropout
from pyrobnn.inference.nuts import NUTS
from pyrobnn.inference.optim.training import Optimizer
from pyrobnn.inference.point_methods import MAP, MLE, DeepEnsemble
from pyrobnn.inference.sgmcmc import SGHMC, SGLD
from pyrobnn.inference.smc import SMC
from pyrobnn.inference.svi import SVI, Guide
from pyrobnn.inference.swag import SWA, SWAG
from pyrobnn.inference.vi import kl_schedules

# `pb.Posterior` is found here: the methods rebuild what it loads, and lead its draws to other rows
from pyrobnn.posterior import Posterior as Posterior

__all__ = [
    "MAP",
    "MLE",
    "NUTS",
    "SGHMC",
    "SGLD",
    "SMC",
    "SVI",
    "SWA",
    "SWAG",
    "DeepEnsemble",
    "Guide",
    "Laplace",
    "MCDropout",
    "Optimizer",
    "distributed",
    "kl_schedules",
]
