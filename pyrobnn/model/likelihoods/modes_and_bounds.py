"""Numbers with several modes, and numbers between two bounds."""

from __future__ import annotations

import math

import numpy as np
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor

from pyrobnn.core.checks import check_count, check_number
from pyrobnn.model.likelihoods.base import Likelihood, Pair, Sampled, Targets
from pyrobnn.model.likelihoods.parameters import Parameter, Params
from pyrobnn.model.likelihoods.special_functions import by_scipy


class MixtureDensity(Likelihood):
    r"""K normal components whose shares, means and widths are functions of the input.

    .. math:: p(y \mid x) = \sum_k \pi_k(x)\, N(y \mid \mu_k(x), \sigma_k(x)^2)

    The network returns (N, 3·out·K): the logits of π, then the means, then ρ with
    :math:`\sigma = \mathrm{softplus}(\rho) + \sigma_{\min}`, each out · K values with the components of one output
    together. Outputs are independent given the network's.

    Args:
        num_components: K.
        min_scale: the smallest σ, in the units of ``y``; keeps the likelihood bounded.

    Its Fisher information has no closed form: Laplace takes it by a Gauss-Hermite rule of 40 nodes per component.

    Caveat: components are exchangeable; means, densities and quantiles are identified, single heads are not.

    Reference: Mixture density networks (Bishop, 1994).

    Example:
        >>> MixtureDensity(3)
        MixtureDensity(num_components=3, min_scale=0.001)
    """

    task = "mixture_density"

    def __init__(self, num_components: int = 3, *, min_scale: float = 1e-3):
        super().__init__()
        self.num_components = check_count("num_components", num_components)
        self.min_scale = check_number("min_scale", min_scale, above=0)
        self.targets = Targets(heads=3 * self.num_components, measured="affine")

    def distribution(self, f: Tensor, params: Params) -> TorchDistributionMixin:
        """Of each output a mixture over (\\*batch, N, out, K) components."""
        logits, loc, raw = f.unflatten(-1, (3, -1, self.num_components)).unbind(-3)
        components = dist.Normal(loc, F.softplus(raw) + self.min_scale)
        return dist.MixtureSameFamily(dist.Categorical(logits=logits), components).to_event(1)

    def cdf(self, f: Tensor, y: Tensor, params: Params) -> Pair:
        law = self.distribution(f.double(), params).base_dist
        normal = law.component_distribution
        share = law.mixture_distribution.probs
        below = (share * torch.special.ndtr((y.unsqueeze(-1) - normal.loc) / normal.scale)).sum(-1)
        return below, below

    def fisher_root(self, f: Tensor, params: Params) -> Tensor:
        """By quadrature, output by output: a square root of the mean square of the score."""
        law = self.distribution(f.double(), params).base_dist
        # normalised, as torch keeps them
        log_share = law.mixture_distribution.logits
        normal = law.component_distribution
        slope = f.double().unflatten(-1, (3, -1, self.num_components))[..., 2, :, :].sigmoid()
        fisher = _fisher_of_components(log_share, normal, slope)
        values, vectors = torch.linalg.eigh(fisher)
        root = vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2)
        return _in_order_of_heads(root).to(f.dtype)


def _fisher_of_components(
    log_share: Tensor, normal: torch.distributions.Normal, slope: Tensor
) -> Tensor:
    """The Fisher information of each output in its logits, means and ρ, (N, out, 3K, 3K), by Gauss-Hermite quadrature.

    Args:
        log_share, normal: the components of each output, (N, out, K).
        slope: the derivative of their scales in ρ.
    """
    nodes, weights = (torch.tensor(v).to(log_share) for v in np.polynomial.hermite_e.hermegauss(40))
    # (N, out, K·node)
    y = (normal.loc.unsqueeze(-1) + normal.scale.unsqueeze(-1) * nodes).flatten(-2)
    weight = (log_share.exp().unsqueeze(-1) * weights / math.sqrt(2 * math.pi)).flatten(-2)
    score = _score_of_components(log_share, normal, slope, y)
    return torch.einsum("noq,noqa,noqb->noab", weight, score, score)


def _in_order_of_heads(root: Tensor) -> Tensor:
    """The roots (N, out, 3K, 3K) of all outputs as one, (N, 3·out·K, 3·out·K), its rows in the order of the network's.

    The network returns the logits of all outputs, then their means, then their ρ.
    """
    num, out, width = root.shape[:3]
    whole = root.new_zeros(num, 3, out, width // 3, out, width)
    for output in range(out):
        whole[:, :, output, :, output] = root[:, output].unflatten(1, (3, -1))
    return whole.reshape(num, out * width, out * width)


def _score_of_components(
    log_share: Tensor,
    normal: torch.distributions.Normal,
    slope: Tensor,
    y: Tensor,
) -> Tensor:
    """Derivatives of the log density at ``y`` (N, out, q) in logits, means and ρ of the components: (N, out, q, 3K)."""
    log_share, loc, scale, slope = (
        v.unsqueeze(-2) for v in (log_share, normal.loc, normal.scale, slope)
    )
    log_joint = log_share + dist.Normal(loc, scale).log_prob(y.unsqueeze(-1))
    responsibility = log_joint.softmax(-1)
    z = (y.unsqueeze(-1) - loc) / scale
    by_logit = responsibility - log_share.exp()
    by_mean = responsibility * z / scale
    by_rho = responsibility * (z.square() - 1) * slope / scale
    return torch.cat([by_logit, by_mean, by_rho], -1)


class Beta(Likelihood):
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
        Beta(fixed precision, low=0.0, high=100.0)
    """

    task = "beta"

    def __init__(
        self,
        precision: Parameter = "learned",
        *,
        low: float = 0.0,
        high: float = 1.0,
    ):
        super().__init__()
        self.low = check_number("low", low)
        self.high = check_number("high", high, above=self.low)
        self.own.declare("precision", precision)

    def target(self, y: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        y = super().target(y, width, dtype)
        outside = y[(y <= self.low) | (y >= self.high)]
        if len(outside):
            raise ValueError(
                f"'y' must lie between {self.low:g} and {self.high:g} for Beta and reach neither, got {outside[0]:g}: "
                "pass wider bounds, or bring (y - low) / (high - low) inside by (y (N - 1) + 1/2) / N"
            )
        return y

    def _share(self, y: Tensor) -> Tensor:
        return (y - self.low) / (self.high - self.low)

    def _shape_parameters(self, f: Tensor, params: Params) -> Pair:
        """a and b of Beta(a, b) on the unit interval, (\\*batch, N, out) each."""
        precision = self.own.value("precision", f, params)
        return f.sigmoid() * precision, (-f).sigmoid() * precision

    def distribution(self, f: Tensor, params: Params) -> TorchDistributionMixin:
        return Sampled(self, f, params, f.shape[-1])

    def log_prob(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        a, b = self._shape_parameters(f, params)
        share = self._share(y)
        precision = self.own.value("precision", f, params)
        norm = torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(precision)
        log_kernel = (a - 1) * share.log() + (b - 1) * torch.log1p(-share)
        log_density = log_kernel - norm - math.log(self.high - self.low)
        return log_density.sum(-1)

    def draw(self, f: Tensor, params: Params) -> Tensor:
        """One datum for each output, in float64 until it is known to reach neither bound."""
        eps = torch.finfo(f.dtype).eps
        law = torch.distributions.Beta(*self._shape_parameters(f.double(), params))
        share = law.sample().clamp(eps, 1 - eps)
        return (self.low + (self.high - self.low) * share).to(f.dtype)

    def mean_variance(self, f: Tensor, params: Params) -> Pair:
        width = self.high - self.low
        mean = f.sigmoid()
        var = mean * (-f).sigmoid() / (1 + self.own.value("precision", f, params))
        return self.low + width * mean, width**2 * var

    def cdf(self, f: Tensor, y: Tensor, params: Params) -> Pair:
        a, b = self._shape_parameters(f.double(), params)
        below = by_scipy("betainc", a, b, self._share(y).clamp(0.0, 1.0))
        return below, below

    def fisher_root(self, f: Tensor, params: Params) -> Tensor:
        r""":math:`H = \phi^2 \mu^2 (1 - \mu)^2 \left(\psi'(\mu \phi) + \psi'((1 - \mu) \phi)\right)`, per output."""
        # ψ' of a mean near a bound is beyond float32
        a, b = self._shape_parameters(f.double(), params)
        slope = a * b / (a + b)
        root = slope * (torch.polygamma(1, a) + torch.polygamma(1, b)).sqrt()
        return torch.diag_embed(root).to(f.dtype)
