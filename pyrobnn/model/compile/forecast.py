"""What a function will cost compiled and interpreted, forecast from its traced graph: no clock, so that runs repeat.

The constants, :data:`MEASURED`, lie near the least squares of relative errors over the 13 cells (a method and a size of
model, compiled and interpreted) that ``scripts/speed/tiers.jsonl`` has of both; the script beside it measures cells and
prints the fit. The costs of an element are set by hand, to about twice the fitted ones: between what an element costs
in small tensors and in those larger than the CPU's cache. A compile is one of a new process whose cache is empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import getitem
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pyrobnn.model.compile.graph_nodes import constant_of, library_calls, schema_of, size

#: whether to compile: yes, no, or what the forecast says costs less
Compile: TypeAlias = bool | Literal["auto"]


class _Costs(NamedTuple):
    """Seconds of a compile, by itself and for each node; of a call, by itself and for node, element and product."""

    compile: float
    compile_node: float
    call: float
    node: float
    element: float
    product: float


#: the costs of either tier, in seconds on one core
MEASURED = {
    "compiled": _Costs(3.0, 0.012, 4e-6, 0.0, 0.3e-9, 0.036e-9),
    "trace": _Costs(0.0, 0.0, 0.0, 2.8e-6, 1.4e-9, 0.036e-9),
}

#: seconds of an operation on one core from which on threads are quicker: ten times what they wait for each other
_REPAYS_THREADS = 1e-4


@dataclass(frozen=True)
class Work:
    """What a call of a graph does.

    Attributes: ``nodes``, operations other than views; ``elements`` of all the tensors that they compute; ``products``,
        multiplications of the matrix products and convolutions among them.
    """

    nodes: int
    elements: int
    products: int

    @classmethod
    def of(cls, graph: GraphModule) -> Work:
        computing = [node for node in graph.graph.nodes if _computes(node)]
        return cls(
            nodes=len(computing),
            elements=sum(map(size, computing)),
            products=sum(_multiplications(graph, call) for call in library_calls(graph)),
        )


@dataclass(frozen=True)
class Forecast:
    """The seconds that so many calls of a graph take in either tier, without those of tracing it.

    What a loop of :func:`pyrobnn.scan` repeats is counted once: of a graph that is ``looped`` it is the least that a
    call takes.
    """

    work: Work
    calls: int
    looped: bool = False

    @property
    def tier(self) -> str:
        """The one that takes less."""
        return "compiled" if self.seconds("compiled") < self.seconds("trace") else "trace"

    def seconds(self, tier: str) -> float:
        """From the compile to the last call."""
        return self.seconds_to_compile(tier) + self.calls * self.seconds_of_call(tier)

    def seconds_of_call(self, tier: str) -> float:
        """Of one call, once compiled."""
        costs = MEASURED[tier]
        return (
            costs.call
            + costs.node * self.work.nodes
            + costs.element * self.work.elements
            + costs.product * self.work.products
        )

    def seconds_to_compile(self, tier: str = "compiled") -> float:
        """Until the first call."""
        costs = MEASURED[tier]
        return costs.compile + costs.compile_node * self.work.nodes

    def meta(self) -> dict[str, Any]:
        """What ``meta["tier"]`` has of it."""
        return {
            "nodes": self.work.nodes,
            "elements": self.work.elements,
            "products": self.work.products,
            "calls": self.calls,
            "seconds_compiled": round(self.seconds("compiled"), 3),
            "seconds_traced": round(self.seconds("trace"), 3),
        }


def is_small(graph: GraphModule) -> bool:
    """Whether no operation of a graph takes so long on one core that several threads would save more than they wait."""
    costs = MEASURED["trace"]
    products = {call: _multiplications(graph, call) for call in library_calls(graph)}
    return all(
        costs.element * size(node) + costs.product * products.get(node, 0) < _REPAYS_THREADS
        for node in graph.graph.nodes
        if _computes(node)
    )


def is_looped(graph: GraphModule) -> bool:
    """Whether a graph holds a loop of :func:`pyrobnn.scan`, whose body is a function of its own."""
    return any("pyrobnn.loop" in str(node.target) for node in graph.graph.nodes)


def _computes(node: Node) -> bool:
    """Whether a node computes something: views do not."""
    if node.op != "call_function" or node.target is getitem:
        return False
    schema = schema_of(node)
    if schema is None or schema.is_mutable:
        return True
    return not any(value.alias_info for value in schema.returns)


def _multiplications(graph: GraphModule, call: Node) -> int:
    """How many numbers a matrix product or a convolution multiplies."""
    shapes = [_shape(graph, argument) for argument in call.args if isinstance(argument, Node)]
    if "convolution_backward" in str(call.target):
        result, _, weight = shapes
        return 2 * result.numel() * weight[1:].numel()
    if "convolution" in str(call.target):
        return size(call) * shapes[1][1:].numel()
    factor = shapes[-2]
    return size(call) * factor[-1]


def _shape(graph: GraphModule, node: Node) -> torch.Size:
    """The shape of a node that is a tensor, computed or a constant."""
    if node.op == "get_attr":
        return cast(Tensor, constant_of(graph, node)).shape
    shape: torch.Size = node.meta["tensor_meta"].shape
    return shape
