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
    # a graph that is wrong is no more spread out for it
    _, plain = _results(graph, inputs)
    spreads = [torch.zeros((), device=result.device) for result in exact]
    for index, width in enumerate(_WIDTHS):
        # both of a mirrored pair have one seed
        _, noisy = _results(_WithNoise(graph, index - index % 2, width).run, inputs)
        times = _SPREADS / abs(width)
        spreads = [
            _spread(spread, noisy_result, plain_result, times)
            for spread, noisy_result, plain_result in zip(spreads, noisy, plain, strict=True)
        ]
    return spreads


def snapshot(inputs: list[Tensor]) -> list[Tensor]:
    """Copies of the arguments with their strides; those of more than four million elements themselves."""
    return [_copy(tensor) for tensor in inputs]


def _copy(tensor: Tensor) -> Tensor:
    """A copy of the tensor with its strides; a large one itself."""
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
    allowed = min(_PLAIN * unit, _WORST) * size + min(_OF_LARGEST * unit, _WORST) * largest
    allowed = allowed + torch.finfo(exact.dtype).tiny + spread
    same = (result == exact) | (result.isnan() & exact.isnan())
    wrong = ~same & ~(exact.isfinite() & (error <= allowed))
    if not wrong.any():
        return None
    worst = float(torch.where(wrong, error, 0.0).nan_to_num(torch.inf).max())
    return f"a difference of {worst:.3g} (the largest value is {float(largest):.3g})"


def _rounds(value: Tree) -> TypeGuard[Tensor]:
    """Whether it is a tensor of numbers that operations round."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _spread(
    so_far: Tensor,
    noisy: Tensor,
    plain: Tensor,
    times: float,
) -> Tensor:
    """``times`` the largest distance of the noisy results from the plain ones."""
    same = (noisy == plain) | (noisy.isnan() & plain.isnan())
    distance = (noisy - plain).abs().nan_to_num(torch.inf)
    return torch.where(same, 0.0, times * distance).clamp(min=so_far)


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
        added = self._size_of_summation(node, random_source)
        unit = self.width * torch.finfo(value.dtype).eps
        # whole numbers are results of no rounding: counts and flags
        whole = (value == real.round()) & (added == 0)
        return torch.where(whole, value, value + unit * noise * (size + added))

    def _size_of_summation(self, node: Node, random_source: torch.Generator) -> Tensor:
        """What a sum of K terms, or a product that sums, adds to the size of its noise; zero of another operation.

        Adding the terms one by one rounds, in units, about sqrt(K) / 5 times a partial sum. Half of that is added, of
        the sum up to a random term; nothing where that is a whole number, which is no result of rounding.
        """
        # aten.addmm.default(bias, left, right): its terms come second
        name = f"{node.target}.".split(".")[1]
        args, options = self.fetch_args_kwargs_from_env(node)
        product = name.endswith(("mm", "mv", "dot"))
        position = int("add" in name)
        if not (product or name in ("sum", "mean")) or not args[position].dim():
            return torch.zeros((), device=random_source.device)
        terms = args[position]
        axes = [-1] if product else (len(args) > 1 and args[1]) or range(terms.dim())
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
        whole = partial_sum == partial_sum.round()
        return torch.where(whole, 0.0, 0.1 * math.sqrt(num) * partial_sum)
