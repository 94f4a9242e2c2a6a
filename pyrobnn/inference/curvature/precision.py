"""The posterior precision of a Laplace approximation: curvature plus prior, always positive definite."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from pyrobnn.checks import Refused
from pyrobnn.density import Density
from pyrobnn.inference.curvature.blocks import Block, DenseBlock, DiagBlock
from pyrobnn.inference.curvature.ggn import DiagCurvature, KronCurvature, ggn
from pyrobnn.inference.curvature.held_out import hold_out
from pyrobnn.inference.curvature.hessian import hessian, hessian_diagonal
from pyrobnn.inference.curvature.jacobian import NetworkJacobian
from pyrobnn.inference.curvature.mode import Centre
from pyrobnn.inference.curvature.output import DataRoot
from pyrobnn.inference.curvature.prior import prior_precision, with_precision
from pyrobnn.inference.curvature.resolution import check_finite
from pyrobnn.inference.curvature.tuning import Residual, Tuned, maximize_evidence
from pyrobnn.inference.fitting.batches import forward_in_parts
from pyrobnn.inference.point_methods import MAP
from pyrobnn.likelihoods import SCALE
from pyrobnn.model import NET


@dataclass(frozen=True, eq=False)
class Precision:
    """Gaussian blocks at a centre.

    Attributes: ``centre`` (of the tuned model, where tuned); ``blocks``; ``jacobian`` of the network (None for a
        program); ``damping``: the most that was added to the diagonal; ``tuned``: factors, or None;
        ``has_evidence``: whether the log evidence of the tuned model says anything.
    """

    centre: Centre
    blocks: list[Block]
    jacobian: NetworkJacobian | None
    damping: float
    tuned: dict[str, Any] | None = None
    has_evidence: bool = True


def hessian_precision(
    method: Any, search: MAP, centre: Centre, given: bool, seed: int, remarks: list[str]
) -> Precision:
    """Exact Hessian, full or its diagonal."""
    index = _coordinates(centre, centre.names)
    block, damping = _hessian_block(centre, index, method.structure, method.damping, remarks)
    weights = [name for name in centre.names if centre.problem.is_bnn and name.startswith(NET)]
    jacobian = _jacobian(centre, weights) if weights else None
    return Precision(centre, [block], jacobian, damping)


def ggn_precision(
    method: Any, search: MAP, centre: Centre, given: bool, seed: int, remarks: list[str]
) -> Precision:
    """Gauss-Newton matrix of the weights and, beside it, the exact Hessian of the noise.

    ``search`` finds a mode on part of the data where these are held out; ``given``: the centre was, by the user.

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
    likelihood = centre.problem.bnn.likelihood
    parameters = centre.density.constrain(centre.mode) | centre.points
    root = DataRoot(likelihood, parameters, centre.problem.y)
    curvature = ggn(jacobian, centre.problem.x, root, method.structure, prior.prec + method.damping)
    if isinstance(curvature, KronCurvature) and curvature.averaged:
        remarks.append("the prior precision varies over a layer's outputs: Kronecker factors use its average")
    tuned, held_out = Tuned(torch.ones(1, dtype=torch.float64), 1.0), None
    if method.tune is not None:
        if method.tune == "cross_validation":
            held_out = hold_out(method, search, centre, given, seed, remarks)
            tau = torch.tensor([held_out.factor], dtype=torch.float64, device=prior.prec.device)
            tuned = Tuned(tau, 1.0, held_out.at_bound)
        else:
            deviation = (centre.mode[jacobian.index] - cast(Tensor, prior.mean)).square() * prior.prec
            tuned = maximize_evidence(curvature, deviation, _residual(centre), method.tune_per_layer)
        if held_out is not None and tuned.at_bound:
            remarks.append(
                f"cross-validation ended at the edge of the factors it tries, {held_out.factor:g}: the held-out data "
                "set no limit to this prior precision. There is no log_evidence: the mode is that of the declared "
                "prior, not of one so far from it"
            )
        elif tuned.at_bound:
            remarks.append(
                "tuning ended at its bound: the data set no limit to this prior precision or noise"
            )
    blocks = curvature.blocks(tuned.tau.to(prior.prec.device), tuned.c)
    for block in blocks:
        check_finite(block.log_det())  # a number of float64 may overflow in the net's dtype
    if not isinstance(curvature, DiagCurvature):
        note = curvature.resolution().note(tuned.c / float(tuned.tau.min()))
        remarks.extend([note] if note else [])
    report = None
    if method.tune is not None:
        names = curvature.group_names if len(tuned.tau) > 1 else ["all"]
        report = {
            "prior_precision_factor": dict(zip(names, tuned.tau.tolist())),
            "noise_factor": tuned.c**-0.5,
        }
        if held_out is not None:
            report["held_out"] = asdict(held_out)
        centre = _tuned_centre(centre, curvature.group_names, tuned)
    noise = [name for name in centre.names if not name.startswith(NET)]
    if noise:
        index = _coordinates(centre, noise)
        block, added = _hessian_block(centre, index, "full", method.damping, remarks)
        blocks, damping = [*blocks, block], max(damping, added)
    has_evidence = held_out is None or not tuned.at_bound
    return Precision(centre, blocks, jacobian, damping, report, has_evidence)


def _jacobian(centre: Centre, weights: list[str]) -> NetworkJacobian:
    jacobian = NetworkJacobian(centre.problem.bnn, centre.density, centre.mode, centre.points, weights)
    jacobian.prefer_products(centre.problem.x)
    return jacobian


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
        diagonal = check_finite(hessian_diagonal(centre.density, centre.mode, index)) + damping
        lowest, highest = float(diagonal.min()), float(diagonal.max())
        added = 0.0 if lowest > 0 else _needed(lowest, highest)
        block: Block = DiagBlock(index, diagonal + added)
    else:
        matrix = check_finite(hessian(centre.density, centre.mode, index))
        matrix.diagonal().add_(damping)
        factor, info = torch.linalg.cholesky_ex(matrix)
        added, lowest = 0.0, 0.0
        if int(info):
            values = torch.linalg.eigvalsh(matrix)
            lowest, highest = float(values[0]), float(values[-1])
            added = _needed(lowest, highest)
            matrix.diagonal().add_(added)
            factor = torch.linalg.cholesky(matrix)
        else:
            remarks.extend(_rounding(matrix, factor, centre.density.dtype))
        block = DenseBlock(index, factor)
    if added:
        remarks.append(
            f"the Hessian is not positive definite (lowest curvature {lowest:.3g}): damped by {added:.3g}; "
            "its widths are then not those of the posterior: find a better mode, or use curvature='ggn'"
        )
    return block, damping + added


def _rounding(matrix: Tensor, factor: Tensor, dtype: torch.dtype) -> list[str]:
    """A remark where the factor's least pivot, a bound on the lowest curvature, is within the rounding of the rest."""
    least, norm = float(factor.diagonal().min()) ** 2, float(torch.linalg.matrix_norm(matrix))
    if least > torch.finfo(dtype).eps * norm:
        return []
    return [
        f"the Hessian spans from {norm:.2g} to less than {least:.2g}, more than {str(dtype).removeprefix('torch.')} "
        "resolves: its widest widths are rounding. Use curvature='ggn', a larger noise or a float64 net (net.double())"
    ]


def _needed(lowest: float, highest: float) -> float:
    """Damping that gives the worst direction its own curvature with the right sign, or what float64 can resolve."""
    return -lowest + max(abs(lowest), 1e-8 * abs(highest), 1e-12)


@torch.no_grad()
def _residual(centre: Centre) -> Residual | None:
    """Scaled residuals, where Gaussian noise is learned and hence tuned too."""
    problem = centre.problem
    if SCALE not in centre.points or not problem.bnn.likelihood.normal:
        return None
    f = forward_in_parts(problem.bnn, centre.density.constrain(centre.mode) | centre.points, problem.x)
    loc, scale = problem.bnn.likelihood.loc_scale(f, centre.points)
    return Residual(float(((problem.y - loc) / scale).double().square().sum()), loc.numel())


def _tuned_centre(centre: Centre, groups: list[str], tuned: Tuned) -> Centre:
    """The same mode under the tuned prior and noise."""
    problem = centre.problem
    model = copy.copy(problem.bnn)
    factors = tuned.tau.expand(len(groups)).tolist()
    by_layer = dict(zip(groups, factors))
    model.priors = dict(model.priors)
    for name in centre.names:
        if name.startswith(NET):
            factor = by_layer[name.rpartition(".")[0]]
            model.priors[name] = with_precision(name, model.priors[name], factor)
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
