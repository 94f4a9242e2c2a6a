"""What a program asks of its data while it is traced (how many are missing, and where) is answered, not traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# fmt: off
_LOOKS = {
    "isnan", "isfinite", "isinf", "logical_not", "logical_and", "logical_or", "bitwise_not", "bitwise_and",
    "bitwise_or", "__invert__", "__and__", "__or__", "eq", "ne", "lt", "le", "gt", "ge", "__eq__", "__ne__", "__lt__",
    "__le__", "__gt__", "__ge__", "sum", "count_nonzero", "any", "all", "max", "min", "unique", "nonzero", "bincount",
    "__getitem__", "long", "int", "bool", "item", "tolist", "__int__", "__index__", "__bool__", "__float__",
}
# fmt: on


def looks() -> contextlib.AbstractContextManager[Any]:
    """A handler for a program that is being traced; none where it is not.

    ``x[~torch.isnan(x)]`` has as many elements as the data say, which a trace of tensors without values cannot know.
    What neither a point nor an argument of the trace has touched is a constant of it, and so is what it comes to.
    """
    try:
        from torch.fx.experimental.proxy_tensor import get_proxy_mode
    except ImportError:  # torch does not promise to keep it; such a program then runs uncompiled
        return contextlib.nullcontext()
    mode = get_proxy_mode()
    return contextlib.nullcontext() if mode is None else _Looks(mode.tracer)


class _Looks(TorchFunctionMode):
    def __init__(self, tracer: Any) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

        kwargs = kwargs or {}
        if func.__name__ in _LOOKS:
            own = (
                [_innermost(each) for each in args],
                {name: _innermost(each) for name, each in kwargs.items()},
            )
            if not self._is_traced([*own[0], *own[1].values()]):
                with disable_proxy_modes_tracing(), torch._C._DisableFuncTorch():
                    return func(*own[0], **own[1])
        return func(*args, **kwargs)

    def _is_traced(self, value: Any) -> bool:
        from torch.fx.experimental.proxy_tensor import has_proxy_slot

        if isinstance(value, tuple | list):
            return any(map(self._is_traced, value))
        return isinstance(value, Tensor) and has_proxy_slot(value, self._tracer)


def _innermost(value: Any) -> Any:
    """The tensor that the transforms of ``torch.func`` have wrapped."""
    if type(value) in (tuple, list):
        return type(value)(map(_innermost, value))
    while isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return value
