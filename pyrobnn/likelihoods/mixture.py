"""Mixture-density networks: numbers with several modes, or noise of any form."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor

from pyrobnn.core.checks import check_count, check_number
from pyrobnn.likelihoods.numbers import Numbers, Response

#: nodes of the Gauss-Hermite rule with which the Fisher information of each component is integrated
_NUM_NODES = 40


class MixtureDensity(Numbers):
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
        MixtureDensity(3 components, min_scale=0.001)
    """

    task = "mixture_density"
    head_names = "a share, a mean and a scale of every component"

    def __init__(self, num_components: int = 3, *, min_scale: float = 1e-3):
        super().__init__()
        self.num_components = check_count("num_components", num_components)
        self.min_scale = check_number("min_scale", min_scale, above=0)
        self.heads = 3 * self.num_components

    def units(self, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor] | None:
        return mean, scale

    def parts(self, f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log shares, means and scales of the components, each (\\*batch, N, out, K)."""
        logits, loc, raw = f.unflatten(-1, (3, -1, self.num_components)).unbind(-3)
        return logits.log_softmax(-1), loc, F.softplus(raw) + self.min_scale

    def distribution(self, f: Tensor, params: Mapping[str, Tensor]) -> TorchDistributionMixin:
        return Response(self, f, params, f.shape[-1] // self.heads)

    def log_prob(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        share, loc, scale = self.parts(f)
        return torch.logsumexp(share + _log_normal(y.unsqueeze(-1), loc, scale), -1).sum(-1)

    def draw(self, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        share, loc, scale = self.parts(f)
        gumbel = -torch.empty_like(share).exponential_().log()
        chosen = (share + gumbel).argmax(-1, keepdim=True)
        loc, scale = (value.gather(-1, chosen).squeeze(-1) for value in (loc, scale))
        return loc + scale * torch.randn_like(loc)

    def mean_variance(self, f: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        share, loc, scale = self.parts(f)
        share = share.exp()
        mean = (share * loc).sum(-1)
        return mean, (share * (scale.square() + (loc - mean.unsqueeze(-1)).square())).sum(-1)

    def cdf(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        share, loc, scale = self.parts(f.double())
        below = (share.exp() * torch.special.ndtr((y.unsqueeze(-1) - loc) / scale)).sum(-1)
        return below, below

    def fisher_root(self, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        """By quadrature, output by output: a square root of the mean square of the score."""
        share, loc, scale = self.parts(f.double())
        slope = f.double().unflatten(-1, (3, -1, self.num_components))[..., 2, :, :].sigmoid()
        nodes, weights = (torch.tensor(v).to(loc) for v in np.polynomial.hermite_e.hermegauss(_NUM_NODES))
        y = (loc.unsqueeze(-1) + scale.unsqueeze(-1) * nodes).flatten(-2).unsqueeze(-1)  # (N, out, K·node, 1)
        weight = (share.exp().unsqueeze(-1) * weights / math.sqrt(2 * math.pi)).flatten(-2)
        share, loc, scale, slope = (value.unsqueeze(-2) for value in (share, loc, scale, slope))
        part = (share + _log_normal(y, loc, scale)).softmax(-1)
        z = (y - loc) / scale
        score = torch.cat([part - share.exp(), part * z / scale, part * (z.square() - 1) * slope / scale], -1)
        fisher = torch.einsum("noq,noqa,noqb->noab", weight, score, score)
        values, vectors = torch.linalg.eigh(fisher)
        root = vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2)  # (N, out, 3K, 3K)
        num, out, width = root.shape[:3]
        whole = root.new_zeros(num, 3, out, self.num_components, out, width)
        for output in range(out):
            whole[:, :, output, :, output] = root[:, output].unflatten(1, (3, -1))
        return whole.reshape(num, out * width, out * width).to(f.dtype)

    def __repr__(self) -> str:
        return f"MixtureDensity({self.num_components} components, min_scale={self.min_scale:g})"


def _log_normal(y: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    return -0.5 * ((y - loc) / scale).square() - scale.log() - 0.5 * math.log(2 * math.pi)
