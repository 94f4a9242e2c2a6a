r"""Rows that are shared out over the ranks of a process group, so that all of them fit as one process would.

A batch of the fit is the union of the ranks' batches. Its loss is linear in the log likelihood, so that it is the mean
over ranks of what each computes from its own rows with their likelihood taken R times:

.. math:: -\log p(\theta) - s \sum_r \ell_r(\theta)
    = \frac1R \sum_r \big( -\log p(\theta) - s R\, \ell_r(\theta) \big)

That mean is taken of gradients and losses where a loop evaluates them, outside of compiled code; everything else is
computed by every rank alike. The random numbers of weights are those of one process too.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

from pyrobnn.core.checks import Refused
from pyrobnn.core.seeding import seeded

Outcome = TypeVar("Outcome", Tensor, tuple[Tensor, ...])
_Plain = TypeVar("_Plain")
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


class Ranks:
    """The processes of a group, and which of them this is.

    Attributes: ``active``, whether there is a group; ``count`` of the ranks; ``rank``, the number of this one;
        ``asked_to_end``, says whether this process was asked to end; ``ending``, whether any was, as all of them know
        since the latest mean.
    """

    def __init__(self) -> None:
        self.active = dist.is_available() and dist.is_initialized()
        self.count = dist.get_world_size() if self.active else 1
        self.rank = dist.get_rank() if self.active else 0
        self.asked_to_end: Callable[[], bool] = lambda: False
        self.ending = False

    def mean(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The means over the ranks of tensors of floating types."""
        sent = values[0]
        flag = torch.full(
            (1,),
            float(self.asked_to_end()),
            dtype=sent.dtype,
            device=sent.device,
        )
        by_type: dict[torch.dtype, list[Tensor]] = {sent.dtype: [flag]}
        for value in values:
            by_type.setdefault(value.dtype, []).append(value)
        means: dict[torch.dtype, Iterator[Tensor]] = {}
        for dtype, group in by_type.items():
            flat = torch.cat([value.reshape(-1) for value in group])
            if self.count > 1:
                dist.all_reduce(flat)
                flat /= self.count
            means[dtype] = iter(flat.split([value.numel() for value in group]))
        self.ending = bool(next(means[sent.dtype]) > 0)
        return [next(means[value.dtype]).reshape(value.shape) for value in values]

    def from_first(self, value: _Plain) -> _Plain:
        """What rank 0 has, on every rank; an error is raised on all of them."""
        box = [value]
        if self.count > 1:
            dist.broadcast_object_list(box)
        if isinstance(box[0], Exception):
            raise box[0]
        return box[0]

    def agree(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these tensors are the same on all ranks, bit for bit."""
        return self.same(tuple(map(digest, tensors)))

    def same(self, value: _Plain) -> bool:
        """Whether a plain value is the same on all ranks."""
        values = [value] * self.count
        if self.count > 1:
            dist.all_gather_object(values, value)
        return all(other == values[0] for other in values)

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.count > 1:
            dist.barrier()


def digest(tensor: Tensor) -> int:
    """A number that changes with any bit of a tensor, or with the order of its values."""
    values = tensor.detach().contiguous().reshape(-1)
    size = values.element_size()
    bits = values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    numbers = torch.arange(
        1,
        2 * len(bits),
        2,
        device=bits.device,
    )
    return int((bits.long() * (numbers * _ODD)).sum())


class Shares:
    """The shares of one fit: what its loops take the means of, and the random numbers that are a rank's own.

    Args:
        ranks: that share the rows.
        seed: of the fit.
        device: of what is evaluated.
        own_noise: whether an evaluation draws for its rows alone, as dropout does: other numbers on every rank.
    """

    def __init__(
        self,
        ranks: Ranks,
        seed: int,
        device: torch.device,
        *,
        own_noise: bool,
    ) -> None:
        self.ranks = ranks
        self.evaluations = 0
        self._seed = seed
        self._device = device
        self._own_noise = own_noise

    @property
    def rows_of_batch(self) -> tuple[int, int]:
        """Which rows of a batch of the fit are this rank's: the number of the first, and the step to the next."""
        return self.ranks.rank, self.ranks.count

    def across(self, function: Callable[..., Outcome]) -> Callable[..., Outcome]:
        """The mean over the ranks of a function of this rank's rows, whose values are tensors."""

        def mean(*args: Tensor) -> Any:
            self.evaluations += 1
            with self.noise("evaluation", self.evaluations) if self._own_noise else _AS_IT_IS:
                outcome = function(*args)
            if isinstance(outcome, Tensor):
                return self.ranks.mean([outcome])[0]
            return tuple(self.ranks.mean(outcome))

        return mean

    @contextlib.contextmanager
    def noise(self, purpose: str, number: int) -> Iterator[None]:
        """Torch's random numbers of this rank alone, by a purpose and a number of it."""
        name = f"{self._seed} {self.ranks.rank} {purpose} {number}"
        bits = hashlib.sha256(name.encode()).digest()[:4]
        with seeded(int.from_bytes(bits, "big"), self._device):
            yield

    def check_state(self, state: Tensor) -> None:
        """RuntimeError unless all ranks have the same state, bit for bit."""
        if not self.ranks.agree([state]):
            raise RuntimeError(
                "the ranks have come to different parameters, which are to be the same bit for bit: run the same "
                "program, versions and kind of machine on every rank, and leave random numbers of torch alone in "
                "callbacks"
            )


_AS_IT_IS: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def across(shares: Shares | None, function: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """A function of a batch, of shares its mean over ranks; without shares as it is."""
    return function if shares is None else shares.across(function)


# -- loaders -----------------------------------------------------------------------------------------------------------


class SharedLoader(DataLoader):
    """All rows in the batches of the fit, of which ``share`` gives those of this rank.

    Every batch is the union of the ranks' batches under torch's ``DistributedSampler``, without the rows that it
    repeats to give all ranks as many; a last batch of fewer rows than ranks belongs to the one before.

    Args:
        loader: one rank's, by :func:`shares_of_loader`.
        ranks: that share the rows.
    """

    def __init__(self, loader: DataLoader, ranks: Ranks) -> None:
        batching = cast(BatchSampler, loader.batch_sampler)
        sampler = cast(DistributedSampler, batching.sampler)
        self.ranks = ranks
        self.order: DistributedSampler = DistributedSampler(
            loader.dataset,
            num_replicas=1,
            rank=0,
            shuffle=sampler.shuffle,
            seed=sampler.seed,
        )
        self.union = UnionOfBatches(
            self.order,
            batching.batch_size * ranks.count,
            batching.drop_last,
            ranks.count,
        )
        options: dict[str, Any] = {
            "collate_fn": loader.collate_fn,
            "num_workers": loader.num_workers,
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": loader.multiprocessing_context,
        }
        super().__init__(
            loader.dataset,
            batch_sampler=self.union,
            **options,
        )
        if loader.num_workers:
            options |= {
                "prefetch_factor": loader.prefetch_factor,
                "persistent_workers": loader.persistent_workers,
            }
        self.share: DataLoader = DataLoader(
            loader.dataset,
            batch_sampler=_ShareOfBatches(self.union, ranks),
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            **options,
        )

    @property
    def plan(self) -> list[Any]:
        """What has to be the same on all ranks."""
        order = self.order
        return [
            len(self.union.order),
            self.union.size,
            self.union.drop_last,
            order.shuffle,
            order.seed,
        ]


class UnionOfBatches(Sampler[list[int]]):
    """Lists of row numbers, ``size`` of them in each but for the end of the order."""

    def __init__(
        self,
        order: DistributedSampler,
        size: int,
        drop_last: bool,
        num_ranks: int,
    ) -> None:
        self.order = order
        self.size = size
        self.drop_last = drop_last
        self.bounds = self._bounds(num_ranks)

    def _bounds(self, num_ranks: int) -> list[tuple[int, int]]:
        """Where in the order each batch begins and ends."""
        drawn = len(self.order)
        starts = list(range(0, drawn, self.size))
        if starts and drawn - starts[-1] < self.size and self.drop_last:
            drawn = starts.pop()
        if len(starts) > 1 and drawn - starts[-1] < num_ranks:
            starts.pop()
        if not starts or drawn < num_ranks:
            raise ValueError(
                f"a pass of the DataLoader gives {drawn} rows in batches of {self.size}, and {num_ranks} ranks share "
                "them: use fewer ranks or smaller batches"
            )
        return list(zip(starts, [*starts[1:], drawn], strict=True))

    def __iter__(self) -> Iterator[list[int]]:
        rows = list(self.order)
        return (rows[start:end] for start, end in self.bounds)

    def __len__(self) -> int:
        return len(self.bounds)


class _ShareOfBatches(Sampler[list[int]]):
    """Of every batch the rows of this rank, as a ``DistributedSampler`` deals them out."""

    def __init__(self, union: UnionOfBatches, ranks: Ranks) -> None:
        self._union = union
        self._ranks = ranks

    def __iter__(self) -> Iterator[list[int]]:
        return (rows[self._ranks.rank :: self._ranks.count] for rows in self._union)

    def __len__(self) -> int:
        return len(self._union)


def gives_shares(loader: DataLoader | _Plain) -> bool:
    """Whether this is a DataLoader whose rows a ``DistributedSampler`` of torch's order deals out."""
    batching = loader.batch_sampler if isinstance(loader, DataLoader) else None
    if type(batching) is not BatchSampler:
        return False
    sampler = batching.sampler
    return (
        isinstance(sampler, DistributedSampler)
        and type(sampler).__iter__ is DistributedSampler.__iter__
    )


def shared_loader(loader: DataLoader, ranks: Ranks) -> SharedLoader:
    """The loader of all rows whose shares such a loader gives.

    Raises:
        Refused: shares of another number of ranks, or of another rank, than this process's.
        ValueError: another plan on another rank, or fewer rows than ranks.
    """
    sampler = cast(DistributedSampler, cast(BatchSampler, loader.batch_sampler).sampler)
    if (sampler.num_replicas, sampler.rank) != (ranks.count, ranks.rank):
        raise Refused(
            f"the DataLoader gives this process one of {sampler.num_replicas} shares of the rows "
            f"(share {sampler.rank}), and it is rank {ranks.rank} of {ranks.count}: fit_on_ranks shares rows over "
            "the ranks of the process group. Make the group first, and then DistributedSampler(dataset)"
        )
    shared = SharedLoader(loader, ranks)
    if not ranks.same(shared.plan):
        raise ValueError(
            "the ranks' DataLoaders differ in the length of their data sets, batch_size, drop_last, shuffle or seed: "
            "make them alike on every rank"
        )
    return shared
