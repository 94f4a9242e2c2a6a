"""Nets of several inputs: a row of all of them is one row of numbers, which the net takes apart again."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pyrobnn.core.checks import as_tensor

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    Parts = Sequence[ArrayLike] | Mapping[str, ArrayLike]

#: whole numbers up to which float32 has every one
_LARGEST_WHOLE = 2**24
#: the name of the targets in batches that are dictionaries
_TARGETS = "y"


@dataclass(frozen=True)
class InputLayout:
    """How several inputs (N, …) lie beside each other in rows (N, width).

    Attributes: ``names`` of the inputs, None where they have none; for each its ``shapes`` of a row, and ``dtypes``;
        ``ranges``, the least and the largest value of those that are no floating-point numbers, else None.
    """

    names: tuple[str, ...] | None
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    ranges: tuple[tuple[float, float] | None, ...]

    @classmethod
    def of(cls, x: Parts) -> InputLayout:
        """Of inputs as a tuple or a dictionary."""
        names = tuple(x) if isinstance(x, Mapping) else None
        tensors = _tensors(names, x)
        ranges = [
            None if tensor.is_floating_point() else (float(tensor.min()), float(tensor.max()))
            for tensor in tensors
        ]
        shapes = tuple(tuple(tensor.shape[1:]) for tensor in tensors)
        return cls(names, shapes, tuple(tensor.dtype for tensor in tensors), tuple(ranges))

    @property
    def widths(self) -> list[int]:
        """Columns of each input."""
        return [math.prod(shape) for shape in self.shapes]

    def rows(self, x: Parts) -> Tensor:
        """Inputs (N, …) as rows (N, width), floating.

        Raises:
            ValueError: other inputs, shapes or numbers of rows than the layout's, or whole numbers too large.
            TypeError: floating-point numbers where whole ones or truth values are expected.
        """
        given = tuple(x) if isinstance(x, Mapping) else None
        if (given is None) != (self.names is None) or set(given or ()) != set(self.names or ()):
            raise ValueError(f"'x' must have the inputs {self.described}, got {_said_of(x)}")
        tensors = _tensors(self.names, x)
        if len(tensors) != len(self.shapes):
            raise ValueError(f"'x' must have the inputs {self.described}, got {_said_of(x)}")
        floating = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
        dtype = torch.get_default_dtype()
        if floating:
            dtype = torch.float64 if torch.float64 in floating else torch.float32
        columns = []
        for index, tensor in enumerate(tensors):
            self._check(index, tensor, dtype)
            columns.append(tensor.reshape(len(tensor), -1).to(dtype))
        return torch.cat(columns, 1)

    def parts(self, rows: Tensor) -> list[Tensor]:
        """The inputs (N, …) of rows (N, width), of their own shapes; floating ones have the type of the rows."""
        parts = []
        for columns, shape, dtype in zip(rows.split(self.widths, 1), self.shapes, self.dtypes):
            part = columns.reshape(-1, *shape)
            if dtype == torch.bool:
                part = part > 0.5
            elif not dtype.is_floating_point:
                part = part.round().to(dtype)
            parts.append(part)
        return parts

    def possible(self, rows: Tensor) -> Tensor:
        """Rows (N, width) whose whole numbers and truth values are such, in the range of the training inputs."""
        columns = []
        for values, bounds in zip(rows.split(self.widths, 1), self.ranges):
            columns.append(values if bounds is None else values.round().clamp(*bounds))
        return torch.cat(columns, 1)

    def batch(self, batch: Any) -> tuple[Tensor, Any]:
        """Rows and targets of a loader's batch: (x1, x2, …, y), ((x1, x2, …), y), or a dictionary with ``"y"``."""
        if isinstance(batch, Mapping):
            if _TARGETS not in batch:
                raise ValueError(
                    f"the DataLoader gives dictionaries with {', '.join(map(str, batch))}: the targets must be under "
                    f"{_TARGETS!r}"
                )
            inputs = {name: value for name, value in batch.items() if name != _TARGETS}
            return self.rows(inputs), batch[_TARGETS]
        *parts, y = batch
        several = self.names is not None or len(self.shapes) > 1
        if len(parts) == 1 and several and isinstance(parts[0], Tensor):
            return parts[0], y  # rows already
        if len(parts) == 1 and isinstance(parts[0], tuple | list | Mapping):
            (parts,) = parts
        return self.rows(parts if isinstance(parts, Mapping) else tuple(parts)), y

    def inputs_of_batch(self, batch: Any) -> Tensor:
        """Rows of a batch of inputs, with targets behind them or without."""
        if isinstance(batch, Tensor):
            return batch
        names = () if self.names is None else self.names
        if isinstance(batch, Mapping):
            return self.rows({name: value for name, value in batch.items() if name in names})
        return self.rows(batch) if len(batch) == len(self.shapes) else self.batch(batch)[0]

    def _check(
        self,
        index: int,
        tensor: Tensor,
        dtype: torch.dtype,
    ) -> None:
        name = self._name(index)
        expected = self.dtypes[index]
        if tuple(tensor.shape[1:]) != self.shapes[index]:
            raise ValueError(
                f"the input {name} has shape {tuple(tensor.shape)}: a row of it is {self.shapes[index]}"
            )
        if tensor.is_floating_point() and not expected.is_floating_point:
            raise TypeError(
                f"the input {name} has dtype {tensor.dtype}, but {expected} is expected"
            )
        is_whole = not tensor.is_floating_point() and tensor.dtype != torch.bool
        if is_whole and dtype == torch.float32 and int(tensor.abs().max()) > _LARGEST_WHOLE:
            raise ValueError(
                f"the input {name} has whole numbers beyond {_LARGEST_WHOLE:,}, of which float32 has not every one: "
                "number them from 0, or give a floating input in float64 and net.double()"
            )

    def _name(self, index: int) -> str:
        return str(index) if self.names is None else repr(self.names[index])

    @property
    def described(self) -> str:
        """The inputs by name, or number, each with its shape."""
        parts = [
            f"{self._name(index)} (N, {', '.join(map(str, shape))})".replace(", )", ",)")
            for index, shape in enumerate(self.shapes)
        ]
        return ", ".join(parts)


def _tensors(names: Sequence[str] | None, x: Parts) -> list[Tensor]:
    """The inputs as tensors with a common number of rows."""
    if isinstance(x, Mapping):
        tensors = [as_tensor(f"x[{name!r}]", x[name]) for name in names or x]
    else:
        tensors = [as_tensor(f"x[{index}]", value) for index, value in enumerate(x)]
    if not tensors or any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError("'x' must have at least one input, each with a row for each point")
    if len({len(tensor) for tensor in tensors}) > 1:
        lengths = ", ".join(str(len(tensor)) for tensor in tensors)
        raise ValueError(f"the inputs have {lengths} rows: all need the same number")
    return tensors


def _said_of(x: Parts) -> str:
    return ", ".join(map(repr, x)) if isinstance(x, Mapping) else f"{len(x)} without names"


class SeveralInputs(nn.Module):
    """A net that is called as ``net(x1, x2, …)`` or ``net(a=…, b=…)``, as one of a single input.

    Put it around the net of a :class:`pyrobnn.BNN` whose inputs are a tuple or a dictionary of tensors with a row for
    each point. ``fit``, ``predict`` and the others then take such a tuple or dictionary, and loaders of (x1, x2, …, y),
    of ((x1, x2, …), y) or of dictionaries with the targets under ``"y"``. Inside, a row of all inputs is one row of
    numbers; whole numbers (of an ``nn.Embedding``) and truth values (masks) come to the net as such. The sites of the
    parameters are ``net.net.<parameter>``.

    Args:
        net: the net.
        x: training inputs, a tuple or a dictionary of tensors (N, …): their names, shapes and types are kept, and
            between which values whole numbers lie. No row is.
        as_one: call ``net(x)`` with the tuple or the dictionary itself.

    Raises:
        TypeError, ValueError: inputs that are no such tuple or dictionary, or that ``net`` cannot take.

    Caveat: all rows of an input have one shape; pad sequences, and pass the mask as an input.

    Example:
        >>> import pyrobnn as pb
        >>> class Ratings(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.users = torch.nn.Embedding(50, 4)
        ...         self.items = torch.nn.Linear(3, 4)
        ...     def forward(self, user, item):
        ...         return (self.users(user) * self.items(item)).sum(-1, keepdim=True)
        >>> x = {"user": torch.arange(50), "item": torch.zeros(50, 3)}
        >>> net = SeveralInputs(Ratings(), x)
        >>> net(net.layout.rows(x)).shape
        torch.Size([50, 1])
    """

    def __init__(
        self,
        net: nn.Module,
        x: Parts,
        *,
        as_one: bool = False,
    ):
        super().__init__()
        if not isinstance(net, nn.Module):
            raise TypeError(f"'net' must be a torch.nn.Module, got {type(net).__name__}")
        if not isinstance(x, tuple | list | Mapping):
            raise TypeError(
                f"'x' must be a tuple or a dictionary of tensors, got {type(x).__name__}: a net of one input needs no "
                "SeveralInputs"
            )
        self.net = net
        self.layout = InputLayout.of(x)
        self.as_one = bool(as_one)

    def forward(self, rows: Tensor) -> Any:
        """The net's output for rows (N, width)."""
        parts = self.layout.parts(rows)
        if self.layout.names is None:
            return self.net(tuple(parts)) if self.as_one else self.net(*parts)
        by_name = dict(zip(self.layout.names, parts))
        return self.net(by_name) if self.as_one else self.net(**by_name)


class _Collated:
    """What a loader's ``collate_fn`` gives, with the inputs as rows."""

    def __init__(self, layout: InputLayout, collate: Callable[[Any], Any]):
        self.layout = layout
        self.collate = collate

    def __call__(self, samples: Any) -> tuple[Tensor, Any]:
        return self.layout.batch(self.collate(samples))


def as_rows(net: nn.Module, x: Any) -> Any:
    """Inputs as the package computes with them: a tuple or dictionary, or a loader of such, as rows.

    Anything else as it is.

    Raises:
        TypeError: a dictionary for a net of one input.
    """
    if isinstance(net, SeveralInputs):
        if isinstance(x, DataLoader):
            # the same sampler and workers, with batches that are put together in another way
            loader = copy.copy(x)
            loader.collate_fn = _Collated(net.layout, x.collate_fn)
            return loader
        return net.layout.rows(x) if isinstance(x, tuple | list | Mapping) else x
    if isinstance(x, Mapping):
        raise TypeError(
            f"'x' is a dictionary ({', '.join(map(str, x))}), and the net is declared with one input: put "
            "pb.networks.SeveralInputs(net, x) into the BNN in place of net"
        )
    return x


def batches_as_rows(net: nn.Module, batches: Any) -> Any:
    """As :func:`as_rows` of what is to be predicted: batches have no targets, or are followed by them."""
    if not isinstance(net, SeveralInputs) or isinstance(batches, tuple | Mapping):
        return as_rows(net, batches)
    return batches if isinstance(batches, Tensor) else _rows_of_each(net.layout, batches)


def _rows_of_each(layout: InputLayout, batches: Any) -> Iterator[Tensor]:
    for batch in batches:
        yield layout.inputs_of_batch(batch)
