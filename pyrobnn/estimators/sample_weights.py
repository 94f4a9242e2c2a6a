"""Sample weights: a row of weight w counts as w rows, its log likelihood times w."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pyro
import pyro.poutine
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor

from pyrobnn.core.checks import Refused
from pyrobnn.data import Standardizer
from pyrobnn.inference.laplace import Laplace
from pyrobnn.likelihoods import DATA, Likelihood
from pyrobnn.model import BNN
from pyrobnn.posterior import Posterior


def as_rows(weights: np.ndarray) -> np.ndarray | None:
    """The row numbers that whole weights stand for, each as often as its weight; None where weights are fractions.

    Args:
        weights: (N,), not negative.
    """
    # ten times the rows at most
    if (weights != np.round(weights)).any() or weights.sum() > 10 * len(weights):
        return None
    return np.repeat(np.arange(len(weights)), weights.astype(np.int64))


class Weighted(Likelihood):
    r"""A likelihood to the power of each row's weight: :math:`\sum_n w_n \log p(y_n \mid x_n, \theta)`.

    The weights are the last column of ``y``, so that a mini-batch has those of its rows; the other columns are in the
    units of the program.

    Args:
        likelihood: of one row.
    """

    #: neither standardised nor predicted from: what knows the columns of y as targets leaves these alone
    task: ClassVar[str] = "weighted"

    def __init__(self, likelihood: Likelihood):
        super().__init__()
        self.likelihood = likelihood
        self.own = likelihood.own

    def like(self, weight: Tensor) -> Weighted:
        return Weighted(self.likelihood.like(weight))

    def target(self, y: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        values, weights = self._split(y)
        values = self.likelihood.target(values, width, dtype).reshape(len(y), -1)
        return torch.cat([values.to(dtype), weights[:, None].to(dtype)], 1)

    def log_prob(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        values, weights = self._split(y)
        return weights * self.likelihood.log_prob(f, values, params)

    def observe(
        self, f: Tensor, y: Tensor | None, params: Mapping[str, Tensor], num_data: float | None = None
    ) -> Tensor:
        if y is None:
            return self.likelihood.observe(f, None, params, num_data)
        values, weights = self._split(y)
        size: Any = len(f) if num_data is None else num_data
        with pyro.plate(f"{DATA}_plate", size=size, subsample=f), pyro.poutine.scale(scale=weights):
            return pyro.sample(DATA, self.likelihood.distribution(f, params), obs=values)

    def distribution(self, f: Tensor, params: Mapping[str, Tensor]) -> TorchDistributionMixin:
        return self.likelihood.distribution(f, params)

    def _split(self, y: Tensor) -> tuple[Tensor, Tensor]:
        values, weights = y[:, :-1], y[:, -1]
        return (values[:, 0].long() if self.likelihood.targets.kind == "label" else values), weights


def fit_weighted(
    method: Any, model: BNN, x: Tensor, y: Tensor, weights: Tensor, options: dict[str, Any]
) -> Posterior:
    """The posterior of ``model`` where the log likelihood of row n counts ``weights[n]`` times.

    Args:
        x, y: inputs and targets in the units of the data, or labels.
        weights: (N,).
        options: of the method's ``fit``.

    Raises:
        Refused: a Gauss-Newton matrix, which needs more of the likelihood than its density.
    """
    if isinstance(method, Laplace) and method.curvature == "ggn":
        raise Refused(
            "the Gauss-Newton matrix of rows with fractional weights is not known: use whole weights, "
            "Laplace(curvature='hessian'), SVI or NUTS"
        )
    raised = BNN(model.net, model.prior, Weighted(model.likelihood), standardizer=model.standardizer)
    y = model.standard_targets(y)
    y = y.double().reshape(len(y), -1)
    posterior = method.fit(raised, x, torch.cat([y, weights.double()[:, None]], 1), **options)
    meta = posterior.meta | {"likelihood": model.likelihood.task}
    return dataclasses.replace(posterior, model=model.to(posterior.bnn.device), meta=meta)


def weighted_units(x: Tensor, y: Tensor | None, weights: Tensor) -> Standardizer:
    """Means and standard deviations of weighted rows, float64; a column without spread keeps its scale of one.

    Args:
        x: inputs (N, feature).
        y: targets (N, out), or None for classes.
        weights: (N,).
    """
    share = (weights / weights.sum())[:, None]

    def moments(values: Tensor) -> tuple[Tensor, Tensor]:
        mean = (share * values).sum(0)
        spread = (share * (values - mean).square()).sum(0).sqrt()
        return mean, torch.where((values == values[:1]).all(0), 1.0, spread)

    if y is None:
        return Standardizer(*moments(x), torch.zeros(1), torch.ones(1))
    return Standardizer(*moments(x), *moments(y))
