"""Comparison of a compiled function with the function it was made from.

Rounding differs between the two: sums are taken in another order, products are fused with sums. Where they differ by
more than an elementary operation rounds, the traced function is interpreted a few times with every operation off by a
unit in the last place, up or down, and a sum by what its partial sums round; 30 times the spread of the results is
allowed. A step function of a gradient's sign, as Adam's first update, spreads only if the noise turns the sign. So half
of the noises are 30 units wide (and count once), and each comes with its mirror image: where rounding can turn the
sign, one of the two does.

Reference: CESTAC: A stochastic method for a faithful control of rounding errors (Vignes, 1993).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from operator import getitem
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from pyrobnn.core.seeding import generator, kept
from pyrobnn.model.compile.trees import TensorFunction, Tree, leaves_of, mapped

# units in the last place that are allowed, of an element and of the largest
_PLAIN = 1000
_OF_LARGEST = 10
_WORST = 0.03  # relative, whatever the units of a short type come to
_SPREADS = 30  # how many times the spread of a noise of one unit is allowed
#: widths of the noise in units, in pairs of mirror images
_WIDTHS = (1, -1, 1, -1, _SPREADS, -_SPREADS, _SPREADS, -_SPREADS)
#: elements of an argument that is copied; larger ones are written into by both functions
_COPIED = 2**22

Layout = tuple[tuple[int, ...], torch.dtype, torch.device]


def disagreement(
    fn: TensorFunction,
    call: TensorFunction,
    inputs: list[Tensor],
    trace: Callable[[], GraphModule],
) -> str | None:
    """Where a compiled function and its origin differ by more than rounding, in words; None where they agree.

    First the results themselves are compared (:func:`_difference`), and only where they differ, with what rounding may
    change in each (:func:`_spreads`: the graph interpreted with noise, :class:`_WithNoise`).

    Both start from the same arguments and the same random state. What they write into their arguments is compared as
    what they return is; of an argument of more than four million elements only the sum.

    Args:
        fn, call: the function, and the same compiled.
        inputs: arguments as of :func:`snapshot`; the larger ones are written into.
        trace: returns the graph of ``fn``, asked for where the two differ.
    """
    # the compiled one first: a large argument shows what only one of them writes
    layouts, results = _results(call, inputs)
    exact_layouts, exact = _results(fn, inputs)
    if layouts != exact_layouts:
        return f"{layouts} instead of {exact_layouts}"
    if not any(map(_difference, results, exact)):
        return None
    spreads = _spreads(trace(), inputs, exact)
    for number, difference in enumerate(map(_difference, results, exact, spreads), start=1):
        if difference:
            place = f"of the {len(exact)} tensors that it returns and writes into"
            return f"{difference} in number {number} {place}"
    return None


def _results(run: TensorFunction, inputs: list[Tensor]) -> tuple[list[Layout], list[Tensor]]:
    """What a function returns and writes into copies of its arguments, in numbers that round; and their layouts."""
    arguments = snapshot(inputs)
    with kept(*{tensor.device for tensor in inputs}):
        returned = run(*arguments)
    tensors = [leaf for leaf in leaves_of(returned) if isinstance(leaf, Tensor)]
    for argument in arguments:
        tensors.append(argument if argument.numel() <= _COPIED else argument.nansum())
    layouts = [(tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in tensors]
    for index, tensor in enumerate(tensors):
        if not _rounds(tensor):
            tensors[index] = tensor.double()
    return layouts, tensors


def _spreads(graph: GraphModule, inputs: list[Tensor], exact: list[Tensor]) -> list[Tensor]:
    """What rounding may change in each of the ``exact`` results: the graph's spread over noises of every width."""
    # by the graph's own results: a graph that is wrong is no more spread out for it
    _, without_noise = _results(graph, inputs)
    spreads = [torch.zeros((), device=result.device) for result in exact]
    for index, width in enumerate(_WIDTHS):
        # both of a mirrored pair have one seed
        _, with_noise = _results(_WithNoise(graph, index - index % 2, width).run, inputs)
        factor = _SPREADS / abs(width)
        spreads = [
            _larger_spread(spread, noisy_result, noiseless_result, factor)
            for spread, noisy_result, noiseless_result in zip(
                spreads,
                with_noise,
                without_noise,
                strict=True,
            )
        ]
    return spreads


def snapshot(inputs: list[Tensor]) -> list[Tensor]:
    """Copies of the arguments with their strides; those of more than four million elements themselves."""
    return [_copy_of_small(tensor) for tensor in inputs]


def _copy_of_small(tensor: Tensor) -> Tensor:
    """A copy of the tensor with its strides, whatever lies between its elements; a large one itself."""
    if tensor.numel() > _COPIED:
        return tensor
    if 0 in tensor.stride():
        return tensor.clone()
    copy = torch.empty_strided(
        tensor.shape,
        tensor.stride(),
        dtype=tensor.dtype,
        device=tensor.device,
    )
    return copy.copy_(tensor)


def _difference(result: Tensor, exact: Tensor, spread: Tensor | float = 0.0) -> str | None:
    """How two results differ beyond rounding; NaN equals NaN."""
    if not exact.numel():
        return None
    unit = torch.finfo(exact.dtype).eps
    error = (result - exact).abs()
    size = exact.abs()
    largest = torch.where(size.isfinite(), size, 0.0).max()
    tolerance = min(_PLAIN * unit, _WORST) * size + min(_OF_LARGEST * unit, _WORST) * largest
    tolerance = tolerance + torch.finfo(exact.dtype).tiny + spread
    is_same = (result == exact) | (result.isnan() & exact.isnan())
    is_wrong = ~is_same & ~(exact.isfinite() & (error <= tolerance))
    if not is_wrong.any():
        return None
    worst = float(torch.where(is_wrong, error, 0.0).nan_to_num(torch.inf).max())
    return f"a difference of {worst:.3g} (the largest value is {float(largest):.3g})"


def _rounds(value: Tree) -> TypeGuard[Tensor]:
    """Whether it is a tensor of numbers that operations round."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _larger_spread(
    spread: Tensor,
    noisy: Tensor,
    noiseless: Tensor,
    factor: float,
) -> Tensor:
    """The ``spread`` so far, or ``factor`` times the distance of a noisy result from the noiseless one, by element."""
    is_same = (noisy == noiseless) | (noisy.isnan() & noiseless.isnan())
    distance = (noisy - noiseless).abs().nan_to_num(torch.inf)
    return torch.where(is_same, 0.0, factor * distance).clamp(min=spread)


class _WithNoise(Interpreter):
    """A graph of which every operation is off by ``width`` units in the last place, a sum by more."""

    def __init__(self, graph: GraphModule, seed: int, width: int) -> None:
        super().__init__(graph)
        self.seeds = itertools.count(seed << 24)
        self.width = width

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.op != "call_function" or n.target is getitem:
            return value
        inputs = leaves_of([self.env[source] for source in n.all_input_nodes if source in self.env])
        storages = {
            leaf.untyped_storage().data_ptr() for leaf in inputs if isinstance(leaf, Tensor)
        }

        def with_noise(leaf: Tree) -> Tree:
            if not _rounds(leaf) or leaf.untyped_storage().data_ptr() in storages:
                return leaf
            return self._with_rounding_noise(leaf, n)

        return mapped(with_noise, value)

    def _with_rounding_noise(self, value: Tensor, node: Node) -> Tensor:
        real = value.real if value.is_complex() else value
        random_source = generator(next(self.seeds), value.device)
        uniform = torch.rand(
            real.shape,
            dtype=real.dtype,
            device=real.device,
            generator=random_source,
        )
        noise = (uniform - 0.5).sign()
        # the tanh of the compiled code is exact to a unit of one, not of its value
        size = 1 + value.abs() if "tanh" in str(node.target) else value.abs()
        summation = self._size_of_summation(node, random_source)
        unit = self.width * torch.finfo(value.dtype).eps
        # whole numbers are results of no rounding: counts and flags
        is_whole = (value == real.round()) & (summation == 0)
        return torch.where(is_whole, value, value + unit * noise * (size + summation))

    def _size_of_summation(self, node: Node, random_source: torch.Generator) -> Tensor:
        """What a sum of K terms, or a product that sums, adds to the size of its noise; zero of another operation.

        Adding the terms one by one rounds, in units, about sqrt(K) / 5 times a partial sum. Half of that is added, of
        the sum up to a random term; nothing where that is a whole number, which is no result of rounding.
        """
        # aten.addmm.default(bias, left, right): its terms come second
        name = f"{node.target}.".split(".")[1]
        args, options = self.fetch_args_kwargs_from_env(node)
        is_product = name.endswith(("mm", "mv", "dot"))
        position = int("add" in name)
        if not (is_product or name in ("sum", "mean")) or not args[position].dim():
            return torch.zeros((), device=random_source.device)
        terms = args[position]
        axes = [-1] if is_product else (len(args) > 1 and args[1]) or range(terms.dim())
        num, axis = max((terms.shape[axis], axis) for axis in axes)
        end = int(
            torch.rand(
                (),
                device=random_source.device,
                generator=random_source,
            )
            * num
        )
        terms = terms.index_fill(axis, torch.arange(num, device=random_source.device)[end + 1 :], 0)
        operation = cast(Any, node.target)
        partial_sum = operation(
            *args[:position],
            terms,
            *args[position + 1 :],
            **options,
        ).abs()
        is_whole = partial_sum == partial_sum.round()
        return torch.where(is_whole, 0.0, 0.1 * math.sqrt(num) * partial_sum)
