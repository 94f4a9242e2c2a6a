"""Matrices that a program factorises: one that has no factor makes the density undefined there, not the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CHOLESKY = {torch.linalg.cholesky, torch.cholesky, Tensor.cholesky}


class Factors(TorchFunctionMode):
    """Cholesky factors that are NaN where the matrix is not positive definite, instead of an error.

    A covariance whose smallest eigenvalue is below the resolution of its dtype has no factor in it, at one point among
    the many that are evaluated together: a sampler has to see that the density of this one is not finite.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _CHOLESKY or "out" in kwargs:
            return func(*args, **kwargs)
        factor, info = torch.linalg.cholesky_ex(*args, **kwargs)
        return torch.where((info == 0)[..., None, None], factor, torch.nan)
