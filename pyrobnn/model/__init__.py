"""The one idea: net, prior and likelihood are a program, traced into a log density and compiled to machine code.

To read in this order: ``compile.trees`` (nested tensors), ``nodes`` (what a run of a program leaves), ``handlers``
(under which it runs), ``log_terms`` (the log density of a node), ``density`` (a program as a function of one flat
vector); then ``bnn`` (a net with priors as such a program), ``weight_priors`` and ``likelihoods``. At need: ``guards``
(impossible parameters), ``enumeration`` (discrete sites), ``constants``, ``fused``, and ``compile``, which has an order
of its own.
"""

from __future__ import annotations

from pyrobnn.model.bnn import BATCH_NORM as BATCH_NORM
from pyrobnn.model.bnn import BNN as BNN
from pyrobnn.model.bnn import NET as NET
from pyrobnn.model.bnn import CheckedData as CheckedData
from pyrobnn.model.bnn import check_data as check_data
from pyrobnn.model.bnn import checked_data as checked_data
from pyrobnn.model.bnn import output_width as output_width
from pyrobnn.model.density import Density as Density
