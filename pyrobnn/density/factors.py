"""A program that is written for one point, run or traced for many: its factors, layers, and questions to its data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyrobnn.compile.private import Tracer
from pyrobnn.density.fused import WrittenOut

_CHOLESKY = {torch.linalg.cholesky, torch.cholesky, Tensor.cholesky}
#: functions whose result a program's Python may look at, or that have a shape which depends on values
_QUESTIONS = {
    *("isnan", "isfinite", "isinf", "eq", "ne", "lt", "le", "gt", "ge", "any", "all", "max", "min", "sum"),
    *("logical_not", "logical_and", "logical_or", "bitwise_not", "bitwise_and", "bitwise_or"),
    *("__invert__", "__and__", "__or__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
    *("count_nonzero", "unique", "nonzero", "bincount", "__getitem__", "long", "int", "bool"),
    *("item", "tolist", "__int__", "__index__", "__bool__", "__float__"),
}


@contextlib.contextmanager
def at_many_points() -> Iterator[None]:
    """The handler under which a program that is written for one point is run, or traced, for many."""
    tracer = Tracer.active()
    with Factors(), contextlib.nullcontext() if tracer is None else _Answered(tracer), WrittenOut():
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


class _Answered(TorchFunctionMode):
    """What a program asks of its data while it is traced (how many are missing, and where) is answered, not traced.

    ``x[~torch.isnan(x)]`` has as many elements as the data say, which a trace of tensors without values cannot know.
    What neither a point nor an argument of the trace has touched is a constant of it, and so is what it comes to.
    """

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.__name__ in _QUESTIONS:
            plain = self._tracer.innermost(args)
            named = {name: self._tracer.innermost(value) for name, value in kwargs.items()}
            if not self._tracer.depends([*plain, *named.values()]):
                with self._tracer.paused():
                    return func(*plain, **named)
        return func(*args, **kwargs)
