"""A program that is written for one point, run or traced for many: its factors, layers, and looks at its data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyrobnn.compile.looks import looks
from pyrobnn.sites.fused import WrittenOut

_CHOLESKY = {torch.linalg.cholesky, torch.cholesky, Tensor.cholesky}


@contextlib.contextmanager
def at_many_points() -> Iterator[None]:
    """The handler under which a program that is written for one point is run, or traced, for many."""
    with Factors(), looks(), WrittenOut():
        yield


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
