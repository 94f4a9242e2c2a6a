"""Graph passes that compute once what would be computed again and again.

Constant folding, the hoisting of operations that are invariant along a broadcast dimension, and the materialisation of
intermediates that many iterations of a loop read.
"""

from __future__ import annotations

import math
from operator import getitem

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from pyrobnn.compile.products import (
    ACTIVATIONS,
    Overload,
    materialize_node,
    operator,
    shape_of,
    shape_or_scalar,
    size,
)

_ATEN = torch.ops.aten
_CPU = torch.device("cpu")
_SMALL = 2**13  # elements of a constant that is packed with others
_HOISTED_FROM_REPEATS = 16  # a costly operation is hoisted if it would be repeated so often
_STORED_FROM_READS = 4  # an intermediate is materialised if each of its elements is read so often,
_STORED_FROM_OPERATIONS = 4  # and takes so many operations,
_OPERATIONS_OF_COSTLY = 8  # a costly one counting as so many
#: what costs more than reading its result
_COSTLY = {
    _ATEN.log,
    _ATEN.log1p,
    _ATEN.exp,
    _ATEN.expm1,
    _ATEN.div,
    _ATEN.reciprocal,
    _ATEN.sqrt,
    _ATEN.rsqrt,
    _ATEN.lgamma,
    _ATEN.digamma,
    *ACTIVATIONS,
}
_SUMS = {_ATEN.sum, _ATEN.mean, _ATEN.logsumexp, _ATEN.amax}


def fold_constants(graph: GraphModule, device: torch.device = _CPU) -> None:
    """Replace what depends on constants alone (the data, the parameters of a prior) by its value; pack small constants.

    Nothing is folded that is drawn at random, written into, returned, or larger than what it is computed from. Every
    constant is an argument of every call, which is why the small ones of a type share one tensor.

    Args:
        graph: changed in place.
        device: where the graph computes.
    """
    exposed = _exposed(graph)
    values: dict[Node, Tensor] = {}
    for node in graph.graph.nodes:
        sources = node.all_input_nodes
        if node in exposed:
            continue
        if node.op == "get_attr":
            value = getattr(graph, node.target)
        elif sources and _pure(node) and all(source in values for source in sources):
            value = node.target(*map_arg(node.args, values.get), **map_arg(node.kwargs, values.get))
        else:
            continue
        largest = max((values[source].numel() for source in sources), default=math.inf)
        if isinstance(value, Tensor) and value.numel() <= largest:
            values[node] = value
    inner = {node for node in values if not _is_view(node)}
    for node, value in values.items():
        if node in inner and node.op != "get_attr" and not inner.issuperset(node.users):
            _become(graph, node, value)
    graph.graph.eliminate_dead_code(lambda node: node.op != "get_attr" and not _pure(node))
    _pack(graph, exposed, device)
    used = {node.target for node in graph.graph.nodes if node.op == "get_attr"}
    for name in [name for name, _ in graph.named_buffers() if name not in used]:
        delattr(graph, name)
    graph.recompile()


def _become(graph: GraphModule, node: Node, value: Tensor) -> None:
    name = f"_value_{node.name}"
    graph.register_buffer(name, value)
    with graph.graph.inserting_before(node):
        constant = graph.graph.get_attr(name)
    constant.meta = dict(node.meta)
    node.replace_all_uses_with(constant)


def _pack(graph: GraphModule, exposed: set[Node], device: torch.device) -> None:
    """One tensor of each type for all small constants of the device.

    Where the graph computes elsewhere, those on the CPU are left alone: a scalar of its own is a literal to inductor,
    but one that lies in a longer tensor is memory that a kernel of the device cannot read.
    """
    small: dict[tuple[torch.dtype, torch.device], list[Node]] = {}
    for node in graph.graph.nodes:
        value = getattr(graph, str(node.target)) if node.op == "get_attr" and node not in exposed else None
        if not isinstance(value, Tensor) or value.device.type != device.type:
            continue
        if value.layout == torch.strided and value.numel() <= _SMALL:
            small.setdefault((value.dtype, value.device), []).append(node)
    for i, nodes in enumerate(small.values()):
        parts, start = [_distinct(getattr(graph, str(node.target))) for node in nodes], 0
        graph.register_buffer(f"_packed_{i}", torch.cat([part.flatten() for part in parts]))
        with graph.graph.inserting_before(next(iter(graph.graph.nodes))):
            packed = graph.graph.get_attr(f"_packed_{i}")
        for node, part in zip(nodes, parts, strict=True):
            shape = getattr(graph, str(node.target)).shape
            strides = [
                0 if one < many else step
                for one, many, step in zip(part.shape, shape, part.stride(), strict=True)
            ]
            with graph.graph.inserting_before(node):
                place = (packed, list(shape), strides, start)
                view = graph.graph.call_function(_ATEN.as_strided.default, place)
            view.meta = dict(node.meta)
            node.replace_all_uses_with(view)
            graph.graph.erase_node(node)
            start += part.numel()


def _distinct(value: Tensor) -> Tensor:
    """What an expanded tensor repeats, contiguous."""
    for dim, step in enumerate(value.stride()):
        if step == 0:
            value = value.narrow(dim, 0, min(1, value.shape[dim]))
    return value.contiguous()


def _pure(node: Node) -> bool:
    """Whether a node computes its tensor from its arguments, the same one at every call."""
    if not isinstance(node.target, Overload):
        return False
    return not node.target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags


def _exposed(graph: GraphModule) -> set[Node]:
    """What is written into or returned, and what that is a view of."""
    pending, found = [], set()
    for node in graph.graph.nodes:
        if node.op == "output" or (isinstance(node.target, Overload) and node.target._schema.is_mutable):
            pending += node.all_input_nodes
    while pending:
        node = pending.pop()
        found.add(node)
        if _is_view(node):
            pending += node.all_input_nodes
    return found


def _is_view(node: Node) -> bool:
    return node.target is getitem or (isinstance(node.target, Overload) and node.target.is_view)


def hoist_invariants(graph: GraphModule) -> None:
    """Hoist what every datum shares out of the loop over the data: the logarithm of a scale, the inverse of a variance.

    A distribution expands its parameters to the shape of the data before it computes with them: the loops over the
    data would take a logarithm per datum.
    """
    repeats: dict[Node, frozenset[int]] = {}  # dimensions, from the last, along which a node repeats itself
    costly: set[Node] = set()
    narrow: dict[Node, Node] = {}

    def narrow_shape(node: Node) -> list[int]:
        shape = shape_or_scalar(node)
        return [1 if d in repeats[node] else shape[d] for d in range(-len(shape), 0)]

    def narrowed(node: Node) -> Node:
        """The node with the dimensions along which it repeats itself at length one."""
        if repeats.get(node) and node not in narrow:
            call = graph.graph.call_function
            with graph.graph.inserting_before(node):  # there, because an argument may be written into later
                if _elementwise(node) and callable(node.target):
                    rest = map_arg(node.args, narrowed), map_arg(node.kwargs, narrowed)
                    narrow[node] = call(node.target, *rest)
                else:
                    source = node.all_input_nodes[0]
                    narrow[node] = narrowed(source)
                    if ones := [1] * (len(shape_or_scalar(node)) - len(shape_or_scalar(source))):
                        place = (narrow[node], ones + narrow_shape(source))
                        narrow[node] = call(_ATEN.view.default, place)
        return narrow.get(node, node)

    lifted: dict[Node, Node] = {}
    for node in list(graph.graph.nodes):
        repeats[node] = _repeats(node, repeats)
        if repeats[node] and (operator(node) in _COSTLY or costly.intersection(node.all_input_nodes)):
            costly.add(node)
        if not _elementwise(node) and operator(node) not in _SUMS:
            continue
        for source in [source for source in node.all_input_nodes if source in costly]:
            shape = narrow_shape(source)
            if repeats[source] <= repeats[node] or size(source) < _HOISTED_FROM_REPEATS * math.prod(shape):
                continue
            if source not in lifted:
                with graph.graph.inserting_before(source):
                    lifted[source] = materialize_node(graph, narrowed(source), shape)
            with graph.graph.inserting_before(node):
                wide = graph.graph.call_function(
                    _ATEN.expand.default, (lifted[source], list(shape_or_scalar(source)))
                )
            node.replace_input_with(source, wide)
    graph.recompile()


def materialize_broadcasts(graph: GraphModule) -> None:
    """Materialise what many iterations of a loop would compute again: the residual of a datum, read by every unit.

    Inductor inlines arithmetic into the loops that read it, by rules that count operations but not iterations.
    """
    work: dict[Node, int] = {}  # operations of a loop that reads the node
    for node in list(graph.graph.nodes):
        sources = node.all_input_nodes
        work[node] = 0
        if _elementwise(node):
            cost = _OPERATIONS_OF_COSTLY if operator(node) in _COSTLY else 1
            work[node] = cost + sum(work[source] for source in sources)
        elif _is_inlined_view(node):
            work[node] = work[sources[0]]
        if not _elementwise(node) and operator(node) not in _SUMS:
            continue
        reads = max(size(one) for one in (node, *sources))
        for root in sources:
            while _is_inlined_view(root):
                root = root.all_input_nodes[0]
            if work[root] >= _STORED_FROM_OPERATIONS and 0 < _STORED_FROM_READS * size(root) <= reads:
                meta = root.meta["tensor_meta"]
                with graph.graph.inserting_after(root):
                    place = (root, list(meta.shape), list(meta.stride))
                    stored = graph.graph.call_function(_ATEN.as_strided.default, place)
                root.replace_all_uses_with(stored, lambda user, stored=stored: user is not stored)
                work[stored] = work[root] = 0
    graph.recompile()


def _is_inlined_view(node: Node) -> bool:
    return _is_view(node) and operator(node) is not _ATEN.as_strided and bool(node.all_input_nodes)


def _repeats(node: Node, known: dict[Node, frozenset[int]]) -> frozenset[int]:
    shape, sources = shape_of(node), node.all_input_nodes
    same = operator(node) is _ATEN.view and shape_of(sources[0]) == shape
    if shape is None or not (_elementwise(node) or operator(node) is _ATEN.expand or same):
        return frozenset()
    dims = {d for d in range(-len(shape), 0) if shape[d] > 1}
    for source in sources:
        length = shape_of(source)
        if length is None:
            return frozenset()
        dims = {d for d in dims if d < -len(length) or length[d] == 1 or d in known[source]}
    return frozenset(dims)


def _elementwise(node: Node) -> bool:
    if not _pure(node):
        return False
    pointwise = isinstance(node.target, Overload) and torch.Tag.pointwise in node.target.tags
    return pointwise or operator(node) in {_ATEN._to_copy, _ATEN.clone}
