"""Functions of a point, and the gradient of a log density, at many points at once."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyrobnn.core.private_torch import without_fallback_warnings
from pyrobnn.core.private_trace import Tracer
from pyrobnn.core.threads import Shared
from pyrobnn.model.compile.trees import Tree, leaves_of, mapped
from pyrobnn.model.constants import OwnTensors
from pyrobnn.model.guards import values_read

#: `warnings.catch_warnings` would change the filters of all threads, and of two that overlap leave one's for good
_UNWARNED = Shared(without_fallback_warnings)

#: inside of its context, derivatives are taken by reverse passes alone: forward ones cannot be traced for any number
#: of rows
REVERSE_ONLY = ContextVar("reverse_only", default=False)


@contextmanager
def reverse_only() -> Iterator[None]:
    """Inside, in this thread, derivatives along a direction are taken by reverse passes."""
    token = REVERSE_ONLY.set(True)
    try:
        yield
    finally:
        REVERSE_ONLY.reset(token)


T = TypeVar("T")
Gradient = Callable[[Tensor], tuple[Tensor, Tensor]]


def batched_gradient(log_density: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Gradient, str]:
    """Gradient and value for all chains at once, or one after the other where the program cannot be batched.

    Returns:
        The function, and in words why it is not batched; empty if it is (then it can be compiled).
    """
    single = torch.func.grad_and_value(log_density)
    batched = torch.func.vmap(single)
    try:
        batched(z)
    except RuntimeError as error:  # what functorch raises, for control flow on values above all
        why = why_not_batched(error)

        def looped(z: Tensor) -> tuple[Tensor, Tensor]:
            # one alone may be traced
            reads = contextlib.nullcontext() if Tracer.active() else values_read()
            with reads:
                gradients, values = zip(*map(single, z), strict=True)
            return torch.stack(gradients), torch.stack(values)

        looped(z)  # an error of the program itself surfaces here
        return looped, why
    return batched, ""


_BRANCHES = "the program's Python depends on the values of its sites"


def is_untraceable(why: str) -> bool:
    """Whether the reason of :func:`why_not_batched` keeps one point alone from being traced too."""
    return why.startswith(_BRANCHES)


def why_not_batched(error: RuntimeError) -> str:
    """What keeps a program from being run at many points at once, by the error of ``torch.func.vmap``."""
    message = str(error).strip().partition("\n")[0]
    if "data-dependent control flow" in message or ".item()" in message:
        return f"{_BRANCHES} (if, while, assert, float() or .item() of one)"
    if "in-place" in message or "inplace" in message:
        return "the program writes into a tensor that all points share: collect values in a list and torch.stack them"
    return f"torch cannot run one of its operations at many points at once ({message or type(error).__name__})"


def at_each(
    function: Callable[..., T],
    *points: Tree,
    batch: torch.Size | None = None,
    at_once: int | None = None,
) -> T:
    """``function`` of the first element of every argument, of the second and so on, stacked.

    Args:
        function: returns a tensor, or tensors by name.
        *points: tensors, or tensors by name, with a leading axis (point, …), or leading axes ``batch``.
        batch: the shape of the leading axes where there may be several, or none: then the function is called once.
        at_once: how many points are evaluated together; None for all.
    Returns:
        As of ``torch.func.vmap``; point by point where one is to be evaluated at once, or where that raises a
        RuntimeError, whatever the reason.
    """
    if batch is not None:
        if not batch:
            return function(*points)
        flat = mapped(lambda leaf: leaf.reshape(-1, *leaf.shape[len(batch) :]), points)
        flat_results = at_each(function, *flat)
        return mapped(lambda leaf: leaf.reshape(batch + leaf.shape[1:]), flat_results)
    if at_once is not None:
        count = len(leaves_of(points)[0])
        if at_once == 1:
            return _one_by_one(function, points)
        blocks = [slice(start, start + at_once) for start in range(0, count, at_once)]
        block_results = [at_each(function, *_indexed(points, block)) for block in blocks]
        return mapped(lambda *leaves: torch.cat(leaves), *block_results)

    try:
        return _batched(function, *points)
    except RuntimeError:
        return _one_by_one(function, points)


def _one_by_one(function: Callable[..., T], points: tuple[Tree, ...]) -> T:
    """The results of a function at each of the points, stacked."""
    count = len(leaves_of(points)[0])
    results = [function(*_indexed(points, index)) for index in range(count)]
    return mapped(lambda *leaves: torch.stack(leaves), *results)


def as_one_of_several(function: Callable[..., T], point: Tree) -> T:
    """``function`` of a point, run as the only one of several: that tells the data, which can be read, apart.

    Args:
        function: returns tensors.
        point: a tensor, or tensors by name.

    Raises:
        RuntimeError: what ``torch.func.vmap`` raises, as of Python that depends on the values of sites.
    """
    alone = mapped(lambda value: value[None], point)
    results: T = torch.func.vmap(function, randomness="different")(alone)
    return mapped(operator.itemgetter(0), results)


def runs_at_once(function: Callable[..., Any], *points: Tree) -> bool:
    """Whether :func:`at_each` runs the function for several of the points at once, tried with two of them."""
    try:
        _batched(function, *_indexed(points, slice(0, 2)))
    except RuntimeError:
        return False
    return True


def _batched(function: Callable[..., T], *points: Tree) -> T:
    """As :func:`at_each`, of all points together; RuntimeError where torch cannot."""

    def at_point(*point: Tree) -> T:
        with _OwnEmpty(leaves_of(point)[0]):
            return function(*point)

    with _UNWARNED:
        results: T = torch.func.vmap(at_point, randomness="different")(*points)
    return results


def _indexed(points: tuple[Tree, ...], index: int | slice) -> tuple[Tree, ...]:
    """One point, or some of them."""
    indexed: tuple[Tree, ...] = mapped(operator.itemgetter(index), points)
    return indexed


class _OwnEmpty(OwnTensors):
    """A tensor that is allocated empty inside ``vmap`` is batched: each point has its own.

    Distributions fill such tensors in place with random numbers, which ``vmap`` refuses where all points share them.
    """

    functions = frozenset({torch.empty, torch.empty_like, Tensor.new, Tensor.new_empty})
