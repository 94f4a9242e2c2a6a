r"""Ranks that share the rows of every batch: each takes its part, and all step along the same gradient.

Rank r sees :math:`b_r` of the b rows of a batch and scales their likelihood to all N data, as if they were the batch.
The mean of the ranks' gradients with the weights :math:`b_r / b` is that of the whole batch:

.. math:: \sum_r \frac{b_r}{b} \Big( \nabla \log p(\theta)
    + \frac{N}{b_r} \sum_{i \in r} \nabla \log p(y_i \mid \theta) \Big)
    = \nabla \log p(\theta) + \frac Nb \sum_i \nabla \log p(y_i \mid \theta).

Everything else every rank does alike, from the same seed. No collective is inside compiled code: a rank that finds its
code in the cache waits for one that compiles.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pyrobnn.core.checks import Refused
from pyrobnn.wording.findings import Finding


@dataclass(frozen=True)
class Ranks:
    """This process among those that share the rows: its number and how many there are."""

    rank: int
    count: int

    def part(self, rows: Tensor, dim: int = 0) -> Tensor:
        """This rank's of the rows along ``dim``: every ``count``-th."""
        if (num := rows.shape[dim]) < self.count:
            raise ValueError(
                f"a batch of {num} rows cannot be shared by {self.count} ranks: raise batch_size, or start fewer ranks"
            )
        own = torch.arange(self.rank, num, self.count, device=rows.device)
        return rows.index_select(dim, own)

    def mean(self, values: Sequence[Tensor], own: int, whole: int) -> list[Tensor]:
        """The mean of every rank's ``values``, each with the share of the ``whole`` rows of which it had ``own``."""
        shares = [value * (own / whole) for value in values]
        for share in shares:
            dist.all_reduce(share)
        return shares


_SHARING: ContextVar[bool] = ContextVar("sharing", default=False)


@contextlib.contextmanager
def sharing_rows() -> Iterator[None]:
    """Inside, the ranks of the process group share the rows of every batch of a fit."""
    before = _SHARING.set(True)
    try:
        yield
    finally:
        _SHARING.reset(before)


def ranks() -> Ranks | None:
    """Those that share the rows of batches; None where every process takes all of them."""
    if not _SHARING.get() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return Ranks(dist.get_rank(), dist.get_world_size())


def check_shareable(is_bnn: bool = True, from_loader: bool = False, together: Sequence[Finding] = ()) -> None:
    """Refuse a fit in which ranks that share rows have none to share: of a program, a loader, a net that mixes rows."""
    if ranks() is None:
        return
    if not is_bnn:
        raise Refused(
            "ranks share the rows of a pyrobnn.BNN alone: a plain Pyro program's data are its own affair"
        )
    if from_loader:
        raise Refused(
            "a rank takes its part of each batch from all of the rows: pass tensors instead of a DataLoader"
        )
    if together:
        raise Refused(f"{together[0]}. Ranks cannot share the rows of its batches: fit it in one process")
