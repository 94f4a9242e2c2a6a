"""The table of checks: what each asks, the statistic that answers, its limits, their sources, and of which trees.

A new check is a statistic and a row here, with its sentences in `wording`; its page in the documentation is written
from these. It takes the place of another: of the faults that are planted in posteriors (scripts/verdict/run.py) ten
checks see 87 %, all together 89 %.
"""

from __future__ import annotations

import functools
import json
from importlib.resources import files

from pyrobnn.diagnostics.calibration import held_out, left_out
from pyrobnn.diagnostics.chain_checks import (
    chains,
    divergences,
    energy,
    largest_rhat,
    moving,
    smallest_ess,
)
from pyrobnn.diagnostics.class_calibration import class_calibration
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.fidelity import against
from pyrobnn.diagnostics.importance import weighted
from pyrobnn.diagnostics.influence import tails
from pyrobnn.diagnostics.integrity import (
    claim,
    copied_chains,
    finite,
    fit,
    log_likelihood,
    repeated_draws,
    rows,
)
from pyrobnn.diagnostics.limits import CHANGE_LIMITS, RHAT_LIMITS
from pyrobnn.diagnostics.outputs import across_outputs
from pyrobnn.diagnostics.papers import (
    BFMI,
    CLAIM,
    ECE,
    HMC,
    LOO,
    LOO_PIT,
    MOVES,
    OWN,
    PIT,
    RHAT,
    STEIN,
    VARIATIONAL,
)
from pyrobnn.diagnostics.patterns import by_region, order, pattern
from pyrobnn.diagnostics.relabelling import component_order
from pyrobnn.diagnostics.row import Row
from pyrobnn.diagnostics.target import density_moves, function_moves, score, virial


def _of_draws(evidence: Evidence) -> bool:
    """Of everything but point estimates."""
    return not evidence.is_point


def _of_independent(evidence: Evidence) -> bool:
    """Of independent draws, for which R-hat is 1 by construction."""
    return _of_draws(evidence) and evidence.is_iid


def _of_chains(evidence: Evidence) -> bool:
    """Of Markov chains."""
    return _of_draws(evidence) and not evidence.is_iid


#: every check, in the order in which a reader sees them
TABLE = (
    Row("finite", "draws", finite, (0.0,), "values", "arithmetic"),
    Row(
        "fit", "draws", fit, (10.0,), "times the gain that may be left at the end of a search", OWN
    ),
    Row("claim", "draws", claim, (0.05,), "effective parameters", CLAIM),
    Row("moving", "draws", moving, (0.25,), "share of draws like the one before", OWN, _of_draws),
    Row("chains", "draws", chains, (50.0, 4.0), "draws a chain, chains", RHAT, _of_chains),
    Row("rhat_function", "draws", largest_rhat, RHAT_LIMITS, "ratio", RHAT, _of_chains),
    Row("component_order", "draws", component_order, (1.0,), "orders", OWN, _of_draws),
    Row("ess_function", "draws", smallest_ess, (400.0, 100.0), "effective draws", RHAT, _of_chains),
    Row("divergences", "draws", divergences, (0.0, 0.01), "share beyond chance", HMC, _of_chains),
    Row("bfmi", "draws", energy, (0.3, 0.2), "share", BFMI, _of_chains),
    Row(
        "importance",
        "draws",
        weighted,
        (0.1, 0.38, 0.8, 0.5),
        "changes of probabilities: 0.1 for a mean that is 0.25 sd away, 0.38 for one 1 sd away; ratios of sds",
        VARIATIONAL,
        _of_independent,
    ),
    Row(
        "function_moves",
        "draws",
        function_moves,
        CHANGE_LIMITS,
        "sd, ratios of sds",
        MOVES,
        _of_draws,
    ),
    Row(
        "density_moves",
        "draws",
        density_moves,
        (0.3, 1.0, 0.2, 0.5),
        "sd, log ratios of sds",
        MOVES,
        _of_chains,
    ),
    Row("virial", "draws", virial, (0.15, 0.4), "log ratio of variances", STEIN, _of_draws),
    Row("score", "draws", score, (0.3, 0.6), "sd of the gradient", STEIN, _of_draws),
    Row(
        "reference",
        "draws",
        against,
        CHANGE_LIMITS,
        "reference sds, ratios of sds",
        CLAIM,
        _of_draws,
        against=True,
    ),
    Row("held_out_rows", "model", rows, (0.02, 0.5, 0.2), "shares of the rows", OWN),
    # where and how errors differ says more than that they differ: those come first
    Row("pattern", "model", pattern, (0.15, 0.35), "span of the mean PIT, correlation", PIT),
    Row("row_order", "model", order, (0.15, 0.35), "span of the mean PIT, correlation", PIT),
    Row("coverage_by_region", "model", by_region, (0.125, 0.25), "coverage", LOO_PIT),
    Row("across_outputs", "model", across_outputs, (0.15, 0.35), "excess correlation", OWN),
    Row("pit", "model", held_out, (0.05, 0.1), "distance from uniform", PIT),
    Row("loo_pit", "model", left_out, (0.05, 0.1), "distance from uniform", LOO_PIT),
    Row("ece", "model", class_calibration, (0.1, 0.05, 0.15), "error beyond chance, shares", ECE),
    Row("loo_khat", "model", tails, (2e-3,), "rate of false alarms", LOO, _of_draws),
)

#: checks that compare draws with the density that they were made for, which need not be that of the model
OF_DENSITY = ("importance", "function_moves", "density_moves", "virial", "score")

#: what `audit` looks for on request
AUDIT = (
    Row(
        "copied_chains",
        "draws",
        copied_chains,
        (0.9,),
        "correlation of moves",
        "arithmetic",
        _of_chains,
    ),
    Row(
        "repeated_draws",
        "draws",
        repeated_draws,
        (0.02, 0.25),
        "shares of chains, others",
        "arithmetic",
        _of_draws,
    ),
    Row(
        "log_likelihood",
        "draws",
        log_likelihood,
        (0.1, 0.3),
        "nats per datum",
        "arithmetic",
        _of_draws,
    ),
)


@functools.cache
def rates() -> dict[str, dict[str, int]]:
    """Check → cases of ``healthy`` and ``sick`` posteriors, its ``false_alarms`` and the faults ``seen`` among them."""
    path = files("pyrobnn.diagnostics").joinpath("rates.json")
    return json.loads(path.read_text(encoding="utf-8"))


def said_rates(name: str) -> str:
    """The rates of a check in a sentence; empty where none were measured.

    >>> said_rates("virial").startswith("False alarms")
    True
    """
    counts = rates().get(name)
    if counts is None:
        return ""
    healthy = counts["healthy"]
    sick = counts["sick"]
    alarms = (
        f"False alarms: {counts['false_alarms'] / healthy:.1%} of {healthy} correct posteriors."
    )
    if not sick:
        return alarms
    return f"{alarms} Detects {counts['seen'] / sick:.0%} of the {sick} faults it is meant for."
