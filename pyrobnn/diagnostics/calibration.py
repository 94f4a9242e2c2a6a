"""Calibration of numbers: whether predictive intervals are as wide as errors are large."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from scipy import stats

from pyrobnn.core.groups import PREDICTIONS
from pyrobnn.diagnostics.evidence import RATES, Evidence, flattened, spread
from pyrobnn.diagnostics.grades import Found, Limits, Status, grade_tested
from pyrobnn.diagnostics.leave_one_out import left_out_pit
from pyrobnn.diagnostics.limits import FEWEST_HELD_OUT, LEVEL, MAX_DATA, MIN_DATA
from pyrobnn.diagnostics.points import held_out_pit, predictive_draws
from pyrobnn.diagnostics.prediction_metrics import pit_of
from pyrobnn.diagnostics.uniformity import (
    SD_SIZE,
    Dependence,
    dependence_of,
    least_p,
    p_binned,
    p_moments,
    uniform,
)

#: the worst first: of an outcome that nothing decides a pass of another says nothing
_WORST_FIRST = {"fail": 0, "warn": 1, "info": 2, "pass": 3}


def held_out(evidence: Evidence, limits: Limits) -> Found | None:
    """Asks whether the PIT of held-out data (the probability predicted for values below the outcome) is uniform.

    Of several outputs the worst decides. Of few data only the coverage of their 90 % intervals is judged.
    """
    u = held_out_pit(evidence)
    draws = predictive_draws(evidence)
    if u is None or draws is None or len(u) < FEWEST_HELD_OUT:
        return None
    stored = evidence.tree[PREDICTIONS].attrs
    dependence = dependence_of(draws) if stored.get("joint", True) else Dependence()
    if len(u) < MIN_DATA:
        return _coverage(u, dependence, evidence.rates)
    levels = stored.get("levels", ())
    if len(levels):
        p_values = [p_binned(column, levels) for column in u.T]
    else:
        p_values = [p_moments(column, dependence) for column in u.T]
    worst = u[:, np.argmin(p_values)]
    return uniform(worst, limits, "held-out", evidence.rates, least_p(*p_values))


def _coverage(u: np.ndarray, dependence: Dependence, rates: tuple[float, float]) -> Found:
    """Whether 90 % intervals hold enough of few outcomes, by their PIT (point, output); they never show wide ones."""
    covered = float((np.abs(u - 0.5) <= 0.5 * LEVEL).mean())
    count = max(1, round(len(u) / dependence.coverage**2))
    p = float(stats.binom.cdf(round(covered * count), count, LEVEL))
    numbers = {
        "count": u.size,
        "which": "held-out",
        "outer": 1.0 - covered,
        "p": p,
    }
    if p >= rates[0]:
        return Found("info", covered, "calibrated", numbers, LEVEL)
    status: Status = "fail" if p < rates[1] else "warn"
    return Found(status, covered, "too_narrow", numbers, LEVEL)


def left_out(evidence: Evidence, limits: Limits) -> Found | None:
    """Asks whether the leave-one-out PIT of the training data is uniform.

    Without leave-one-out it is the PIT of the training data in their replicates. A model misses its training data by
    less than new data, but only as far as its parameters allow: residuals shrink to √((1 − h) / (1 + h)) of the
    predicted error, with h the number of parameters per datum. Beyond that the intervals are too wide. Of several
    observed variables the worst decides; of a joint event each value is predicted from those before it.
    """
    views = evidence.by_outcome
    # Bonferroni over the observed variables
    rates = RATES[0] / len(views), RATES[1] / len(views)
    results = [result for view in views if (result := _left_out(view, limits, rates)) is not None]
    if not results:
        return None
    worst = min(results, key=lambda result: (_WORST_FIRST[result.status], result.numbers["p"]))
    p = min(1.0, worst.numbers["p"] * len(views))
    return replace(worst, numbers=dict(worst.numbers) | {"p": p})


def _left_out(evidence: Evidence, limits: Limits, rates: tuple[float, float]) -> Found | None:
    """`left_out` of a tree with one observed variable, at these rates of chance."""
    step = evidence.one_step
    if step is not None:
        return _stepwise(evidence, step[0], limits, rates)
    left_out_values = left_out_pit(evidence)
    if left_out_values is not None:
        u = left_out_values[1]
        return uniform(u, limits, "left-out", rates) if len(u) >= MIN_DATA else None
    outcomes = None if evidence.has_classes else evidence.replicates()
    if outcomes is None or len(outcomes[1]) < MIN_DATA:
        return None
    u = pit_of(*outcomes)
    trained = uniform(u, limits, "training", rates)
    status = trained.status
    if trained.code == "too_wide":
        status = _grade_of_width(u, _free_parameters(evidence), limits, rates)
    return replace(trained, status="info" if status == "pass" else status)


def _stepwise(
    evidence: Evidence,
    u: np.ndarray,
    limits: Limits,
    rates: tuple[float, float],
) -> Found | None:
    """`left_out` by the PIT values (value, output) of each value of a joint event given those before it."""
    if len(u) < MIN_DATA:
        return None
    # independent values, so that the tests with the most power hold
    p = p_moments(u[:, 0], Dependence())
    stepwise = uniform(u, limits, "one-step", rates, p)
    if stepwise.code == "too_wide":
        status = _grade_of_width(u, _free_parameters(evidence), limits, rates)
        stepwise = replace(stepwise, status=status)
    return stepwise


def _grade_of_width(
    u: np.ndarray,
    num_parameters: int,
    limits: Limits,
    rates: tuple[float, float],
) -> Status:
    """The grade of training PIT values nearer to a half than that many parameters bring them."""
    share = min(1.0, num_parameters / len(u))
    # E|Φ(s Z) − ½| = arctan(s) / π
    allowed = float(np.arctan(np.sqrt((1.0 - share) / (1.0 + share)))) / np.pi
    gap = allowed - float(np.abs(u - 0.5).mean())
    p = float(stats.norm.sf(gap * np.sqrt(u.size) / SD_SIZE))
    return grade_tested(p, gap, rates, limits)


def _free_parameters(evidence: Evidence) -> int:
    """How many directions the draws of the posterior move in: all, where they are too few to show how many."""
    sites = [flattened(values, 2) for values in evidence.sites.values()]
    draws = np.concatenate(sites, axis=2).astype(np.float64)
    steps = np.diff(draws, axis=1).reshape(-1, draws.shape[2])
    sample = steps[spread(len(steps), MAX_DATA), :MAX_DATA]
    sample = sample[:, sample.any(axis=0)]
    rank = 0
    if sample.size:
        directions = sample / np.linalg.norm(sample, axis=0)
        rank = int(np.linalg.matrix_rank(directions, rtol=1e-3))
    return rank if rank < len(sample) else steps.shape[1]
