"""Programs whose tensors are of several types, where torch combines one only: which of the data to cast, in words."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pyrobnn.model.compile.trees import Tree, leaves_of, mapped
from pyrobnn.model.density import Density, Program

_CASTS = {
    torch.float32: "float()",
    torch.float64: "double()",
    torch.int64: "long()",
}
#: in what torch says of an operation between types
_WORDS = ("dtype", "scalar type", "output type", "bool tensor", "not implemented for", "bias type")


@contextlib.contextmanager
def types_explained(program: Program, data: Mapping[str, Any]) -> Iterator[None]:
    """Inside, torch's error of a program that combines tensors of several types is one that says what to cast.

    Args:
        program: a plain Pyro program.
        data: its arguments by name, each a tensor, a tree of tensors, or anything else.

    Raises:
        TypeError: naming the data and their cast; or that it is tensors that the program itself holds.
    """
    try:
        yield
    except (RuntimeError, TypeError, IndexError) as error:
        reason = why_of_types(program, data, error)
        if not reason:
            raise
        raise TypeError(reason) from error


def why_of_types(program: Program, data: Mapping[str, Any], error: Exception) -> str:
    """What to cast so that the program runs, found by trying; empty where types are not what stops it."""
    cast = _cast_that_helps(program, data)
    if cast:
        return cast
    args = tuple(data.values())
    message = str(error).strip().partition("\n")[0]
    if any(word in message for word in _WORDS) or _runs(program, args, double=True):
        return (
            f"tensors of several types meet in the program, and torch combines one type only ({message}): give the "
            "tensors that the program itself holds, and the parameters of its priors, one type, by .float() or "
            ".double()"
        )
    return ""


def _cast_that_helps(program: Program, data: Mapping[str, Any]) -> str:
    """The first cast of data with which the program runs, in words; empty where none is found."""
    args = tuple(data.values())
    names: list[str] = []
    for argument, value in data.items():
        names += _names(argument, value)
    leaves = leaves_of(args)
    for target in dict.fromkeys((torch.get_default_dtype(), *_CASTS)):
        for group in _groups(leaves, target):
            if group and _runs(program, _cast(args, group, target)):
                dtypes = [leaves[index].dtype for index in group]
                return _sentence([names[index] for index in group], dtypes, target)
    return ""


def _groups(leaves: list[Tree], target: torch.dtype) -> list[list[int]]:
    """The numbers of leaves to try to cast: one alone, then all that are floating, then all."""
    tensors = {index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    castable = [index for index, tensor in tensors.items() if tensor.dtype != target]
    groups = [[index] for index in castable]
    if target.is_floating_point:
        groups.append([index for index in castable if tensors[index].is_floating_point()])
        groups.append(castable)
    return groups


def _names(name: str, tree: Tree) -> list[str]:
    """How a user writes each leaf of an argument, in the order of :func:`leaves_of`."""
    fields = getattr(tree, "_fields", None)
    if isinstance(tree, dict):
        branches = [(f"{name}[{key!r}]", value) for key, value in tree.items()]
    elif fields is not None:
        branches = [(f"{name}.{field}", getattr(tree, field)) for field in fields]
    elif isinstance(tree, list | tuple):
        branches = [(f"{name}[{index}]", value) for index, value in enumerate(tree)]
    else:
        return [name]
    names: list[str] = []
    for branch_name, branch in branches:
        names += _names(branch_name, branch)
    return names


def _cast(args: tuple[Tree, ...], group: list[int], target: torch.dtype) -> tuple[Any, ...]:
    """The arguments with the leaves of these numbers cast."""
    numbers = iter(range(len(leaves_of(args))))

    def cast_leaf(leaf: Tree) -> Tree:
        is_chosen = next(numbers) in group
        return leaf.to(target) if is_chosen and isinstance(leaf, Tensor) else leaf

    cast: tuple[Any, ...] = mapped(cast_leaf, args)
    return cast


def _runs(program: Program, args: tuple[Tree, ...], double: bool = False) -> bool:
    """Whether the program has a log density with these arguments."""
    try:
        density = Density(program, args, double=double)
        density.log_joint(density.sample_prior(1, seed=0)[0])
    except Exception:  # whatever else a program raises is told where it is run
        return False
    return True


def _sentence(names: list[str], dtypes: list[torch.dtype], target: torch.dtype) -> str:
    """Which data are of which types, and how to cast them."""
    kinds = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    subject = " and ".join(f"{name!r} is {kind}" for name, kind in zip(names, kinds, strict=True))
    casts = " and ".join(f"{name}.{_CASTS[target]}" for name in names)
    needed = str(target).removeprefix("torch.")
    if target is torch.int64:
        return f"{subject}, and the program takes it as an index: pass {casts}"
    return (
        f"{subject}, but the sites of the program are {needed}, and torch combines one type only: pass {casts}, or "
        "give the priors parameters of the other type"
    )
