"""Names of the groups of a DataTree, in ArviZ's vocabulary, and the dimensions that every draw has."""

from __future__ import annotations

import re

POSTERIOR = "posterior"
SAMPLE_STATS = "sample_stats"
HISTORY = "history"
#: data that the posterior has seen, which updates need
ROWS = "rows"
#: buffers of the net, such as batch-norm statistics that no draw has of its own
BUFFERS = "buffers"
#: exact leave-one-out log densities of the rows that were removed one by one
LEFT_OUT = "exact_loo"
LOG_LIKELIHOOD = "log_likelihood"
LOG_PRIOR = "log_prior"
#: f, its log densities and layer norms at the probes
FUNCTION = "function"
POSTERIOR_PREDICTIVE = "posterior_predictive"
#: several replicates of each draw, where draws are few: ArviZ takes what is beside ``y`` in the group above for another
#: outcome
REPLICATES = "replicates"
#: PIT and mean of each value of an observed joint event, given the values before it
ONE_STEP = "one_step"
#: exchanges of components that leave the density as it is, and that the draws tell apart
EXCHANGE = "exchange"
#: attribute of an observed variable: the number of its joint events, whose values depend on each other
EVENTS = "joint_events"
#: attribute of an observed variable: its rows may have been chosen by their outcome
SELECTED = "selected_rows"
#: data from which on the distribution of PIT values is tested; fewer joint events are judged by their values
MIN_DATA = 20
OBSERVED_DATA = "observed_data"
#: of observed sites under a mask, which of their data count (1) and which the program leaves out (0)
COUNTED = "counted_data"
CONSTANT_DATA = "constant_data"
#: at held-out points; their inputs and outcomes are in HELD_OUT
PREDICTIONS = "predictions"
HELD_OUT = "predictions_constant_data"
#: over the range of a single input
GRID = "grid"
#: Stein's identities at thinned draws, by site
STEIN = "stein"
#: f at the probes for draws and as Hamiltonian moves change it: of thinned draws before and after, or of an
#: approximation beside short chains that began at its draws
MOVED = "moved"
PRIOR = "prior"
PRIOR_PREDICTIVE = "prior_predictive"

SAMPLE_DIMS = ("chain", "draw")
#: of outcomes drawn several times for each draw; ArviZ stacks chains and draws as "sample"
REPLICATE = "replicate"


def variable(site: str) -> str:
    """The name of a site in a tree, different for different sites.

    A tree allows no slash in a name, and no name that is empty, ".", or of a dimension: the slash is written as a bar,
    and the others get an underscore behind them.
    """
    name = site.replace("~", "~~").replace("|", "~|").replace("/", "|")
    return (
        f"{name}_"
        if re.fullmatch(rf"(|\.|{'|'.join(SAMPLE_DIMS)}|.*_dim_\d+)_*", name, re.DOTALL)
        else name
    )
