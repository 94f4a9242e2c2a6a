"""Curvature of the likelihood in the network's output: the small matrix in the middle of the Gauss-Newton sandwich."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from pyrobnn.likelihoods import Likelihood


def output_root(likelihood: Likelihood, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
    """A square root (N, width, k) of the expected Fisher information of each datum: ``likelihood.fisher_root``.

    Reference: New insights and perspectives on the natural gradient method (Martens, 2020).

    Example:
        >>> import torch
        >>> from pyrobnn.likelihoods import Bernoulli
        >>> output_root(Bernoulli(), torch.zeros(1, 1), {})
        tensor([[[0.5000]]])
    """
    return likelihood.fisher_root(f, params)
