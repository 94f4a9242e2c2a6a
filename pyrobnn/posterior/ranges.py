"""Between which values the inputs of the training data lie: what a prediction can tell of a row beyond them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyrobnn.core.checks import as_tensor


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
    def of_batches(cls, batches: Iterable[Any]) -> InputRange:
        """Of the inputs of a loader's batches, (x, y) or x each.

        Raises:
            ValueError: there is no batch.
        """
        total: InputRange | None = None
        for batch in batches:
            inputs = batch[0] if isinstance(batch, tuple | list) else batch
            part = cls.of(as_tensor("x", inputs))
            total = part if total is None else total.joined(part)
        if total is None:
            raise ValueError("'x' is a loader without batches: pass the training inputs")
        return total

    def joined(self, other: InputRange) -> InputRange:
        """The range of both."""
        low = torch.minimum(self.low, other.low)
        high = torch.maximum(self.high, other.high)
        return InputRange(low, high, self.dtype)

    def state(self) -> dict[str, Any]:
        """JSON-able: low, high and dtype."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {"low": self.low.tolist(), "high": self.high.tolist(), "dtype": dtype}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> InputRange:
        """Of :meth:`state`."""
        dtype = getattr(torch, state["dtype"])
        low, high = (torch.tensor(state[end], dtype=dtype) for end in ("low", "high"))
        return cls(low, high, dtype)
