"""Mini-batches of the rows of a program's plates, at which the ELBO is estimated in every step.

A program draws them itself, ``pyro.plate("rows", N, subsample_size=B) as rows``, or is handed the data of some rows,
``SVI(batch_size=B)``, in a plate of their number, ``pyro.plate("rows", len(x))``. Either way the rows of a step are
numbers that come from outside of the program, so that guide and model see the same ones, every row is seen equally
often, and the parameters of a row are those that a guide of all rows has for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyrobnn.core.checks import Refused
from pyrobnn.inference.fitting.batches import Batches, PermutedRows
from pyrobnn.model.compile.trees import Tree, mapped
from pyrobnn.model.density import Density
from pyrobnn.model.nodes import Node, is_subsample

if TYPE_CHECKING:
    from pyrobnn.inference.fitting.problem import Problem


@dataclass(frozen=True, eq=False)
class RowBatches:
    """How a program is run at some rows.

    Attributes: ``whole``, the density of all rows, and ``some``, that of a first few; ``sizes`` (N) and ``counts`` (B)
    of each plate by its name; ``given``: whether the program is given the data of the rows, the same of each plate.
    """

    whole: Density
    some: Density
    sizes: Mapping[str, int]
    counts: Mapping[str, int]
    given: bool

    @classmethod
    def of(cls, problem: Problem, batch_size: int | None) -> RowBatches | None:
        """Those of a plain program; None where every step sees all rows, or none belongs to a latent site.

        Raises:
            Refused: a program that cannot be run at some rows, or has values for rows outside of a plate.
            ValueError: a size beside that of a DataLoader.
        """
        density = problem.density
        if problem.gathered_size is not None:
            if batch_size is not None:
                raise ValueError(
                    f"the DataLoader sets the size of batches, got batch_size={batch_size} too: leave it out"
                )
            batch_size = problem.gathered_size
        if batch_size is not None:
            return cls._given(density, problem.num_rows, batch_size)
        if not density.local:
            return None
        sizes = density.plate_sizes
        counts = density.plate_counts
        rows = {name: _last(sizes[name], count, density) for name, count in counts.items()}
        return cls(
            density,
            _at_rows(density, rows, sizes, ()),
            sizes,
            counts,
            given=False,
        )

    @classmethod
    def _given(
        cls,
        density: Density,
        num_rows: int,
        batch_size: int,
    ) -> RowBatches | None:
        """Those whose data the program is given."""
        if density.plate_sizes:
            name = next(iter(density.plate_sizes))
            raise Refused(
                f"'batch_size' is given, and the plate {name!r} of the program draws a subsample itself: leave one of "
                "the two out"
            )
        if batch_size >= num_rows:
            return None
        rows = _last(num_rows, batch_size, density)
        args = _data_at(density.args, rows, num_rows)
        names = _plates_of_rows(density, args, num_rows, batch_size)
        sizes = dict.fromkeys(names, num_rows)
        numbers = dict.fromkeys(names, rows)
        some = _at_rows(density, numbers, sizes, args)
        return cls(
            density,
            some,
            sizes,
            dict.fromkeys(names, batch_size),
            given=True,
        )

    @property
    def num_batches(self) -> int:
        """Batches of an epoch; of several plates that draw, of the one with most."""
        return max(size // self.counts[name] for name, size in self.sizes.items())

    def batches(self, device: torch.device) -> Batches[tuple[Tensor, ...]]:
        """Endless row numbers, one tensor (B,) of each plate; one for all where the program is given the data."""
        orders = [
            PermutedRows(size, self.counts[name], device) for name, size in self.sizes.items()
        ]
        return _Together(orders[:1] if self.given else orders)

    def at(self, rows: Sequence[Tensor]) -> Density:
        """The density at the rows of a batch."""
        if not self.given:
            return self.some.at_rows(dict(zip(self.sizes, rows, strict=True)), self.sizes)
        numbers = dict.fromkeys(self.sizes, rows[0])
        size = next(iter(self.sizes.values()))
        return self.some.at_rows(numbers, self.sizes, _data_at(self.whole.args, rows[0], size))


class _Together(Batches[tuple[Tensor, ...]]):
    """The next of several orders of rows."""

    def __init__(self, orders: Sequence[PermutedRows]) -> None:
        self._orders = orders

    def __next__(self) -> tuple[Tensor, ...]:
        return tuple(next(order) for order in self._orders)

    def state(self) -> Any:
        return [order.state() for order in self._orders]

    def restore(self, state: Any) -> None:
        for order, saved in zip(self._orders, state, strict=True):
            order.restore(saved)


def _last(size: int, count: int, density: Density) -> Tensor:
    """The numbers (count,) of the last rows: what takes the first ones whatever it is asked for shows."""
    return torch.arange(
        size - count,
        size,
        device=density.device,
    )


def _data_at(args: tuple[Tree, ...], rows: Tensor, num_rows: int) -> tuple[Tree, ...]:
    """The data of some rows; what has no axis of all rows stays as it is."""

    def taken(value: Tree) -> Tree:
        if isinstance(value, Tensor) and value.dim() and len(value) == num_rows:
            return value[rows]
        return value

    return mapped(taken, args)


def _at_rows(
    density: Density,
    numbers: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    args: tuple[Tree, ...],
) -> Density:
    """The density at some rows; Refused where the program cannot be run there."""
    try:
        return density.at_rows(numbers, sizes, args)
    except Refused:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise not_at_rows("program", numbers, sizes, error) from error


def not_at_rows(
    whose: str,
    numbers: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    error: Exception,
) -> Refused:
    """That a program, or its guide, cannot be run at some rows, and why."""
    names = ", ".join(map(repr, numbers))
    rows = " and ".join(f"{len(value):,} of {sizes[name]:,}" for name, value in numbers.items())
    reason = " ".join(str(error).split()) or type(error).__name__
    return Refused(
        f"the {whose} cannot be run at {rows} rows of {names} ({reason}): take what belongs to rows by the plate's, as "
        "in 'with pyro.plate(…) as rows: y[rows]', and sizes from the data, len(x)"
    )


def _plates_of_rows(
    density: Density,
    args: tuple[Tree, ...],
    num_rows: int,
    batch_size: int,
) -> list[str]:
    """The plates that have as many rows as the data that the program is given.

    Raises:
        Refused: there is none, or a site outside of them has a value for each row.
    """
    nodes = density.trace(density.constrain(density.initial()))
    few = density.at_rows({}, {}, args)
    try:
        fewer_nodes = few.trace(few.constrain(few.initial()))
    except Refused:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        rows = torch.arange(batch_size)
        raise not_at_rows("program", {"x and y": rows}, {"x and y": num_rows}, error) from error
    names: list[str] = []
    for name, node in fewer_nodes.items():
        if node["type"] != "sample" or is_subsample(node):
            continue
        of_rows = [plate for plate in _plates(node) if _sizes(nodes[name]).get(plate) == num_rows]
        of_rows = [plate for plate in of_rows if _sizes(node)[plate] == batch_size]
        if not of_rows and node["value"].shape != nodes[name]["value"].shape:
            for plate, size in _sizes(node).items():
                if size == num_rows:
                    raise Refused(
                        f"the plate {plate!r} has {num_rows:,} rows however many the program is given, {batch_size:,} "
                        "of a batch: take its size from the data, len(x)"
                    )
            raise Refused(
                f"with 'batch_size' the site {name!r} has a value for each row of the batch and lies in no plate of "
                "rows, so that nothing says by how much it counts: sample it in 'with pyro.plate('rows', len(x))'"
            )
        names += [plate for plate in of_rows if plate not in names]
    if not names:
        raise Refused(
            "'batch_size' needs a plate of the rows of x and y, 'with pyro.plate('rows', len(x))', and the program has "
            "none whose size is that of its data: pass the data as x and y, or let the program draw batches itself, "
            "with pyro.plate('rows', len(x), subsample_size=100) as rows, and y[rows] as obs"
        )
    return names


def _plates(node: Node) -> Iterable[str]:
    return [frame.name for frame in node["cond_indep_stack"] if frame.vectorized]


def _sizes(node: Node) -> dict[str, int]:
    """The plates of a node, each with all of its rows, or those of a batch."""
    return {frame.name: frame.size for frame in node["cond_indep_stack"]}
