r"""Where mini-batches come from, so that every datum weighs the same whatever brings it.

An epoch of a loader gives K batches of :math:`b_1, \dots, b_K` points. A step on one of them sees the likelihood of its
points times a factor s, so that over the epoch a datum has the mean weight s / K, whatever batch it is in. It has to be
:math:`N / \sum_k b_k` (one, if an epoch shows each datum once), hence

.. math:: s = \frac{N}{\bar b}, \qquad \bar b = \frac1K \sum_k b_k .

The familiar :math:`N / b_k` is the same where all batches are alike, but gives the points of a short last batch more
weight than the others'; in a fixed order they are always the same points.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

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

from pyrobnn.core.checks import Refused, as_tensor, check_finite
from pyrobnn.core.findings import Finding
from pyrobnn.model import check_data

if TYPE_CHECKING:
    from pyrobnn.inference.fitting.problem import Problem
    from pyrobnn.model import BNN
    from pyrobnn.model.density import Density

#: rows up to which a search sees all in every step (at 10,000 mini-batches found a better mode in a fifth of the time)
MAX_WHOLE_ROWS = 2000
_PART = 20_000  # data at once in a pass over all of them
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
    refuse_shares(loader)
    size = _num_stored(loader)
    batching = loader.batch_sampler
    sampler: Any = loader.sampler if batching is None else batching
    if type(batching) is BatchSampler:
        sampler = batching.sampler
    if isinstance(sampler, Iterator) or isinstance(batching, Iterator):
        raise ValueError(
            "the DataLoader's sampler is an iterator, and can be walked only once: pass a list or Sampler"
        )
    if type(batching) is BatchSampler and hasattr(sampler, "__len__"):
        drawn = len(sampler)
        width = batching.batch_size
        batches = drawn // width if batching.drop_last else -(-drawn // width)
        points = min(drawn, batches * width)
    else:
        sizes = _walked_sizes(loader)
        drawn = sum(sizes)
        points = drawn
        batches = len(sizes)
        if batching is None:
            size = drawn
    if points == 0:
        raise ValueError(
            f"the DataLoader gives no batch: its data set holds {size} points and its sampler draws {drawn}"
            + (", fewer than a batch, with drop_last=True" if drawn else "")
        )
    num_data = min(drawn if _shuffles(sampler) else points, size)
    chosen = isinstance(sampler, (SubsetRandomSampler, Sequence)) or not hasattr(sampler, "__len__")
    odd = getattr(sampler, "replacement", False) or (drawn != size and not chosen)
    shown = {
        "drawn": drawn,
        "size": size,
        "points": points,
        "num_data": num_data,
    }
    notes = (Finding("loader_epoch", shown),) if odd or num_data < min(drawn, size) else ()
    return Epoch(num_data, points, batches, notes)


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


def _shuffles(sampler: Any) -> bool:
    """Whether the sampler draws another order in each epoch."""
    if isinstance(sampler, DistributedSampler):
        return sampler.shuffle
    return isinstance(sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler))


def refuse_shares(loader: DataLoader) -> None:
    """Refuse a loader that gives every process a share of the rows: each would take its share for all of the data."""
    for sampler in _samplers(loader):
        for name in _NUM_SHARES:
            number = getattr(sampler, name, 1)
            if isinstance(number, int) and number > 1:
                raise Refused(
                    f"the DataLoader gives this process one of {number} shares of the rows ({type(sampler).__name__}, "
                    f"{name}={number}), and a fit would take its share for all of the data: rows cannot be spread over "
                    "processes yet. Pass a DataLoader that gives all rows on every rank (without DistributedSampler); "
                    "pb.distributed.fit_on_ranks spreads chains, or the members of an ensemble"
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


def read(loader: DataLoader, *, gather: bool) -> tuple[Tensor, Tensor, Epoch]:
    """The first batch of a loader, or with ``gather`` the points of a pass as whole tensors; and what a pass gives."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):  # iterating a loader advances the global state
        epoch = survey(loader)
        batches = iter(_in_order(loader) if gather else loader)
        batch = next(batches, None)
        if batch is None:
            raise ValueError(
                f"the DataLoader gives no batch, although its sampler promises {epoch.num_batches}: is it one that can "
                "be walked only once? Pass a list or a Sampler"
            )
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ValueError(
                "the DataLoader must give batches (x, y): return two tensors from the dataset"
            )
        pairs = [batch, *batches] if gather else [batch]
    x = torch.cat([as_tensor("x", pair[0]) for pair in pairs])
    y = torch.cat([as_tensor("y", pair[1]) for pair in pairs])
    if not gather:
        return x, y, epoch
    num = len(x)
    notes = epoch.notes
    if num < epoch.num_data and not notes:
        shown = {
            "drawn": epoch.num_data,
            "size": epoch.num_data,
            "points": num,
            "num_data": num,
        }
        notes = (Finding("loader_epoch", shown),)
    return x, y, Epoch(num, num, 1, notes)


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


def checked(
    model: BNN,
    x: Any,
    y: Any,
    device: torch.device,
    loader: DataLoader | None,
) -> tuple[Tensor, Tensor]:
    """As :func:`check_data`; what is not finite in a batch of a loader is named by its row of the data set."""
    try:
        return check_data(model, x, y, device)
    except ValueError:
        finite = all(
            bool(as_tensor(name, value).isfinite().all()) for name, value in (("x", x), ("y", y))
        )
        if not finite and loader is not None and loader.batch_sampler is not None:
            parts = DataLoader(
                loader.dataset,
                1000,
                collate_fn=loader.collate_fn,
                generator=torch.Generator(),
            )
            for index, pair in enumerate(parts):
                for name, value in zip("xy", pair):
                    check_finite(name, as_tensor(name, value), 1000 * index)
        raise


def scaled_program(model: BNN, num_data: int, epoch: Epoch | None) -> Callable[..., Any]:
    """The generative program of ``model`` with the likelihood of any batch scaled to all N data."""
    if epoch is None:
        return partial(model.pyro_model, num_data=num_data)
    return partial(model.batch_model, epoch.factor)


def check_batch_size(problem: Problem, batch_size: int | None) -> None:
    """Refuse a size of mini-batches beside a plain program or a DataLoader, whose own they are."""
    if batch_size is not None and not problem.is_bnn:
        raise Refused(
            "'batch_size' needs a BNN: only a plain Pyro program itself knows which of its sites are one per datum; "
            "leave 'batch_size' out. Where no latent site has a value for each row, the program may draw its batches "
            "itself: with pyro.plate('rows', len(x), subsample_size=100) as rows, and y[rows] as obs"
        )
    if batch_size is not None and problem.loader is not None:
        raise ValueError(
            f"the DataLoader sets the size of batches, got batch_size={batch_size} too: leave it out"
        )


def mini_batches(problem: Problem, batch_size: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless mini-batches (x, y) in an order from torch's present random state; all data without a size."""
    check_batch_size(problem, batch_size)
    if problem.loader is not None:
        return _streamed(problem)
    if batch_size is None or batch_size >= problem.num_rows:
        return itertools.repeat((problem.x, problem.y))
    rows = permuted_rows(problem.num_rows, batch_size, problem.device)
    return ((problem.x.index_select(0, index), problem.y.index_select(0, index)) for index in rows)


def permuted_rows(
    num_data: int,
    batch_size: int,
    device: torch.device,
    num_walks: int | None = None,
) -> Iterator[Tensor]:
    """Endless row numbers (batch_size,); for several walks, each in an order of its own, (num_walks, batch_size).

    The last incomplete batch of a permutation is dropped, and the next epoch draws another one: in the mean every datum
    is seen equally often.
    """
    used = num_data - num_data % batch_size
    while True:
        if num_walks is None:
            order = torch.randperm(num_data, device=device)
        else:
            order = torch.rand(num_walks, num_data, device=device).argsort(1)
        yield from order[..., :used].split(batch_size, -1)


def independent_batches(
    problem: Problem, batch_size: int | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless mini-batches drawn independently; a loader's as they come.

    Within a reshuffled epoch the noise of the gradients cancels, and the iterates of SGD hardly move.
    """
    if batch_size is None or batch_size >= problem.num_rows:
        yield from mini_batches(problem, batch_size)
        return
    while True:
        rows = torch.randint(
            problem.num_rows,
            (batch_size,),
            device=problem.device,
        )
        yield problem.x[rows], problem.y[rows]


@dataclass(frozen=True)
class Inputs:
    """One pass through the inputs alone, as often as wanted."""

    problem: Problem

    def __iter__(self) -> Iterator[Tensor]:
        if self.problem.loader is None:
            return iter(self.problem.x.split(512))
        return (x for x, _ in self.problem.one_pass())


def _streamed(problem: Problem) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of the loader, epoch after epoch."""
    while True:
        batch = None
        for batch in problem.one_pass():
            yield batch
        if batch is None:
            raise ValueError(
                "the DataLoader gave its batches once and then none: pass a list or a Sampler"
            )


def in_parts(density: Density, x: Tensor, y: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """z (dim,) → gradient (dim,) and value of minus the log joint of a BNN on all data x, y, in bounded memory."""
    num_data = len(x)

    def likelihood(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        # the program scales the likelihood of its rows to all N
        return -density.log_parts(z, x, y)[1] * (len(x) / num_data)

    def minus_log_prior(z: Tensor) -> Tensor:
        return -(density.log_parts(z, x[:1], y[:1])[0] + density.log_jacobian(z).double())

    def slope(z: Tensor) -> tuple[Tensor, Tensor]:
        total, value = torch.func.grad_and_value(minus_log_prior)(z)
        for rows in zip(x.split(_PART), y.split(_PART), strict=True):
            gradient, loss = torch.func.grad_and_value(likelihood)(z, *rows)
            total = total + gradient
            value = value + loss
        return total, value

    return slope


@torch.no_grad()
def forward_in_parts(model: BNN, values: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The net's output (N, width) at one set of site values, in bounded memory."""
    return torch.cat([model.forward(values, rows) for rows in x.split(_PART)])
