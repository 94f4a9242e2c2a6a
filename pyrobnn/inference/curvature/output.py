"""Curvature of the likelihood in the network's output: the small matrix in the middle of the Gauss-Newton sandwich."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pyrobnn.checks import Refused
from pyrobnn.likelihoods import (
    Bernoulli,
    Categorical,
    HeteroskedasticGaussian,
    HomoskedasticGaussian,
    Likelihood,
)


def output_root(likelihood: Likelihood, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
    r"""A square root of the expected Fisher information of one datum in the network output.

    .. math:: S_n S_n^\top = H_n = E_{y \sim p(\cdot \mid f_n)}\left[ -\partial_f^2 \log p(y \mid f_n) \right]

    - Gaussian: :math:`H = \mathrm{diag}(1/\sigma^2)`.
    - heteroskedastic Gaussian, f = (μ, ρ) with σ = softplus(ρ) + σ_min: for each output the 2×2 block
      :math:`\mathrm{diag}\left(1/\sigma^2,\; 2\,\sigma'(\rho)^2/\sigma^2\right)`; mean and scale are orthogonal.
    - Categorical: :math:`H = \mathrm{diag}(p) - p p^\top` with root :math:`\mathrm{diag}(\sqrt p) - p \sqrt p^\top`.
    - Bernoulli: :math:`H = \mathrm{diag}(p (1 - p))`.

    Args:
        likelihood: one of :mod:`pyrobnn.likelihoods`.
        f: network outputs (N, width).
        params: the likelihood's own parameters (the noise), without batch dimensions.

    Returns:
        (N, width, k): column k is one vector to be pulled back through the network.

    Raises:
        TypeError: a likelihood whose Fisher information is not known here.

    Reference: New insights and perspectives on the natural gradient method (Martens, 2020).

    Example:
        >>> output_root(Bernoulli(), torch.zeros(1, 1), {})
        tensor([[[0.5000]]])
    """
    if isinstance(likelihood, HomoskedasticGaussian):
        _, scale = likelihood.loc_scale(f, params)
        return torch.diag_embed(1 / scale)
    if isinstance(likelihood, HeteroskedasticGaussian):
        _, scale = likelihood.loc_scale(f, params)
        slope = f.chunk(2, dim=-1)[1].sigmoid()  # derivative of softplus
        return torch.diag_embed(torch.cat([1 / scale, 2**0.5 * slope / scale], -1))
    if isinstance(likelihood, Categorical):
        p = f.softmax(-1)
        return torch.diag_embed(p.sqrt()) - p.unsqueeze(-1) * p.sqrt().unsqueeze(-2)
    if isinstance(likelihood, Bernoulli):
        p = f.sigmoid()
        return torch.diag_embed((p * (1 - p)).sqrt())
    raise Refused(
        f"the Gauss-Newton matrix of {type(likelihood).__name__} is not known: use curvature='hessian'"
    )
