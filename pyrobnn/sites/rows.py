"""The rows of a tensor that a program writes and reads one at a time, each by itself until the tensor is used whole."""

from __future__ import annotations

import torch
from torch import Tensor


class Rows:
    """What a loop over the first dimension writes into and reads from.

    The gradient of ``h[t] = s * h[t - 1]`` on the tensor itself touches all of it at every step, T² numbers in T loops
    of machine code; row by row it is T.

    Args:
        whole: the tensor, which nobody else has a view of.

    Attributes: ``live`` (until the tensor is used whole; then its rows are those of the tensor).
    """

    def __init__(self, whole: Tensor) -> None:
        self.whole, self.live = whole, True
        self._rows = list(whole.clone().unbind(0))
        self._given: set[int] = set()  # rows that somebody holds, as they hold views of a tensor
        self._written = False

    def read(self, index: int) -> Tensor:
        """Row ``index``: the same tensor at every call, so that a write into it is one into the row."""
        if index not in self._given:
            self._rows[index] = self._rows[index].clone()
            self._given.add(index)
        return self._rows[index]

    def write(self, index: int, value: Tensor | float) -> None:
        """``whole[index] = value``."""
        row = self._rows[index]
        self._written = True
        if value is row:
            return
        new = torch.as_tensor(value, dtype=row.dtype, device=row.device)
        if index in self._given:
            row.copy_(new)
        else:
            self._rows[index] = torch.zeros_like(row) + new.expand(row.shape)

    def changed(self) -> None:
        """A row that was read has been written into."""
        self._written = True

    def end(self) -> None:
        """Write the rows into the tensor."""
        if self.live and self._written:
            self.whole.copy_(torch.stack(self._rows))
        self.live = False
