"""Indices and masks that a traced graph makes of its constants: computed once, not at every call."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from pyrobnn.model.compile.graph_nodes import (
    Schema,
    constant_of,
    is_random,
    is_undeclared_view,
    memory_of,
    schemas_of,
    size,
)


def compute_indices(graph: GraphModule) -> None:
    """Compute now what a graph makes of its constants in whole numbers and truth values: indices and masks of data.

    Left in the graph they are computed at every call, and loops that gather by them are not vectorized.
    """
    schemas = schemas_of(graph)
    written = _written(schemas)
    known = _unchanged_constants(graph, written)
    for node, schema in schemas.items():
        if schema is None or node in written or _writes_or_draws(node, schema):
            continue
        if node.all_input_nodes and known >= {*node.all_input_nodes}:
            known.add(node)
            if _is_index(node):
                known.add(_replaced_by_constant(graph, node))
    graph.recompile()


def _unchanged_constants(graph: GraphModule, written: set[Node]) -> set[Node]:
    """The nodes of constants into whose memory no operation writes; each use of a constant is a node of its own."""
    constants = [node for node in graph.graph.nodes if node.op == "get_attr"]
    memory = {node: memory_of(graph, node) for node in constants}
    changing = {memory[node] for node in written & memory.keys()}
    return {node for node in constants if memory[node] not in changing}


def _written(schemas: dict[Node, Schema | None]) -> set[Node]:
    """The nodes whose tensors an operation of the graph writes into; through a view what it is a view of is written."""
    written = set[Node]()
    for node, schema in reversed(schemas.items()):
        if schema is None:
            continue
        if schema.is_mutable or (node in written and _makes_view(node, schema)):
            written |= {*node.all_input_nodes}
    return written


def _writes_or_draws(node: Node, schema: Schema) -> bool:
    return schema.is_mutable or is_random(node)


def _makes_view(node: Node, schema: Schema) -> bool:
    return is_undeclared_view(node) or any(argument.alias_info for argument in schema.arguments)


def _is_index(node: Node) -> bool:
    """Whether it computes several whole numbers or truth values."""
    kind = getattr(node.meta.get("tensor_meta"), "dtype", torch.float32)
    return not kind.is_floating_point and size(node) > 1


def _replaced_by_constant(graph: GraphModule, node: Node) -> Node:
    """The node of a new constant, the value of ``node``, which takes the place of ``node`` in the graph."""
    name = f"_computed_{node.name}"
    graph.register_buffer(name, _value_of(graph, node))
    with graph.graph.inserting_before(node):
        constant = graph.graph.get_attr(name)
        node.replace_all_uses_with(constant)
    constant.meta = node.meta
    return constant


def _value_of(graph: GraphModule, node: Node) -> Any:
    """What a node computes from constants."""
    if node.op == "get_attr":
        return constant_of(graph, node)
    value_of = functools.partial(_value_of, graph)
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), value_of)
    return cast(Any, node.target)(*args, **kwargs)
