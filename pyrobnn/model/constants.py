"""Idioms of Python in a program that is run, or traced, for many points at once: data that are read, tensors filled.

Data are the same at every point, so what the program's Python reads of them (``int(group[i])``, ``x[x > 0]``) is read
while it is traced, and is a constant of the graph. A tensor that is made inside the program and then written into
(``mean[i] = slope * x[i]``) belongs to one point: it is made for each point, since ``vmap`` does not let one point
write into what all points share.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor

from pyrobnn.core.private_torch import depends, of_constant
from pyrobnn.model.torch_calls import Call, CallHandler

#: one entry of an index
_Index: TypeAlias = "Tensor | int | slice | EllipsisType | Sequence[_Index] | None"
#: reads of one value or of all, which Python then computes with
_READS: dict[Any, Callable[[Tensor], Any]] = {
    Tensor.item: Tensor.item,
    Tensor.tolist: Tensor.tolist,
    Tensor.__int__: int,
    Tensor.__float__: float,
    Tensor.__bool__: bool,
    Tensor.__index__: int,
}
#: functions whose result has a size that depends on the values
_SIZED: dict[Any, Callable[..., Any]] = {
    Tensor.nonzero: Tensor.nonzero,
    torch.nonzero: torch.nonzero,
    Tensor.unique: torch.unique,
    torch.unique: torch.unique,
    torch.bincount: torch.bincount,
    torch.nn.functional.one_hot: torch.nn.functional.one_hot,
}
#: functions that make a tensor to write into
_MAKES = {
    torch.zeros,
    torch.ones,
    torch.full,
    torch.empty,
    torch.eye,
    torch.zeros_like,
    torch.ones_like,
    torch.full_like,
    torch.empty_like,
    torch.clone,
    Tensor.clone,
    Tensor.new_zeros,
    Tensor.new_ones,
    Tensor.new_full,
    Tensor.new_empty,
}
#: functions that write into a tensor
_WRITES = {
    Tensor.__setitem__,
    Tensor.index_put_,
    Tensor.index_copy_,
    Tensor.masked_scatter_,
    Tensor.copy_,
}


class Constants(CallHandler):
    """Reads of tensors that are the same at every point are answered by their values.

    Only at a point that is one of several that ``vmap`` has put together (:func:`is_batched`): what depends on it is
    then batched too, and nothing else is. At one point alone a value that has no gradient, as ``slope > 0``, would look
    like data.
    """

    functions = frozenset({*_READS, *_SIZED, Tensor.__getitem__, Tensor.__setitem__})

    def answer(self, call: Call) -> Any:
        read = _READS.get(call.function) or _SIZED.get(call.function)
        if read is not None and not any(map(_depends, (*call.args, *call.options.values()))):
            return of_constant(read, *call.args, **call.options)
        if call.function in (Tensor.__getitem__, Tensor.__setitem__):
            target, index, *values = call.args
            return call.function(target, _without_masks(index), *values)
        return call.result()


def _depends(argument: Any) -> bool:
    """Whether an argument of a call has a value of its own at each point."""
    return isinstance(argument, Tensor) and depends(argument)


def _without_masks(index: _Index | tuple[_Index, ...]) -> _Index | tuple[_Index, ...]:
    """An index with masks of data replaced by the places that they select."""
    entries = index if isinstance(index, tuple) else (index,)
    if not any(map(_is_mask_of_data, entries)):
        return index
    places: list[_Index] = []
    for entry in entries:
        if _is_mask_of_data(entry):
            places.extend(of_constant(Tensor.nonzero, entry).unbind(-1))
        else:
            places.append(entry)
    return tuple(places)


def _is_mask_of_data(entry: _Index) -> TypeGuard[Tensor]:
    """Whether an entry of an index is a mask, the same at every point."""
    return _is_mask(entry) and not depends(entry)


def _is_mask(entry: _Index) -> TypeGuard[Tensor]:
    """Whether an entry of an index picks elements by truth values."""
    return isinstance(entry, Tensor) and entry.dtype == torch.bool and entry.dim() > 0


@dataclass
class Habits:
    """Whether a program writes into tensors that it has made, and whether its Python reads the values of tensors."""

    writes: bool = False
    reads: bool = False


class Noting(CallHandler):
    """Notes the habits of a program that runs inside."""

    functions = frozenset({*_WRITES, *_READS, *_SIZED, Tensor.__getitem__, Tensor.__setitem__})

    def __init__(self) -> None:
        super().__init__()
        self.habits = Habits()

    def answer(self, call: Call) -> Any:
        self.habits.writes |= call.function in _WRITES
        self.habits.reads |= call.function in _READS or call.function in _SIZED
        if call.function in (Tensor.__getitem__, Tensor.__setitem__):
            index = call.args[1]
            entries = index if isinstance(index, tuple) else (index,)
            self.habits.reads |= any(map(_is_mask, entries))
        return call.result()


class OwnTensors(CallHandler):
    """Tensors that are made inside belong to the point: each has its own to write into.

    Attributes: ``functions``, those whose results these are.
    """

    functions: Collection[Any] = _MAKES

    def __init__(self, point: Tensor) -> None:
        super().__init__()
        self.point = point

    def answer(self, call: Call) -> Any:
        out = call.result()
        if "out" in call.options:
            return out
        # a truth value for each point, whichever it is: so ``where`` gives each point a tensor of its own
        truth_of_point = (self.point == self.point).any().to(out.device)
        return torch.where(truth_of_point, out, out)
