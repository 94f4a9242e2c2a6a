"""Between which values the inputs of the training data lie: what a prediction can tell of a row beyond them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor

from pyrobnn.core.checks import as_tensor
from pyrobnn.model import BNN


class RangeState(TypedDict):
    """A range as JSON has it."""

    low: list[float] | float
    high: list[float] | float
    dtype: str


@dataclass(frozen=True, eq=False)
class InputRange:
    """The least and the largest value: of each feature (feature,) of a table, of all values () of other inputs.

    ``dtype`` is the type of the inputs as they came.
    """

    low: Tensor
    high: Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> InputRange:
        """Of inputs (N, …), N > 0."""
        rows = x.detach() if x.dim() == 2 else x.detach().reshape(-1, 1)
        low, high = rows.aminmax(dim=0)
        shape = low.shape if x.dim() == 2 else ()
        return cls(low.reshape(shape).cpu(), high.reshape(shape).cpu(), x.dtype)

    @classmethod
    def of_batches(cls, batches: Iterable[Tensor | Sequence[Tensor]]) -> InputRange:
        """Of the inputs of a loader's batches, (x, y) or x each.

        Raises:
            ValueError: there is no batch.
        """
        total: InputRange | None = None
        for batch in batches:
            inputs = batch[0] if isinstance(batch, tuple | list) else batch
            of_batch = cls.of(as_tensor("x", inputs))
            total = of_batch if total is None else total.joined(of_batch)
        if total is None:
            raise ValueError("'x' is a loader without batches: pass the training inputs")
        return total

    def joined(self, other: InputRange) -> InputRange:
        """The range of both."""
        low = torch.minimum(self.low, other.low)
        high = torch.maximum(self.high, other.high)
        return InputRange(low, high, self.dtype)

    def state(self) -> RangeState:
        """JSON-able: low, high and dtype."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {"low": self.low.tolist(), "high": self.high.tolist(), "dtype": dtype}

    @classmethod
    def from_state(cls, state: RangeState) -> InputRange:
        """Of :meth:`state`."""
        dtype = getattr(torch, state["dtype"])
        low = torch.tensor(state["low"], dtype=dtype)
        high = torch.tensor(state["high"], dtype=dtype)
        return cls(low, high, dtype)


def column_names(x: Any) -> list[str]:
    """The names of the columns of a data frame, where they are texts; none of anything else."""
    columns = list(getattr(x, "columns", ()))
    return columns if all(isinstance(column, str) for column in columns) else []


def in_order(x: Any, names: Sequence[str] | None) -> Any:
    """A data frame with its columns in the order of these names; anything else, or without names, as it is.

    Raises:
        ValueError: it lacks some of them, or has others.
    """
    columns = column_names(x)
    if not names or not columns or columns == list(names):
        return x
    missing = [repr(name) for name in names if name not in columns]
    others = [repr(name) for name in columns if name not in names]
    if missing or others:
        differences = [f"lacks {', '.join(missing)}"] if missing else []
        differences += [f"has {', '.join(others)}, which the fit had not"] if others else []
        raise ValueError(
            f"'x' {' and '.join(differences)}: its columns must be those of the fit, {', '.join(names)}, in any order"
        )
    return x[list(names)]


def made_up_inputs(bnn: BNN, input_range: InputRange | None, shares: Tensor) -> Tensor:
    """Inputs in the units of the data, from between the ends of the training data.

    Args:
        bnn: whose units count where no ends are known: the inputs are then normal, in standard units.
        input_range: the ends; None where they are not known.
        shares: in (0, 1), float64 (N, …), of the way between them or, without ends, of probability.

    Returns:
        (N, …), of the type that the training data had.
    """
    if input_range is None:
        normal = torch.special.ndtri(shares).to(bnn.dtype)
        if bnn.standardizer is None:
            return normal
        units = bnn.standardizer.to("cpu")
        return normal * units.x_scale + units.x_mean
    low = input_range.low.double()
    values = low + shares * (input_range.high.double() - low)
    dtype = input_range.dtype
    return values.to(dtype) if dtype.is_floating_point else values.round().to(dtype)
