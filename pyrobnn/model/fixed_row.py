"""Matrices of which one row is fixed: what ``padding_idx`` asks of an embedding's weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Transform, biject_to, constraints

from pyrobnn.model.distribution_kinds import elementwise


class InsertRow(Transform):
    """From matrices (…, num - 1, width) to those that have a fixed row among theirs, (…, num, width)."""

    domain = constraints.independent(constraints.real, 2)
    bijective = True

    def __init__(self, number: int, row: Tensor) -> None:
        super().__init__()
        self.number = number
        self.row = row

    @property
    def codomain(self) -> constraints.Constraint:  # type: ignore[override]
        """Matrices with that row."""
        return RowIs(self.number, self.row)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, InsertRow):
            return False
        return self.number == other.number and torch.equal(self.row, other.row)

    def _call(self, x: Tensor) -> Tensor:
        row = self.row.to(x).expand(*x.shape[:-2], 1, x.shape[-1])
        return torch.cat([x[..., : self.number, :], row, x[..., self.number :, :]], -2)

    def _inverse(self, y: Tensor) -> Tensor:
        return torch.cat([y[..., : self.number, :], y[..., self.number + 1 :, :]], -2)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Zero of each matrix, (…,): the other rows are as they were."""
        return x.new_zeros(x.shape[:-2])

    def forward_shape(self, shape: Sequence[int]) -> torch.Size:
        """With the row."""
        return torch.Size((*shape[:-2], shape[-2] + 1, shape[-1]))

    def inverse_shape(self, shape: Sequence[int]) -> torch.Size:
        """Without the row."""
        return torch.Size((*shape[:-2], shape[-2] - 1, shape[-1]))


class RowIs(constraints.Constraint):
    """Real matrices whose row of this number is fixed."""

    event_dim = 2

    def __init__(self, number: int, row: Tensor) -> None:
        self.number = number
        self.row = row

    def check(self, value: Tensor) -> Tensor:
        """Whether it is, of each matrix (…,)."""
        return (value[..., self.number, :] == self.row.to(value)).all(-1)


@biject_to.register(RowIs)
def _from_other_rows(support: RowIs) -> InsertRow:
    return InsertRow(support.number, support.row)


class WithFixedRow(dist.TransformedDistribution):
    """A distribution of the other rows, (num - 1, width), as one of the whole matrix."""

    def __init__(self, other_rows: Distribution, number: int, row: Tensor) -> None:
        super().__init__(other_rows, [InsertRow(number, row)])

    @property
    def insertion(self) -> InsertRow:
        """What puts the row among the others."""
        insertion: Any = self.transforms[0]
        return insertion


def padding_row(net: nn.Module, module: nn.Module, param: Tensor) -> int | None:
    """The row of an embedding's weights that torch does not train; None of other parameters.

    Nor of weights that another layer has too: there the row is trained.
    """
    number = getattr(module, "padding_idx", None)
    if number is None or not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return None
    if param is not module.weight or len(param) < 2:
        return None
    # a tied parameter has a name for each of its layers
    names = [name for name, known in net.named_parameters(remove_duplicate=False) if known is param]
    return number % len(param) if len(names) == 1 else None


def prior_of_element(prior: Distribution) -> Any:
    """The distribution of one element that is not fixed, of a prior of independent ones."""
    if isinstance(prior, WithFixedRow):
        prior = prior.base_dist
    return elementwise(prior)
