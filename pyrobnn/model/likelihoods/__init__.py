"""What a network's output says about the data: users import it as ``pyrobnn.likelihoods``.

To read in this order: ``parameters`` (a likelihood's own, such as a noise), ``base`` (what a likelihood is),
``catalogue`` (those there are), ``modes_and_bounds`` (mixtures, and numbers between bounds), ``special_functions``.
"""

import sys

from pyrobnn.model.likelihoods import base, catalogue, modes_and_bounds

# estimators pickled by 0.3.0 name these modules by the place where they stood
for module in (base, catalogue, modes_and_bounds):
    sys.modules[module.__name__.replace(".model", "")] = module
