"""The prior precision of a Laplace fit by cross-validation: a mode that has never seen the points it is judged on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyrobnn.core.seeding import generator
from pyrobnn.inference.curvature.ggn import ggn
from pyrobnn.inference.curvature.linearized import Linearized
from pyrobnn.inference.curvature.mode import Centre, find_centre, in_standard_units
from pyrobnn.inference.curvature.prior import prior_precision
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.inference.point_methods import MAP
from pyrobnn.likelihoods import averages
from pyrobnn.wording.findings import Finding

#: factors on the prior precision that are tried; the middle one is the declared prior
_GRID = torch.logspace(-4, 4, 25, dtype=torch.float64)
#: parts, one after another of which is held out until so many rows have been: they tell a width to 3 %
FOLDS, ENOUGH = 5, 500


@dataclass(frozen=True)
class HeldOut:
    """What held-out data say about the prior precision.

    Attributes: ``best`` of the factors tried, with its ``gain`` over the declared prior in log predictive density per
        held-out point and the gain's standard ``error``; ``factor``, the one closest to one that the best does not
        beat by more than the error of the difference; ``num_points`` held out.
    """

    factor: float
    best: float
    gain: float
    error: float
    num_points: int

    @property
    def at_bound(self) -> bool:
        """Whether the factor is at the end of those tried."""
        return self.factor in (float(_GRID[0]), float(_GRID[-1]))


def hold_out(
    method: Any, search: MAP, centre: Centre, given: bool, seed: int, notes: list[Finding | str]
) -> HeldOut:
    """Search for a mode on four fifths of the data, and judge widths around it by the fifth that it has not seen.

    One fifth after another, until 500 rows have been judged: of a few residuals that happen to be small, the best
    posterior has no width at all.

    Where the centre was ``given``, the search starts from a freshly initialised net: the given one may know all of the
    data. Otherwise it starts where the fit did.

    Raises:
        ValueError: too few data.
    """
    problem = centre.problem
    count = len(problem.x)
    order = torch.randperm(count, generator=generator(seed)).to(problem.device)
    if count < 4:
        raise ValueError(f"cross-validation needs at least 4 data points, got {count}")
    size = max(2, count // FOLDS)  # a gain has an error from two points on
    model = in_standard_units(problem.bnn.reinitialized(seed) if given else problem.bnn)
    scores, knows, seen = [], [], _score(method, centre)
    for fold in order.split(size)[: min(FOLDS, -(-ENOUGH // size))]:
        kept = order[~torch.isin(order, fold)]
        source = model, problem.x[kept], problem.y[kept]
        part = prepare(*source, points="free", device=problem.device)
        found = find_centre(search, part, source, centre.names, init=None, seed=seed)
        # a centre that fits rows it has seen worse than one that has not will do no better on new ones
        rows, unseen = (problem.x[fold], problem.y[fold]), _score(method, found)
        both = [torch.minimum(unseen(tau, *rows), seen(tau, *rows)) for tau in _GRID.to(problem.device)]
        scores.append(torch.stack(both))
        knows.append(not given and _knows(found, problem.x[fold], problem.y[fold]))
    chosen = _choose(torch.cat(scores, 1))
    if all(knows):
        notes.append(Finding("cross_validation_blind"))
    return chosen


def _choose(scores: Tensor) -> HeldOut:
    """From log predictive densities (factors, points): the mildest factor that the best does not beat by its error."""
    middle, root = len(_GRID) // 2, math.sqrt(scores.shape[1])
    best = int(scores.mean(1).argmax())
    loss = scores[best] - scores
    allowed = (loss.mean(1) <= loss.std(1) / root).nonzero().squeeze(1).tolist()
    chosen = min(allowed, key=lambda number: abs(number - middle))
    gain, error = float(loss[middle].mean()), float(loss[middle].std()) / root
    return HeldOut(float(_GRID[chosen]), float(_GRID[best]), gain, error, scores.shape[1])


def _score(method: Any, centre: Centre) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """(τ, x, y) → log predictive density (N,) of points, linearised, with the curvature at the centre."""
    problem = centre.problem
    likelihood = problem.bnn.likelihood
    jacobian, parameters = centre.jacobian(), centre.values
    curvature = ggn(jacobian, problem.x, centre.root, method.structure, prior_precision(jacobian).prec)

    def score(tau: Tensor, x: Tensor, y: Tensor) -> Tensor:
        f, cov = Linearized(jacobian, curvature.blocks(tau.reshape(1), 1.0)).output_moments(x)
        return averages.log_predictive(likelihood, f, cov, y, parameters)

    return score


@torch.no_grad()
def _knows(centre: Centre, x: Tensor, y: Tensor) -> bool:
    """Whether the net that the search started from fits the points no worse than the mode."""
    model = centre.problem.bnn
    values = centre.values
    start = values | model.initial_values()
    fits = [
        model.likelihood.log_prob(model.forward(each, x), y, values).double().sum()
        for each in (start, values)
    ]
    return bool(fits[0] >= fits[1])
