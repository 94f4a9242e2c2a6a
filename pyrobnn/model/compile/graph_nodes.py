"""What the nodes of a traced graph say: sizes, constants, operators and calls of a library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

_ATEN = torch.ops.aten
#: operators whose result has as many elements as a condition holds for, and those that take a mask
_PICKS = {_ATEN.nonzero, _ATEN.masked_select, _ATEN._unique2, _ATEN.unique_dim}
_INDEXES = {_ATEN.index, _ATEN.index_put, _ATEN.index_put_}
#: what leaves the fused loops for a library
_LIBRARY = {_ATEN.bmm, _ATEN.mm, _ATEN.addmm, _ATEN.convolution, _ATEN.convolution_backward}


class _Argument(Protocol):
    """An argument of an operator."""

    @property
    def alias_info(self) -> object:
        """Whose memory its result shares; None where it shares none."""


class Schema(Protocol):
    """What torch says of an operator: whether it writes into its arguments, and whose memory its result shares."""

    @property
    def is_mutable(self) -> bool: ...

    @property
    def arguments(self) -> Sequence[_Argument]: ...


def size(node: Node) -> int:
    """Elements of the tensor that a node computes; 0 where it is none."""
    shape = getattr(node.meta.get("tensor_meta"), "shape", None)
    return 0 if shape is None else shape.numel()


def library_calls(graph: GraphModule) -> list[Node]:
    """The matrix products and convolutions that remain."""
    return [
        node
        for node in graph.graph.nodes
        if getattr(node.target, "overloadpacket", None) in _LIBRARY
    ]


def shapes_depend_on_values(graph: GraphModule) -> bool:
    """Whether a mask that varies picks elements, so that the graph is right for the example alone."""
    varying: set[Node] = set()
    for node in graph.graph.nodes:
        varies = node.op == "placeholder" or not varying.isdisjoint(node.all_input_nodes)
        if not varies:
            continue
        varying.add(node)
        operator = getattr(node.target, "overloadpacket", None)
        if operator in _PICKS:
            return True
        if operator in _INDEXES and any(
            index in varying and dtype_of(index) is torch.bool for index in node.args[1]
        ):
            written = node.args[2] if len(node.args) > 2 else node
            if not isinstance(written, Node) or _rank(written):
                return True
    return False


def dtype_of(node: Node) -> torch.dtype | None:
    """The type of the tensor that a node computes; None where it is none."""
    return getattr(node.meta.get("tensor_meta"), "dtype", None)


def _rank(node: Node) -> int:
    return len(getattr(node.meta.get("tensor_meta"), "shape", ()))


def schemas_of(graph: GraphModule) -> dict[Node, Schema | None]:
    """The nodes of a graph in its order, each with the schema of its operator; None without one."""
    return {node: getattr(node.target, "_schema", None) for node in graph.graph.nodes}


def constant_of(graph: GraphModule, node: Node) -> Tensor | GraphModule:
    """What a node takes from the graph's module: a tensor, or a graph inside of the graph."""
    return getattr(graph, str(node.target))
