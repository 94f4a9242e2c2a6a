"""Noise of several outputs that depend on each other."""

from __future__ import annotations

import math

import pyro.distributions as dist
import torch
import torch.distributions.constraints as constraints
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor

from pyrobnn.core.checks import check_number
from pyrobnn.model.likelihoods.base import Likelihood, Pair, Sampled, Targets
from pyrobnn.model.likelihoods.parameters import SITE, Parameter, Params

_CORRELATION = f"{SITE}correlation"


class CorrelatedGaussian(Likelihood):
    r"""Normal noise of several outputs with one covariance.

    .. math:: y \sim N(f(x), \; S C C^\top S), \qquad S = \mathrm{diag}(\sigma)

    C is the Cholesky factor of the correlations between the outputs' errors, the site ``likelihood.correlation``:
    learned, beginning at independence, where the scale is fixed or learned; inferred under an LKJ prior where the
    scale is inferred.

    Args:
        scale: σ in the units of ``y``, one of each output: a tensor (out,), a prior of that shape,
            ``dist.HalfNormal(torch.ones(2))``, or ``pb.likelihoods.learned(init=torch.ones(2))``.
        concentration: η of the LKJ prior: one makes all correlations equally likely, larger ones prefer small ones.

    Raises:
        ValueError: a scale that is not positive, or has not one value of each of two or more outputs.

    Caveat: quantiles and intervals of predictions are those of each output by itself; draws have the correlations.

    Reference: Generating random correlation matrices based on vines and extended onion method (Lewandowski et al.,
    2009).

    Example:
        >>> import pyro.distributions as dist
        >>> CorrelatedGaussian(dist.HalfNormal(torch.ones(2)))
        CorrelatedGaussian(inferred scale, inferred correlation)
    """

    task = "correlated_gaussian"
    targets = Targets(linear_mean=True, measured="affine")

    def __init__(self, scale: Parameter, *, concentration: float = 1.0):
        super().__init__()
        eta = check_number(
            "concentration",
            concentration,
            above=0,
        )
        self.own.declare("scale", scale)
        shape = self.own.shapes["scale"]
        if len(shape) != 1 or shape[0] < 2:
            raise ValueError(
                f"'scale' of CorrelatedGaussian has shape {tuple(shape)}: give one value of each of two or more "
                "outputs, as learned(init=torch.ones(2)) or dist.HalfNormal(torch.ones(2))"
            )
        num = shape[0]
        if self.own.priors:
            self.own.priors[_CORRELATION] = dist.LKJCholesky(num, torch.tensor(eta))
        else:
            self.own.points[_CORRELATION] = (torch.eye(num), constraints.corr_cholesky)

    def _scale(self, f: Tensor, params: Params) -> Tensor:
        return self.own.value("scale", f, params).expand(f.shape)

    def distribution(self, f: Tensor, params: Params) -> TorchDistributionMixin:
        return Sampled(self, f, params, f.shape[-1])

    def log_prob(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        scale = self._scale(f, params)
        factor = params[_CORRELATION].unsqueeze(-3)
        error = _whitened(factor, (y - f) / scale)
        log_volume = scale.log() + factor.diagonal(dim1=-2, dim2=-1).log()
        return (-0.5 * error.square() - log_volume - 0.5 * math.log(2 * math.pi)).sum(-1)

    def draw(self, f: Tensor, params: Params) -> Tensor:
        """Values of y (\\*batch, N, out) around f."""
        noise = torch.randn_like(f).unsqueeze(-1)
        return f + self._scale(f, params) * (params[_CORRELATION].unsqueeze(-3) @ noise).squeeze(-1)

    def mean_variance(self, f: Tensor, params: Params) -> Pair:
        return f, self._scale(f, params).square()

    def cdf(self, f: Tensor, y: Tensor, params: Params) -> Pair:
        below = torch.special.ndtr((y - f.double()) / self._scale(f.double(), params))
        return below, below

    def fisher_root(self, f: Tensor, params: Params) -> Tensor:
        r""":math:`H = (S C C^\top S)^{-1}`."""
        factor = params[_CORRELATION].expand(*f.shape, f.shape[-1])
        identity = torch.eye(
            f.shape[-1],
            dtype=f.dtype,
            device=f.device,
        )
        inverse = torch.linalg.solve_triangular(
            factor.mT,
            identity.expand_as(factor),
            upper=True,
        )
        return inverse / self._scale(f, params).unsqueeze(-1)


def _whitened(factor: Tensor, error: Tensor) -> Tensor:
    """Errors (…, out) times the inverse of a lower triangular factor (…, out, out), one output after the other."""
    columns: list[Tensor] = []
    for row in range(error.shape[-1]):
        known = sum(factor[..., row, place] * columns[place] for place in range(row))
        columns.append((error[..., row] - known) / factor[..., row, row])
    return torch.stack(columns, -1)
