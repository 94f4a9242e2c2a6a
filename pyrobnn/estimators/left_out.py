"""Rows left out of a linearised fit, without a fit for each: how likely they are by the others."""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import numpy as np
import torch
from sklearn.linear_model import BayesianRidge
from torch import Tensor

from pyrobnn.core.matrices import symmetric_root
from pyrobnn.estimators.comparison import log_density
from pyrobnn.inference.curvature.linearized import Linearized
from pyrobnn.inference.curvature.nearest import expected_derivatives
from pyrobnn.model import BNN
from pyrobnn.model.likelihoods.base import Likelihood
from pyrobnn.posterior import Posterior


class RowsFit(NamedTuple):
    """A fit at rows: likelihood, targets, mean (N, out) and covariance of f, the curvature's root there.

    ``params`` are the means of the likelihood's own parameters, by site.
    """

    likelihood: Likelihood
    targets: Tensor
    f: Tensor
    cov: Tensor
    root: Tensor
    params: dict[str, Tensor]


def at_rows(posterior: Posterior, x: Tensor, y: Tensor) -> RowsFit:
    """A linearised fit at rows in the units of the data."""
    model = posterior.bnn
    likelihood = model.likelihood
    x, y = in_standard_units(model, x, y)
    # a net of float32 may have data of float64
    x = x.to(next(model.net.parameters()))
    y = y.to(model.device)
    names = (*likelihood.own.priors, *likelihood.own.points)
    params = {name: posterior.draws[name].mean((0, 1)) for name in names}
    f, cov = cast(Linearized, posterior.network).output_moments(x)
    f = f.detach()
    cov = cov.detach()
    if y.is_floating_point():
        f = f.to(y)
        cov = cov.to(y)
    return RowsFit(likelihood, y, f, cov, likelihood.curvature_root(f, y, params), params)


def in_standard_units(model: BNN, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in the units in which the net computes."""
    units = model.standardizer
    if units is None:
        return x, y
    return units.transform_x(x), units.transform_y(y)


def leverage(cov: Tensor, root: Tensor) -> Tensor:
    """Of each row and output, (N, out)."""
    return cov.diagonal(dim1=1, dim2=2) * root.square().sum(-1)


def left_out(posterior: Posterior, x: Tensor, y: Tensor) -> tuple[np.ndarray, np.ndarray]:
    r"""Log density (N,) of each row left out of a linearised fit, and of a linear regression.

    .. math:: y_n - f_{-n} = \frac{y_n - f_n}{1 - h_n}, \quad v_{-n} = \frac{v_n}{1 - h_n}, \quad
        h_n = \frac{v_n}{\sigma^2}
    """
    likelihood, targets, f, cov, root, params = at_rows(posterior, x, y)
    unexplained = 1 - leverage(cov, root).clamp_max(0.99)
    without_row = targets - (targets - f) / unexplained.sqrt()
    ours = likelihood.log_prob(without_row, targets, params) + unexplained.log().sum(-1) / 2
    inputs = in_standard_units(posterior.bnn, x, y)[0].cpu().numpy()
    return ours.cpu().numpy(), _left_out_of_line(inputs, targets[:, 0].cpu().numpy())


def _left_out_of_line(inputs: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """Log density (N,) of each of the outputs (N,) left out of a Bayesian linear regression on inputs (N, feature)."""
    regression = BayesianRidge().fit(inputs, outputs)
    mean, scale = regression.predict(inputs, return_std=True)
    slack = 1 - np.minimum(regression.alpha_ * scale**2 - 1 + 1 / len(outputs), 0.99)
    return log_density((outputs - mean) / slack, 1 / (slack * regression.alpha_))


def left_out_labels(posterior: Posterior, x: Tensor, y: Tensor) -> np.ndarray:
    r"""Log density (N,) of each label under a linearised fit without its row, by 256 draws of f.

    .. math:: V_{-n} = V_n (I - \Lambda_n V_n)^{-1}, \quad f_{-n} = f_n - V_{-n} \nabla_f \log p(y_n \mid f_n)

    with covariance V and, of the likelihood, curvature :math:`\Lambda`, both at f; of a variational fit in the mean.
    """
    size = max(1, 2**16 // (1 + int(y.max())))
    variational = posterior.meta["settings"]["curvature"] == "variational"
    densities = []
    for inputs, targets in zip(x.split(size), y.split(size)):
        densities.append(_label_densities(at_rows(posterior, inputs, targets), variational))
    return torch.cat(densities).cpu().numpy()


def _label_densities(fit: RowsFit, variational: bool) -> Tensor:
    """Log density (N,) of each label of a fit at rows without its row."""
    f = fit.f.double()
    cov = fit.cov.double()
    slope, curvature = expected_derivatives(
        fit.likelihood, f, cov * variational, fit.targets, fit.params
    )
    identity = torch.eye(f.shape[1]).to(f)
    cov = torch.linalg.solve(
        identity - curvature @ cov,
        cov,
        left=False,
    )
    noise = torch.randn(
        256,
        1,
        f.shape[1],
        1,
        generator=torch.Generator().manual_seed(0),
    ).to(f)
    deviation = symmetric_root((cov + cov.mT) / 2) @ noise - cov @ slope.unsqueeze(-1)
    draws = f + deviation.squeeze(-1)
    mean_likelihood = fit.likelihood.log_prob(draws, fit.targets, fit.params).logsumexp(0)
    return mean_likelihood - math.log(len(draws))
