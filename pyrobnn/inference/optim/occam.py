"""The evidence of a mode, by which ends of a search are compared that are to stand for a whole posterior."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pyrobnn.core.checks import Refused
from pyrobnn.inference.fitting.batches import log_joints_in_parts
from pyrobnn.inference.fitting.problem import Problem
from pyrobnn.inference.fitting.program import rows_together
from pyrobnn.model import NET, Density

#: numbers of a Jacobian of all rows, and columns of a square matrix, up to which both cost little beside the search
MAX_NUMBERS = 4_000_000
MAX_COLUMNS = 1000
#: points times the cube of their parameters up to which their precisions are factorised as often as wanted
MAX_FACTORISED = 500_000_000
#: rows that show the scale of the noise where the Jacobian would be larger
MAX_SHOWN = 2000
#: of a precision in a direction: what is off its mode may have smaller ones
SMALLEST = 1e-6
#: draws of the prior that show its spread where its curvature does not
NUM_PRIOR_DRAWS = 101
#: of the precision that belongs to the prior's spread, below which a curvature does not show how wide the prior is
FLAT_SHARE = 0.01
#: of a normal distribution, the distance of its quartiles in standard deviations
NORMAL_QUARTILES = 1.349


def log_joints(problem: Problem, thetas: Tensor) -> Tensor:
    """Log joint of all data at points (point, dim), in unconstrained coordinates, (point,), float64."""
    return log_joints_in_parts(problem.density, problem.x, problem.y, thetas).double()


def log_evidences(problem: Problem, thetas: Tensor) -> Tensor:
    r"""Laplace's estimate of the evidence around points (point, dim) of a BNN, (point,), float64.

    .. math:: \log p(y, z) + \tfrac{D}{2} \log 2\pi - \tfrac12 \log\det\Lambda(z)

    with the Gauss-Newton matrix of the weights, the curvature of their prior on its diagonal, and the exact curvature
    of what else is inferred. A prior without curvature, as Laplace's, counts as a normal one of the same quartiles.
    Where the Jacobian is large, every direction that the data can tell counts as if it had the curvature of a row's
    output; where the likelihood's is not known, this is the log joint.
    """
    values = log_joints(problem, thetas)
    num_outputs = problem.bnn.forward(problem.density.initial_points, problem.x[:1]).shape[1]
    rank = min(problem.num_rows * num_outputs, problem.density.dim)
    size = problem.num_rows * num_outputs * problem.density.dim
    small = size <= MAX_NUMBERS and rank <= MAX_COLUMNS
    try:
        if small:
            at_once = max(1, MAX_NUMBERS // size)
            log_det = torch.func.vmap(partial(_log_det, problem), chunk_size=at_once)
            log_dets = log_det(thetas, _prior_precisions(problem, thetas))
        else:
            log_dets = torch.stack([_rough_log_det(problem, theta, rank) for theta in thetas])
    except (Refused, RuntimeError):
        # no Fisher information, no second derivative, or no rule for batches
        return values
    return values + 0.5 * problem.density.dim * math.log(2 * math.pi) - 0.5 * log_dets.detach()


@dataclass(frozen=True, eq=False)
class Units:
    """Of points (point, dim) of a BNN the units in which its posterior is as wide in all directions, by Gauss-Newton.

    The rows of the Jacobian are taken anew at every call; the precisions of the prior and of the noise, which hardly
    change in unconstrained coordinates, are those where the points began.

    Attributes: ``problem``; ``prior_precisions`` (point, weight), float64; ``noise_precisions`` (point, noise, noise),
        float64, positive definite.
    """

    problem: Problem
    prior_precisions: Tensor
    noise_precisions: Tensor

    @classmethod
    def around(cls, problem: Problem, thetas: Tensor) -> Units | None:
        """Those around points; None where they take much, or the likelihood's curvature is not known.

        They are taken row by row, which a net has not whose rows depend on each other.
        """
        num_points, dim = thetas.shape
        if rows_together(problem.bnn, problem.x):
            return None
        num_outputs = problem.bnn.forward(problem.density.initial_points, problem.x[:1]).shape[1]
        if problem.num_rows * num_outputs * dim > MAX_NUMBERS:
            return None
        if num_points * dim**3 > MAX_FACTORISED:
            return None
        noise = (~_of_weights(problem.density)).nonzero().flatten()
        try:
            curvatures = torch.func.vmap(
                lambda theta: _noise_curvature(problem.density, theta, noise)
            )(thetas)
            # a direction in which the curvature is negative counts with the opposite sign
            values, basis = torch.linalg.eigh(curvatures.detach().nan_to_num())
            values = values.abs().clamp_min(SMALLEST).unsqueeze(1)
            units = cls(problem, _prior_precisions(problem, thetas), (basis * values) @ basis.mT)
            units.roots(thetas[:1], slice(0, 1))
        except (Refused, RuntimeError):
            return None
        return units

    def roots(self, thetas: Tensor, which: slice = slice(None)) -> Tensor:
        """Roots R (point, dim, dim) of the covariances at points: rows of standard deviations u become steps u R.

        Where a precision is not finite it is the identity. ``which`` of the points these are.
        """
        size = self.problem.num_rows * thetas.shape[1]
        precisions = torch.func.vmap(
            partial(_precision, self.problem), chunk_size=max(1, MAX_NUMBERS // size)
        )(thetas, self.prior_precisions[which], self.noise_precisions[which]).detach()
        identity = torch.eye(thetas.shape[1]).to(precisions)
        precisions[~precisions.isfinite().all(-1).all(-1)] = identity
        factors, failures = torch.linalg.cholesky_ex(precisions)
        factors[failures > 0] = identity
        return torch.linalg.solve_triangular(
            factors,
            identity,
            upper=False,
        )


def _of_weights(density: Density) -> Tensor:
    """Which coordinates (dim,) are the net's weights; the others are the noise's."""
    weights = torch.zeros(
        density.dim,
        dtype=torch.bool,
        device=density.device,
    )
    for site in density.sites:
        weights[site.start : site.stop] = site.name.startswith(NET)
    return weights


def _prior_precisions(problem: Problem, thetas: Tensor) -> Tensor:
    """Of points (point, dim) the precisions (point, weight) of the weights' prior, float64.

    They are its curvatures; where it has none at a point, the precision of its spread.
    """
    weights = _of_weights(problem.density)
    diagonal = torch.func.vmap(partial(_row_sums, _log_prior(problem)))
    curvatures = -diagonal(thetas)[:, weights].double()
    if bool((curvatures > SMALLEST).all()):
        return curvatures
    of_spread = weight_spreads(problem.density)[weights].clamp_min(math.sqrt(SMALLEST)).pow(-2)
    return torch.where(curvatures < FLAT_SHARE * of_spread, of_spread, curvatures)


def weight_spreads(density: Density) -> Tensor:
    """The spread of each weight under its prior, in standard deviations, by quartiles; zero of the noise (dim,)."""
    draws = density.sample_prior(NUM_PRIOR_DRAWS, seed=0).double()
    lower, upper = draws.quantile(torch.tensor([0.25, 0.75]).to(draws), 0)
    spreads = (upper - lower) / NORMAL_QUARTILES
    return torch.where(_of_weights(density), spreads, 0.0)


def _log_det(
    problem: Problem,
    theta: Tensor,
    prior_precision: Tensor,
) -> Tensor:
    """log det of the precision at ``theta`` (dim,), with that of the weights' prior, (weight,)."""
    density = problem.density
    weights = _of_weights(density)
    rows = _rows(problem, theta)[:, weights] / prior_precision.sqrt()
    gram = rows @ rows.mT if len(rows) < rows.shape[1] else rows.mT @ rows
    eigenvalues = torch.linalg.eigvalsh(gram).clamp_min(0.0)
    total = prior_precision.log().sum() + eigenvalues.log1p().sum()
    if not bool(weights.all()):
        curvature = _noise_curvature(density, theta, (~weights).nonzero().flatten())
        total = total + torch.linalg.eigvalsh(curvature).clamp_min(SMALLEST).log().sum()
    return total


def _noise_curvature(density: Density, theta: Tensor, index: Tensor) -> Tensor:
    """The exact curvature of minus the log joint in the coordinates ``index`` (noise,) of the noise, float64."""
    if not len(index):
        # a derivative in no direction at all ends the process where it passes a batch-norm layer
        return theta.new_zeros(0, 0, dtype=torch.float64)

    def log_joint(noise: Tensor) -> Tensor:
        return density.log_joint(theta.index_copy(0, index, noise))

    return -torch.func.jacrev(torch.func.grad(log_joint))(theta[index]).double()


def _precision(
    problem: Problem,
    theta: Tensor,
    prior_precision: Tensor,
    noise_precision: Tensor,
) -> Tensor:
    """The precision (dim, dim) at ``theta`` (dim,), given those of the weights' prior, (weight,), and of the noise."""
    weights = _of_weights(problem.density)
    index = weights.nonzero().flatten()
    rows = _rows(problem, theta)[:, index]
    of_weights = rows.mT @ rows + torch.diag(prior_precision)
    # the blocks side by side, then in the order of the flat vector
    place = torch.cat([index, (~weights).nonzero().flatten()]).argsort()
    return torch.block_diag(of_weights, noise_precision)[place][:, place]


def _rough_log_det(problem: Problem, theta: Tensor, rank: int) -> Tensor:
    """As :func:`_log_det` but for a constant, with the curvature of a row's output in ``rank`` directions."""
    values = problem.density.initial_points | problem.density.constrain(theta)
    with torch.no_grad():
        outputs = problem.bnn.forward(values, problem.x[:MAX_SHOWN])
        roots = problem.bnn.likelihood.fisher_root(outputs, values).double()
    return rank * roots[:, 0].square().sum(-1).log().mean()


def _rows(problem: Problem, theta: Tensor) -> Tensor:
    """A square root (row, dim) of the Gauss-Newton matrix of the log likelihood, float64."""
    density = problem.density
    model = problem.bnn

    def output(z: Tensor, x: Tensor) -> Tensor:
        return model.forward(density.initial_points | density.constrain(z), x[None])[0]

    values = density.initial_points | density.constrain(theta)
    with torch.no_grad():
        roots = model.likelihood.fisher_root(model.forward(values, problem.x), values)
        slopes = torch.func.vmap(torch.func.jacrev(output), (None, 0))(theta, problem.x)
        return torch.einsum("nwd,nwk->nkd", slopes, roots).flatten(0, 1).double()


def _log_prior(problem: Problem) -> Callable[[Tensor], Tensor]:
    """Log prior with the Jacobian, as a function of z (dim,), float64."""
    density = problem.density

    def log_prior(z: Tensor) -> Tensor:
        prior, _ = density.log_parts(z, problem.x[:1], problem.y[:1])
        return prior + density.log_jacobian(z).double()

    return log_prior


def _row_sums(function: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
    """Sums of the rows of a Hessian (dim, dim): its diagonal where it has nothing else, as of independent weights."""
    slope = torch.func.grad(function)
    return torch.func.grad(lambda z: slope(z).sum())(theta)
