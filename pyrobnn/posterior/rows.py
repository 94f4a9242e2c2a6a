"""The rows of data that a posterior has seen, which it needs in order to learn more and to forget some."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pyrobnn.core.checks import Refused
from pyrobnn.model import BNN
from pyrobnn.model.density import Program

#: an odd multiplier, 2^64 over the golden ratio as int64, that spreads the bits of a hash
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


@dataclass(frozen=True, eq=False)
class Rows:
    """Inputs (N, …), or None of a program that takes none, and targets (N, …): references to what was given.

    ``digest`` (N,) int64 is taken when they are given: a tensor that is changed afterwards is found out. ``shared``
    holds what updates of one posterior compute once; neither a file nor a pickle has it.
    """

    x: Tensor | None
    y: Tensor
    digest: Tensor
    shared: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        model: BNN | Program,
        x: Tensor | DataLoader | Dataset | None,
        y: Tensor | None,
    ) -> Rows | None:
        """Of what ``fit`` was given; None where rows cannot be told from it (a loader, a program's own data)."""
        if isinstance(x, (DataLoader, Dataset)) or y is None:
            return None
        if isinstance(model, BNN):
            x = model.rows(x)
            y = model.likelihood.targets.read(y)
        if not isinstance(y, Tensor) or not y.dim():
            return None
        if x is not None and not _has_rows(x, len(y)):
            return None
        return cls(x, y, digest(x, y))

    @property
    def summary(self) -> str:
        """A digest of all rows in their order, from which none can be had."""
        return hashlib.sha256(self.digest.numpy().tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.y)

    def checked(self) -> Rows:
        """These, if they still are what the posterior has seen.

        Raises:
            Refused: the tensors were changed after the fit.
        """
        changed = (digest(self.x, self.y) != self.digest).nonzero()[:, 0]
        if len(changed):
            raise Refused(
                f"{len(changed)} rows were changed after the fit (the first is {int(changed[0])}): a posterior keeps a "
                "reference to its data. Fit copies, x.clone() and y.clone(), or fit again"
            )
        return self

    def at(self, index: Tensor) -> Rows:
        """Those of a mask or of indices."""
        x = None if self.x is None else self.x[index.to(self.x.device)]
        return Rows(x, self.y[index.to(self.y.device)], self.digest[index.cpu()], self.shared)

    def joined(self, new: Rows) -> Rows:
        """These and ``new`` ones of the same shapes."""
        y = torch.cat([self.y, new.y.to(self.y)])
        x = None
        if self.x is not None and new.x is not None:
            x = torch.cat([self.x, new.x.to(self.x)])
        return Rows(x, y, digest(x, y), self.shared)

    def state(self) -> dict[str, Tensor]:
        """The tensors, enough to rebuild it."""
        tensors = {"y": self.y, "digest": self.digest}
        return tensors if self.x is None else tensors | {"x": self.x}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Rows | None:
        """Of :meth:`state`; None of nothing."""
        return cls(state.get("x"), state["y"], state["digest"].cpu()) if state else None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"shared": {}}


def _has_rows(x: Tensor, num: int) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0 and len(x) == num


def digest(x: Tensor | None, y: Tensor) -> Tensor:
    """A number for every row, (N,) int64 on the CPU, that changes with any value in it."""
    total = torch.zeros(len(y), dtype=torch.int64)
    if not len(y):
        return total
    for tensor in (x, y):
        if tensor is not None:
            flat = tensor.detach().reshape(len(y), tensor[:1].numel())
            factors = (
                torch.arange(
                    1,
                    flat.shape[1] + 1,
                    device=flat.device,
                )
                * _ODD
                | 1
            )
            # piece by piece, for the memory that its float64 takes
            pieces = flat.split(max(1, 2**24 // max(flat.shape[1], 1)))
            mixed = torch.cat([_mixed(piece, factors) for piece in pieces])
            total = (total ^ (total >> 31)) * _ODD + mixed.cpu()
    return total


def _mixed(values: Tensor, factors: Tensor) -> Tensor:
    """A number for every row of values (row, column), of the bits of their float64."""
    bits = values.double().contiguous().view(torch.int64)
    return ((bits ^ (bits >> 29)) * factors).sum(1)
