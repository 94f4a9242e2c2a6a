"""Programs that fill a tensor element by element, as ``h = torch.zeros(9); h[t] = …``, run at many points at once."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_DUNDERS = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__imatmul__"}
# how distributions draw, which a program at given values does not
_DRAWS = {
    *("normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "bernoulli_", "geometric_", "random_"),
    "clamp_",
}
_MAKERS = {
    *(torch.zeros, torch.ones, torch.empty, torch.full, torch.eye, torch.tensor, torch.clone, Tensor.clone),
    *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like),
    *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor),
}


class Writes:
    """Whether a program writes into tensors, and the handler under which it may do so.

    ``torch.func.vmap`` refuses to write what every point has of its own into a tensor that all share. In a program that
    writes, the tensors it makes are therefore each point's own. And autograd refuses a gradient where a value that it
    needs was overwritten later, as in ``h[t] = s * h[t - 1]``, whose factor is a view of the tensor that the next round
    writes into. In such a program whatever computes with its tensors is given copies; what returns a view of them, as
    was seen in a first run, is given the tensors themselves, so that a write through a view is one.
    """

    def __init__(self) -> None:
        self.found = False
        self.views: set[Any] = set()

    @contextlib.contextmanager
    def handled(self, values: Mapping[str, Tensor | Callable[[Any], Tensor]]) -> Iterator[None]:
        """Watch a run from the prior (no ``values``); in one at the ``values`` of its sites, let it write."""
        own = [each for each in values.values() if isinstance(each, Tensor) and each.is_floating_point()]
        if own and self.found:
            with _Own(torch.zeros_like(own[0]).sum(), self.views):
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
        result = func(*args, **(kwargs or {}))
        self._writes.found |= _is_write(func) and func.__name__ not in _DRAWS
        if {*map(_storage, _tensors(args))} & {*map(_storage, _tensors(result))} - {None}:
            self._writes.views.add(func)
        return result


class _Own(TorchFunctionMode):
    def __init__(self, zero: Tensor, views: set[Any]) -> None:
        super().__init__()
        self._zero, self._views = zero, views
        # tensors of this run, by identity: data that it is given are never copied
        self._made: dict[int, weakref.ref[Tensor]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _MAKERS:
            made = func(*args, **kwargs)
            result = made + self._zero.to(made.dtype) if made.is_floating_point() else made
        elif _is_write(func):
            result = self._written(func, args, kwargs)
        elif func in self._views or func.__name__ == "__get__":
            result = func(*args, **kwargs)
        else:
            result = func(*self._copied(args), **self._copied(kwargs))
        self._made |= {id(each): weakref.ref(each) for each in _tensors(result)}
        return result

    def _written(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The tensor after the write: what is to be written is computed beside it, as autograd may need the old one."""
        target, rest, name = args[0], self._copied(args[1:]), func.__name__
        other = name.replace("__i", "__", 1) if name.endswith("__") else name[:-1]
        beside = getattr(Tensor, other, None) if name != "__setitem__" and name not in _DRAWS else None
        if callable(beside):
            value = beside(target.clone(), *rest, **self._copied(kwargs))
            if isinstance(value, Tensor) and value.shape == target.shape:
                return target.copy_(value)
        return func(target, *rest, **self._copied(kwargs))

    def _copied(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            known = self._made.get(id(value))
            return value.clone() if known is not None and known() is value else value
        if type(value) is dict:
            return {name: self._copied(each) for name, each in value.items()}
        return type(value)(map(self._copied, value)) if type(value) in (list, tuple) else value


def _is_write(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return name in _DUNDERS or (name.endswith("_") and not name.endswith("__"))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, tuple | list):
        return [found for each in value for found in _tensors(each)]
    return [value] if isinstance(value, Tensor) else []


def _storage(value: Tensor) -> int | None:
    try:
        return value.untyped_storage().data_ptr() or None
    except (NotImplementedError, RuntimeError):  # a tensor without memory of its own, as a sparse one
        return None
