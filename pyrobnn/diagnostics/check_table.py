"""The table of checks: what each asks, the statistic that answers, its limits, their sources, and of which trees.

A new check is a statistic and a row here, and takes the place of another: of the faults that are planted in posteriors
(scripts/verdict/run.py) ten checks see 87 %, all together 89 %.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files

from pyrobnn.diagnostics.calibration import class_calibration, held_out, left_out
from pyrobnn.diagnostics.convergence import (
    RHAT_LIMITS,
    chains,
    divergences,
    energy,
    largest_rhat,
    moving,
    smallest_ess,
)
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.fidelity import against
from pyrobnn.diagnostics.importance import weighted
from pyrobnn.diagnostics.integrity import (
    claim,
    copied_chains,
    finite,
    fit,
    log_likelihood,
    repeated_draws,
    rows,
)
from pyrobnn.diagnostics.leave_one_out import tails
from pyrobnn.diagnostics.patterns import by_region, order, pattern
from pyrobnn.diagnostics.target import density_moves, function_moves, score, virial
from pyrobnn.diagnostics.verdict import Found, Question

RHAT = "Rank-normalization, folding, and localization: an improved R-hat (Vehtari et al., 2021) https://doi.org/10.1214/20-BA1221"
HMC = "A conceptual introduction to Hamiltonian Monte Carlo (Betancourt, 2017) https://arxiv.org/abs/1701.02434"
BFMI = "Diagnosing suboptimal cotangent disintegrations in HMC (Betancourt, 2016) https://arxiv.org/abs/1604.00695"
CLAIM = "What are Bayesian neural network posteriors really like? (Izmailov et al., 2021) https://arxiv.org/abs/2104.14421"
VARIATIONAL = "Yes, but did it work? Evaluating variational inference (Yao et al., 2018) https://arxiv.org/abs/1802.02538"
STEIN = "Measuring sample quality with Stein's method (Gorham & Mackey, 2015) https://arxiv.org/abs/1506.03039"
MOVES = "MCMC using Hamiltonian dynamics (Neal, 2011) https://arxiv.org/abs/1206.1901"
PIT = "Probabilistic forecasts, calibration and sharpness (Gneiting et al., 2007) https://doi.org/10.1111/j.1467-9868.2007.00587.x"
LOO_PIT = (
    "Visualization in Bayesian workflow (Gabry et al., 2019) https://doi.org/10.1111/rssa.12378"
)
LOO = "Practical Bayesian model evaluation using LOO (Vehtari, Gelman & Gabry, 2017) https://doi.org/10.1007/s11222-016-9696-4"
ECE = "On calibration of modern neural networks (Guo et al., 2017) https://arxiv.org/abs/1706.04599"
OWN = "this library's convention"


def of_draws(evidence: Evidence) -> bool:
    """Of everything but point estimates."""
    return not evidence.is_point


def of_independent(evidence: Evidence) -> bool:
    """Of independent draws, for which R-hat is 1 by construction."""
    return of_draws(evidence) and evidence.is_iid


def of_chains(evidence: Evidence) -> bool:
    """Of Markov chains."""
    return of_draws(evidence) and not evidence.is_iid


@dataclass(frozen=True)
class Row:
    """A check.

    Args:
        code: its name in a verdict.
        question: what it answers.
        statistic: from a tree and the limits (and the reference, where `against` one) to what was found, or None where
            there is nothing to judge, or nothing is wrong that it looks for.
        limits: numbers that the statistic is held against, to pass first, in the units of its docstring.
        source: paper or URL; a limit without one is this library's convention.
        applies: of which trees.
        against: whether it needs a reference.
    """

    code: str
    question: Question
    statistic: Callable[..., Found | None]
    limits: tuple[float, ...]
    source: str
    applies: Callable[[Evidence], bool] = lambda evidence: True
    against: bool = False


#: every check, in the order in which a reader sees them; each limit's unit stands at its row
TABLE = (
    Row("finite", "draws", finite, (0.0,), "arithmetic"),  # values
    # times the gain that may be left at the end of a search
    Row("fit", "draws", fit, (10.0,), OWN),
    Row("claim", "draws", claim, (0.05,), CLAIM),  # effective parameters
    Row("moving", "draws", moving, (0.25,), OWN, of_draws),  # share of draws like the one before
    Row("chains", "draws", chains, (50.0, 4.0), RHAT, of_chains),  # draws a chain, chains
    Row("rhat_function", "draws", largest_rhat, RHAT_LIMITS, RHAT, of_chains),  # ratio
    Row("ess_function", "draws", smallest_ess, (400.0, 100.0), RHAT, of_chains),  # effective draws
    Row("divergences", "draws", divergences, (0.0, 0.01), HMC, of_chains),  # share beyond chance
    Row("bfmi", "draws", energy, (0.3, 0.2), BFMI, of_chains),  # share
    # probabilities, of which a mean 0.25 and 1 sd away changes 0.1 and 0.38; ratios of sds
    Row("importance", "draws", weighted, (0.1, 0.38, 0.8, 0.5), VARIATIONAL, of_independent),
    # sd, ratios of sds
    Row("function_moves", "draws", function_moves, (0.25, 1.0, 0.8, 0.5), MOVES, of_draws),
    # sd, log ratios of sds
    Row("density_moves", "draws", density_moves, (0.3, 1.0, 0.2, 0.5), MOVES, of_chains),
    Row("virial", "draws", virial, (0.15, 0.4), STEIN, of_draws),  # log ratio of variances
    Row("score", "draws", score, (0.3, 0.6), STEIN, of_draws),  # sd of the gradient
    # reference sds, ratios of sds
    Row(
        "reference",
        "draws",
        against,
        (0.25, 1.0, 0.8, 0.5),
        CLAIM,
        of_draws,
        against=True,
    ),
    Row("held_out_rows", "model", rows, (0.02, 0.5, 0.2), OWN),  # shares of the rows
    # where and how errors differ says more than that they differ: those come first
    Row("pattern", "model", pattern, (0.15, 0.35), PIT),  # span of the mean PIT, correlation
    Row("row_order", "model", order, (0.15, 0.35), PIT),  # span of the mean PIT, correlation
    Row("coverage_by_region", "model", by_region, (0.125, 0.25), LOO_PIT),  # coverage
    Row("pit", "model", held_out, (0.05, 0.1), PIT),  # distance from uniform
    Row("loo_pit", "model", left_out, (0.05, 0.1), LOO_PIT),  # distance from uniform
    Row("ece", "model", class_calibration, (0.1, 0.05, 0.15), ECE),  # error beyond chance, shares
    Row("loo_khat", "model", tails, (2e-3,), LOO, of_draws),  # rate of false alarms
)

#: checks that compare draws with the density that they were made for, which need not be that of the model
OF_DENSITY = ("importance", "function_moves", "density_moves", "virial", "score")

#: what `audit` looks for on request
AUDIT = (
    # correlation of moves
    Row("copied_chains", "draws", copied_chains, (0.9,), "arithmetic", of_chains),
    # shares of chains, others
    Row("repeated_draws", "draws", repeated_draws, (0.02, 0.25), "arithmetic", of_draws),
    # nats per datum
    Row("log_likelihood", "draws", log_likelihood, (0.1, 0.3), "arithmetic", of_draws),
)


@functools.cache
def rates() -> dict[str, dict[str, int]]:
    """Check → cases of ``healthy`` and ``sick`` posteriors, its ``false_alarms`` and the faults ``seen`` among them."""
    path = files("pyrobnn.diagnostics").joinpath("rates.json")
    return json.loads(path.read_text(encoding="utf-8"))


def said_rates(name: str) -> str:
    """The rates of a check in a sentence; empty where none were measured.

    >>> said_rates("virial").startswith("Fires on")
    True
    """
    counts = rates().get(name)
    if counts is None:
        return ""
    healthy = counts["healthy"]
    sick = counts["sick"]
    alarms = (
        f"Fires on {counts['false_alarms'] / healthy:.1%} of healthy posteriors ({healthy} cases)"
    )
    if not sick:
        return f"{alarms}."
    return f"{alarms}, catches {counts['seen'] / sick:.0%} of the faults it is for ({sick} cases)."
