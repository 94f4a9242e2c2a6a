r"""What one pass through a DataLoader gives, so that every datum weighs the same whatever brings it.

An epoch of a loader gives K batches of :math:`b_1, \dots, b_K` points. A step on one of them sees the likelihood of its
points times a factor s, so that over the epoch a datum has the mean weight s / K, whatever batch it is in. It has to be
:math:`N / \sum_k b_k` (one, if an epoch shows each datum once), hence

.. math:: s = \frac{N}{\bar b}, \qquad \bar b = \frac1K \sum_k b_k .

The familiar :math:`N / b_k` is the same where all batches are alike, but gives the points of a short last batch more
weight than the others'; in a fixed order they are always the same points.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from pyrobnn.core.checks import Refused, as_tensor
from pyrobnn.core.findings import Finding
from pyrobnn.core.seeding import random_state, set_random_state
from pyrobnn.inference.fitting.shares import SharedLoader

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    #: inputs or targets: arrays, the loader that gives both, or what else a program takes as its data
    Data = ArrayLike | DataLoader | Mapping[str, ArrayLike] | None

#: what samplers call the number of processes that they share rows out to: torch's and timm's, Accelerate's, others'
_NUM_SHARES = ("num_replicas", "num_processes", "world_size")


@dataclass(frozen=True)
class Epoch:
    """What one pass through a DataLoader gives, and ``notes`` on what the loader leaves out or repeats."""

    num_data: int
    num_points: int
    num_batches: int
    notes: tuple[Finding, ...] = ()

    @property
    def factor(self) -> float:
        """What the likelihood of each batch is multiplied by: N over the mean batch size."""
        return self.num_data * self.num_batches / self.num_points


def survey(loader: DataLoader) -> Epoch:
    """N, points and batches of a pass, from the loader's sampler; one that has no length is walked through once.

    N is the number of points a pass yields, never more than the data set holds: a point drawn twice counts once.
    A sampler that shuffles and drops its last incomplete batch shows every point in time, so they count. Refused where
    it gives every process a share of the points.
    """
    if isinstance(loader, SharedLoader):
        return _epoch_of_shares(loader)
    _refuse_shares(loader)
    num_stored = _num_stored(loader)
    sampler = _sampler_of_rows(loader)
    drawn, points, num_batches = _counts(loader, sampler)
    if loader.batch_sampler is None:
        num_stored = drawn
    if points == 0:
        raise ValueError(
            f"the DataLoader gives no batch: its data set holds {num_stored} points and its sampler draws {drawn}"
            + (", fewer than a batch, with drop_last=True" if drawn else "")
        )
    num_data = min(drawn if _shuffles(sampler) else points, num_stored)
    notes: tuple[Finding, ...] = ()
    if num_data < min(drawn, num_stored) or _is_uneven(sampler, drawn, num_stored):
        notes = (_epoch_note(drawn, num_stored, points, num_data),)
    return Epoch(num_data, points, num_batches, notes)


def _epoch_of_shares(loader: SharedLoader) -> Epoch:
    """What one pass through the union of the ranks' batches gives."""
    num_stored = len(loader.order)
    points = loader.union.bounds[-1][1]
    num_data = num_stored if loader.order.shuffle else points
    notes: tuple[Finding, ...] = ()
    if num_data < num_stored:
        notes = (_epoch_note(num_stored, num_stored, points, num_data),)
    return Epoch(num_data, points, len(loader.union), notes)


def _sampler_of_rows(loader: DataLoader) -> Iterable:
    """The sampler of row numbers, or of batches where these have a sampler of another kind."""
    batching = loader.batch_sampler
    sampler: Iterable = loader.sampler if batching is None else batching
    if type(batching) is BatchSampler:
        sampler = batching.sampler
    if isinstance(sampler, Iterator) or isinstance(batching, Iterator):
        raise ValueError(
            "the DataLoader's sampler is an iterator, and can be walked only once: pass a list or Sampler"
        )
    return sampler


def _counts(loader: DataLoader, sampler: Iterable) -> tuple[int, int, int]:
    """The points that the sampler draws in a pass, those of them in a batch, and the number of batches."""
    batching = loader.batch_sampler
    if type(batching) is BatchSampler and isinstance(sampler, Sized):
        drawn = len(sampler)
        width = batching.batch_size
        num_batches = drawn // width if batching.drop_last else -(-drawn // width)
        return drawn, min(drawn, num_batches * width), num_batches
    sizes = _walked_sizes(loader)
    return sum(sizes), sum(sizes), len(sizes)


def _is_uneven(sampler: Iterable, drawn: int, num_stored: int) -> bool:
    """Whether a pass leaves points out or shows some twice, and not because the user has chosen which."""
    if getattr(sampler, "replacement", False):
        return True
    chosen = isinstance(sampler, (SubsetRandomSampler, Sequence)) or not isinstance(sampler, Sized)
    return drawn != num_stored and not chosen


def _epoch_note(drawn: int, size: int, points: int, num_data: int) -> Finding:
    """What a pass draws of a data set of this size, shows, and counts as."""
    values = {
        "drawn": drawn,
        "size": size,
        "points": points,
        "num_data": num_data,
    }
    return Finding("loader_epoch", values)


def _num_stored(loader: DataLoader) -> int:
    """The length of the loader's data set."""
    dataset: Any = loader.dataset  # torch declares no length
    try:
        return len(dataset)
    except TypeError as error:
        raise ValueError(
            "the DataLoader's dataset has no length, so N is unknown: use a map-style dataset"
        ) from error


def _walked_sizes(loader: DataLoader) -> list[int]:
    """The sizes of the batches of one pass, by a walk through them or through their row numbers."""
    if loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
        return [len(pair[0]) for pair in loader]
    return [len(rows) for rows in loader.batch_sampler]


def _shuffles(sampler: Iterable) -> bool:
    """Whether the sampler draws another order in each epoch."""
    if isinstance(sampler, DistributedSampler):
        return sampler.shuffle
    return isinstance(sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler))


def _refuse_shares(loader: DataLoader) -> None:
    """Refuse a loader that gives every process a share of the rows: each would take its share for all of the data."""
    for sampler in _samplers(loader):
        for name in _NUM_SHARES:
            number = getattr(sampler, name, 1)
            if isinstance(number, int) and number > 1:
                raise Refused(
                    f"the DataLoader gives this process one of {number} shares of the rows ({type(sampler).__name__}, "
                    f"{name}={number}), and a fit would take its share for all of the data. "
                    "pb.distributed.fit_on_ranks(method, model, loader) shares rows over the ranks of a process group, "
                    "of a DataLoader with torch's DistributedSampler; else pass one that gives all rows"
                )


def _samplers(loader: DataLoader) -> Iterator[Any]:
    """What decides which rows a loader gives: the loader, its samplers, and the samplers that those wrap."""
    waiting: list[Any] = [loader, loader.sampler, loader.batch_sampler]
    # the state of a loader that reads on one rank and hands parts to the others
    waiting.append(getattr(loader, "state", None))
    if isinstance(loader.dataset, IterableDataset):  # which has no sampler and shares out by itself
        waiting.append(loader.dataset)
    known: set[int] = set()
    while waiting:
        sampler = waiting.pop()
        if sampler is None or id(sampler) in known:
            continue
        known.add(id(sampler))
        yield sampler
        attributes = getattr(sampler, "__dict__", {})
        waiting += [
            value
            for name, value in attributes.items()
            if isinstance(value, Sampler) or "sampler" in name
        ]


class LoaderRandomness(TypedDict):
    """The random states that an epoch of a loader may draw from: of torch, of Python and NumPy, of its generators."""

    torch: dict[str, Tensor]
    python: list[Any]
    numpy: list[Any]
    generators: list[Tensor]


def loader_randomness(loader: DataLoader | None, device: torch.device) -> LoaderRandomness:
    """All that an epoch of a loader may draw from: the random states of torch, NumPy and Python, and its generators."""
    version, numbers, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=True)
    name, keys, *others = numpy_state
    return {
        "torch": random_state(device),
        "python": [version, list(numbers), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), *others],
        "generators": [own.get_state() for own in _generators(loader)],
    }


def set_loader_randomness(
    loader: DataLoader | None, device: torch.device, state: LoaderRandomness
) -> None:
    """Random states as :func:`loader_randomness` gave them."""
    set_random_state(state["torch"], device)
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *others = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *others))
    for own, saved in zip(_generators(loader), state["generators"], strict=True):
        own.set_state(saved)


def _generators(loader: DataLoader | None) -> list[torch.Generator]:
    """The generators that a loader and its samplers have for themselves."""
    if loader is None:
        return []
    owned = [getattr(sampler, "generator", None) for sampler in _samplers(loader)]
    unique = {id(own): own for own in owned if isinstance(own, torch.Generator)}
    return list(unique.values())


def read(loader: DataLoader, *, gather: bool) -> tuple[Tensor, Tensor, Epoch]:
    """The first batch of a loader, or with ``gather`` the points of a pass as whole tensors; and what a pass gives."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):  # iterating a loader advances the global state
        epoch = survey(loader)
        pairs = _pairs(loader, epoch, gather)
    x = torch.cat([as_tensor("x", pair[0]) for pair in pairs])
    y = torch.cat([as_tensor("y", pair[1]) for pair in pairs])
    if not gather:
        return x, y, epoch
    num = len(x)
    notes = epoch.notes
    if num < epoch.num_data and not notes:
        notes = (_epoch_note(epoch.num_data, epoch.num_data, num, num),)
    return x, y, Epoch(num, num, 1, notes)


def _pairs(loader: DataLoader, epoch: Epoch, gather: bool) -> list[Sequence[ArrayLike]]:
    """The first batch (x, y), or with ``gather`` all of a pass."""
    batches = iter(_in_order(loader) if gather else loader)
    batch = next(batches, None)
    if batch is None:
        raise ValueError(
            f"the DataLoader gives no batch, although its sampler promises {epoch.num_batches}: is it one that can "
            "be walked only once? Pass a list or a Sampler"
        )
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError(
            "the DataLoader must give batches (x, y): return two tensors from the dataset; of several inputs, as "
            "(x1, x2, y) or a dictionary, put pb.networks.SeveralInputs(net, x) into the BNN in place of net"
        )
    return [batch, *batches] if gather else [batch]


def _in_order(loader: DataLoader) -> DataLoader:
    """The loader without its shuffling, so that what is gathered does not depend on it."""
    batching: Any = loader.batch_sampler
    sampler: Any = getattr(batching, "sampler", None)
    shuffles = (
        type(batching) is BatchSampler
        and type(sampler) is RandomSampler
        and not sampler.replacement
    )
    if not shuffles or sampler.num_samples != len(loader.dataset):  # type: ignore[arg-type]
        return loader
    options = {"drop_last": batching.drop_last, "collate_fn": loader.collate_fn}
    return DataLoader(
        loader.dataset,
        batching.batch_size,
        num_workers=loader.num_workers,
        **options,
    )
