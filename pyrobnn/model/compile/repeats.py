"""A function that repeats its operations, as one of fewer: those that are alike become one, of their arguments stacked.

A program's loop over times or sites makes the same few operations again and again, each on tensors of its own, and all
of them would be traced, compiled and called one by one. Those that do not wait for each other are computed together
here, as ``torch.func.vmap`` does for several points. What waits for its neighbour stays as it is, such as the sum over
the states of a Markov chain.

Compilers of arithmetic know this as superword-level parallelism.

Reference: Exploiting superword level parallelism with multimedia instruction sets (Larsen & Amarasinghe, 2000).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem, itemgetter
from typing import Any, ClassVar, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from pyrobnn.core.private import Gone
from pyrobnn.core.seeding import kept
from pyrobnn.model.compile import bodies_compiled, tracing
from pyrobnn.model.compile.forecast import is_looped
from pyrobnn.model.compile.graph_nodes import (
    constant_of,
    is_random,
    is_undeclared_view,
    schema_of,
)
from pyrobnn.model.compile.inductor import Untraceable, traced
from pyrobnn.model.torch_calls import Call, CallHandler

#: what a node computes
_Value: TypeAlias = Tensor | Sequence[Tensor]
#: from a point (dim,) to a tensor, a scalar or several numbers
Function: TypeAlias = Callable[[Tensor], Tensor]
#: calls of torch by a function from which on it repays to look at its operations
_MANY_CALLS = 400
#: operations alike that are worth a stack
_FEWEST = 3
#: parts of stacks that make one argument; what is in more is looked up by index
_MOST_PIECES = 4
#: of the operations of a trace, those that may be left, or the function stays as it is
_MOST_LEFT = 0.5
#: relative differences of values and gradients that are rounding, in units of the type
_ROUNDING_UNITS = 1e3
_SELECT = torch.ops.aten.select.int
_SPLIT = torch.ops.aten.split_with_sizes.default
_UNSQUEEZE = torch.ops.aten.unsqueeze.default
_ADD = torch.ops.aten.add.Tensor
_SUBTRACT = torch.ops.aten.sub.Tensor


def in_fewer_operations(function: Function, points: Tensor) -> Function:
    """The function in fewer operations where it repeats many; else the function itself.

    Its Python runs a few times here. What is not the point is a constant of the result. Values and gradients are those
    of the function up to rounding; they are compared at the ``points``, and where they differ the function stays.

    Args:
        function: from a point (dim,) to a tensor, of any shape; it draws no random numbers.
        points: (point, dim), like those to come.
    """
    points = points.detach()
    with kept(points.device):
        if _num_calls(function, points[0]) < _MANY_CALLS:
            return function
        try:
            # a loop, which has its own code, needs none here
            with tracing([points[0]]), bodies_compiled(False):
                graph = traced(function, [points[0]])
            merged = _Merged.of(graph)
        except (Untraceable, Gone, _Unmergeable):
            return function
        if merged is None or not _agree(function, merged, points):
            return function
        return merged


class _Unmergeable(RuntimeError):
    """A graph whose operations may not be taken out of their order, or have no derivative."""


class _CallCounter(CallHandler):
    """Counts the calls of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def answer(self, call: Call) -> Any:
        self.count += 1
        return call.result()


@torch.no_grad()
def _num_calls(function: Function, point: Tensor) -> int:
    """How often a function of a point (dim,) calls torch; zero where it cannot be run there."""
    counter = _CallCounter()
    try:
        with counter:
            function(point)
    except RuntimeError:
        return 0
    return counter.count


def _agree(function: Function, merged: Function, points: Tensor) -> bool:
    """Whether two functions have the same values and gradients at points (point, dim), up to rounding.

    Points at which nothing is finite show nothing.
    """
    try:
        slopes, values = _slopes_and_values(merged, points)
        expected_slopes, expected = _slopes_and_values(function, points)
    except RuntimeError:
        # no rule for batches, or no derivative
        return False
    tolerance = _ROUNDING_UNITS * torch.finfo(points.dtype).eps
    scale = expected_slopes.abs().amax(1, keepdim=True).nan_to_num(posinf=1.0) + 1.0
    alike = torch.isclose(slopes / scale, expected_slopes / scale, 0.0, tolerance, equal_nan=True)
    same_values = torch.isclose(values, expected, tolerance, equal_nan=True)
    finite = expected.reshape(len(points), -1).isfinite().all(1)
    return bool(finite.any() & alike.all() & same_values.all())


def _slopes_and_values(function: Function, points: Tensor) -> tuple[Tensor, Tensor]:
    """At points (point, dim): the gradients (point, dim) of the sum of its numbers, each with a weight of its own.

    And the values themselves, (point, …).
    """

    def weighted_sum(point: Tensor) -> tuple[Tensor, Tensor]:
        value = function(point)
        weights = torch.arange(1, value.numel() + 1, dtype=value.dtype, device=value.device)
        return (value.reshape(-1) * weights).sum(), value

    slopes, values = torch.func.vmap(torch.func.grad(weighted_sum, has_aux=True))(points)
    return slopes, values


class _Merged:
    """A function of a point (dim,) by steps, each of one operation, or of several that are alike.

    Attributes: ``constants``, what depends on no point, by node; ``steps``, in their order; ``places``, of nodes that
        are computed together, the number of their step and their place in it; ``taken_apart``, the numbers of steps
        whose stacks are taken apart at once.
    """

    def __init__(
        self,
        graph: GraphModule,
        constants: dict[Node, _Value],
        steps: list[list[Node]],
    ) -> None:
        self.constants = constants
        self.places: dict[Node, _Place] = {}
        self._point = next(node for node in graph.graph.nodes if node.op == "placeholder")
        self._result = cast(Node, graph.graph.output_node().args[0])
        self.steps: list[_Step] = []
        for nodes in steps:
            self.steps.append(self._step(nodes))
            if len(nodes) > 1:
                number = len(self.steps) - 1
                self.places |= {node: _Place(number, at) for at, node in enumerate(nodes)}
        self.taken_apart = self._taken_apart()

    def _taken_apart(self) -> set[int]:
        """The steps of whose stacks half or more is asked for one by one."""
        single: set[Node] = set()
        for step in self.steps:
            single.update(step.single_operands())
        counts = Counter(self.places[node].step for node in single if node in self.places)
        return {step for step, count in counts.items() if 2 * count >= len(self.steps[step].nodes)}

    @classmethod
    def of(cls, graph: GraphModule) -> _Merged | None:
        """That of a graph; None where it has not many fewer operations.

        Raises:
            _Unmergeable: operations of the graph write into tensors, draw, or are loops.
        """
        _make_pure(graph)
        _select_single_parts(graph)
        _check(graph)
        num_traced = sum(node.op == "call_function" for node in graph.graph.nodes)
        constants = _simplify(graph)
        _gather_sums(graph, constants)
        varying = [
            node
            for node in graph.graph.nodes
            if node.op == "call_function" and node not in constants
        ]
        steps = _steps_of(varying, constants)
        if len(steps) > _MOST_LEFT * num_traced:
            return None
        return cls(graph, constants, steps)

    def __call__(self, point: Tensor) -> Tensor:
        run = _Run(self, {**self.constants, self._point: point})
        for step in self.steps:
            run.results.append(step.compute(run))
        return cast(Tensor, run.value(self._result))

    def _step(self, nodes: list[Node]) -> _Step:
        first = nodes[0]
        if len(nodes) == 1 and first.target is _total:
            terms = cast("list[Node]", first.args[0])
            alone = _Place(-1, 0)
            in_stacks = sorted(terms, key=lambda term: self.places.get(term, alone))
            return _Sum(nodes, self._column(in_stacks))
        if len(nodes) == 1:
            return _Alone(nodes)
        if first.target is _SELECT:
            source, axis, _ = first.args
            numbers = [cast(int, node.args[2]) for node in nodes]
            return _Selected(nodes, cast(Node, source), cast(int, axis), _index(numbers))
        columns = zip(*map(_operands, nodes), strict=True)
        return _Together(nodes, [self._column(column) for column in columns])

    def _column(self, nodes: Sequence[Node]) -> _Column:
        """What stands at one place of the arguments of operations that are alike."""
        if len(set(nodes)) == 1:
            return _Same(nodes[0])
        if all(node in self.constants for node in nodes):
            return _Constants(torch.stack([cast(Tensor, self.constants[node]) for node in nodes]))
        pieces = self._pieces(nodes)
        if len(pieces) == 1:
            return pieces[0]
        if len(pieces) <= _MOST_PIECES:
            return _Joined(pieces)
        places = [self.places.get(node) for node in nodes]
        steps = {place.step for place in places if place is not None}
        if None in places or len(steps) > 1:
            return _Stack(nodes)
        index = torch.tensor([place.at for place in places if place is not None])
        return _Taken(steps.pop(), index)

    def _pieces(self, nodes: Sequence[Node]) -> list[_Taken | _Stack]:
        """Nodes in their order as parts of stacks, at regular distances, and others."""
        pieces: list[list[Node]] = []
        for node in nodes:
            if pieces and self._follows(pieces[-1], node):
                pieces[-1].append(node)
            else:
                pieces.append([node])
        return [self._piece(piece) for piece in pieces]

    def _follows(self, piece: Sequence[Node], node: Node) -> bool:
        """Whether a node goes on with a piece: by the distance of its last two in their stack, or as all have none."""
        place = self.places.get(node)
        last = self.places.get(piece[-1])
        if place is None or last is None:
            return place is last
        distance = place.at - last.at
        if place.step != last.step or distance <= 0:
            return False
        return len(piece) == 1 or distance == last.at - self.places[piece[-2]].at

    def _piece(self, nodes: Sequence[Node]) -> _Taken | _Stack:
        if nodes[0] not in self.places:
            return _Stack(nodes)
        first, last = self.places[nodes[0]], self.places[nodes[-1]]
        if len(nodes) == len(self.steps[first.step].nodes):
            return _Taken(first.step, None)
        distance = (last.at - first.at) // max(1, len(nodes) - 1)
        return _Taken(first.step, slice(first.at, last.at + 1, max(1, distance)))


class _Place(NamedTuple):
    """Where a node is computed: the number of the step, and the place in its stack."""

    step: int
    at: int


class _Run:
    """One call of a merged function.

    Attributes: ``results`` of its steps so far: of an operation by itself, or the stack of several.
    """

    def __init__(self, merged: _Merged, values: dict[Node, _Value]) -> None:
        self.results: list[_Value] = []
        self._merged = merged
        self._values = values

    def value(self, node: Node) -> _Value:
        """What a node has computed."""
        if node not in self._values:
            place = self._merged.places[node]
            stack = cast(Tensor, self.results[place.step])
            if place.step not in self._merged.taken_apart:
                return self.keep(node, stack[place.at])
            # one operation, whose gradient is one too
            nodes = self._merged.steps[place.step].nodes
            self._values.update(zip(nodes, stack.unbind(), strict=True))
        return self._values[node]

    def keep(self, node: Node, value: _Value) -> _Value:
        """Note what an operation by itself has computed, and return it."""
        self._values[node] = value
        return value


@dataclass(frozen=True, eq=False)
class _Same:
    """One value for all of the operations."""

    node: Node
    axis: ClassVar[int | None] = None

    def value(self, run: _Run) -> _Value:
        return run.value(self.node)


@dataclass(frozen=True, eq=False)
class _Constants:
    """A constant for each, stacked."""

    stack: Tensor
    axis: ClassVar[int | None] = 0

    def value(self, run: _Run) -> Tensor:
        return self.stack


@dataclass(frozen=True, eq=False)
class _Stack:
    """What nodes have computed, stacked now."""

    nodes: Sequence[Node]
    axis: ClassVar[int | None] = 0

    def value(self, run: _Run) -> Tensor:
        return torch.stack([cast(Tensor, run.value(node)) for node in self.nodes])


@dataclass(frozen=True, eq=False)
class _Taken:
    """What an earlier step has computed as a stack, at ``index``; None: all of it."""

    step: int
    index: slice | Tensor | None
    axis: ClassVar[int | None] = 0

    def value(self, run: _Run) -> Tensor:
        stack = cast(Tensor, run.results[self.step])
        return stack if self.index is None else stack[self.index]


@dataclass(frozen=True, eq=False)
class _Joined:
    """Several pieces, one after the other."""

    pieces: list[_Taken | _Stack]
    axis: ClassVar[int | None] = 0

    def value(self, run: _Run) -> Tensor:
        return torch.cat([piece.value(run) for piece in self.pieces])


_Column: TypeAlias = _Same | _Constants | _Stack | _Taken | _Joined


@dataclass(frozen=True, eq=False)
class _Alone:
    """An operation by itself."""

    nodes: list[Node]

    def compute(self, run: _Run) -> _Value:
        (node,) = self.nodes
        args, options = map_arg((node.args, dict(node.kwargs)), run.value)
        return run.keep(node, cast(Callable, node.target)(*args, **options))

    def single_operands(self) -> list[Node]:
        """Nodes whose values are asked for one by one."""
        return _operands(self.nodes[0])


@dataclass(frozen=True, eq=False)
class _Selected:
    """Selections from one tensor, the ``source``, along one axis, at ``index``."""

    nodes: list[Node]
    source: Node
    along: int
    index: slice | Tensor

    def compute(self, run: _Run) -> Tensor:
        rows = cast(Tensor, run.value(self.source)).movedim(self.along, 0)
        return rows[self.index]

    def single_operands(self) -> list[Node]:
        """Nodes whose values are asked for one by one."""
        return [self.source]


@dataclass(frozen=True, eq=False)
class _Together:
    """Operations that are alike, on the stacks of their arguments."""

    nodes: list[Node]
    columns: list[_Column]

    def compute(self, run: _Run) -> Tensor:
        first = self.nodes[0]

        def one(*operands: Tensor) -> Tensor:
            following = iter(operands)
            args, options = map_arg((first.args, dict(first.kwargs)), lambda _: next(following))
            return cast(Callable, first.target)(*args, **options)

        values = [cast(Tensor, column.value(run)) for column in self.columns]
        axes = tuple(column.axis for column in self.columns)
        result: Tensor = torch.func.vmap(one, axes)(*values)
        return result

    def single_operands(self) -> list[Node]:
        """Nodes whose values are asked for one by one."""
        return [node for column in self.columns for node in _single_nodes(column)]


@dataclass(frozen=True, eq=False)
class _Sum:
    """A sum of many terms."""

    nodes: list[Node]
    terms: _Column

    def compute(self, run: _Run) -> Tensor:
        (node,) = self.nodes
        total = cast(Tensor, self.terms.value(run)).sum(0)
        run.keep(node, total)
        return total

    def single_operands(self) -> list[Node]:
        """Nodes whose values are asked for one by one."""
        return _single_nodes(self.terms)


def _single_nodes(column: _Column) -> list[Node]:
    """The nodes of a column whose values are asked for one by one."""
    nodes = [column.node] if isinstance(column, _Same) else []
    for piece in column.pieces if isinstance(column, _Joined) else [column]:
        if isinstance(piece, _Stack):
            nodes += piece.nodes
    return nodes


_Step: TypeAlias = _Alone | _Selected | _Together | _Sum


def _index(numbers: Sequence[int]) -> slice | Tensor:
    """An index of these numbers: a slice where they are regular, whose gradient adds nothing up."""
    step = numbers[1] - numbers[0]
    stop = numbers[-1] + 1
    if numbers[0] >= 0 and step > 0 and list(numbers) == list(range(numbers[0], stop, step)):
        return slice(numbers[0], stop, step)
    return torch.tensor(numbers)


def _check(graph: GraphModule) -> None:
    """_Unmergeable where operations write into tensors or draw random numbers, or are loops of their own."""
    if is_looped(graph):
        raise _Unmergeable("a loop has its own derivative")
    for node in graph.graph.nodes:
        schema = schema_of(node)
        if is_random(node) or (schema is not None and schema.is_mutable):
            raise _Unmergeable(str(node.target))


def _make_pure(graph: GraphModule) -> None:
    """Let what is written into a tensor that nothing else holds be a tensor of its own, as after ``torch.empty``."""
    order = {node: number for number, node in enumerate(graph.graph.nodes)}
    for node in order:
        pure = _pure_operator(node)
        base = node.args[0] if node.args else None
        if (
            pure is None
            or not isinstance(base, Node)
            or not _is_held_alone(base, order[node], order)
        ):
            continue
        with graph.graph.inserting_before(node):
            written = graph.graph.call_function(pure, node.args, node.kwargs)
        written.meta = dict(node.meta)
        for user in list(base.users):
            if user not in (node, written) and order.get(user, -1) > order[node]:
                user.replace_input_with(base, written)
        node.replace_all_uses_with(written)
        graph.graph.erase_node(node)


def _pure_operator(node: Node) -> Callable[..., Tensor] | None:
    """The operator that returns what a node's writes into its first argument; None of a node that writes nowhere."""
    schema = schema_of(node)
    if schema is None or not schema.is_mutable:
        return None
    writes = [
        value.alias_info is not None and value.alias_info.is_write for value in schema.arguments
    ]
    packet = getattr(node.target, "overloadpacket", None)
    name = getattr(packet, "__name__", "")
    if writes.index(True) != 0 or sum(writes) > 1 or not name.endswith("_"):
        return None
    operator = getattr(torch.ops.aten, name.removesuffix("_"), None)
    overload = str(node.target).rpartition(".")[2]
    pure: Callable[..., Tensor] | None = getattr(operator, overload, None)
    return pure


def _is_held_alone(node: Node, until: int, order: Mapping[Node, int]) -> bool:
    """Whether a tensor is new, and no other node before ``until`` lies in its memory."""
    return not _is_view(node) and not any(
        _is_view(user) for user in node.users if order.get(user, until) < until
    )


def _is_view(node: Node) -> bool:
    """Whether what a node returns may lie in the memory of an argument, or of the graph's own."""
    schema = schema_of(node)
    if schema is None or is_undeclared_view(node):
        return True
    return any(value.alias_info is not None for value in schema.returns)


def _simplify(graph: GraphModule) -> dict[Node, _Value]:
    """What depends on no argument of a graph, by node; of nodes that compute the same one is left."""
    graph.graph.eliminate_dead_code()
    constants: dict[Node, _Value] = {}
    known: dict[tuple[Any, ...], Node] = {}
    for node in list(graph.graph.nodes):
        if node.op not in ("get_attr", "call_function"):
            continue
        key = (node.target, repr(node.args), repr(node.kwargs))
        same = known.setdefault(key, node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.graph.erase_node(node)
        elif node.op == "get_attr":
            constants[node] = cast(Tensor, constant_of(graph, node))
        elif all(source in constants for source in node.all_input_nodes):
            args, options = map_arg((node.args, dict(node.kwargs)), constants.__getitem__)
            constants[node] = cast(Callable, node.target)(*args, **options)
    return constants


def _select_single_parts(graph: GraphModule) -> None:
    """Let what a split takes of one row each be selected, as rows of one tensor that need not be taken apart."""
    for node in list(graph.graph.nodes):
        split = node.args[0] if node.target is getitem else None
        if not isinstance(split, Node) or split.target is not _SPLIT:
            continue
        tensor = split.args[0]
        sizes = cast("list[int]", split.args[1])
        axis = cast(int, split.args[2]) if len(split.args) > 2 else 0
        number = cast(int, node.args[1])
        row_meta: Any = node.meta.get("tensor_meta")
        if sizes[number] != 1 or row_meta is None:
            continue
        shape = list(row_meta.shape)
        del shape[axis]
        with graph.graph.inserting_before(node):
            row = graph.graph.call_function(_SELECT, (tensor, axis, sum(sizes[:number])))
            part = graph.graph.call_function(_UNSQUEEZE, (row, axis))
        row.meta = {**node.meta, "tensor_meta": row_meta._replace(shape=torch.Size(shape))}
        part.meta = dict(node.meta)
        node.replace_all_uses_with(part)
    graph.graph.eliminate_dead_code()


def _total(terms: Sequence[Tensor]) -> Tensor:
    """The sum of tensors of one shape."""
    return torch.stack([*terms]).sum(0)


def _gather_sums(graph: GraphModule, constants: Mapping[Node, _Value]) -> None:
    """Let what is added one after the other be one sum, whose terms need not wait for each other."""
    sums: dict[Node, list[Node]] = {}
    for node in list(graph.graph.nodes):
        if node in constants or not _is_sum(node):
            continue
        first, second = node.args
        if node.target is _ADD and second in sums and first not in sums:
            first, second = second, first
        terms = [first]
        if first in sums and len(first.users) == 1:
            terms = sums.pop(first)
        if node.target is _SUBTRACT:
            with graph.graph.inserting_before(node):
                negative = graph.graph.call_function(torch.ops.aten.neg.default, (second,))
            negative.meta = dict(second.meta)
            second = negative
        sums[node] = [*terms, second]
    for node, terms in sums.items():
        if len(terms) >= _FEWEST:
            with graph.graph.inserting_before(node):
                total = graph.graph.call_function(_total, (terms,))
            total.meta = dict(node.meta)
            node.replace_all_uses_with(total)
    graph.graph.eliminate_dead_code()


def _is_sum(node: Node) -> bool:
    """Whether a node adds or subtracts two different tensors of its own shape and floating type."""
    if node.target not in (_ADD, _SUBTRACT) or node.kwargs or len(set(node.args)) != 2:
        return False
    kinds = set()
    for source in (node, *node.args):
        meta: Any = source.meta.get("tensor_meta") if isinstance(source, Node) else None
        if not hasattr(meta, "dtype") or not meta.dtype.is_floating_point:
            return False
        kinds.add((tuple(meta.shape), meta.dtype))
    return len(kinds) == 1


def _steps_of(nodes: Sequence[Node], constants: Mapping[Node, _Value]) -> list[list[Node]]:
    """Nodes in an order in which each follows its arguments; those that are computed together in one list."""
    depths: dict[Node, int] = {}
    alike: dict[tuple[Any, ...], list[Node]] = {}
    for node in nodes:
        depths[node] = 1 + max(
            (depths.get(source, 0) for source in node.all_input_nodes), default=0
        )
        alike.setdefault((depths[node], *_kind(node, constants)), []).append(node)
    steps: list[list[Node]] = []
    # of nodes that are computed together, the number of their step
    origins: dict[Node, int] = {}
    for kind in sorted(alike, key=itemgetter(0)):
        for members in _by_origin(alike[kind], origins, constants):
            if len(members) >= _FEWEST:
                origins |= dict.fromkeys(members, len(steps))
                steps.append(members)
            else:
                steps += [[member] for member in members]
    return steps


def _by_origin(
    members: list[Node],
    origins: Mapping[Node, int],
    constants: Mapping[Node, _Value],
) -> list[list[Node]]:
    """Nodes that are alike by where their arguments come from, if that makes a few steps; else all together.

    What comes from one stack is a part of it; what comes from several by turns would be put together one by one.
    """

    def origin(source: Node) -> Node | int | None:
        return None if source in constants else origins.get(source, source)

    parts: dict[tuple[Node | int | None, ...], list[Node]] = {}
    for member in members:
        key = tuple(map(origin, _operands(member)))
        parts.setdefault(key, []).append(member)
    num_steps = sum(1 if len(part) >= _FEWEST else len(part) for part in parts.values())
    return list(parts.values()) if num_steps <= _MOST_PIECES else [members]


def _kind(node: Node, constants: Mapping[Node, _Value]) -> tuple[Any, ...]:
    """What nodes have in common that can be computed together: operator, shapes and types, and what is no tensor."""
    if node.target is getitem or "tensor_meta" not in node.meta:
        return (node,)
    if node.target is _SELECT and len(node.args) == 3:
        return (node.target, *node.args[:2])

    def shape(source: Node) -> str:
        value: Any = constants.get(source, source.meta.get("tensor_meta"))
        if not hasattr(value, "shape"):
            return source.name
        return f"{tuple(value.shape)} {value.dtype}"

    return (node.target, repr(map_arg(node.args, shape)), repr(map_arg(dict(node.kwargs), shape)))


def _operands(node: Node) -> list[Node]:
    """The nodes among the arguments of a node, in their order."""
    operands: list[Node] = []
    map_arg((node.args, dict(node.kwargs)), operands.append)
    return operands
