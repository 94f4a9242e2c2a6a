"""Where mini-batches come from, and passes over all of the data in bounded memory."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NotRequired, TypedDict, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pyrobnn.core.checks import Refused, as_tensor, check_finite
from pyrobnn.core.positions import evenly_spaced
from pyrobnn.core.seeding import generator

# `batches.read` and the like: `problem` imports this module alone
from pyrobnn.inference.fitting.loaders import Epoch as Epoch
from pyrobnn.inference.fitting.loaders import (
    LoaderRandomness,
    loader_randomness,
    set_loader_randomness,
)
from pyrobnn.inference.fitting.loaders import read as read
from pyrobnn.inference.fitting.loaders import survey as survey
from pyrobnn.inference.fitting.shares import Ranks, SharedLoader, Shares
from pyrobnn.model import CheckedData, checked_data
from pyrobnn.model.density import Program
from pyrobnn.model.gradient import at_each

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from pyrobnn.inference.fitting.problem import Problem
    from pyrobnn.model import BNN
    from pyrobnn.model.density import Density

T = TypeVar("T")
S = TypeVar("S")
#: rows up to which a search sees all in every step (at 10,000 mini-batches found a better mode in a fifth of the time)
MAX_WHOLE_ROWS = 2000
_PART = 20_000  # data at once in a pass over all of them


def checked(
    model: BNN,
    x: ArrayLike,
    y: ArrayLike,
    device: torch.device,
    loader: DataLoader | None,
) -> CheckedData:
    """As :func:`checked_data`; what is not finite in a batch of a loader is named by its row of the data set."""
    try:
        return checked_data(model, x, y, device)
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


class Batches(Iterator[T], abc.ABC):
    """Endless batches, which know where they are: what :meth:`state` gave, :meth:`restore` goes on from.

    Attributes: ``shares``, of batches that are a rank's: what is computed from them counts by its mean over the ranks.
    """

    shares: Shares | None = None

    def state(self) -> Any:
        """Where they are; None where every batch is drawn by itself."""

    def restore(self, state: Any) -> None:
        """Go on from there."""

    def mapped(self, change: Callable[[T], S]) -> Batches[S]:
        """What ``change`` makes of each."""
        return _Mapped(self, change)


class _Mapped(Batches[S], Generic[T, S]):
    """What a function makes of other batches."""

    def __init__(self, batches: Batches[T], change: Callable[[T], S]) -> None:
        self._batches = batches
        self._change = change
        self.shares = batches.shares

    def __next__(self) -> S:
        return self._change(next(self._batches))

    def state(self) -> Any:
        return self._batches.state()

    def restore(self, state: Any) -> None:
        self._batches.restore(state)


class Independent(Batches[T]):
    """Batches that are each drawn by itself, from torch's present random state."""

    def __init__(self, draw: Callable[[], T]) -> None:
        self._draw = draw

    def __next__(self) -> T:
        return self._draw()


def same(batch: T) -> Batches[T]:
    """One batch, again and again."""
    return Independent(lambda: batch)


class _OrderState(TypedDict):
    """What a checkpoint has of an order: how many of its batches were taken, and the states of its generators."""

    order: Tensor
    taken: int
    generators: NotRequired[list[Tensor]]


class _Orders(Batches[Tensor]):
    """Row numbers (…, batch_size) of permutations of all rows, one permutation after the other.

    The last incomplete batch of a permutation is dropped, and the next epoch draws another one: in the mean every datum
    is seen equally often.
    """

    def __init__(self, num_data: int, batch_size: int) -> None:
        self._num_data = num_data
        self._batch_size = batch_size
        self._order = torch.zeros(0, dtype=torch.int64)
        self._taken = 0
        self._batches: Sequence[Tensor] = ()

    @abc.abstractmethod
    def _drawn(self) -> Tensor:
        """Another permutation, (…, num_data)."""

    def __next__(self) -> Tensor:
        if self._taken == len(self._batches):
            self._begin(self._drawn())
        self._taken += 1
        return self._batches[self._taken - 1]

    def _begin(self, order: Tensor) -> None:
        self._order = order
        self._taken = 0
        used = self._num_data - self._num_data % self._batch_size
        self._batches = order[..., :used].split(self._batch_size, -1)

    def state(self) -> _OrderState:
        return {"order": self._order, "taken": self._taken}

    def restore(self, state: _OrderState) -> None:
        if len(state["order"]):
            self._begin(state["order"].to(self._device))
        self._taken = state["taken"]

    @property
    @abc.abstractmethod
    def _device(self) -> torch.device:
        """Where the numbers are."""


class PermutedRows(_Orders):
    """Endless row numbers (batch_size,); for several walks, each in an order of its own, (num_walks, batch_size)."""

    def __init__(
        self,
        num_data: int,
        batch_size: int,
        device: torch.device,
        num_walks: int | None = None,
    ) -> None:
        super().__init__(num_data, batch_size)
        self._place = device
        self._num_walks = num_walks

    def _drawn(self) -> Tensor:
        if self._num_walks is None:
            return torch.randperm(self._num_data, device=self._place)
        return torch.rand(self._num_walks, self._num_data, device=self._place).argsort(1)

    @property
    def _device(self) -> torch.device:
        return self._place


class MemberRows(_Orders):
    """Endless row numbers (member, batch_size): each member walks through permutations by its own seed."""

    def __init__(
        self,
        num_data: int,
        batch_size: int,
        device: torch.device,
        seeds: Sequence[int],
    ) -> None:
        super().__init__(num_data, batch_size)
        self._generators = [generator(seed, device) for seed in seeds]

    def __next__(self) -> Tensor:
        # compiled code takes every batch to lie in memory as the first did
        return super().__next__().contiguous()

    def _drawn(self) -> Tensor:
        orders = []
        for of_member in self._generators:
            order = torch.randperm(
                self._num_data,
                generator=of_member,
                device=of_member.device,
            )
            orders.append(order)
        return torch.stack(orders)

    @property
    def _device(self) -> torch.device:
        return self._generators[0].device

    def state(self) -> _OrderState:
        generators = [of_member.get_state() for of_member in self._generators]
        return {**super().state(), "generators": generators}

    def restore(self, state: _OrderState) -> None:
        super().restore(state)
        for of_member, random in zip(self._generators, state["generators"], strict=True):
            of_member.set_state(random)


class _StreamState(TypedDict):
    """What a checkpoint has of a stream: the random states at the beginning of its epoch, and the batches since."""

    begun: LoaderRandomness | None
    taken: int


class _Streamed(Batches[tuple[Tensor, ...]]):
    """The batches of a loader, epoch after epoch.

    What an epoch brings depends on the random state at its beginning; to go on in the middle of one, it is begun from
    that again, and the batches that were seen are passed over.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._begun: LoaderRandomness | None = None
        self._taken = 0
        self._epoch: Iterator[tuple[Any, Any]] = iter(())

    def __next__(self) -> tuple[Tensor, ...]:
        batch = next(self._epoch, None)
        if batch is None:
            self._begin()
            batch = next(self._epoch, None)
        if batch is None:
            raise ValueError(
                "the DataLoader gave its batches once and then none: pass a list or a Sampler"
            )
        self._taken += 1
        problem = self._problem
        return checked(problem.bnn, *batch, problem.device, problem.loader)[:2]

    def _begin(self) -> None:
        self._begun = loader_randomness(self._problem.loader, self._problem.device)
        self._taken = 0
        self._epoch = iter(self._problem.loader or ())

    def state(self) -> _StreamState:
        return {"begun": self._begun, "taken": self._taken}

    def restore(self, state: _StreamState) -> None:
        if state["begun"] is None:
            return
        set_loader_randomness(self._problem.loader, self._problem.device, state["begun"])
        self._begin()
        for _ in range(state["taken"]):
            next(self._epoch)
        self._taken = state["taken"]


class _ShareState(TypedDict):
    """What a checkpoint has of a rank's batches: the epoch, its batches that were taken, and evaluations so far."""

    epoch: int
    taken: int
    evaluations: int


class _SharedStream(Batches[tuple[Tensor, ...]]):
    """This rank's rows of the batches of a loader, epoch after epoch.

    What an epoch brings depends on its number, the seed and the rank alone: the state is the same on all ranks.
    """

    def __init__(self, problem: Problem, loader: SharedLoader, shares: Shares) -> None:
        self._problem = problem
        self._loader = loader
        self._given = shares
        self.shares = shares
        self._epoch = -1
        self._taken = 0
        self._batches: Iterator[tuple[Any, Any]] = iter(())

    def __next__(self) -> tuple[Tensor, ...]:
        if self._epoch < 0 or self._taken == len(self._loader.union):
            self._begin(self._epoch + 1)
        batch = self._drawn()
        problem = self._problem
        return checked(problem.bnn, *batch, problem.device, problem.loader)[:2]

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        self._taken = 0
        self._loader.order.set_epoch(epoch)
        with self._given.noise("epoch", epoch):
            self._batches = iter(self._loader.share)

    def _drawn(self) -> tuple[Any, Any]:
        """The next batch; what its data set draws at random is this rank's own."""
        number = self._epoch * len(self._loader.union) + self._taken
        self._taken += 1
        with self._given.noise("batch", number):
            return next(self._batches)

    def state(self) -> _ShareState:
        return {
            "epoch": self._epoch,
            "taken": self._taken,
            "evaluations": self._given.evaluations,
        }

    def restore(self, state: _ShareState) -> None:
        self._given.evaluations = state["evaluations"]
        if state["epoch"] < 0:
            return
        self._begin(state["epoch"])
        while self._taken < state["taken"]:
            self._drawn()


def share_of_program(program: partial[None], num_ranks: int) -> Callable[..., Any]:
    """A program by :func:`scaled_program` of a loader, with its likelihood taken ``num_ranks`` times."""
    (factor,) = program.args
    return partial(program.func, num_ranks * factor)


def density_of_share(density: Density, ranks: Ranks) -> Density:
    """The density of a net given this rank's rows of all, their likelihood taken as often as there are ranks.

    Its mean over the ranks is the density given all rows.
    """
    mine = tuple(argument[ranks.rank :: ranks.count] for argument in density.args)
    counted = ranks.count * len(mine[0])

    def counting(program: Program) -> Program:
        return partial(cast("partial[None]", program).func, num_data=counted)

    share = density.with_programs(counting)
    share.args = mine
    return share


def mini_batches(problem: Problem, batch_size: int | None) -> Batches[tuple[Tensor, ...]]:
    """Endless mini-batches (x, y) in an order from torch's present random state; all data without a size."""
    check_batch_size(problem, batch_size)
    if problem.shares is not None and isinstance(problem.loader, SharedLoader):
        return _SharedStream(problem, problem.loader, problem.shares)
    if problem.loader is not None:
        return _Streamed(problem)
    if batch_size is None or batch_size >= problem.num_rows:
        return same((problem.x, problem.y))
    rows = PermutedRows(problem.num_rows, batch_size, problem.device)
    return rows.mapped(
        lambda index: (problem.x.index_select(0, index), problem.y.index_select(0, index))
    )


def independent_batches(problem: Problem, batch_size: int | None) -> Batches[tuple[Tensor, ...]]:
    """Endless mini-batches drawn independently; a loader's as they come.

    Within a reshuffled epoch the noise of the gradients cancels, and the iterates of SGD hardly move.
    """
    if batch_size is None or batch_size >= problem.num_rows:
        return mini_batches(problem, batch_size)

    def draw() -> tuple[Tensor, ...]:
        rows = torch.randint(
            problem.num_rows,
            (batch_size,),
            device=problem.device,
        )
        return problem.x[rows], problem.y[rows]

    return Independent(draw)


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


@dataclass(frozen=True)
class Inputs:
    """One pass through the inputs alone, as often as wanted; in memory, of at most ``largest`` rows, in parts."""

    problem: Problem
    largest: int
    part: int = 512

    def __iter__(self) -> Iterator[Tensor]:
        if self.problem.loader is not None:
            return (x for x, _ in self.problem.one_pass())
        x = self.problem.x
        if len(x) > self.largest:
            x = x[even_rows(len(x), self.largest).to(x.device)]
        return iter(row_parts(x, self.part))

    def few(self, count: int) -> list[Tensor]:
        """About so many rows of the pass, evenly spaced, as one batch."""
        stream = self.problem.stream
        if stream is None:
            return list(Inputs(self.problem, count, count))
        every = max(1, stream.num_batches // count)
        of_batch = max(1, count // stream.num_batches)
        parts = itertools.islice(self, 0, None, every)
        return [torch.cat([x[even_rows(len(x), of_batch).to(x.device)] for x in parts])]


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
def log_joints_in_parts(density: Density, x: Tensor, y: Tensor, points: Tensor) -> Tensor:
    """Log joint of a BNN on all data x, y at points (point, dim), (point,), float64, in bounded memory."""
    log_likelihood = torch.zeros(len(points), dtype=torch.float64, device=points.device)
    at_once = max(1, _PART // len(x))
    for rows in zip(x.split(_PART), y.split(_PART), strict=True):
        log_parts = partial(_log_parts_of_rows, density, rows)
        log_prior, part = at_each(log_parts, points, at_once=at_once)
        # the program scales the likelihood of its rows to all N
        log_likelihood += part * (len(rows[0]) / len(x))
    return log_prior + log_likelihood


def _log_parts_of_rows(
    density: Density, rows: tuple[Tensor, Tensor], z: Tensor
) -> tuple[Tensor, Tensor]:
    """Log prior density of a point (dim,) in its unconstrained coordinates, and log likelihood of rows (x, y)."""
    log_prior, log_likelihood = density.log_parts(z, *rows)
    return log_prior + density.log_jacobian(z).double(), log_likelihood


@torch.no_grad()
def forward_in_parts(model: BNN, values: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The net's output (N, width) at one set of site values, in bounded memory."""
    return torch.cat([model.forward(values, rows) for rows in x.split(_PART)])
