"""Comparison of a compiled function with the function it was made from.

Rounding differs between the two: sums are taken in another order, products are fused with sums. Where they differ by
more than an elementary operation rounds, the traced function is interpreted a few times with every operation off by a
random fraction of a unit in the last place, and 30 times the spread of its results is what is allowed. A result that is
nearly a step (Adam's first update) has no spread but close to the step: so one noise is 30 units wide, and comes with
its mirror image. Of a gradient that rounding can turn round, one of the two changes the sign.

Reference: CESTAC: A stochastic method for a faithful control of rounding errors (Vignes, 1993).
"""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from pyrobnn.core.seeding import generator, kept
from pyrobnn.model.compile.trees import leaves_of, mapped

_PLAIN, _OF_LARGEST = 1000, 10  # units in the last place that are allowed, of an element and of the largest
_WORST = 0.03  # relative, whatever the units of a short type come to
_SPREADS = 30  # how many times the spread of a noise of one unit is allowed
#: widths of the noise in units, in pairs of mirror images
_WIDTHS = (1, -1, 1, -1, _SPREADS, -_SPREADS, _SPREADS, -_SPREADS)
_COPIED = 2**22  # elements of an argument that is copied; larger ones are written into by both functions


def disagreement(
    fn: Callable[..., Any], call: Callable[..., Any], inputs: list[Tensor], trace: Callable[[], GraphModule]
) -> str | None:
    """Where a compiled function and its origin differ by more than rounding, in words; None where they agree.

    Both start from the same arguments and the same random state. What they write into their arguments is compared as
    what they return is; of an argument of more than four million elements only the sum.

    Args:
        fn, call: the function, and the same compiled.
        inputs: arguments as of :func:`snapshot`; the larger ones are written into.
        trace: returns the graph of ``fn``, asked for where the two differ.
    """
    devices = {tensor.device for tensor in inputs}

    def results(run: Callable[..., Any]) -> list[Any]:
        own = snapshot(inputs)
        with kept(*devices):
            returned = run(*own)
        return [*leaves_of(returned), *(t if t.numel() <= _COPIED else t.nansum() for t in own)]

    mine = results(call)  # first: a large argument shows what only one of them writes
    exact = results(fn)
    if len(mine) != len(exact):
        return f"{len(mine)} tensors instead of {len(exact)}"
    if not any(map(_difference, mine, exact)):
        return None
    graph = trace()
    plain = results(graph)  # a graph that is wrong is no more spread out for it
    spreads: list[Any] = [None] * len(exact)
    for seed, width in enumerate(_WIDTHS):
        noisy, times = results(_WithNoise(graph, seed - seed % 2, width).run), _SPREADS / abs(width)
        spreads = [_spread(*each, times) for each in zip(spreads, noisy, plain, strict=True)]
    found = map(_difference, mine, exact, spreads)
    place = f"of the {len(exact)} tensors that it returns and writes into"
    return next((f"{what} in number {i + 1} {place}" for i, what in enumerate(found) if what), None)


def snapshot(inputs: list[Tensor]) -> list[Tensor]:
    """Copies of the arguments with their strides; those of more than four million elements themselves."""
    return [_copy(tensor) if tensor.numel() <= _COPIED else tensor for tensor in inputs]


def _copy(tensor: Tensor) -> Tensor:
    if 0 in tensor.stride():
        return tensor.clone()
    same = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return same.copy_(tensor)


def _difference(mine: Any, exact: Any, spread: Tensor | None = None) -> str | None:
    """How two results differ beyond rounding; NaN equals NaN."""
    if not isinstance(exact, Tensor) or not isinstance(mine, Tensor):
        return None if mine is exact or mine == exact else f"{mine!r} instead of {exact!r}"
    if (mine.shape, mine.dtype, mine.device) != (exact.shape, exact.dtype, exact.device):
        return f"{tuple(mine.shape)} {mine.dtype} instead of {tuple(exact.shape)} {exact.dtype}"
    if not exact.numel():
        return None
    if not _rounds(exact):
        wrong = mine != exact if spread is None else (mine != exact) & ~spread
        return f"{int(wrong.sum())} of {exact.numel()} elements differ" if wrong.any() else None
    unit, error, size = torch.finfo(exact.dtype).eps, (mine - exact).abs(), exact.abs()
    largest = torch.where(size.isfinite(), size, 0.0).max()
    allowed = min(_PLAIN * unit, _WORST) * size + min(_OF_LARGEST * unit, _WORST) * largest
    allowed = allowed + torch.finfo(exact.dtype).tiny + (0.0 if spread is None else spread)
    same = (mine == exact) | (mine.isnan() & exact.isnan())
    wrong = ~same & ~(exact.isfinite() & (error <= allowed))
    if not wrong.any():
        return None
    worst = float(torch.where(wrong, error, 0.0).nan_to_num(torch.inf).max())
    return f"a difference of {worst:.3g} (the largest value is {float(largest):.3g})"


def _rounds(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _spread(so_far: Tensor | None, noisy: Any, plain: Any, times: float) -> Tensor | None:
    """``times`` the largest distance of the noisy results from the plain ones; of integers, whether any differed."""
    if not isinstance(plain, Tensor):
        return None
    if not _rounds(plain):
        return (noisy != plain) if so_far is None else so_far | (noisy != plain)
    same = (noisy == plain) | (noisy.isnan() & plain.isnan())
    distance = torch.where(same, 0.0, times * (noisy - plain).abs().nan_to_num(torch.inf))
    return distance if so_far is None else torch.maximum(so_far, distance)


def _storage(value: Any) -> int | None:
    return value.untyped_storage().data_ptr() if isinstance(value, Tensor) else None


class _WithNoise(Interpreter):
    """A graph of which every operation is off by up to ``width`` units in the last place."""

    def __init__(self, graph: GraphModule, seed: int, width: int) -> None:
        super().__init__(graph)
        self.seed, self.width = seed, width
        self.generators: dict[torch.device, torch.Generator] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.op != "call_function" or n.target is getitem:
            return value
        taken = {_storage(self.env[source]) for source in n.all_input_nodes if source in self.env}

        def off(leaf: Any) -> Any:
            return self._off(leaf, n) if _rounds(leaf) and _storage(leaf) not in taken else leaf

        return mapped(off, value)

    def _off(self, value: Tensor, node: Node) -> Tensor:
        if value.device not in self.generators:
            self.generators[value.device] = generator(self.seed, value.device)
        real = value.real if value.is_complex() else value
        source = self.generators[value.device]
        noise = torch.rand(real.shape, dtype=real.dtype, device=real.device, generator=source) * 2 - 1
        # the tanh of the compiled code is exact to a unit of one, not of its value
        size = 1 + value.abs() if "tanh" in str(node.target) else value
        unit = self.width * torch.finfo(value.dtype).eps
        # whole numbers are results of no rounding: counts and flags
        return torch.where(value == real.round(), value, value + unit * noise * size)
