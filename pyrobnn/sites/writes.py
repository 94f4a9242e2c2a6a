"""Programs that fill a tensor element by element, as ``h = torch.zeros(9); h[t] = …``, run at many points at once."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyrobnn.sites.rows import Rows

_DUNDERS = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__imatmul__"}
# how distributions draw, which a program at given values does not
_DRAWS = {
    *("normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "bernoulli_", "geometric_", "random_"),
    "clamp_",
}
# what returns a view that nobody writes into: all that distributions do with their parameters. Of a row they are given
# a copy, so that a distribution keeps the value that it was made with, whatever is written there before it is asked
_SPREADS = {"broadcast_tensors", "expand", "expand_as"}
# what does not ask for a tensor's values
_FACTS = {
    *("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf"),
    *("size", "dim", "numel", "__len__", "is_floating_point"),
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
            with _Own(torch.zeros_like(own[0]).sum(), self.views) as handler:
                yield
            handler.end()
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
        # tensors of this run, by identity: data that it is given are never copied; and those that have no view
        self._made: dict[int, weakref.ref[Tensor]] = {}
        self._whole: dict[int, weakref.ref[Tensor]] = {}
        self._rows: dict[int, Rows] = {}
        self._given: dict[int, tuple[Tensor, Rows, int]] = {}  # rows that the program holds

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        asked = getattr(func, "__self__", func) if func.__name__ == "__get__" else func
        if asked.__name__ in _FACTS:
            return func(*args, **kwargs)
        if func.__name__ in ("__getitem__", "__setitem__") and (rows := self._rows_of(*args[:2])):
            return self._row(rows, args[1] % len(args[0]), *args[2:])
        is_write = _is_write(func)
        shares = func in self._views or func.__name__ == "__get__"
        self._settle(args, shares or is_write)
        self._settle(list(kwargs.values()), shares)
        if func in _MAKERS:
            made = func(*args, **kwargs)
            result = made + self._zero.to(made.dtype) if made.is_floating_point() else made
        elif is_write:
            result = self._written(func, args, kwargs)
        elif shares:
            keep = func.__name__ not in _SPREADS
            result = func(*(self._viewed(arg, keep) for arg in args), **kwargs)
        else:
            result = func(*self._copied(args), **self._copied(kwargs))
        new = {id(each): weakref.ref(each) for each in _tensors(result)}
        self._made |= new
        if not (shares or is_write):
            self._whole |= new
        return result

    def end(self) -> None:
        """Every tensor as the program has left it."""
        for rows in self._rows.values():
            rows.end()

    def _rows_of(self, tensor: Any, index: Any) -> Rows | None:
        if type(index) is not int or not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            return None
        if id(tensor) not in self._rows and _same(self._whole.get(id(tensor)), tensor) and tensor.dim():
            self._rows[id(tensor)] = Rows(tensor)
        rows = self._rows.get(id(tensor))
        live = rows is not None and rows.whole is tensor and rows.live
        return rows if live and -len(tensor) <= index < len(tensor) else None

    def _row(self, rows: Rows, index: int, *value: Any) -> Tensor | None:
        if value:
            self._settle(value, False)
            own = id(value[0]) in self._given and self._given[id(value[0])][1] is rows
            new = value[0] if own else self._copied(value[0])
            if rows.live:
                rows.write(index, new)
            else:  # the value is made of the tensor itself
                rows.whole[index] = new
            return None
        row = rows.read(index)
        self._given[id(row)] = row, rows, index
        return row

    def _settle(self, values: Any, shares: bool) -> None:
        """Tensors that are used whole have all that was written into their rows."""
        for tensor in _tensors(values):
            if id(tensor) in self._rows:
                self._rows[id(tensor)].end()
            if shares:
                self._whole.pop(id(tensor), None)

    def _viewed(self, value: Any, keep: bool) -> Any:
        """What a function that returns a view is given: of a row, that of the tensor, or a copy where none is kept."""
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            return type(value)(self._viewed(each, keep) for each in value)
        if not isinstance(value, Tensor) or id(value) not in self._given:
            return value
        row, rows, index = self._given[id(value)]
        if rows.live and not keep:
            return row.clone()
        rows.end()
        return rows.whole[index]

    def _written(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The tensor after the write: what is to be written is computed beside it, as autograd may need the old one."""
        target, rest, name = args[0], self._copied(args[1:]), func.__name__
        other = name.replace("__i", "__", 1) if name.endswith("__") else name[:-1]
        beside = getattr(Tensor, other, None) if name != "__setitem__" and name not in _DRAWS else None
        if id(target) in self._given:
            _, rows, index = self._given[id(target)]
            if rows.live and callable(beside):
                rows.changed()
            else:
                target = self._viewed(target, True)
        if callable(beside):
            value = beside(target.clone(), *rest, **self._copied(kwargs))
            if isinstance(value, Tensor) and value.shape == target.shape:
                return target.copy_(value)
        return func(target, *rest, **self._copied(kwargs))

    def _copied(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) in self._given:
                row, rows, index = self._given[id(value)]
                return (row if rows.live else rows.whole[index]).clone()
            return value.clone() if _same(self._made.get(id(value)), value) else value
        if type(value) is dict:
            return {name: self._copied(each) for name, each in value.items()}
        return type(value)(map(self._copied, value)) if type(value) in (list, tuple) else value


def _same(known: weakref.ref[Tensor] | None, value: Tensor) -> bool:
    return known is not None and known() is value


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
