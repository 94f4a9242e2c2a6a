"""The posterior precision of a Laplace approximation: curvature plus prior, always positive definite."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Normal

from pyrobnn.checks import Refused
from pyrobnn.curvature.blocks import Block, DenseBlock, DiagBlock
from pyrobnn.curvature.ggn import KronCurvature, ggn
from pyrobnn.curvature.hessian import hessian, hessian_diagonal
from pyrobnn.curvature.jacobian import NetworkJacobian, Root
from pyrobnn.curvature.linearized import Linearized
from pyrobnn.curvature.output import output_root
from pyrobnn.curvature.prior import PriorPrecision, elementwise, prior_precision
from pyrobnn.density import Density
from pyrobnn.inference.laplace_mode import Centre
from pyrobnn.inference.laplace_tuning import Residual, Tuned, maximize_evidence, maximize_held_out
from pyrobnn.likelihoods import SCALE, Likelihood
from pyrobnn.model import NET
from pyrobnn.seeding import generator


@dataclass(frozen=True)
class Precision:
    """Gaussian blocks at a centre.

    Attributes: ``centre`` (of the tuned model, where tuned); ``blocks``; ``jacobian`` of the network (None for a
        program); ``damping``: the most that was added to the diagonal; ``tuned``: factors, or None.
    """

    centre: Centre
    blocks: list[Block]
    jacobian: NetworkJacobian | None
    damping: float
    tuned: dict[str, Any] | None = None


def hessian_precision(method: Any, centre: Centre, seed: int, remarks: list[str]) -> Precision:
    """Exact Hessian, full or its diagonal."""
    index = _coordinates(centre, centre.names)
    block, damping = _hessian_block(centre, index, method.structure, method.damping, remarks)
    weights = [name for name in centre.names if centre.problem.is_bnn and name.startswith(NET)]
    jacobian = _jacobian(centre, weights) if weights else None
    return Precision(centre, [block], jacobian, damping)


def ggn_precision(method: Any, centre: Centre, seed: int, remarks: list[str]) -> Precision:
    """Gauss-Newton matrix of the weights and, beside it, the exact Hessian of the noise.

    Raises:
        ValueError: no weight among the sites; a prior or layer that the structure or the tuning can't take.
    """
    weights = [name for name in centre.names if name.startswith(NET)]
    if not weights:
        raise Refused(f"'subset' holds no weights, only {', '.join(centre.names)}: use curvature='hessian'")
    jacobian = _jacobian(centre, weights)
    prior = prior_precision(jacobian)
    damping = max(method.damping, prior.raised)
    if prior.raised:
        remarks.append(
            f"the log prior of {', '.join(prior.raised_sites)} is flat or convex at the mode: "
            f"its precision was raised by up to {prior.raised:.3g}"
        )
    likelihood = centre.problem.model.likelihood
    parameters = centre.density.constrain(centre.mode) | centre.points
    root: Root = partial(_root, likelihood, parameters)
    curvature = ggn(jacobian, centre.problem.x, root, method.structure, prior.prec + method.damping)
    if isinstance(curvature, KronCurvature) and curvature.averaged:
        remarks.append("the prior precision varies over a layer's outputs: Kronecker factors use its average")
    tuned = Tuned(torch.ones(1, dtype=torch.float64), 1.0)
    if method.tune is not None:
        if prior.mean is None:
            raise Refused("'tune' scales normal priors: leave it None for the other prior families")
        tuned = _tune(method, centre, jacobian, prior, curvature, root, seed)
        if tuned.at_bound:
            remarks.append(
                "tuning ended at its bound: the data say nothing about this prior precision or noise"
            )
    blocks = curvature.blocks(tuned.tau.to(prior.prec.device), tuned.c)
    report = None
    if method.tune is not None:
        names = curvature.group_names if len(tuned.tau) > 1 else ["all"]
        report = {
            "prior_precision_factor": dict(zip(names, tuned.tau.tolist())),
            "noise_factor": tuned.c**-0.5,
        }
        centre = _tuned_centre(centre, curvature.group_names, tuned)
    noise = [name for name in centre.names if not name.startswith(NET)]
    if noise:
        index = _coordinates(centre, noise)
        block, added = _hessian_block(centre, index, "full", method.damping, remarks)
        blocks, damping = [*blocks, block], max(damping, added)
    return Precision(centre, blocks, jacobian, damping, report)


def _jacobian(centre: Centre, weights: list[str]) -> NetworkJacobian:
    jacobian = NetworkJacobian(centre.problem.model, centre.density, centre.mode, centre.points, weights)
    jacobian.prefer_products(centre.problem.x)
    return jacobian


def _root(likelihood: Likelihood, parameters: dict[str, Tensor], f: Tensor) -> Tensor:
    return output_root(likelihood, f, parameters)


def _coordinates(centre: Centre, names: Any) -> Tensor:
    parts = [
        torch.arange(site.start, site.stop, device=centre.mode.device)
        for site in centre.density.sites
        if site.name in set(names)
    ]
    return torch.cat(parts)


def _hessian_block(
    centre: Centre, index: Tensor, structure: str, damping: float, remarks: list[str]
) -> tuple[Block, float]:
    """Exact Hessian, damped by as much as it takes; the amount, and a remark if it had to be."""
    if structure == "diag":
        diagonal = hessian_diagonal(centre.density, centre.mode, index) + damping
        lowest, highest = float(diagonal.min()), float(diagonal.max())
        added = 0.0 if lowest > 0 else _needed(lowest, highest)
        block: Block = DiagBlock(index, diagonal + added)
    else:
        matrix = hessian(centre.density, centre.mode, index)
        matrix.diagonal().add_(damping)
        factor, info = torch.linalg.cholesky_ex(matrix)
        added, lowest = 0.0, 0.0
        if int(info):
            values = torch.linalg.eigvalsh(matrix)
            lowest, highest = float(values[0]), float(values[-1])
            added = _needed(lowest, highest)
            matrix.diagonal().add_(added)
            factor = torch.linalg.cholesky(matrix)
        block = DenseBlock(index, factor)
    if added:
        remarks.append(
            f"the Hessian is not positive definite (lowest curvature {lowest:.3g}): damped by {added:.3g}; "
            "its widths are then not those of the posterior: find a better mode, or use curvature='ggn'"
        )
    return block, damping + added


def _needed(lowest: float, highest: float) -> float:
    """Damping that gives the worst direction its own curvature with the right sign, or what float64 can resolve."""
    return -lowest + max(abs(lowest), 1e-8 * abs(highest), 1e-12)


def _tune(
    method: Any,
    centre: Centre,
    jacobian: NetworkJacobian,
    prior: PriorPrecision,
    curvature: Any,
    root: Root,
    seed: int,
) -> Tuned:
    if method.tune == "marginal_likelihood":
        deviation = (centre.mode[jacobian.index] - prior.mean).square() * prior.prec
        return maximize_evidence(curvature, deviation, _residual(centre), method.tune_per_layer)
    return maximize_held_out(_held_out_score(method, centre, jacobian, prior, root, seed))


@torch.no_grad()
def _residual(centre: Centre) -> Residual | None:
    """Scaled residuals, where the noise is learned and hence tuned too."""
    problem = centre.problem
    if SCALE not in centre.points:
        return None
    f = problem.model.forward(centre.density.constrain(centre.mode) | centre.points, problem.x)
    loc, scale = problem.model.likelihood.loc_scale(f, centre.points)
    return Residual(float(((problem.y - loc) / scale).double().square().sum()), loc.numel())


def _held_out_score(
    method: Any, centre: Centre, jacobian: NetworkJacobian, prior: PriorPrecision, root: Root, seed: int
) -> Callable[[Tensor], float]:
    """τ → mean log predictive density of a held-out fifth, linearised, with the curvature of the other four.

    The weights have seen all of the data, so only the width of the posterior is judged on held-out points.
    """
    problem = centre.problem
    count = len(problem.x)
    order = torch.randperm(count, generator=generator(seed)).to(problem.device)
    held, kept = order[: max(1, count // 5)], order[max(1, count // 5) :]
    if not len(kept):
        raise ValueError(f"cross-validation needs at least 2 data points, got {count}")
    curvature = ggn(jacobian, problem.x[kept], root, method.structure, prior.prec)
    likelihood, y = problem.model.likelihood, problem.y[held]
    parameters = centre.density.constrain(centre.mode) | centre.points

    def score(tau: Tensor) -> float:
        linear = Linearized(jacobian, curvature.blocks(tau.to(problem.device), 1.0))
        if likelihood.task != "gaussian":
            f, cov = linear.output_moments(problem.x[held])
            shrunk = f / (1 + math.pi / 8 * cov.diagonal(dim1=1, dim2=2)).sqrt()
            return float(likelihood.log_prob(shrunk, y, parameters).double().mean())
        f, _ = linear.output_moments(problem.x[held])
        loc, scale = likelihood.loc_scale(f, parameters)
        _, var = linear.moments(problem.x[held])
        total = (var.double() + scale.double().square()).sqrt()
        return float(torch.distributions.Normal(loc.double(), total).log_prob(y.double()).sum(-1).mean())

    return score


def _tuned_centre(centre: Centre, groups: list[str], tuned: Tuned) -> Centre:
    """The same mode under the tuned prior and noise."""
    problem = centre.problem
    model = copy.copy(problem.model)
    factors = tuned.tau.expand(len(groups)).tolist()
    by_layer = dict(zip(groups, factors))
    model.priors = dict(model.priors)
    for name in centre.names:
        if name.startswith(NET):
            prior = model.priors[name]
            base = elementwise(prior)
            scale = base.scale * by_layer[name.rpartition(".")[0]] ** -0.5
            shape = prior.event_shape
            model.priors[name] = _normal(base, scale).expand(shape).to_event(len(shape))
    points = dict(centre.points)
    if SCALE in points:
        points[SCALE] = points[SCALE] * tuned.c**-0.5
    density = Density(
        partial(model.pyro_model, num_data=problem.num_data),
        problem.density.args,
        points="free",
        values=points,
    )
    tuned_problem = replace(problem, model=model, density=density)
    held = Density(density.program, density.args, points="held", values=points)
    # the gradient says whether the mode was found for the model it was searched in
    return replace(centre, problem=tuned_problem, density=held, points=points)


def _normal(base: Normal, scale: Tensor) -> Normal:
    return type(base)(base.loc, scale)
