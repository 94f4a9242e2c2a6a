"""Nested dicts, lists and tuples of tensors, as arguments and results of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of a tree, in order: whatever is not a dict, list or tuple."""
    if not isinstance(tree, dict | list | tuple):
        return [tree]
    return [
        leaf
        for part in (tree.values() if isinstance(tree, dict) else tree)
        for leaf in leaves_of(part)
    ]


def mapped(fn: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """The same tree with ``fn`` of every leaf, and of those of other trees of the same structure."""
    if isinstance(tree, dict):
        return {
            key: mapped(fn, value, *[other[key] for other in others]) for key, value in tree.items()
        }
    if not isinstance(tree, list | tuple):
        return fn(tree, *others)
    parts = [mapped(fn, *values) for values in zip(tree, *others, strict=True)]
    return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
