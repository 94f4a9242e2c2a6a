"""Programs that fill a tensor element by element, as ``h = torch.zeros(9); h[t] = …``, run at many points at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_OPERATORS = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__imatmul__"}
#: how distributions draw, which a program at given values does not
_DRAWS = {
    *("normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "bernoulli_", "geometric_", "random_"),
    "clamp_",
}
_MAKERS = {
    *(torch.zeros, torch.ones, torch.empty, torch.full, torch.eye, torch.tensor, torch.clone, Tensor.clone),
    *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like),
    *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor),
}


class WatchWrites(TorchFunctionMode):
    """Sees whether what runs inside writes into tensors (``found``)."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        in_place = name.endswith("_") and not name.endswith("__") and name not in _DRAWS
        self.found |= in_place or name in _OPERATORS
        return func(*args, **(kwargs or {}))


class OwnTensors(TorchFunctionMode):
    """The handler under which a program that writes runs inside of ``torch.func.functionalize``.

    That makes every write a new tensor: autograd refuses a gradient where a value that it needs was overwritten later,
    as in ``h[t] = s * h[t - 1]``. The tensors that the program makes become each point's own, for ``torch.func.vmap``
    refuses to write what every point has of its own into one that all share; and an assignment is written as
    operations that have a derivative in their functional form.

    Args:
        like: a value that every point has of its own.
    """

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self._zero = torch.zeros_like(like).sum()

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.copy_ and args[0].is_floating_point():
            return _assigned(args[0], args[1])
        if func in (Tensor.__getitem__, Tensor.__setitem__) and _is_view(args[1]):
            args = args[0], _from_zero(args[1], args[0].shape), *args[2:]
            if len(args) == 3 and args[0].is_floating_point():
                _assigned(args[0][args[1]], args[2])
                return None
        made = func(*args, **(kwargs or {}))
        return made + self._zero.to(made.dtype) if func in _MAKERS and made.is_floating_point() else made


def _assigned(target: Tensor, value: Any) -> Tensor:
    value = value.clone() if isinstance(value, Tensor) else value  # it may be a part of the target
    return target.masked_fill_(torch.ones((), dtype=torch.bool, device=target.device), 0.0).add_(value)


def _is_view(index: Any) -> bool:
    """Whether a tensor at the index is a view of it."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or type(part) in (int, slice) for part in parts)


def _from_zero(index: Any, shape: Sequence[int]) -> Any:
    """The same view without negative bounds, of which functorch's rule for a write into a slice knows nothing."""
    parts = index if isinstance(index, tuple) else (index,)
    taken = sum(part is not None and part is not Ellipsis for part in parts)
    axis, found = 0, []
    for part in parts:
        found.append(slice(*part.indices(shape[axis])) if type(part) is slice else part)
        axis += len(shape) - taken if part is Ellipsis else part is not None
    return tuple(found)
