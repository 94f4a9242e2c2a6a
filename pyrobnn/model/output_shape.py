"""Outputs and targets of more than one dimension a row: images and sequences, whose positions are columns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor, nn

from pyrobnn.model.likelihoods.base import Likelihood
from pyrobnn.model.likelihoods.dense import DenseCategorical

_Output = TypeVar("_Output")
#: whether outputs are flattened; not while somebody asks for their shape
_FLATTENS: ContextVar[bool] = ContextVar("_FLATTENS", default=True)


def flatten_rows(module: nn.Module, args: tuple[Tensor, ...], output: _Output) -> _Output | Tensor:
    """A forward hook: an output (N, a, b, …) as columns, (N, a · b · …); any other as it is."""
    if isinstance(output, Tensor) and output.dim() > 2 and _FLATTENS.get():
        return output.flatten(1)
    return output


def with_digits(module: nn.Module, args: tuple[Tensor, ...], output: _Output) -> _Output | Tensor:
    """A forward hook: an output of 16 bits, as of bfloat16 or autocast, in float32; any other as it is.

    Densities and quantiles need the digits that 16 bits lack, and torch and NumPy lack operations on those.
    """
    if isinstance(output, Tensor) and output.dtype in (torch.bfloat16, torch.float16):
        return output.float()
    return output


@contextmanager
def as_returned() -> Iterator[None]:
    """Inside, nets that have :func:`flatten_rows` return what their ``forward`` returns."""
    token = _FLATTENS.set(False)
    try:
        yield
    finally:
        _FLATTENS.reset(token)


def check_positions(
    likelihood: Likelihood,
    y_shape: Sequence[int],
    output_shape: Sequence[int],
) -> None:
    """ValueError where targets (N, …) are not laid out as the net's output for a row, of this shape, is.

    Columns that were flattened already are taken as they are. A dimension of length one says nothing.
    """
    targets = likelihood.targets
    if len(output_shape) < 2:
        return
    if targets.kind == "label" or targets.censoring is not None:
        raise ValueError(_one_target(likelihood, y_shape, output_shape))
    expected = target_shape(likelihood, output_shape)
    is_flat = len(y_shape) == 2 and targets.heads == 1 and y_shape[1] == math.prod(expected)
    if is_flat or _long_sides(y_shape[1:]) == _long_sides(expected):
        return
    raise ValueError(
        f"'y' has shape {tuple(y_shape)} but {_said(output_shape)} of which {type(likelihood).__name__} "
        f"expects y of shape {_rows(expected)}: {_layout_advice(likelihood, y_shape, output_shape)}"
    )


def target_shape(likelihood: Likelihood, output_shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the targets of a row whose net output has this shape: without classes, or heads, which come first.

    Where the first dimension holds no whole number of heads it is rounded down.
    """
    shape = tuple(output_shape)
    if isinstance(likelihood, DenseCategorical):
        return shape[1:] if likelihood.class_dim == 1 else shape[:-1]
    return (shape[0] // likelihood.targets.heads, *shape[1:])


def _long_sides(shape: Sequence[int]) -> list[int]:
    return [length for length in shape if length != 1]


def _rows(shape: Sequence[int]) -> str:
    return f"({', '.join(['N', *map(str, shape)])})"


def _said(output_shape: Sequence[int]) -> str:
    return f"the net returns {_rows(output_shape)},"


def _layout_advice(
    likelihood: Likelihood, y_shape: Sequence[int], output_shape: Sequence[int]
) -> str:
    """What brings targets and output to one layout."""
    if isinstance(likelihood, DenseCategorical):
        other = -likelihood.class_dim
        turned = DenseCategorical(likelihood.num_classes, other)
        if _long_sides(y_shape[1:]) == _long_sides(target_shape(turned, output_shape)):
            return f"take DenseCategorical({likelihood.num_classes}, class_dim={other})"
        return "give y a label for every position, or the net as many positions"
    if likelihood.targets.heads > 1:
        return (
            f"the {likelihood.targets.heads} numbers of each target are to stand in dimension 1 of the output, "
            "means first: permute it in the net's forward"
        )
    return "permute y, or the output in the net's forward, until both agree"


def _one_target(likelihood: Likelihood, y_shape: Sequence[int], output_shape: Sequence[int]) -> str:
    """What is said of a likelihood of one target a row whose net returns more."""
    name = type(likelihood).__name__
    positions = _long_sides(y_shape[1:])
    if likelihood.targets.kind == "label" and positions:
        for class_dim in (1, -1):
            num_classes = output_shape[0 if class_dim == 1 else -1]
            dense = DenseCategorical(max(num_classes, 2), class_dim)
            if positions == _long_sides(target_shape(dense, output_shape)):
                return (
                    f"{_said(output_shape)} and 'y' {tuple(y_shape)} has a label for each position: take "
                    f"pb.likelihoods.{dense!r} in place of {name}"
                )
    return (
        f"{_said(output_shape)} but {name} expects one target for each row: pool over the positions, or end the net "
        "with nn.Flatten() and a linear layer; where every position has a label, give y of shape (N, positions) and "
        "take pb.likelihoods.DenseCategorical(num_classes)"
    )
