"""What the nodes of a traced graph say: sizes, constants, operators and calls of a library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

_ATEN = torch.ops.aten
#: operators whose result has as many elements as their arguments' values say
_PICKS = {
    _ATEN.nonzero,
    _ATEN.masked_select,
    _ATEN.repeat_interleave,
    _ATEN._unique,
    _ATEN._unique2,
    _ATEN.unique_dim,
    _ATEN.unique_consecutive,
    _ATEN.unique_dim_consecutive,
}
#: operators that do so where an index is a mask
_INDEXES = {_ATEN.index, _ATEN.index_put, _ATEN.index_put_}
#: operators whose result lies in the memory of their first argument, which their schemas do not say
_UNDECLARED_VIEWS = {
    _ATEN._unsafe_view,
    _ATEN.unsafe_split,
    _ATEN.unsafe_split_with_sizes,
    _ATEN.unsafe_chunk,
}
#: what leaves the fused loops for a library
_LIBRARY = {_ATEN.bmm, _ATEN.mm, _ATEN.addmm, _ATEN.convolution, _ATEN.convolution_backward}


class _Alias(Protocol):
    """Memory that an argument and a result of an operator share."""

    @property
    def is_write(self) -> bool: ...


class SchemaArgument(Protocol):
    """An argument or a result of an operator."""

    @property
    def name(self) -> str: ...

    @property
    def kwarg_only(self) -> bool: ...

    @property
    def alias_info(self) -> _Alias | None:
        """The memory that it shares; None where it shares none."""


class Schema(Protocol):
    """What torch says of an operator: whether it writes into its arguments, and whose memory its result shares."""

    @property
    def is_mutable(self) -> bool: ...

    @property
    def arguments(self) -> Sequence[SchemaArgument]: ...

    @property
    def returns(self) -> Sequence[SchemaArgument]: ...


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
    """Whether a mask that differs from call to call picks elements: the graph is right for the example alone then."""
    varying: set[Node] = set()
    for node in graph.graph.nodes:
        begins = node.op == "placeholder" or is_random(node)
        if not begins and varying.isdisjoint(node.all_input_nodes):
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
    return {node: schema_of(node) for node in graph.graph.nodes}


def schema_of(node: Node) -> Schema | None:
    """What torch says of a node's operator; None without one."""
    return getattr(node.target, "_schema", None)


def is_random(node: Node) -> bool:
    """Whether a node draws from torch's generator."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_undeclared_view(node: Node) -> bool:
    """Whether the result of a node lies in the memory of its first argument, though its schema does not say so."""
    return getattr(node.target, "overloadpacket", None) in _UNDECLARED_VIEWS


def constant_of(graph: GraphModule, node: Node) -> Tensor | GraphModule:
    """What a node takes from the graph's module: a tensor, or a graph inside of the graph."""
    return getattr(graph, str(node.target))


def memory_of(graph: GraphModule, node: Node) -> int | None:
    """Where the tensor lies that a node takes from the graph's module; None where it takes something else."""
    constant = constant_of(graph, node)
    return constant.untyped_storage().data_ptr() if isinstance(constant, Tensor) else None
