"""The posterior precision of a Laplace approximation: curvature plus prior, always positive definite."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from pyrobnn.core.checks import Refused
from pyrobnn.density.density import Density
from pyrobnn.inference.curvature.gaussian import Block, DenseBlock, DiagBlock
from pyrobnn.inference.curvature.ggn import check_finite, ggn, name_of
from pyrobnn.inference.curvature.hessian import hessian, hessian_diagonal
from pyrobnn.inference.curvature.jacobian import NetworkJacobian
from pyrobnn.inference.curvature.mode import Centre
from pyrobnn.inference.curvature.prior import prior_precision, with_precision
from pyrobnn.inference.curvature.tuning import Residual, Tuned, hold_out, maximize_evidence
from pyrobnn.inference.fitting.batches import forward_in_parts
from pyrobnn.inference.point_methods import MAP
from pyrobnn.likelihoods import SCALE
from pyrobnn.model import NET
from pyrobnn.wording.findings import Finding

#: the mode counts as found when Newton's step is shorter than this many posterior standard deviations per √dimension
_NEWTON_LIMIT = 0.2
#: of the noise's variance that the last step to the mode of a linear model may take off the residuals
_NOISE_SHARE = 0.1


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
    method: Any, search: MAP, centre: Centre, given: bool, seed: int, remarks: list[Finding | str]
) -> Precision:
    """Exact Hessian, full or its diagonal."""
    index = _coordinates(centre, centre.names)
    block, damping = _hessian_block(centre, index, method.structure, remarks)
    weights = centre.problem.is_bnn and any(name.startswith(NET) for name in centre.names)
    jacobian = centre.jacobian() if weights else None
    return Precision(centre, [block], jacobian, damping)


def ggn_precision(
    method: Any, search: MAP, centre: Centre, given: bool, seed: int, remarks: list[Finding | str]
) -> Precision:
    """Gauss-Newton matrix of the weights and, beside it, the exact Hessian of the noise.

    ``search`` finds a mode on part of the data where these are held out; ``given``: the centre was, by the user.

    Raises:
        ValueError: no weight among the sites; a prior or layer that the structure or the tuning can't take.
    """
    if not any(name.startswith(NET) for name in centre.names):
        raise Refused(f"'subset' holds no weights, only {', '.join(centre.names)}: use curvature='hessian'")
    jacobian = centre.jacobian()
    prior = prior_precision(jacobian)
    damping = prior.raised
    if prior.raised:
        sites = ", ".join(prior.raised_sites)
        remarks.append(Finding("prior_raised", {"sites": sites, "raised": prior.raised}))
    curvature = ggn(jacobian, centre.problem.x, centre.root, method.structure, prior.prec)
    if curvature.averaged:
        remarks.append(Finding("prior_averaged"))
    tuned, held_out = Tuned(torch.ones(1, dtype=torch.float64), 1.0), None
    if method.tune is not None:
        if method.tune == "cross_validation":
            held_out = hold_out(method, search, centre, given, seed, remarks)
            tau = torch.tensor([held_out.factor], dtype=torch.float64, device=prior.prec.device)
            tuned = Tuned(tau, 1.0, held_out.at_bound)
            at_edge = Finding("cross_validation_at_edge", {"factor": held_out.factor})
        else:
            deviation = (centre.mode[jacobian.index] - cast(Tensor, prior.mean)).square() * prior.prec
            tuned = maximize_evidence(curvature, deviation, _residual(centre), method.tune == "per_layer")
            at_edge = Finding("tuning_at_bound")
        if tuned.at_bound:
            remarks.append(at_edge)
    blocks = curvature.blocks(tuned.tau.to(prior.prec.device), tuned.c)
    for block in blocks:
        check_finite(block.log_det())  # a number of float64 may overflow in the net's dtype
    remarks += curvature.resolution().findings(tuned.c / float(tuned.tau.min()))
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
        block, added = _hessian_block(centre, index, "full", remarks)
        blocks, damping = [*blocks, block], max(damping, added)
    has_evidence = held_out is None or not tuned.at_bound
    return Precision(centre, blocks, jacobian, damping, report, has_evidence)


def _coordinates(centre: Centre, names: Any) -> Tensor:
    parts = [
        torch.arange(site.start, site.stop, device=centre.mode.device)
        for site in centre.density.sites
        if site.name in set(names)
    ]
    return torch.cat(parts)


def _hessian_block(
    centre: Centre, index: Tensor, structure: str, remarks: list[Finding | str]
) -> tuple[Block, float]:
    """Exact Hessian, damped by as much as it takes; the amount, and a remark if it had to be."""
    if structure == "diag":
        diagonal = check_finite(hessian_diagonal(centre.density, centre.mode, index))
        lowest, highest = float(diagonal.min()), float(diagonal.max())
        added = 0.0 if lowest > 0 else _needed(lowest, highest)
        block: Block = DiagBlock(index, diagonal + added)
    else:
        matrix = check_finite(hessian(centre.density, centre.mode, index))
        factor, info = torch.linalg.cholesky_ex(matrix)
        added, lowest = 0.0, 0.0
        if int(info):
            values = torch.linalg.eigvalsh(matrix)
            lowest, highest = float(values[0]), float(values[-1])
            added = _needed(lowest, highest)
            matrix.diagonal().add_(added)
            factor = torch.linalg.cholesky(matrix)
        else:
            remarks += _rounding(matrix, factor, centre.density.dtype)
        block = DenseBlock(index, factor)
    if added:
        remarks.append(Finding("hessian_indefinite", {"lowest": lowest, "added": added}))
    return block, added


def _rounding(matrix: Tensor, factor: Tensor, dtype: torch.dtype) -> list[Finding]:
    """Whether the factor's least pivot, a bound on the lowest curvature, is within the rounding of the rest."""
    least, norm = float(factor.diagonal().min()) ** 2, float(torch.linalg.matrix_norm(matrix))
    if least > torch.finfo(dtype).eps * norm:
        return []
    return [Finding("hessian_unresolved", {"norm": norm, "least": least, "dtype": name_of(dtype)})]


def _needed(lowest: float, highest: float) -> float:
    """Damping that gives the worst direction its own curvature with the right sign, or what float64 can resolve."""
    return -lowest + max(abs(lowest), 1e-8 * abs(highest), 1e-12)


@torch.no_grad()
def _residual(centre: Centre) -> Residual | None:
    """Scaled residuals, where Gaussian noise is learned and hence tuned too."""
    problem = centre.problem
    if SCALE not in centre.points or not problem.bnn.likelihood.targets.normal:
        return None
    f = forward_in_parts(problem.bnn, centre.values, problem.x)
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


def record(precision: Precision, remarks: list[Finding | str], given: bool, exact: bool) -> dict[str, Any]:
    """What the fit says about itself; adds to the remarks that the centre (``given`` by the user?) is not a mode.

    Of the ``exact`` mode of the linear model only the noise is not: it is that of the residuals at the centre, whose
    sum of squares the last step lowers by its squared length, in noise variances.
    """
    gradient = precision.centre.gradient
    blocks = precision.blocks
    norm = float(gradient[torch.cat([block.index for block in blocks])].double().norm())
    parts = [block.root(gradient[block.index].unsqueeze(0)).double().square().sum() for block in blocks]
    distance = float(torch.stack(parts).sum().sqrt())
    size = sum(len(block.index) for block in blocks)
    small = exact and distance**2 <= _NOISE_SHARE * len(precision.centre.problem.x)
    if not small and not distance <= _NEWTON_LIMIT * math.sqrt(size):
        far = {"gradient_norm": norm, "distance": distance, "given": given}
        remarks.append(Finding("not_a_mode", far))
    return {
        "gradient_norm": norm,
        "newton_distance": distance,
        "damping": precision.damping,
        "tuned": precision.tuned,
        "log_evidence_kind": "laplace",
        "head": "" if precision.centre.split is None else precision.centre.split.path,
        "layer_products": precision.jacobian is not None and bool(precision.jacobian.layers),
    }


def report_frozen(draws: Mapping[str, Tensor], remarks: list[Finding | str]) -> None:
    """Adds to the remarks that widths are lost where they are added to the mode."""
    moved = torch.cat([(value != value[:, :1]).any(1).flatten() for value in draws.values()])
    some = next(iter(draws.values()))
    if some.shape[1] > 1 and not bool(moved.all()):
        lost = {"count": int((~moved).sum()), "total": len(moved), "dtype": name_of(some.dtype)}
        remarks.append(Finding("draws_unresolved", lost))
