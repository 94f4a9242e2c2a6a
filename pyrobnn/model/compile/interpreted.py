"""A traced graph for the interpreter: as few operations, and as little around each, as the same bits allow.

On small tensors an operation takes less time than the way to it: through ``torch.ops`` and with a number among its
arguments, four times that of ``torch.mul(a, b)``. So what depends on constants alone is computed once, what is computed
twice is computed once, and operators become the functions of ``torch`` that the user calls. Each of these is tried
beside its operator on the example; where a bit differs, the operator stays.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument, Target, map_arg

from pyrobnn.core import private
from pyrobnn.core.seeding import kept
from pyrobnn.model.compile.graph_nodes import (
    SchemaArgument,
    constant_of,
    dtype_of,
    is_random,
    is_undeclared_view,
    memory_of,
    schema_of,
)
from pyrobnn.model.compile.trees import Tree, leaves_of

#: operators whose second argument may be a number: as a tensor without dimensions it takes a third of the time. Not a
#: power, which has arithmetic of its own for some numbers: that of a tensor differs in the last bit, at some arguments
_TAKE_NUMBERS = {
    "add",
    "sub",
    "mul",
    "div",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "__lshift__",
    "__rshift__",
    "eq",
    "ne",
    "ge",
    "gt",
    "le",
    "lt",
}
_ATEN = torch.ops.aten
#: operators that return the first argument where the second is one
_NEUTRAL_ONE = {_ATEN.mul.Tensor, _ATEN.div.Tensor, _ATEN.pow.Tensor_Scalar, _ATEN.mul.Scalar}
#: operators whose result depends on the shape of their arguments alone
_MADE_OF_SHAPES = {
    _ATEN.ones_like.default,
    _ATEN.zeros_like.default,
    _ATEN.new_ones.default,
    _ATEN.new_zeros.default,
}
#: elements from which on an operation takes a hundred times as long as the way to it: another way is not worth a trial
_LARGE = 2**18
#: names that differ from the operator's
_PUBLIC_NAMES = {"__lshift__": "bitwise_left_shift", "__rshift__": "bitwise_right_shift"}


def interpreted(graph: GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """The graph as a Python function of its arguments, which gives the same numbers in less time.

    Args:
        graph: as traced; it is rewritten.
        inputs: arguments like those to come, which may be written into.
    """
    rewriting = _Rewriting(graph, inputs)
    with torch.no_grad(), kept(*{tensor.device for tensor in inputs}):
        rewriting.run()
    return rewriting.function()


class _Rewriting:
    """A graph that is rewritten while it is executed on an example."""

    def __init__(self, graph: GraphModule, inputs: Sequence[Tensor]) -> None:
        #: what the constants of the graph are
        self._owner = graph
        self.graph = graph.graph
        self._inputs = iter(inputs)
        self._memory = _Memory(graph, self.graph)
        #: what a node was on the example, while another that asks for it is still to come
        self._values: dict[Node, Any] = {}
        #: the nodes that are still to come
        self._ahead = dict.fromkeys(self.graph.nodes)
        #: the first of the nodes that compute the same
        self._known: dict[str, Node] = {}
        #: constants of the function, by the arguments that stand for them
        self._constants: dict[Node, Tensor] = {}
        self._numbers: dict[str, Node] = {}
        self._order_operator = private.order_operator()
        self._begin = next(iter(self.graph.nodes))

    def run(self) -> None:
        """Execute every node on the example, and replace it where something else gives the same."""
        for node in list(self.graph.nodes):
            sources = node.all_input_nodes
            if node.op == "placeholder":
                self._values[node] = next(self._inputs)
            elif node.op == "get_attr":
                self._take_constant(node)
            elif node.op == "call_function":
                self._state_type(node)
                self._execute(node)
            del self._ahead[node]
            self._forget([node, *sources, *node.all_input_nodes])
        for node in reversed(list(self.graph.nodes)):
            if not node.users and self._memory.is_removable(node):
                self.graph.erase_node(node)

    def _forget(self, nodes: Sequence[Node]) -> None:
        """Let go of values that no later node asks for: all of a step's together take many times the memory of one."""
        for node in nodes:
            if node not in self._constants and self._ahead.keys().isdisjoint(node.users):
                self._values.pop(node, None)

    def function(self) -> Callable[..., Any]:
        """What the graph has become."""
        self.graph.lint()
        module = GraphModule(self._owner, self.graph)
        constants = [self._constants.pop(node) for node in list(self._constants)]
        return functools.partial(module.forward, *constants)

    def _take_constant(self, node: Node) -> None:
        """A constant of the graph becomes one of the function: as an attribute it is looked for at every call."""
        value = constant_of(self._owner, node)
        self._values[node] = value
        if isinstance(value, Tensor):
            argument = self._argument_for(value)
            self._memory.let_stand_for(argument, node)
            node.replace_all_uses_with(argument)

    def _state_type(self, node: Node) -> None:
        """Let a node that makes real numbers, of none or of whole ones, say their type where torch would make another.

        A density that computes in float64 has had that type as torch's default, and the graph does not say so.
        """
        schema = schema_of(node)
        dtype = dtype_of(node)
        if schema is None or dtype is None or dtype == torch.get_default_dtype():
            return
        takes_real = any(_is_real(self._values[source]) for source in node.all_input_nodes)
        if takes_real or not dtype.is_floating_point:
            return
        options = {argument.name: argument.kwarg_only for argument in schema.arguments}
        if options.get("dtype", False):
            node.kwargs = {**node.kwargs, "dtype": dtype}
        elif "dtype" not in options:
            for source in node.all_input_nodes:
                self._cast(node, source, dtype)

    def _cast(
        self,
        node: Node,
        source: Node,
        dtype: torch.dtype,
    ) -> None:
        """Let a node take one of its arguments in another type."""
        with self.graph.inserting_before(node):
            cast = self.graph.call_function(
                _ATEN._to_copy.default,
                (source,),
                {"dtype": dtype},
            )
        node.replace_input_with(source, cast)
        self._execute(cast)

    def _execute(self, node: Node) -> None:
        """Compute a node on the example, and put what is cheaper in its place.

        In this order: a node that computes the same is shared; what depends on constants alone is folded into one; a
        result that its argument is already, its twin, is that; and an operator is simplified.
        """
        if self._memory.is_foreign(node):
            self._values[node] = self._result(node)
            return
        if self._is_in_order(node):
            node.replace_all_uses_with(node.all_input_nodes[0])
            return
        if self._memory.may_be_shared(node):
            earlier = self._known.setdefault(self._name_of(node), node)
            if earlier is not node:
                if earlier not in self._values:
                    self._values[earlier] = self._result(node)
                node.replace_all_uses_with(earlier)
                self._forget([earlier])
                return
        value = self._result(node)
        self._values[node] = value
        if isinstance(value, Tensor) and self._is_constant(node):
            constant = self._argument_for(value)
            self._known[self._name_of(node)] = constant
            node.replace_all_uses_with(constant)
            return
        twin = self._twin(node)
        if twin is not None:
            # else the next that computes the same would bring this one back
            self._known[self._name_of(node)] = twin
            node.replace_all_uses_with(twin)
            return
        self._simplify(node)

    def _is_in_order(self, node: Node) -> bool:
        """Whether a node copies its argument into an order of memory that it has already, and nobody writes there."""
        if self._order_operator is None or node.target != self._order_operator:
            return False
        (argument,) = node.all_input_nodes
        strides: Any = node.args[1]
        is_ordered = self._values[argument].stride() == tuple(strides)
        return is_ordered and self._memory.may_be_shared(node)

    def _twin(self, node: Node) -> Node | None:
        """The argument of a node that is its result already: of a view, a power or product of one, or a choice."""
        if not node.args or not isinstance(node.args[0], Node) or self._memory.writes(node):
            return None
        argument = node.args[0]
        if self._is_view(node, argument):
            return argument
        same: Argument = None
        if node.target in _NEUTRAL_ONE and self._is_one(node.args[1]):
            same = argument
        elif node.target is _ATEN.where.self and self._is_one(argument):
            same = node.args[1]
        if not isinstance(same, Node) or not self._memory.may_be_shared(node):
            return None
        return same if _have_one_layout(self._values[same], self._values[node]) else None

    def _is_view(self, node: Node, argument: Node) -> bool:
        """Whether the result of a node lies where its argument does, and as that does."""
        argument_value = self._values[argument]
        if not _have_one_layout(argument_value, self._values[node]):
            return False
        is_same_memory = argument_value.data_ptr() == self._values[node].data_ptr()
        return is_same_memory and bool(argument_value.numel())

    def _is_one(self, factor: Argument) -> bool:
        """Whether an argument of a node is one, at every call."""
        if isinstance(factor, Node):
            value = self._constants.get(factor)
            return value is not None and bool((value == 1).all())
        return bool(factor == 1)

    def _name_of(self, node: Node) -> str:
        """The same for nodes that compute the same."""
        return f"{node.target} {node.args} {node.kwargs}"

    def _result(self, node: Node) -> Any:
        """What a node comes to on the example."""
        arguments = map_arg(node.args, self._values.__getitem__)
        options = map_arg(node.kwargs, self._values.__getitem__)
        if node.op == "call_method":
            owner, *positional = arguments
            return getattr(owner, str(node.target))(*positional, **options)
        operation: Any = node.target
        return operation(*arguments, **options)

    def _is_constant(self, node: Node) -> bool:
        """Whether a node has the same value at every call, which nobody writes into."""
        fixed = all(source in self._constants for source in node.all_input_nodes)
        # a large one is not kept between calls
        fixed |= node.target in _MADE_OF_SHAPES and self._num_elements(node) <= _LARGE
        return fixed and self._memory.may_be_shared(node)

    def _argument_for(self, value: Tensor) -> Node:
        """An argument of the function that is this constant."""
        with self.graph.inserting_before(self._begin):
            argument = self.graph.placeholder(f"constant_{len(self._constants)}")
        self._constants[argument] = value
        self._values[argument] = value
        return argument

    def _simplify(self, node: Node) -> None:
        """Let a function of torch take the place of an operator, where it gives the same bits."""
        operator = node.target
        if operator is getitem or self._memory.writes(node) or is_random(node):
            return
        if self._num_elements(node) > _LARGE:
            return
        before = _Call.of(node)
        value = self._values[node]
        packet: Any = getattr(operator, "overloadpacket", operator)
        name = packet.__name__
        if name == "pow" and node.args[1] == 2:
            name = "mul"
            node.args = (node.args[0], node.args[0])
        if name in _TAKE_NUMBERS and len(node.args) == 2 and isinstance(node.args[1], (int, float)):
            self._with_tensor_for_number(node)
        _as_public_function(node, _PUBLIC_NAMES.get(name, name))
        if not self._gives(node, value):
            before.restore(node)

    def _num_elements(self, node: Node) -> int:
        """The elements of the tensors that a node is given and computes."""
        values = [self._values[part] for part in (node, *node.all_input_nodes)]
        leaves = itertools.chain.from_iterable(map(leaves_of, values))
        return sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))

    def _with_tensor_for_number(self, node: Node) -> None:
        """A tensor of the first argument's type in the place of a number, where that holds it."""
        (operand,) = node.all_input_nodes
        number: Any = node.args[1]
        tensor = self._values[operand]
        is_whole = isinstance(number, int) and tensor.dtype is torch.int64
        if isinstance(number, bool) or not (tensor.is_floating_point() or is_whole):
            return
        # a GPU divides by a number and by a tensor differently, in the last bit
        if tensor.device.type != "cpu":
            return
        key = f"{number!r} {tensor.dtype} {tensor.device}"
        if key not in self._numbers:
            constant = torch.tensor(
                number,
                dtype=tensor.dtype,
                device=tensor.device,
            )
            self._numbers[key] = self._argument_for(constant)
        node.args = (operand, self._numbers[key])

    def _gives(self, node: Node, value: Tree) -> bool:
        """Whether a node gives this value, to the bit and with its layout."""
        try:
            candidate = self._result(node)
        except (TypeError, RuntimeError, IndexError):  # the function has another signature
            return False
        if isinstance(candidate, Tensor):
            return _same(candidate, value)
        pairs = list(itertools.zip_longest(leaves_of(candidate), leaves_of(value)))
        return all(_same(*pair) for pair in pairs)


def _is_real(value: Tree) -> bool:
    """Whether a value is a tensor of floating or complex numbers."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


class _Call(NamedTuple):
    """What a node calls, as it was."""

    op: str
    target: Target
    args: tuple[Argument, ...]
    kwargs: dict[str, Argument]

    @classmethod
    def of(cls, node: Node) -> _Call:
        return cls(node.op, node.target, node.args, node.kwargs)

    def restore(self, node: Node) -> None:
        """Let the node call it again."""
        node.op = self.op
        node.target = self.target
        node.args = self.args
        node.kwargs = self.kwargs


def _as_public_function(node: Node, name: str) -> None:
    """Let a node call the function or the method of torch with this name, where there is one."""
    if name == "_to_copy" and [*node.kwargs] == ["dtype"]:
        node.op = "call_method"
        node.target = "to"
        node.args = (*node.args, node.kwargs["dtype"])
        node.kwargs = {}
    elif isinstance(getattr(torch, name, None), types.BuiltinFunctionType):
        node.target = getattr(torch, name)
    elif hasattr(Tensor, name) and node.args and isinstance(node.args[0], Node):
        node.op = "call_method"
        node.target = name


def _same(value: Tree, twin: Tree) -> bool:
    """Whether two tensors are one to the bit, in one layout."""
    if not isinstance(value, Tensor) or not isinstance(twin, Tensor):
        return bool(value == twin)
    if _layout(value) != _layout(twin):
        return False
    # a tensor of torch's device "meta" has a layout alone
    if value.is_meta or torch.equal(value, twin):
        return True
    both_nan = (value != value) & (twin != twin)
    return bool(((value == twin) | both_nan).all())


def _have_one_layout(value: Tree, twin: Tree) -> bool:
    """Whether two values are tensors that lie in memory alike."""
    if not isinstance(value, Tensor) or not isinstance(twin, Tensor):
        return False
    return _layout(value) == _layout(twin)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


class _Memory:
    """Which nodes of a graph write, draw or return what they were given."""

    def __init__(self, owner: GraphModule, graph: Graph) -> None:
        self._owner = owner
        #: what does more than compute its result, whoever asks for that
        self._has_effect: set[Node] = set()
        #: where the memory of a node's result comes from
        self._roots: dict[Node, Node] = {}
        #: the first node of each constant, by the address of its memory
        self._constants: dict[int, Node] = {}
        #: whose memory is written into, or handed out
        self._exposed: set[Node] = set()
        for node in graph.nodes:
            self._roots[node] = self._root(node)
            if self.is_foreign(node) or self.writes(node) or is_random(node):
                self._has_effect.add(node)
            if node.op == "output" or self.is_foreign(node):
                self._exposed |= {self._roots[source] for source in node.all_input_nodes}
            self._exposed |= {self._roots[source] for source in _written(node)}

    def is_foreign(self, node: Node) -> bool:
        """Whether it is a call of something else than an operator of torch."""
        is_call = node.op == "call_function"
        return is_call and node.target is not getitem and schema_of(node) is None

    def writes(self, node: Node) -> bool:
        schema = schema_of(node)
        return schema is not None and schema.is_mutable

    def is_removable(self, node: Node) -> bool:
        """Whether nobody misses a node without users."""
        computes = node.op in ("get_attr", "call_function", "call_method")
        return computes and node not in self._has_effect

    def may_be_shared(self, node: Node) -> bool:
        """Whether a node has one value for all who ask for it, at whatever time."""
        if node in self._has_effect:
            return False
        sources = [node, *node.all_input_nodes]
        # an argument that stands for a number is written into by nobody
        return all(self._roots.get(source, source) not in self._exposed for source in sources)

    def let_stand_for(self, argument: Node, constant: Node) -> None:
        """From here on the argument is in the place of a constant of the graph."""
        self._roots[argument] = self._roots[constant]

    def _root(self, node: Node) -> Node:
        """The node whose memory the result of this one is: itself, but for views and what is written in place."""
        if node.op == "get_attr":
            return self._root_of_constant(node)
        schema = schema_of(node)
        if node.target is getitem or is_undeclared_view(node):
            return self._roots[node.all_input_nodes[0]]
        if schema is None or not any(value.alias_info for value in schema.returns):
            return node
        for argument, value in zip(schema.arguments, node.args, strict=False):
            if argument.alias_info and isinstance(value, Node):
                return self._roots[value]
        return node

    def _root_of_constant(self, node: Node) -> Node:
        """The first node of a constant with this memory: each use of one constant is a node of its own."""
        memory = memory_of(self._owner, node)
        return node if memory is None else self._constants.setdefault(memory, node)


def _written(node: Node) -> list[Node]:
    """The arguments that a node writes into."""
    schema = schema_of(node)
    written: list[Node] = []
    if schema is None:
        return written
    for argument, value in zip(schema.arguments, node.args, strict=False):
        if _is_written(argument):
            written += [leaf for leaf in leaves_of(value) if isinstance(leaf, Node)]
    named = {argument.name: argument for argument in schema.arguments}
    for name, value in node.kwargs.items():
        if _is_written(named[name]) and isinstance(value, Node):
            written.append(value)
    return written


def _is_written(argument: SchemaArgument) -> bool:
    """Whether an operator writes into an argument of its schema."""
    return argument.alias_info is not None and argument.alias_info.is_write
