"""Shares, scores and other numbers between two bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.nn import PyroParam
from torch import Tensor

from pyrobnn.core.checks import check_number
from pyrobnn.likelihoods.numbers import Numbers, Response, by_scipy


class Beta(Numbers):
    r"""Numbers between two bounds: a beta distribution with mean :math:`\mu = \mathrm{sigmoid}(f(x))` of the way.

    .. math:: \frac{y - \mathrm{low}}{\mathrm{high} - \mathrm{low}} \sim \mathrm{Beta}(\mu \phi, (1 - \mu) \phi)

    Args:
        precision: φ; the variance is :math:`\mu (1 - \mu) / (\phi + 1)` of the squared width. A number is fixed;
            ``"learned"`` is a point parameter; a distribution on positive numbers is a prior, and φ is inferred as the
            site ``likelihood.precision``. Shape () or (out,).
        low, high: the bounds, which y does not reach.

    Reference: Beta regression for modelling rates and proportions (Ferrari & Cribari-Neto, 2004).

    Example:
        >>> Beta(10.0, low=0.0, high=100.0)
        Beta(fixed precision, 0 to 100)
    """

    task = "beta"

    def __init__(
        self,
        precision: float | Tensor | str | PyroParam | TorchDistributionMixin = "learned",
        *,
        low: float = 0.0,
        high: float = 1.0,
    ):
        super().__init__()
        self.low = check_number("low", low)
        self.high = check_number("high", high, above=self.low)
        self.declare("precision", precision)

    def value_error(self, y: Tensor) -> str | None:
        wrong = y[(y <= self.low) | (y >= self.high)]
        if not len(wrong):
            return None
        return (
            f"'y' must lie between {self.low:g} and {self.high:g} for Beta and reach neither, got {wrong[0]:g}: pass "
            "wider bounds, or bring (y - low) / (high - low) inside by (y (N - 1) + 1/2) / N"
        )

    def _share(self, y: Tensor) -> Tensor:
        return (y - self.low) / (self.high - self.low)

    def _counts(self, f: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        precision = self.own("precision", f, params)
        return f.sigmoid() * precision, (-f).sigmoid() * precision

    def distribution(self, f: Tensor, params: Mapping[str, Tensor]) -> TorchDistributionMixin:
        return Response(self, f, params, f.shape[-1])

    def log_prob(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        a, b = self._counts(f, params)
        share = self._share(y)
        norm = torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(self.own("precision", f, params))
        each = (a - 1) * share.log() + (b - 1) * torch.log1p(-share) - norm - math.log(self.high - self.low)
        return each.sum(-1)

    def draw(self, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        a, b = self._counts(f.double(), params)
        eps = torch.finfo(f.dtype).eps
        share = torch.distributions.Beta(a, b).sample().clamp(eps, 1 - eps)
        return (self.low + (self.high - self.low) * share).to(f.dtype)

    def mean_variance(self, f: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        width, mean = self.high - self.low, f.sigmoid()
        var = mean * (-f).sigmoid() / (1 + self.own("precision", f, params))
        return self.low + width * mean, width**2 * var

    def cdf(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        below = by_scipy("betainc", *self._counts(f.double(), params), self._share(y).clamp(0.0, 1.0))
        return below, below

    def fisher_root(self, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        r""":math:`H = \phi^2 \mu^2 (1 - \mu)^2 \left(\psi'(\mu \phi) + \psi'((1 - \mu) \phi)\right)`, per output."""
        a, b = self._counts(f.double(), params)  # ψ' of a mean near a bound is beyond float32
        slope = a * b / (a + b)
        return torch.diag_embed(slope * (torch.polygamma(1, a) + torch.polygamma(1, b)).sqrt()).to(f.dtype)

    def __repr__(self) -> str:
        return f"Beta({self.noise['precision']} precision, {self.low:g} to {self.high:g})"
