"""BoTorch's Gaussian processes, and the rows that they choose."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from botorch.models.gpytorch import GPyTorchModel


def gaussian_process(x: Tensor, y: Tensor, saas: bool = False) -> GPyTorchModel:
    """BoTorch's default model, fitted, or its four MAP fits of sparse axes (SAAS; Eriksson & Jankowiak 2021)."""
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from botorch.models.map_saas import EnsembleMapSaasSingleTaskGP
    from gpytorch.mlls import ExactMarginalLogLikelihood

    kind = EnsembleMapSaasSingleTaskGP if saas else SingleTaskGP
    model = kind(x.double(), y.double())
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model.eval()


def by_variance(model: GPyTorchModel, x: Tensor, num: int) -> Tensor:
    """Rows (num,) of the largest variance of a Gaussian process, each given those before."""
    cov = model.posterior(x.double()).mvn.covariance_matrix.detach().clone()
    rows = list[int]()
    for _ in range(num):
        variance = cov.diagonal().clone()
        variance[rows] = -1.0
        row = int(variance.argmax())
        rows.append(row)
        total = cov[row, row] + float(model.likelihood.noise)
        cov = cov - torch.outer(cov[row], cov[row]) / total
    return torch.tensor(rows)


def improvement_by_process(model: GPyTorchModel, best: float) -> Callable[[Tensor], Tensor]:
    """Log expected improvement over ``best`` by a Gaussian process."""
    from botorch.acquisition import LogExpectedImprovement

    improvement = LogExpectedImprovement(
        model,
        best,
        maximize=False,
    )
    return lambda z: improvement(z.double()[:, None])
