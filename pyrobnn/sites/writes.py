"""Programs that fill a tensor element by element, as ``h = torch.zeros(9); h[t] = …``, run at many points at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# fmt: off
_WRITES = {
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "add_", "sub_", "mul_", "div_", "copy_", "fill_",
    "index_put_", "index_copy_", "index_add_", "index_fill_", "masked_fill_", "masked_scatter_", "scatter_",
    "scatter_add_",
}
# fmt: on
_MAKERS = {
    *(torch.zeros, torch.ones, torch.empty, torch.full, torch.eye, torch.tensor, torch.clone, Tensor.clone),
    *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like),
    *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor),
}


class Writes:
    """Whether a program writes into tensors, and the handler under which it may do so at many points at once.

    ``torch.func.vmap`` refuses to write what every point has of its own into a tensor that all share. In a program that
    writes, the tensors it makes are therefore each point's own.
    """

    def __init__(self) -> None:
        self.found = False

    @contextlib.contextmanager
    def handled(self, values: Mapping[str, Tensor | Callable[[Any], Tensor]]) -> Iterator[None]:
        """Watch a run from the prior (no ``values``); in one at the ``values`` of its sites, make tensors theirs."""
        own = [each for each in values.values() if isinstance(each, Tensor) and each.is_floating_point()]
        if own and self.found:
            with _Own(torch.zeros_like(own[0]).sum()):
                yield
        elif not values and not self.found:
            with _Watch(self):
                yield
        else:
            yield


class _Watch(TorchFunctionMode):
    def __init__(self, writes: Writes) -> None:
        super().__init__()
        self._writes = writes

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._writes.found |= getattr(func, "__name__", "") in _WRITES
        return func(*args, **(kwargs or {}))


class _Own(TorchFunctionMode):
    def __init__(self, zero: Tensor) -> None:
        super().__init__()
        self._zero = zero

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made + self._zero.to(made.dtype) if func in _MAKERS and made.is_floating_point() else made
