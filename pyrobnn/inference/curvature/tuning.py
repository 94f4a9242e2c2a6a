"""Prior precision and noise of a Laplace fit: by the marginal likelihood, or by data that a second mode never saw."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyrobnn.core.seeding import generator
from pyrobnn.inference.curvature.ggn import Curvature, ggn
from pyrobnn.inference.curvature.linearized import Linearized
from pyrobnn.inference.curvature.mode import Centre, find_centre, in_standard_units
from pyrobnn.inference.curvature.prior import prior_precision
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.inference.point_methods import MAP
from pyrobnn.likelihoods import averages
from pyrobnn.wording.findings import Finding

#: bounds of log τ and log c
_BOUND = 18.0
#: factors on the prior precision that are tried; the middle one is the declared prior
_GRID = torch.logspace(-4, 4, 25, dtype=torch.float64)
#: parts, one after another of which is held out until so many rows have been: they tell a width to 3 %
FOLDS, ENOUGH = 5, 500


@dataclass(frozen=True, eq=False)
class Tuned:
    """Factors on the declared model.

    Attributes:
        tau: on the prior precision, (1,) or (layers,), float64, on the curvature's device.
        c: on the likelihood's curvature: the noise variance is divided by it.
        at_bound: whether a factor ended at the edge of the search.
    """

    tau: Tensor
    c: float
    at_bound: bool = False


@dataclass(frozen=True)
class Residual:
    """What the likelihood contributes when the noise is tuned: Σ r²/σ² at the present noise, and the terms' number."""

    sum_squares: float
    count: int


def maximize_evidence(
    curvature: Curvature, deviation: Tensor, residual: Residual | None, per_layer: bool
) -> Tuned:
    r"""Maximise the log marginal likelihood over prior factors τ and, for learned noise, the likelihood factor c.

    .. math:: \log Z = \tfrac{n}{2} \log c - \tfrac{c}{2} \textstyle\sum r^2/\sigma^2 - \tfrac12 \sum_g \tau_g q_g
        + \tfrac12 \sum_g p_g \log \tau_g - \tfrac12 \log \det(\mathrm{diag}(\tau) + c \tilde H) + \mathrm{const}

    For one τ, the determinant depends on ρ = τ/c only, and given ρ the best c is n / (Σ r²/σ² + ρ q): one dimension is
    left whatever is tuned.

    Args:
        curvature: whitened curvature at the mode.
        deviation: squared distance of the mode from the prior mean in prior standard deviations, (p,).
        residual: given when the noise is tuned.
        per_layer: one τ per layer.

    Returns:
        The best factors. The mode itself is left where it is.
    """
    if per_layer and len(curvature.group_names) > 1:
        return _per_layer(curvature, deviation, residual)
    q, size = float(deviation.double().sum()), len(curvature.index)
    vector = partial(_vector, device=curvature.index.device)
    one = vector(1.0).squeeze()

    def factors(log_rho: float) -> tuple[float, float]:
        rho = math.exp(log_rho)
        c = 1.0 if residual is None else residual.count / (residual.sum_squares + rho * q)
        return rho * c, c

    def loss(log_rho: float) -> float:
        tau, c = factors(log_rho)
        log_det = float(curvature.log_det(vector(math.exp(log_rho)), one)) + size * math.log(c)
        fit = 0.0 if residual is None else residual.count * math.log(c) - c * residual.sum_squares
        return -0.5 * (fit - tau * q + size * math.log(tau) - log_det)

    best = _minimize_scalar(loss, curvature.cheap)
    tau, c = factors(best)
    return Tuned(vector(tau), c, abs(best) > _BOUND - 1e-3)


def _minimize_scalar(loss: Callable[[float], float], cheap: bool) -> float:
    """Bounded minimum in one dimension: from a grid where evaluations are cheap, else downhill from 0."""
    if cheap:
        grid = torch.linspace(-_BOUND, _BOUND, 73).tolist()
        values = [loss(point) for point in grid]
        best = min(range(len(grid)), key=values.__getitem__)
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
        tolerance = 1e-8
    else:
        low, high = _bracket(loss)
        tolerance = 1e-3  # the loss is flat there: its error is of second order
    from scipy import optimize

    found = optimize.minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": tolerance})
    return float(found.x)


def _bracket(loss: Callable[[float], float]) -> tuple[float, float]:
    here, step = 0.0, 1.5
    value = loss(here)
    if loss(here + step) > value:
        step = -step
    while abs(here + step) < _BOUND:
        ahead = loss(here + step)
        if ahead > value:
            break
        here, value = here + step, ahead
    low, high = sorted((here - step, here + step))
    return max(low, -_BOUND), min(high, _BOUND)


def _per_layer(curvature: Curvature, deviation: Tensor, residual: Residual | None) -> Tuned:
    """L-BFGS on the logarithms, from the best common factor, with exact gradients."""
    common = maximize_evidence(curvature, deviation, residual, per_layer=False)
    groups = len(curvature.group_names)
    q = torch.zeros(groups, dtype=torch.float64, device=deviation.device)
    q.index_add_(0, curvature.group, deviation.double())
    sizes = torch.bincount(curvature.group, minlength=groups).to(q)
    start = [common.tau.log().expand(groups), _vector(math.log(common.c), q.device)]
    theta = torch.cat(start).requires_grad_()
    optimizer = torch.optim.LBFGS(
        [theta], max_iter=100, tolerance_grad=1e-9, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        log_tau = theta[:-1].clamp(-_BOUND, _BOUND)
        log_c = theta[-1] if residual is not None else torch.zeros_like(theta[-1])
        tau, c = log_tau.exp(), log_c.exp()
        fit = 0.0 if residual is None else residual.count * log_c - c * residual.sum_squares
        loss = -0.5 * (fit - tau @ q + sizes @ log_tau - curvature.log_det(tau, c))
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    log_tau = theta[:-1].detach()
    c = float(theta[-1].detach().exp()) if residual is not None else 1.0
    return Tuned(log_tau.clamp(-_BOUND, _BOUND).exp(), c, bool((log_tau.abs() >= _BOUND).any()))


def _vector(value: float, device: torch.device) -> Tensor:
    return torch.tensor([value], dtype=torch.float64, device=device)


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
