"""A density of N rows in the shapes of more: filled rows weigh nothing, so that one compiled code serves every N.

Rows are filled up with copies of the last one, whose terms at the observed sites have weight zero. A site that is one
joint event of all rows, as a multivariate normal is, has no such terms: the program asks for :func:`row_weights` and
takes the filled rows out itself. :func:`padded` compares the density with that of the rows alone, and refuses a program
of which the two differ.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyrobnn.core.checks import Refused
from pyrobnn.core.seeding import seeded
from pyrobnn.model.compile.trees import Tree, leaves_of, mapped
from pyrobnn.model.distribution_kinds import elementwise
from pyrobnn.model.nodes import Node, is_datum

if TYPE_CHECKING:
    from pyrobnn.model.density import Density

#: relative difference of a log density, or of its gradient, that another order of a sum makes in float32
_ROUNDING = 1e-4
#: points at which a density is looked at
_FEW = 4
#: the weights of the rows of the run under way; None where no rows are filled
_weights: ContextVar[Tensor | None] = ContextVar("_weights", default=None)


def row_weights(num: int) -> Tensor:
    """The weights (num,) of the rows of the run under way, for a program with a joint density of all of its rows.

    One for a row of the data, zero for one that was filled in; float32 without padding: all ones.
    """
    weights = _weights.get()
    return torch.ones(num) if weights is None or len(weights) != num else weights


@dataclass(frozen=True, eq=False)
class Padding:
    """What a run with filled rows is told.

    Attributes:
        num_rows: N, of the data.
        is_row: (capacity,), true for a row of the data.
        sites: names of the observed sites that have a term for each row.
        sums_out: whether discrete sites are summed out, all of whose sites must have one scale.
    """

    num_rows: int
    is_row: Tensor
    sites: frozenset[str]
    sums_out: bool

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Inside, :func:`row_weights` has their weights."""
        token = _weights.set(self.is_row.float())
        try:
            yield
        finally:
            _weights.reset(token)

    def weigh(self, nodes: Mapping[str, Any]) -> None:
        """Take the terms of filled rows out of the nodes of a run."""
        for name in self.sites:
            node = nodes[name]
            law = _law_of_rows(node)
            # a joint event of all rows: the program has weighed them
            if law is None:
                continue
            num_trailing = node["value"].dim() - law.event_dim - 1
            is_row = self.is_row.reshape(-1, *[1] * num_trailing)
            node["fn"] = law
            node["scale"] = self._scale_of_rows(node)
            # a weight leaves the values as they are, copies of a row; a mask puts others in their place, of which a law
            # may have no gradient
            if not self.sums_out:
                node["scale"] = node["scale"] * is_row.float()
            else:
                node["mask"] = is_row if node["mask"] is None else is_row & node["mask"]

    def _scale_of_rows(self, node: Node) -> Tensor | float:
        """The scale of a site without what a plate of a stated size N makes of the filled rows, of which it has more.

        The same number for every N, where the rows have no other scale.
        """
        total = len(self.is_row)
        scale: Tensor | float = node["scale"]
        for plate in node["cond_indep_stack"]:
            if plate.full_size == self.num_rows and plate.size == total:
                scale = scale * total / self.num_rows
        is_one = not isinstance(scale, Tensor) and math.isclose(scale, 1.0, rel_tol=1e-12)
        return 1.0 if is_one else scale


def _law_of_rows(node: Node) -> Any:
    """The distribution of the site whose batch shape has the axis of the rows; None where it is of all rows jointly."""
    num_dims = node["value"].dim()
    for law in (node["fn"], elementwise(node["fn"])):
        if law.event_dim < num_dims:
            return law
    return None


def padded(density: Density, capacity: int, z: Tensor) -> Density:
    """The density with its rows filled up to the next multiple of ``capacity``, checked at one of ``z`` (point, dim).

    Its data are its own: a call with other ones, as of a mini-batch, is not weighed.

    Raises:
        Refused: the program has no rows as its arguments, or its density is not one of rows that can be filled up.
    """
    num_rows = _num_rows(density.args)
    total = -(-num_rows // capacity) * capacity
    try:
        filled = _filled(density, num_rows, total)
        same = _agree(density, filled, z)
    except (RuntimeError, ValueError, IndexError, Refused):
        same = False
    if not same:
        raise Refused(
            "'capacity' fills up rows, and the density of this program is not that of its rows then (a mean over them, "
            "a latent value for each, their number, or data that it closes over): take such numbers from outside, "
            "weigh the rows of a joint density by pyrobnn.model.padding.row_weights(len(y)), or leave 'capacity' out"
        )
    return filled


def _num_rows(args: tuple[Tree, ...]) -> int:
    """Rows of the last tensor of the arguments."""
    tensors = [leaf for leaf in leaves_of(args) if isinstance(leaf, Tensor) and leaf.dim()]
    if not tensors or not len(tensors[-1]):
        raise Refused(
            "'capacity' fills up rows, and the program takes none as its arguments: pass the data, fit(program, x, y), "
            "or leave 'capacity' out"
        )
    return len(tensors[-1])


def _filled(density: Density, num_rows: int, total: int) -> Density:
    """The density of ``total`` rows, of which ``num_rows`` count."""

    def fill(leaf: Tree) -> Tree:
        if not isinstance(leaf, Tensor) or not leaf.dim() or len(leaf) != num_rows:
            return leaf
        copies = leaf[-1:].expand(total - num_rows, *leaf.shape[1:])
        return torch.cat([leaf, copies])

    is_row = (torch.arange(total) < num_rows).to(density.device)
    filled = copy.copy(density)
    filled.args = mapped(fill, density.args)
    sites = _sites_of_rows(density, num_rows)
    filled.padding = Padding(num_rows, is_row, sites, density.sums_out)
    return filled


def _sites_of_rows(density: Density, num_rows: int) -> frozenset[str]:
    """The observed sites that get one value fewer where the data have one row fewer; all of so many, of one row."""

    def without_last(leaf: Tree) -> Tree:
        if not isinstance(leaf, Tensor) or not leaf.dim() or len(leaf) != num_rows:
            return leaf
        return leaf[:-1]

    values = density.constrain(
        torch.zeros(
            density.dim,
            dtype=density.dtype,
            device=density.device,
        )
    )
    # discrete sites are drawn
    with seeded(0, density.device):
        lengths = _lengths(density.run(values))
        shorter = lengths
        if num_rows > 1:
            shorter = _lengths(density.run(values, mapped(without_last, density.args)))
    change = int(num_rows > 1)
    return frozenset(
        name
        for name, length in lengths.items()
        if length == num_rows and shorter.get(name) == num_rows - change
    )


def _lengths(nodes: Mapping[str, Node]) -> dict[str, int]:
    """The first axis of the values of the observed sites, by name."""
    return {
        name: len(node["value"])
        for name, node in nodes.items()
        if is_datum(node) and node["value"].dim()
    }


def _agree(density: Density, filled: Density, z: Tensor) -> bool:
    """Whether two densities are the same but for rounding, value and gradient, where the first is finite.

    That is at one of ``z`` (point, dim), or in the box of starts; a density that is finite nowhere is refused by
    whoever samples it.
    """
    for point in (*z[:_FEW], *density.sample_box(_FEW, seed=0)):
        slope, value = torch.func.grad_and_value(density.log_joint)(point)
        if bool(value.isfinite()) and bool(slope.isfinite().all()):
            filled_slope, filled_value = torch.func.grad_and_value(filled.log_joint)(point)
            return _close(filled_value, value) and _close(filled_slope, slope)
    return True


def _close(value: Tensor, expected: Tensor) -> bool:
    """Whether the largest difference is one of rounding."""
    largest = float(expected.abs().max())
    return float((value - expected).abs().max()) <= _ROUNDING * max(1.0, largest)
