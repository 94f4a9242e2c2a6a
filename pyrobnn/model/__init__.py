"""The one idea: net, prior and likelihood are a program, traced into a log density and compiled to machine code."""

from __future__ import annotations

from pyrobnn.model.bnn import BATCH_NORM as BATCH_NORM
from pyrobnn.model.bnn import BNN as BNN
from pyrobnn.model.bnn import NET as NET
from pyrobnn.model.bnn import check_data as check_data
from pyrobnn.model.bnn import output_width as output_width
from pyrobnn.model.density import Density as Density
