"""Nested dicts, lists and tuples of tensors, as arguments and results of functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

#: a tensor, a number or None, or a dict, list or tuple of trees
Tree: TypeAlias = "Tensor | float | None | Mapping[Any, Tree] | Sequence[Tree]"
#: a function of tensors, or of trees of tensors, that returns such
TensorFunction = Callable[..., Tree]


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of a tree, in order: whatever is not a dict, list or tuple."""
    if not isinstance(tree, dict | list | tuple):
        return [tree]
    branches = tree.values() if isinstance(tree, dict) else tree
    leaves: list[Any] = []
    for branch in branches:
        leaves += leaves_of(branch)
    return leaves


def mapped(fn: Callable[..., Any], tree: Any, *twins: Any) -> Any:
    """The same tree with ``fn`` of every leaf, and of those of other trees of the same structure."""
    if isinstance(tree, dict):
        branches = {}
        for key, branch in tree.items():
            branches[key] = mapped(fn, branch, *[twin[key] for twin in twins])
        return branches
    if not isinstance(tree, list | tuple):
        return fn(tree, *twins)
    elements = [mapped(fn, *counterparts) for counterparts in zip(tree, *twins, strict=True)]
    return type(tree)(*elements) if hasattr(tree, "_fields") else type(tree)(elements)
