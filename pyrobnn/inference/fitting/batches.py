"""Where mini-batches come from, and passes over all of the data in bounded memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pyrobnn.core.checks import Refused, as_tensor, check_finite
from pyrobnn.core.positions import evenly_spaced
from pyrobnn.core.seeding import generator

# `batches.read` and the like: `problem` imports this module alone
from pyrobnn.inference.fitting.loaders import Epoch as Epoch
from pyrobnn.inference.fitting.loaders import read as read
from pyrobnn.inference.fitting.loaders import survey as survey
from pyrobnn.model import check_data

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from pyrobnn.inference.fitting.problem import Problem
    from pyrobnn.model import BNN
    from pyrobnn.model.density import Density

#: rows up to which a search sees all in every step (at 10,000 mini-batches found a better mode in a fifth of the time)
MAX_WHOLE_ROWS = 2000
_PART = 20_000  # data at once in a pass over all of them


def checked(
    model: BNN,
    x: ArrayLike,
    y: ArrayLike,
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


def even_rows(num_rows: int, largest: int) -> Tensor:
    """Numbers of ``num_rows`` rows, evenly spaced where these are more than ``largest``."""
    # float32 would have no number for rows beyond 2**24
    return evenly_spaced(num_rows, min(largest, num_rows), torch.float64)


def row_parts(rows: Tensor, size: int) -> tuple[Tensor, ...]:
    """Parts of ``size`` rows; a last one of a single row is joined to the part before, for it has no variance."""
    parts = rows.split(size)
    if len(parts) > 1 and len(parts[-1]) == 1:
        return (*parts[:-2], torch.cat(parts[-2:]))
    return parts


def of_rows(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The batch (x, y); of row numbers (batch_size,) and all data that of these rows."""
    if len(batch) < 3:
        return batch
    rows, x, y = batch
    return x[rows], y[rows]


def member_rows(
    num_data: int,
    batch_size: int,
    device: torch.device,
    seeds: Sequence[int],
) -> Iterator[Tensor]:
    """Endless row numbers (member, batch_size): each member walks through permutations by its own seed.

    The last incomplete batch of a permutation is dropped, as of :func:`permuted_rows`.
    """
    generators = [generator(seed, device) for seed in seeds]
    used = num_data - num_data % batch_size
    while True:
        orders = [
            torch.randperm(num_data, generator=of_member, device=device) for of_member in generators
        ]
        # compiled code takes every batch to lie in memory as the first did
        yield from (
            rows.contiguous() for rows in torch.stack(orders)[:, :used].split(batch_size, 1)
        )


@dataclass(frozen=True)
class Inputs:
    """One pass through the inputs alone, as often as wanted; in memory, of at most ``largest`` rows."""

    problem: Problem
    largest: int

    def __iter__(self) -> Iterator[Tensor]:
        if self.problem.loader is not None:
            return (x for x, _ in self.problem.one_pass())
        x = self.problem.x
        if len(x) > self.largest:
            x = x[even_rows(len(x), self.largest).to(x.device)]
        return iter(row_parts(x, 512))


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

    def minus_log_likelihood(z: Tensor, some_x: Tensor, some_y: Tensor) -> Tensor:
        # the program scales the likelihood of its rows to all N
        return -density.log_parts(z, some_x, some_y)[1] * (len(some_x) / num_data)

    def minus_log_prior(z: Tensor) -> Tensor:
        return -(density.log_parts(z, x[:2], y[:2])[0] + density.log_jacobian(z).double())

    def slope(z: Tensor) -> tuple[Tensor, Tensor]:
        gradient, value = torch.func.grad_and_value(minus_log_prior)(z)
        slope_of_rows = torch.func.grad_and_value(minus_log_likelihood)
        for rows in zip(x.split(_PART), y.split(_PART), strict=True):
            part_gradient, part_value = slope_of_rows(z, *rows)
            gradient = gradient + part_gradient
            value = value + part_value
        return gradient, value

    return slope


@torch.no_grad()
def forward_in_parts(model: BNN, values: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The net's output (N, width) at one set of site values, in bounded memory."""
    return torch.cat([model.forward(values, rows) for rows in x.split(_PART)])
