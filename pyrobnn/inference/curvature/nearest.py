"""The Gaussian nearest to the posterior of the linearised network, by steps of natural gradient from Laplace's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from pyrobnn.core.matrices import symmetric_root
from pyrobnn.core.seeding import generator
from pyrobnn.inference.curvature.gaussian import Block
from pyrobnn.inference.curvature.ggn import ggn
from pyrobnn.inference.curvature.jacobian import CHUNK_SCALARS, NetworkJacobian
from pyrobnn.inference.curvature.linearized import Linearized, mode_of_linear
from pyrobnn.inference.curvature.mode import MANY, Centre
from pyrobnn.inference.curvature.precision import Precision
from pyrobnn.inference.curvature.prior import PriorPrecision, prior_precision
from pyrobnn.model.likelihoods.base import Likelihood

#: steps of natural gradient at most, and the rise of the bound, in nats per weight, below which they end
_MAX_STEPS = 30
_SMALLEST_RISE = 1e-3


def nearest_gaussian(precision: Precision) -> tuple[Precision, Tensor]:
    r"""The Gaussian nearest (KL) to the posterior of the linearised network, and its mean (dim,); from Laplace's.

    .. math:: \Lambda = D + \sum_n J_n^\top E_q[H_n] J_n, \qquad
        D (\mu - m) = \sum_n J_n^\top E_q[\nabla_f \log p(y_n \mid f_n)]

    with the prior's precision D and mean m, and the curvature :math:`H_n` of a row's log density at its output. Each
    step of natural gradient goes half of the way, which does not oscillate where one row decides on its own leverage.
    The steps end where the next would raise the bound by less than :math:`10^{-3}` nats per weight, or after 30.

    Args:
        precision: Laplace's, of structure ``"full"``.

    Returns:
        ``precision`` with the blocks of the nearest Gaussian, and for the gradient at its centre that of the bound at
        the last step; and the mean of the Gaussian, with the other coordinates as at the mode.

    Reference: The Variational Gaussian Approximation Revisited (Opper & Archambeau, 2009); Conjugate-Computation
    Variational Inference (Khan & Lin, 2017).
    """
    centre = precision.centre
    jacobian = cast(NetworkJacobian, precision.jacobian)
    model = _LinearModel(centre, jacobian, prior_precision(jacobian))
    blocks = precision.blocks
    mean = centre.mode.clone()
    curvature = None
    for _ in range(_MAX_STEPS):
        mean_slope, mean_curvature = model.expected(blocks, mean)
        gradient = model.gradient(mean, mean_slope)
        step = mode_of_linear(jacobian, blocks, gradient) - jacobian.mode
        if float(step @ gradient) < _SMALLEST_RISE * len(jacobian.index):
            break
        # the first step takes the whole curvature: Laplace's is not an average to start from
        curvature = mean_curvature if curvature is None else (curvature + mean_curvature) / 2
        mean = mean + step / 2
        blocks = model.blocks(symmetric_root(curvature).to(mean_slope))
    # the bound's gradient at the last step: newton_distance then says how far the search ended
    centre = replace(centre, gradient=gradient)
    return replace(precision, centre=centre, blocks=blocks), mean


@dataclass(frozen=True, eq=False)
class _LinearModel:
    """The network linearised at a centre, with the data and the prior that a Gaussian over its weights answers to."""

    centre: Centre
    jacobian: NetworkJacobian
    prior: PriorPrecision

    def expected(self, blocks: Sequence[Block], mean: Tensor) -> tuple[Tensor, Tensor]:
        """Mean gradient (N, out), in the type of the output, and mean curvature (N, out, out) under a Gaussian."""
        problem = self.centre.problem
        f, cov = Linearized(self.jacobian, blocks, mean).output_moments(problem.x)
        slope, curvature = expected_derivatives(
            self.centre.bnn.likelihood, f, cov, problem.y, self.centre.values
        )
        return slope.to(f), curvature

    def gradient(self, mean: Tensor, mean_slope: Tensor) -> Tensor:
        """The gradient (dim,) of the bound in the mean: the prior's pull and, by row, that of the data."""
        jacobian = self.jacobian
        index = jacobian.index
        gradient = torch.zeros_like(mean)
        gradient[index] = -self.prior.prec * (mean[index] - cast(Tensor, self.prior.mean))
        x = self.centre.problem.x
        for rows, row_slopes in zip(x.split(MANY), mean_slope.split(MANY)):
            pull = torch.func.vjp(lambda z: jacobian.output(z, rows), jacobian.mode[index])[1]  # noqa: B023
            gradient[index] += pull(row_slopes)[0].detach()
        return gradient

    def blocks(self, root: Tensor) -> list[Block]:
        """The Gaussian of the precision to which rows add their curvature, by its ``root`` (N, out, out)."""
        x = self.centre.problem.x
        matrix = ggn(self.jacobian, x, lambda _, rows: root[rows], "full", self.prior.prec)
        return matrix.blocks(root.new_ones(1).double(), 1.0)


def expected_derivatives(
    likelihood: Likelihood,
    f: Tensor,
    cov: Tensor,
    y: Tensor,
    values: Mapping[str, Tensor],
) -> tuple[Tensor, Tensor]:
    """Gradient in f (N, out) and curvature (N, out, out) of each row's log density: means over f ~ N(f, cov).

    By 32 to 512 draws, more for fewer rows, the same at every call: each and its mirror image.
    """
    num_pairs = max(16, min(256, 2**20 // (f.numel() * f.shape[1])))
    size = max(1, CHUNK_SCALARS // (8 * num_pairs * f.shape[1] ** 2))  # rows at once
    random = generator(0)
    slopes: list[Tensor] = []
    curvatures: list[Tensor] = []
    for mean, var, target in zip(f.double().split(size), cov.double().split(size), y.split(size)):
        noise = torch.randn(
            num_pairs,
            *mean.shape,
            1,
            generator=random,
        ).to(mean)
        offset = (symmetric_root(var) @ noise).squeeze(-1)
        draws = torch.cat([mean + offset, mean - offset])
        slope, curvature = _mean_derivatives(likelihood, draws, target, values)
        slopes.append(slope)
        curvatures.append(curvature)
    return torch.cat(slopes), torch.cat(curvatures)


def _mean_derivatives(
    likelihood: Likelihood,
    draws: Tensor,
    y: Tensor,
    values: Mapping[str, Tensor],
) -> tuple[Tensor, Tensor]:
    """Gradient (N, out) and curvature (N, out, out), averaged over draws (draw, N, out) of the outputs."""
    draws = draws.detach().requires_grad_()
    with torch.enable_grad():
        slope = torch.autograd.grad(likelihood.log_prob(draws, y, values).sum(), draws)[0]
    repeated = y.repeat(len(draws), *[1] * (y.dim() - 1))
    root = likelihood.curvature_root(draws.detach().flatten(0, 1), repeated, values)
    root = root.reshape(*draws.shape, -1)
    return slope.mean(0), (root @ root.mT).mean(0)
