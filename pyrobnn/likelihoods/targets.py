"""The columns of y: what is predicted of them, what was seen, and their units. Censored targets are (N, 2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyrobnn.core.checks import as_tensor
from pyrobnn.likelihoods.base import Likelihood


def read(likelihood: Likelihood, y: Any) -> Tensor:
    """``y`` as it was handed over, as a tensor.

    Of a censored likelihood also a structured array or a DataFrame of two columns, of which the truth values say what
    was observed.

    Raises:
        TypeError: not numeric.
    """
    names = getattr(getattr(y, "dtype", None), "names", None) or list(getattr(y, "columns", ()))
    if likelihood.censoring is None or len(names) != 2:
        return as_tensor("y", y)
    columns = [as_tensor("y", np.asarray(y[name])) for name in names]
    columns.sort(key=lambda column: column.dtype == torch.bool)
    return torch.stack([column.double() for column in columns], 1)


def values(likelihood: Likelihood, y: Tensor) -> Tensor:
    """The columns of ``y`` that are predicted."""
    return y if likelihood.censoring is None else y[..., :1]


def observed(likelihood: Likelihood, y: Tensor) -> Tensor:
    """Targets of predicted values of which all were observed."""
    return y if likelihood.censoring is None else torch.cat([y, torch.ones_like(y)], -1)


def as_observed(likelihood: Likelihood, drawn: Tensor, y: Tensor) -> Tensor:
    """Draws (…, N, out) of new values as they would have been seen where ``y`` was: cut off at its limits."""
    if likelihood.censoring is None:
        return drawn
    limit, event = y[:, :1].to(drawn), y[:, 1:].to(drawn.device)
    cut = torch.minimum(drawn, limit) if likelihood.censoring == "right" else torch.maximum(drawn, limit)
    return torch.where(event == 1, drawn, cut)


def in_units(likelihood: Likelihood, y: Tensor, mean: Tensor | float, scale: Tensor | float) -> Tensor:
    """Targets in the units that :meth:`Likelihood.units` gave."""
    if likelihood.censoring is None:
        return (y - mean) / scale
    return torch.cat([(y[..., :1] - mean) / scale, y[..., 1:]], -1)


def log_volume(likelihood: Likelihood, y: Tensor, scale: Tensor | float) -> Tensor:
    """What the log density of every row loses where ``y`` is ``scale`` times what the program measures, (N,).

    Of a density alone: the probability of a censored row has no unit.
    """
    sizes = torch.as_tensor(scale, dtype=torch.float64, device=y.device)
    lost = sizes.log().expand(values(likelihood, y).shape).sum(-1)
    return lost if likelihood.censoring is None else lost * y[..., 1]
