"""The posterior precision of a Laplace approximation: curvature plus prior, always positive definite."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from pyrobnn.core.checks import Refused
from pyrobnn.core.findings import Finding
from pyrobnn.core.seeding import generator
from pyrobnn.inference.curvature.gaussian import Block, DenseBlock, DiagBlock
from pyrobnn.inference.curvature.ggn import check_finite, ggn, hessian, hessian_diagonal
from pyrobnn.inference.curvature.jacobian import CHUNK_SCALARS, NetworkJacobian
from pyrobnn.inference.curvature.linearized import Linearized, mode_of_linear
from pyrobnn.inference.curvature.mode import MANY, Centre
from pyrobnn.inference.curvature.prior import (
    Tuned,
    hold_out,
    maximize_evidence,
    prior_precision,
    with_precision,
)
from pyrobnn.inference.fitting.batches import forward_in_parts
from pyrobnn.inference.point_methods import MAP
from pyrobnn.model import BNN, NET, Density
from pyrobnn.model.likelihoods.base import SCALE, Likelihood


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


def hessian_precision(centre: Centre, structure: str, remarks: list[Finding | str]) -> Precision:
    """Exact Hessian, full or its diagonal."""
    block, damping = _hessian_block(centre, centre.names, structure, remarks)
    weights = centre.problem.is_bnn and any(name.startswith(NET) for name in centre.names)
    return Precision(centre, [block], centre.jacobian() if weights else None, damping)


def ggn_precision(
    method: Any,
    search: MAP,
    centre: Centre,
    centre_given: bool,
    seed: int,
    remarks: list[Finding | str],
) -> Precision:
    """Gauss-Newton matrix of the weights and, beside it, the exact Hessian of the noise.

    ``search`` finds a mode on part of the data where these are held out; ``centre_given``: by the user.

    Raises:
        ValueError: no weight among the sites; a prior or layer that the structure or the tuning can't take.
    """
    if not any(name.startswith(NET) for name in centre.names):
        raise Refused(
            f"'subset' holds no weights, only {', '.join(centre.names)}: use curvature='hessian'"
        )
    jacobian = centre.jacobian()
    prior = prior_precision(jacobian)
    if prior.raised:
        raised = {"sites": ", ".join(prior.raised_sites), "raised": prior.raised}
        remarks.append(Finding("prior_raised", raised))
    curvature = ggn(jacobian, centre.problem.x, centre.root, method.structure, prior.prec)
    if curvature.averaged:
        remarks.append(Finding("prior_averaged"))
    if method.tune is None:
        tuned = Tuned(
            torch.ones(
                1,
                dtype=torch.float64,
                device=prior.prec.device,
            )
        )
    elif method.tune == "cross_validation":
        tuned = hold_out(method, search, centre, centre_given, seed)
        if tuned.at_bound:
            remarks.append(Finding("cross_validation_at_edge", {"factor": float(tuned.tau)}))
    else:
        deviation = (centre.mode[jacobian.index] - cast(Tensor, prior.mean)).square() * prior.prec
        per_layer = method.tune == "per_layer"
        tuned = maximize_evidence(curvature, deviation, _residual(centre), per_layer)
        if tuned.at_bound:
            remarks.append(Finding("tuning_at_bound"))
    blocks = curvature.blocks(tuned.tau, tuned.c)
    for block in blocks:
        check_finite(block.log_det())  # a number of float64 may overflow in the net's dtype
    remarks += curvature.findings(tuned.c / float(tuned.tau.min()))
    report = None
    damping = prior.raised
    if method.tune is not None:
        report = _report_of(tuned, curvature.group_names)
        centre = _tuned_centre(centre, curvature.group_names, tuned)
    noise = [name for name in centre.names if not name.startswith(NET)]
    if noise:
        block, added = _hessian_block(centre, noise, "full", remarks)
        blocks = [*blocks, block]
        damping = max(damping, added)
    has_evidence = tuned.held_out is None or not tuned.at_bound
    return Precision(centre, blocks, jacobian, damping, report, has_evidence)


def _report_of(tuned: Tuned, groups: list[str]) -> dict[str, Any]:
    """The factors by the names of their layers, for ``meta``."""
    names = groups if len(tuned.tau) > 1 else ["all"]
    report: dict[str, Any] = {
        "prior_precision_factor": dict(zip(names, tuned.tau.tolist())),
        "noise_factor": tuned.c**-0.5,
    }
    if tuned.held_out is not None:
        report["held_out"] = tuned.held_out
    return report


def nearest_gaussian(precision: Precision) -> tuple[Precision, Tensor]:
    r"""The Gaussian nearest (KL) to the posterior of the linearised network, and its mean (dim,); from Laplace's.

    .. math:: \Lambda = D + \sum_n J_n^\top E_q[H_n] J_n, \qquad
        D (\mu - m) = \sum_n J_n^\top E_q[\nabla_f \log p(y_n \mid f_n)]

    with the prior's precision D and mean m. Each step of natural gradient goes half of the way, which does not
    oscillate where one row decides on its own leverage.

    Reference: The Variational Gaussian Approximation Revisited (Opper & Archambeau, 2009); Conjugate-Computation
    Variational Inference (Khan & Lin, 2017).
    """
    centre = precision.centre
    jacobian = cast(NetworkJacobian, precision.jacobian)
    blocks = precision.blocks
    x = centre.problem.x
    y = centre.problem.y
    likelihood = centre.problem.bnn.likelihood
    prior = prior_precision(jacobian)
    index = jacobian.index
    loc = centre.mode.clone()
    curvature = None
    for _ in range(30):
        f, cov = Linearized(jacobian, blocks, loc).output_moments(x)
        slope, expected = expected_derivatives(likelihood, f, cov, y, centre.values)
        gradient = torch.zeros_like(loc)
        gradient[index] = -prior.prec * (loc[index] - cast(Tensor, prior.mean))
        for rows, row_slopes in zip(x.split(MANY), slope.to(f).split(MANY)):
            pull = torch.func.vjp(lambda z: jacobian.output(z, rows), jacobian.mode[index])[1]  # noqa: B023
            gradient[index] += pull(row_slopes)[0].detach()
        step = mode_of_linear(jacobian, blocks, gradient) - jacobian.mode
        if float(step @ gradient) < 1e-3 * len(index):  # nats
            break
        curvature = expected if curvature is None else (curvature + expected) / 2
        loc = loc + step / 2
        root = symmetric_root(curvature).to(f)
        tau = loc.new_ones(1).double()
        blocks = ggn(jacobian, x, lambda _, rows: root[rows], "full", prior.prec).blocks(tau, 1.0)  # noqa: B023
    return replace(
        precision,
        centre=replace(centre, gradient=gradient),
        blocks=blocks,
    ), loc


def expected_derivatives(
    likelihood: Likelihood,
    f: Tensor,
    cov: Tensor,
    y: Tensor,
    values: Mapping[str, Tensor],
) -> tuple[Tensor, Tensor]:
    """Of the log density of each row, gradient in f (N, out) and curvature (N, out, out): means over f ~ N(f, cov).

    By 32 to 512 draws, more for fewer rows, the same at every call: each and its mirror image.
    """
    num = max(16, min(256, 2**20 // (f.numel() * f.shape[1])))
    size = max(1, CHUNK_SCALARS // (8 * num * f.shape[1] ** 2))
    random = generator(0)
    slopes: list[Tensor] = []
    curvatures: list[Tensor] = []
    for mean, var, target in zip(f.double().split(size), cov.double().split(size), y.split(size)):
        noise = torch.randn(
            num,
            *mean.shape,
            1,
            generator=random,
        ).to(mean)
        away = (symmetric_root(var) @ noise).squeeze(-1)
        draws = torch.cat([mean + away, mean - away]).requires_grad_()
        with torch.enable_grad():
            slope = torch.autograd.grad(likelihood.log_prob(draws, target, values).sum(), draws)[0]
        again = target.repeat(2 * num, *[1] * (target.dim() - 1))
        root = likelihood.curvature_root(draws.detach().flatten(0, 1), again, values).reshape(
            *draws.shape, -1
        )
        slopes.append(slope.mean(0))
        curvatures.append((root @ root.mT).mean(0))
    return torch.cat(slopes), torch.cat(curvatures)


def symmetric_root(matrix: Tensor) -> Tensor:
    """Of positive semidefinite matrices (…, p, p)."""
    values, basis = torch.linalg.eigh(matrix)
    return (basis * values.clamp_min(0).sqrt().unsqueeze(-2)) @ basis.mT


def _hessian_block(
    centre: Centre,
    names: Sequence[str],
    structure: str,
    remarks: list[Finding | str],
) -> tuple[Block, float]:
    """Exact Hessian in the sites, damped by as much as it takes; the amount, and a remark if it had to be."""
    sites = [site for site in centre.density.sites if site.name in names]
    index = torch.cat(
        [
            torch.arange(
                site.start,
                site.stop,
                device=centre.mode.device,
            )
            for site in sites
        ]
    )
    if structure == "diag":
        diagonal = check_finite(hessian_diagonal(centre.density, centre.mode, index))
        values = diagonal
        positive = bool((diagonal > 0).all())
    else:
        matrix = check_finite(hessian(centre.density, centre.mode, index))
        factor, info = torch.linalg.cholesky_ex(matrix)
        positive = not int(info)
        if not positive:
            values = torch.linalg.eigvalsh(matrix)
    added = 0.0
    if not positive:
        lowest = float(values.min())
        highest = float(values.max())
        # the worst direction has its own curvature with the right sign, or what float64 can resolve
        added = -lowest + max(abs(lowest), 1e-8 * abs(highest), 1e-12)
        remarks.append(Finding("hessian_indefinite", {"lowest": lowest, "added": added}))
    if structure == "diag":
        return DiagBlock(index, diagonal + added), added
    if added:
        matrix.diagonal().add_(added)
        factor = torch.linalg.cholesky(matrix)
    return DenseBlock(index, factor), added


@torch.no_grad()
def _residual(centre: Centre) -> tuple[float, int] | None:
    """Σ r²/σ² and the number of residuals, where Gaussian noise is learned and hence tuned too."""
    problem = centre.problem
    if SCALE not in centre.points or not problem.bnn.likelihood.targets.normal:
        return None
    f = forward_in_parts(problem.bnn, centre.values, problem.x)
    loc, scale = problem.bnn.likelihood.loc_scale(f, centre.points)
    return float(((problem.y - loc) / scale).double().square().sum()), loc.numel()


def tuned_model(model: BNN, names: Iterable[str], factors: Mapping[str, float]) -> BNN:
    """The model with the prior precision of these sites multiplied, by layer or, as ``"all"``, alike."""
    model = copy.copy(model)
    model.priors = dict(model.priors)
    for name in names:
        if name.startswith(NET):
            factor = factors.get(name.rpartition(".")[0], factors.get("all", 1.0))
            model.priors[name] = with_precision(name, model.priors[name], factor)
    return model


def _tuned_centre(centre: Centre, groups: list[str], tuned: Tuned) -> Centre:
    """The same mode under the tuned prior and noise."""
    problem = centre.problem
    factors = dict(zip(groups, tuned.tau.expand(len(groups)).tolist()))
    model = tuned_model(problem.bnn, centre.names, factors)
    points = dict(centre.points)
    if SCALE in points:
        points[SCALE] = points[SCALE] * tuned.c**-0.5
    program = partial(model.pyro_model, num_data=problem.num_data)
    free = Density(
        program,
        problem.density.args,
        points="free",
        values=points,
    )
    held_density = Density(
        program,
        problem.density.args,
        points="held",
        values=points,
    )
    # the gradient says whether the mode was found for the model it was searched in
    return replace(
        centre,
        problem=replace(problem, model=model, density=free),
        density=held_density,
        points=points,
    )


def record(
    precision: Precision,
    remarks: list[Finding | str],
    centre_given: bool,
    exact: bool,
) -> dict[str, Any]:
    """What the fit says about itself; adds to the remarks that the centre is not a mode.

    Of the ``exact`` mode of the linear model only the noise is not: it is that of the residuals at the centre, whose
    sum of squares the last step lowers by its squared length, in noise variances.
    """
    gradient = precision.centre.gradient
    blocks = precision.blocks
    norm = float(gradient[torch.cat([block.index for block in blocks])].double().norm())
    parts = [
        block.root(gradient[block.index].unsqueeze(0)).double().square().sum() for block in blocks
    ]
    distance = float(torch.stack(parts).sum().sqrt())
    size = sum(len(block.index) for block in blocks)
    # the mode counts as found when Newton's step is shorter than .2 posterior sds per √dimension
    small = exact and distance**2 <= 0.1 * len(precision.centre.problem.x)
    if not small and not distance <= 0.2 * math.sqrt(size):
        remarks.append(
            Finding(
                "not_a_mode",
                {
                    "gradient_norm": norm,
                    "distance": distance,
                    "given": centre_given,
                },
            )
        )
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
    draws_of_site = next(iter(draws.values()))
    if draws_of_site.shape[1] > 1 and not bool(moved.all()):
        lost = {
            "count": int((~moved).sum()),
            "total": len(moved),
            "dtype": str(draws_of_site.dtype).removeprefix("torch."),
        }
        remarks.append(Finding("draws_unresolved", lost))
