"""What is changed in a traced graph before inductor turns it into loops.

Small products become arithmetic, what depends on constants alone is computed once and what repeats along the data once
per call, and the data lie along memory where that pays. No result changes by more than the rounding of a sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from operator import getitem

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

_ATEN = torch.ops.aten
_FEW_FEATURES, _FEW_MULTIPLICATIONS = 8, 2**17
_SMALL = 2**13  # elements of a constant that is packed with others
_MANY = 16  # repetitions from which a value is computed once and read from memory,
_MUCH_WORK, _COSTLY_WORK = 4, 8  # if it takes so many operations; a costly one counts as so many
#: what leaves the fused loops for a library
LIBRARY = {_ATEN.bmm, _ATEN.mm, _ATEN.addmm, _ATEN.convolution, _ATEN.convolution_backward}
_ACTIVATIONS = {
    _ATEN.tanh,
    _ATEN.relu,
    _ATEN.sigmoid,
    _ATEN.silu,
    _ATEN.gelu,
    _ATEN.softplus,
    _ATEN.elu,
    _ATEN.leaky_relu,
}
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
    *_ACTIVATIONS,
}
_SUMS = {_ATEN.sum, _ATEN.mean, _ATEN.logsumexp, _ATEN.amax}


def operator(node: Node):
    """The ATen operator that a node calls, whatever its overload; None for the rest of the graph."""
    return getattr(node.target, "overloadpacket", None)


def size(node: Node) -> int:
    """Elements of the tensor that a node computes; 0 where it is none."""
    shape = _shape(node)
    return 0 if shape is None else shape.numel()


def library_calls(graph: GraphModule) -> list[Node]:
    """The matrix products and convolutions that remain."""
    return [node for node in graph.graph.nodes if operator(node) in LIBRARY]


def returns_nothing(graph: GraphModule) -> bool:
    """Whether the function only writes into its arguments."""
    return not graph.graph.output_node().all_input_nodes


def settled(tensor: Tensor) -> Tensor:
    """The same tensor, written to memory where inductor would otherwise compute it again in every loop that reads it.

    Weights that are cheap to compute, read once per datum, are the case in point.
    """
    return torch.as_strided(tensor, tensor.shape, tensor.stride())


# -- products ----------------------------------------------------------------------------------------------------------


def _small_bmm(left: Tensor, right: Tensor) -> Tensor:
    """A batched product with an outer or inner dimension of one, as arithmetic that fuses with its neighbours.

    Under ``vmap`` every ``Linear`` becomes a ``bmm``; with one input or one output feature the library call costs more
    than the product, and separates the loops before and after it.
    """
    _, rows, inner = left.shape
    columns = right.shape[2]
    if inner == 1:
        return left * right
    if columns == 1:
        return (left * right.transpose(1, 2)).sum(2, keepdim=True)
    if rows == 1:
        return (left.transpose(1, 2) * right).sum(1, keepdim=True)
    return NotImplemented


def _small_mm(left: Tensor, right: Tensor) -> Tensor:
    """The same without a batch, and products of few features with the data along memory.

    Under ``vmap`` a linear predictor of one set of inputs is a product (N, features) @ (features, chains), and its
    gradient (features, N) @ (N, chains): a library would store the few chains along memory.
    """
    (rows, inner), columns = left.shape, right.shape[1]
    product = _small_bmm(left[None], right[None])
    if product is not NotImplemented:
        return product[0]
    if rows * inner * columns > _FEW_MULTIPLICATIONS:
        return NotImplemented
    if inner <= _FEW_FEATURES:
        features = settled(left.T.contiguous())
        terms = [features[i] * right[i].unsqueeze(1) for i in range(inner)]
        return sum(terms[1:], terms[0]).T
    if rows <= _FEW_FEATURES and right.stride(0) == 1:
        return (settled(left.contiguous()).unsqueeze(1) * right.T).sum(2)
    return NotImplemented


def _small_addmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = _small_mm(left, right) if alpha == beta == 1 else NotImplemented
    return product if product is NotImplemented else bias + product


DECOMPOSITIONS = {
    _ATEN.bmm.default: _small_bmm,
    _ATEN.mm.default: _small_mm,
    _ATEN.addmm.default: _small_addmm,
}


# -- layout ------------------------------------------------------------------------------------------------------------


def lay_data_innermost(graph: GraphModule) -> None:
    """Store the activations (..., N, units) of a layer of one input feature with the data along memory.

    The loops over hidden units then add whole vectors, where 50 units would leave 14 lanes of the fourth vector of 16
    empty and every datum would end in a sum across lanes: a gradient takes a quarter less time.
    """
    for node in list(graph.graph.nodes):
        if operator(node) not in _ACTIVATIONS or not _is_outer(node):
            continue
        with graph.graph.inserting_before(node):
            call = graph.graph.call_function
            turned = call(_ATEN.transpose.int, (node.args[0], -2, -1))
            new = call(node.target, (turned, *node.args[1:]), node.kwargs)
            *batch, rows, columns = _shape(node)
            new = _settled(graph, new, [*batch, columns, rows])  # in this very order
            new = call(_ATEN.transpose.int, (new, -2, -1))
        node.replace_all_uses_with(new)
        graph.graph.erase_node(node)
    graph.recompile()


def _is_outer(node: Node) -> bool:
    """Whether a tall matrix comes from smaller tensors and ends in sums: then nobody else prescribes its layout."""
    shape = _shape(node)
    if shape is None or len(shape) < 2 or shape[-1] >= shape[-2]:
        return False
    return _fused(node, lambda other: other.all_input_nodes) and _fused(node, lambda other: other.users)


def _fused(node: Node, neighbours: Callable[[Node], Iterable[Node]]) -> bool:
    """Whether no argument, result or library call of the graph is reached through tensors of the node's size."""
    pending, seen = [node], {node}
    while pending:
        for other in neighbours(pending.pop()):
            library = operator(other) in LIBRARY
            if library or (operator(other) is None and size(other) >= size(node)) or other.op == "output":
                return False
            if size(other) >= size(node) and other not in seen:
                seen.add(other)
                pending.append(other)
    return True


# -- computed once -----------------------------------------------------------------------------------------------------


def fold_constants(graph: GraphModule) -> None:
    """Replace what depends on constants alone (the data, the parameters of a prior) by its value; pack small constants.

    Nothing is folded that is drawn at random, written into, returned, or larger than what it is computed from. Every
    constant is an argument of every call, which is why the small ones of a type share one tensor.
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
    for node in [node for node in inner if node.op != "get_attr" and not inner.issuperset(node.users)]:
        _become(graph, node, values[node])
    graph.graph.eliminate_dead_code(lambda node: node.op != "get_attr" and not _pure(node))
    _pack(graph, exposed)
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


def _pack(graph: GraphModule, exposed: set[Node]) -> None:
    """One tensor of each type for all small constants."""
    small: dict[tuple[torch.dtype, torch.device], list[Node]] = {}
    for node in graph.graph.nodes:
        value = getattr(graph, node.target) if node.op == "get_attr" and node not in exposed else None
        if isinstance(value, Tensor) and value.layout == torch.strided and value.numel() <= _SMALL:
            small.setdefault((value.dtype, value.device), []).append(node)
    for i, nodes in enumerate(small.values()):
        parts, start = [_distinct(getattr(graph, node.target)) for node in nodes], 0
        graph.register_buffer(f"_packed_{i}", torch.cat([part.flatten() for part in parts]))
        with graph.graph.inserting_before(next(iter(graph.graph.nodes))):
            packed = graph.graph.get_attr(f"_packed_{i}")
        for node, part in zip(nodes, parts, strict=True):
            shape = getattr(graph, node.target).shape
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
    if not isinstance(node.target, OpOverload):
        return False
    return not node.target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags


def _exposed(graph: GraphModule) -> set[Node]:
    """What is written into or returned, and what that is a view of."""
    pending, found = [], set()
    for node in graph.graph.nodes:
        if node.op == "output" or (isinstance(node.target, OpOverload) and node.target._schema.is_mutable):
            pending += node.all_input_nodes
    while pending:
        node = pending.pop()
        found.add(node)
        if _is_view(node):
            pending += node.all_input_nodes
    return found


def _is_view(node: Node) -> bool:
    return node.target is getitem or (isinstance(node.target, OpOverload) and node.target.is_view)


def lift_repeats(graph: GraphModule) -> None:
    """Compute what is the same for every datum once: the logarithm of a scale, the inverse of a variance.

    A distribution expands its parameters to the shape of the data before it computes with them: the loops over the
    data would take a logarithm per datum.
    """
    repeats: dict[
        Node, frozenset[int]
    ] = {}  # dimensions, counted from the last, along which a node repeats itself
    costly: set[Node] = set()
    narrow: dict[Node, Node] = {}

    def narrow_shape(node: Node) -> list[int]:
        shape = _shape(node)
        return [1 if d in repeats[node] else shape[d] for d in range(-len(shape), 0)]

    def narrowed(node: Node) -> Node:
        """The node with the dimensions along which it repeats itself at length one."""
        if repeats.get(node) and node not in narrow:
            call, source = graph.graph.call_function, node.args[0]
            if _elementwise(node):
                rest = map_arg(node.args, narrowed), map_arg(node.kwargs, narrowed)
                narrow[node] = call(node.target, *rest)
            elif len(_shape(source)) < len(_shape(node)):
                ones = [1] * (len(_shape(node)) - len(_shape(source)))
                narrow[node] = call(_ATEN.view.default, (narrowed(source), ones + narrow_shape(source)))
            else:
                narrow[node] = narrowed(source)
        return narrow.get(node, node)

    lifted: dict[Node, Node] = {}
    for node in list(graph.graph.nodes):
        repeats[node] = _repeats(node, repeats)
        if repeats[node] and (operator(node) in _COSTLY or costly.intersection(node.all_input_nodes)):
            costly.add(node)
        if not _elementwise(node) and operator(node) not in _SUMS:
            continue
        for source in costly.intersection(node.all_input_nodes):
            shape = narrow_shape(source)
            if repeats[source] <= repeats[node] or size(source) < _MANY * math.prod(shape):
                continue
            if source not in lifted:
                with graph.graph.inserting_before(node):
                    lifted[source] = _settled(graph, narrowed(source), shape)
            with graph.graph.inserting_before(node):
                wide = graph.graph.call_function(_ATEN.expand.default, (lifted[source], list(_shape(source))))
            node.replace_input_with(source, wide)
    graph.recompile()


def settle_broadcasts(graph: GraphModule) -> None:
    """Write to memory what many turns of a loop would compute again: the residual of a datum, read by every unit.

    Inductor inlines arithmetic into the loops that read it, by rules that count operations but not turns.
    """
    work: dict[Node, int] = {}  # operations of a loop that reads the node
    for node in list(graph.graph.nodes):
        sources = node.all_input_nodes
        work[node] = 0
        if _elementwise(node):
            cost = _COSTLY_WORK if operator(node) in _COSTLY else 1
            work[node] = cost + sum(work[source] for source in sources)
        elif _is_inlined_view(node):
            work[node] = work[sources[0]]
        if not _elementwise(node) and operator(node) not in _SUMS:
            continue
        turns = max(size(one) for one in (node, *sources))
        for root in sources:
            while _is_inlined_view(root):
                root = root.all_input_nodes[0]
            if work[root] >= _MUCH_WORK and 0 < _MANY * size(root) <= turns:
                meta = root.meta["tensor_meta"]
                with graph.graph.inserting_after(root):
                    place = (root, list(meta.shape), list(meta.stride))
                    settled = graph.graph.call_function(_ATEN.as_strided.default, place)
                root.replace_all_uses_with(settled, lambda user, settled=settled: user is not settled)
                work[settled] = work[root] = 0
    graph.recompile()


def _is_inlined_view(node: Node) -> bool:
    return _is_view(node) and operator(node) is not _ATEN.as_strided and bool(node.all_input_nodes)


def _repeats(node: Node, known: dict[Node, frozenset[int]]) -> frozenset[int]:
    shape, sources = _shape(node), node.all_input_nodes
    same = operator(node) is _ATEN.view and _shape(sources[0]) == shape
    if shape is None or not (_elementwise(node) or operator(node) is _ATEN.expand or same):
        return frozenset()
    dims = {d for d in range(-len(shape), 0) if shape[d] > 1}
    for source in sources:
        length = _shape(source)
        if length is None:
            return frozenset()
        dims = {d for d in dims if d < -len(length) or length[d] == 1 or d in known[source]}
    return frozenset(dims)


def _elementwise(node: Node) -> bool:
    if not _pure(node):
        return False
    return torch.Tag.pointwise in node.target.tags or operator(node) in {_ATEN._to_copy, _ATEN.clone}


def _shape(node: Node) -> torch.Size | None:
    return getattr(node.meta.get("tensor_meta"), "shape", None)


def _settled(graph: GraphModule, node: Node, shape: list[int]) -> Node:
    """:func:`settled` in the graph, contiguous."""
    call, strides = graph.graph.call_function, list(torch.empty(shape, device="meta").stride())
    new = call(_ATEN.clone.default, (node,), {"memory_format": torch.contiguous_format})
    return call(_ATEN.as_strided.default, (new, shape, strides))
