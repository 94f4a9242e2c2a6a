"""What a normal network output says of y, and what the data can tell of an output."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pyrobnn.core.seeding import generator
from pyrobnn.likelihoods.base import Likelihood


def identified(likelihood: Likelihood, f: Tensor) -> Tensor:
    """What of ``f`` the data can tell: of logits of classes all but their mean, which leaves probabilities alone."""
    return f - f.mean(-1, keepdim=True) if likelihood.task == "categorical" else f


def log_predictive(
    likelihood: Likelihood, f: Tensor, cov: Tensor, y: Tensor, params: Mapping[str, Tensor]
) -> Tensor:
    """Log density of ``y`` where the network output is normal, (N,).

    In closed form for normal y, with the noise at the mean of f; of classes by the probit approximation of MacKay
    (1992), which drops the correlations of logits; otherwise by draws of f.

    Args:
        f: means (N, width). cov: covariances (N, width, width). y: targets as :meth:`Likelihood.target` gives them.
    """
    if likelihood.targets.normal:
        loc, scale = likelihood.loc_scale(f, params)
        var = cov.diagonal(dim1=1, dim2=2).double()[:, : loc.shape[1]]
        total = (var + scale.double().square()).sqrt()
        return torch.distributions.Normal(loc.double(), total).log_prob(y.double()).sum(-1)
    if likelihood.task in ("categorical", "bernoulli"):
        var = cov.diagonal(dim1=1, dim2=2).double()
        return likelihood.log_prob(f / (1 + math.pi / 8 * var).sqrt().to(f), y, params).double()
    f, cov = f.double(), cov.double()
    values, vectors = torch.linalg.eigh(cov)  # singular where fewer data than outputs tell
    root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    noise = torch.randn(256, 1, f.shape[1], 1, generator=generator(0), dtype=f.dtype).to(f.device)
    noise = torch.cat([noise, -noise])
    drawn = f + (root @ noise).squeeze(-1)
    own = {name: value.double() for name, value in params.items()}
    return torch.logsumexp(likelihood.log_prob(drawn, y, own), 0) - math.log(len(drawn))
