"""Numbers that several statistics and checks share: how many data and draws they need, and what counts as large."""

from __future__ import annotations

from pyrobnn.core.groups import MIN_DATA as MIN_DATA

#: R-hat of long chains, to pass and not to fail (Vehtari et al., 2021, section 4; the second as in Stan's manuals)
RHAT_LIMITS = 1.01, 1.05
#: of a change of the function: of its mean in sds, of its sd as a ratio; each to pass, and not to fail
CHANGE_LIMITS = 0.25, 1.0, 0.8, 0.5
#: effective draws that estimates rest on: 100 for each of four chains (Vehtari et al., 2021, section 4)
ENOUGH_DRAWS = 400.0
#: standard errors beyond which a change counts, to warn and to fail: this library's convention
SIGMAS = 3.5, 5.0

#: held-out values of which coverage and confidence say something, by an exact tail and a simulated one
FEWEST_HELD_OUT = 8
#: data whose PIT is computed, evenly spread over all
MAX_DATA = 2000
#: of the predictive intervals whose coverage is judged
LEVEL = 0.9
#: quantiles that stand for a distribution
NUM_QUANTILES = 400
#: data sets that are simulated to see what chance does
NUM_SIMULATED = 400
