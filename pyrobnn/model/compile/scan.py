"""Loops whose compiled code does not grow with their length: the body and its derivative once, whatever the number."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyrobnn.core.checks import check_type
from pyrobnn.core.private import Gone, Tracer, callable_in_a_trace, trace
from pyrobnn.model.compile import compiled
from pyrobnn.model.compile.inductor import tolerable
from pyrobnn.model.compile.trees import leaves_of, mapped

Tensors = list[Tensor]
#: (carry, slices, held) → (carry, outputs, terms of sums)
Body = Callable[[Tensors, Tensors, Tensors], tuple[Tensors, Tensors, Tensors]]
# steps in one turn of the loop: up to so many operations, and so many steps
_OPERATIONS = 96
_STEPS = 4


def scan(
    step: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any = None,
    *,
    length: int | None = None,
) -> tuple[Any, Any]:
    r"""A loop over the leading axis: :math:`(c_{t+1}, y_t) = f(c_t, x_t)`, as of ``jax.lax.scan``.

    Where a method compiles the program that holds it, the body and its derivative are compiled once, whatever the
    length; elsewhere it is a loop in Python. Values and gradients are those of the loop.

    Args:
        step: f, a pure function (carry, x) → (carry, y) of tensors, which may use others from around it. Pyro's
            statements belong before or after the loop.
        carry: c_0: a tensor, or (nested) dict, list or tuple of tensors; of the shapes and types that f returns.
        xs: x: a tensor (T, …), or a tree of such; None with ``length``.
        length: T, where there is no ``xs``.

    Returns:
        The last carry, and y stacked: (T, …) of each of its tensors; None where f returns no y.

    Raises:
        ValueError, TypeError: ``xs`` of unequal or no lengths, or f returns another carry than it is given.

    Caveat: a step that draws random numbers, nests another ``scan`` or calls ``torch.func`` is unrolled.

    Example:
        >>> import torch, pyrobnn as pb
        >>> last, sums = pb.scan(lambda c, x: (c + x, c + x), torch.tensor(0.0), torch.arange(1.0, 4.0))
        >>> last.item(), sums.tolist()
        (6.0, [1.0, 3.0, 6.0])
    """
    check_type("step", step, Callable, "a function (carry, x) -> (carry, y)")
    carry = mapped(torch.as_tensor, carry)
    slices = [] if xs is None else leaves_of(xs)
    if not all(isinstance(leaf, Tensor) and leaf.ndim for leaf in slices):
        raise TypeError(f"'xs' must be tensors with a leading axis, got {xs!r}")
    lengths = {len(leaf) for leaf in slices} | ({length} if length is not None else set())
    if len(lengths) != 1 or min(lengths) < 1:
        raise ValueError(
            f"'xs' and 'length' must say one number of steps above zero, got {sorted(lengths)}"
        )
    (count,) = lengths
    if count > _STEPS and (tracer := Tracer.active()) is not None:
        try:
            return _rolled(tracer, step, carry, xs, count)
        except (_Unrolled, Gone):
            pass
    return _unrolled(step, carry, xs, range(count))


def _unrolled(step: Callable[..., Any], carry: Any, xs: Any, steps: range) -> tuple[Any, Any]:
    """The loop in Python."""
    found = []
    for t in steps:
        new, y = step(carry, None if xs is None else mapped(lambda leaf, t=t: leaf[t], xs))
        if (is_like := _kinds(carry)) != (got := _kinds(new)):
            raise TypeError(f"'step' must return a carry as it is given, {is_like}, got {got}")
        carry = mapped(lambda _, leaf: leaf, carry, new)
        found.append(y)
    return carry, mapped(lambda *ys: None if ys[0] is None else torch.stack(ys), *found)


def _kinds(tree: Any) -> Any:
    return mapped(lambda v: (tuple(v.shape), v.dtype) if isinstance(v, Tensor) else type(v), tree)


class _Unrolled(Exception):
    """A step that cannot be a body of its own."""


class _Held(TorchFunctionMode):
    """Finds the tensors that a step uses and neither makes nor is given, or puts others in their place."""

    def __init__(
        self, given: Tensors, held: Tensors | None = None, others: Tensors | None = None
    ) -> None:
        super().__init__()
        self.held: Tensors = []
        self._finds = held is None
        self._others = {id(one): other for one, other in zip(held or [], others or [], strict=True)}
        self._kept: list[Any] = [
            *given,
            *(held or []),
            *(others or []),
        ]  # an id belongs to what is alive
        self._known = {id(tensor) for tensor in (*given, *(others or []))}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*mapped(self.other, args), **mapped(self.other, kwargs or {}))
        self._kept.append(out)
        self._known.update(id(leaf) for leaf in leaves_of(out) if isinstance(leaf, Tensor))
        return out

    def other(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or id(value) in self._known:
            return value
        if self._finds:
            self.held.append(value)
            self._known.add(id(value))
            return value
        if id(value) not in self._others:
            raise _Unrolled
        return self._others[id(value)]


def _rolled(
    tracer: Tracer, step: Callable[..., Any], carry: Any, xs: Any, count: int
) -> tuple[Any, Any]:
    """The loop as one node of the graph that is being traced."""
    state = leaves_of(carry)
    slices = [] if xs is None else leaves_of(xs)
    first = None if xs is None else mapped(lambda leaf: leaf[0], xs)
    _, like = _unrolled(
        step, carry, xs, range(1)
    )  # what is made lazily at first use is there from now on
    given = [*state, *leaves_of(first)] if slices else state
    with _Held(given) as mode:
        step(carry, first)
    held = mode.held

    def flat(*values: Tensor) -> Tensors:
        own = list(values[: len(given)])
        others = list(values[len(given) :])
        rest = iter(own)
        a = mapped(lambda _: next(rest), carry)
        with _Held(own, held, others) as inside:
            new, y = step(a, first if xs is None else mapped(lambda _: next(rest), first))
        out = [*leaves_of(mapped(lambda _, leaf: leaf, carry, new)), *leaves_of(y)]
        return [inside.other(leaf) for leaf in out if leaf is not None]

    try:
        with tracer.outside():
            graph = trace(flat, [tracer.sample(value) for value in (*given, *held)])
    except Exception as error:  # whatever the step may raise: the loop itself says what is wrong
        raise _Unrolled from tolerable(error)
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    if any(
        node.target is torch.ops.pyrobnn.loop.default  # which has no derivative in a body
        or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        for node in calls
    ):
        raise _Unrolled
    # steps left over are compiled once more, beside the loop
    most = max(1, min(_STEPS, _OPERATIONS // max(1, len(calls)), count))
    turns = max(
        range(1, most + 1),
        key=lambda number: number - count % number * len(calls) * _STEPS / _OPERATIONS,
    )

    def steps(
        a: Tensors, x: Tensors, h: Tensors, number: int = turns
    ) -> tuple[Tensors, Tensors, Tensors]:
        found = []
        for t in range(number):
            out = graph(*a, *(leaf[t] for leaf in x[: len(slices)]), *h)
            a = list(out[: len(state)])
            found.append(out[len(state) :])
        return a, [torch.stack(ys) for ys in zip(*found, strict=True)], []

    whole = count - count % turns
    blocks = [leaf[:whole].unflatten(0, (-1, turns)) for leaf in slices]
    blocks = blocks or [torch.zeros(whole // turns, device=state[0].device)]
    out = _Scan.apply(_Counted(steps, len(state), len(blocks), 0), *state, *blocks, *held)
    state, ys, _ = _split(out, len(state), len(out) - 2 * len(state))
    ys = [leaf.flatten(0, 1) for leaf in ys]
    if whole < count:
        state, more, _ = steps(state, [leaf[whole:] for leaf in slices], held, count - whole)
        ys = [torch.cat(parts) for parts in zip(ys, more, strict=True)]
    ends = iter(state)
    stacked = iter(ys)
    return mapped(lambda _: next(ends), carry), mapped(
        lambda y: None if y is None else next(stacked), like
    )


@dataclass(frozen=True)
class _Counted:
    """A body, and how many tensors of each kind it takes, and sums."""

    body: Body
    carried: int
    slices: int
    sums: int

    def split(self, flat: Sequence[Any]) -> list[list[Any]]:
        """Carry, slices and held tensors."""
        return _split(flat, self.carried, self.slices)


def _split(flat: Sequence[Any], *lengths: int) -> list[list[Any]]:
    """Lists of these lengths, and what is left."""
    rest = iter(flat)
    return [*(list(itertools.islice(rest, length)) for length in lengths), list(rest)]


class _Turn(NamedTuple):
    """A compiled body, which writes into tensors it is given; shape and dtype of each carry, output and sum."""

    call: Callable[..., Any]
    kinds: list[list[tuple[torch.Size, torch.dtype]]]

    def places(self, count: int, device: torch.device) -> list[Tensors]:
        """Zeros for all carries, the first included; for outputs; for sums."""
        return [
            [torch.zeros(*leading, *shape, dtype=dtype, device=device) for shape, dtype in kinds]
            for leading, kinds in zip(((count + 1,), (count,), ()), self.kinds, strict=True)
        ]


_TURNS: dict[str, _Turn] = {}  # by the content of the body: compiled code on disk names it


@torch.library.custom_op("pyrobnn::loop", mutates_args=())
def _run(key: str, carry: list[Tensor], xs: list[Tensor], held: list[Tensor]) -> list[Tensor]:
    """All carries, outputs and sums, and an empty tensor: C++ of torch 2.13 crashes on a list of one."""
    turn = _TURNS[key]
    states, outputs, sums = turn.places(len(xs[0]), xs[0].device)
    for state, leaf in zip(states, carry, strict=True):
        state[0].copy_(leaf)
    held = [leaf.contiguous() for leaf in held]
    taken = zip(*(leaf[:-1] for leaf in states), *(leaf.contiguous() for leaf in xs), strict=True)
    written = zip(*(leaf[1:] for leaf in states), *outputs, strict=True)
    with torch.no_grad(), callable_in_a_trace():
        for given, places in zip(taken, written, strict=True):
            turn.call(*given, *held, *places, *sums)
    return [*states, *outputs, *sums, xs[0].new_empty(0)]


@_run.register_fake
def _(key: str, carry: list[Tensor], xs: list[Tensor], held: list[Tensor]) -> list[Tensor]:
    return [*itertools.chain(*_TURNS[key].places(len(xs[0]), xs[0].device)), xs[0].new_empty(0)]


def _loop(body: Body, carry: Tensors, xs: Tensors, held: Tensors) -> tuple[Tensor, ...]:
    """The last carry, outputs, sums, and the carries before each turn; the body is compiled here."""
    with tracer.outside() if (tracer := Tracer.active()) else contextlib.nullcontext():
        given = [leaf.detach().contiguous() for leaf in (*carry, *(leaf[0] for leaf in xs), *held)]

        def turn(*flat: Tensor) -> None:
            *taken, places = _split(flat, len(carry), len(xs), len(held))
            new, ys, terms = body(*taken)
            rest = iter(places)
            for value in (*new, *ys):
                next(rest).copy_(value)
            for value, place in zip(terms, rest, strict=True):
                place.add_(value)

        kinds = [
            [(value.shape, value.dtype) for value in part]
            for part in body(*_split(given, len(carry), len(xs)))
        ]
        example = [
            *given,
            *(given[0].new_zeros(shape, dtype=dtype) for part in kinds for shape, dtype in part),
        ]
        graph = trace(turn, example)
        constants = [
            getattr(graph, str(node.target)) for node in graph.graph.nodes if node.op == "get_attr"
        ]
        parts = (
            [(leaf.shape, leaf.dtype, leaf.device) for leaf in example],
            [(c.dtype, c.tolist()) for c in constants],
        )
        key = hashlib.sha256(f"{graph.code}{parts}".encode()).hexdigest()
        if key not in _TURNS:
            _TURNS[key] = _Turn(
                compiled(graph, *example, name="the body of a loop").unchecked, kinds
            )
    states, others = _split(_run(key, carry, xs, held)[:-1], len(carry))
    return *(leaf[-1] for leaf in states), *others, *(leaf[:-1] for leaf in states)


class _Scan(torch.autograd.Function):
    """The last carry, outputs, sums and the carries before each turn; its derivatives are such loops again."""

    @staticmethod
    def forward(own: _Counted, *flat: Tensor) -> tuple[Tensor, ...]:
        return tuple(leaf.clone() for leaf in _loop(own.body, *own.split(flat)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.own, *flat = inputs
        ctx.save_for_backward(*output[len(output) - ctx.own.carried :], *flat[ctx.own.carried :])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Any:
        own: _Counted = ctx.own
        before, xs, held = own.split(ctx.saved_tensors)
        needs = own.split(ctx.needs_input_grad[1:])
        floats = [i for i, value in enumerate(before) if value.is_floating_point()]
        of_x, of_h = (
            [i for i, value in enumerate(values) if need[i] and value.is_floating_point()]
            for values, need in ((xs, needs[1]), (held, needs[2]))
        )
        outputs = len(slopes) - 2 * own.carried - own.sums
        _, to_y, to_sum, to_before = _split(slopes, own.carried, outputs, own.sums)
        by_turn = [slope for slope in (*to_y, *to_before) if slope is not None]

        def pulled(a: Tensors, x: Tensors, h: Tensors) -> tuple[Tensors, Tensors, Tensors]:
            c, own_x, by_turn = _split(x, own.carried, own.slices)
            (own_h, by_sum) = _split(h, len(held))
            by_y = iter(by_turn)

            def results(*values: Tensor) -> tuple[Tensor, ...]:
                rest = iter(values)
                for values_of, places in ((c, floats), (own_x, of_x), (own_h, of_h)):
                    for i in places:
                        values_of[i] = next(rest)
                new, ys, sums = own.body(c, own_x, own_h)
                told = [*zip(ys, to_y, strict=True), *zip(sums, to_sum, strict=True)]
                return *(new[i] for i in floats), *(
                    value for value, slope in told if slope is not None
                )

            at = [*(c[i] for i in floats), *(own_x[i] for i in of_x), *(own_h[i] for i in of_h)]
            slope_of = [*a, *(next(by_y) for s in to_y if s is not None), *by_sum]
            found = list(torch.func.vjp(results, *at)[1](tuple(slope_of)))
            for place, i in enumerate(floats):
                if to_before[i] is not None:
                    found[place] = found[place] + next(by_y)
            return tuple(_split(found, len(floats), len(of_x)))  # type: ignore[return-value]

        start = [torch.zeros_like(before[i][0]) if slopes[i] is None else slopes[i] for i in floats]
        turns = [leaf.flip(0) for leaf in (*before, *xs, *by_turn)]
        fixed = [*held, *(slope for slope in to_sum if slope is not None)]
        out = _Scan.apply(
            _Counted(pulled, len(start), len(turns), len(of_h)), *start, *turns, *fixed
        )
        found: list[Any] = [None] * (1 + own.carried + own.slices + len(held))
        places = [
            *floats,
            *(own.carried + i for i in of_x),
            *(own.carried + own.slices + i for i in of_h),
        ]
        for place, slope in zip(places, out, strict=False):  # the carries before each turn are left
            is_slice = own.carried <= place < own.carried + own.slices
            found[1 + place] = slope.flip(0) if is_slice else slope
        return tuple(found)

    @staticmethod
    def vmap(info: Any, in_dims: Any, own: _Counted, *flat: Tensor) -> Any:
        dims = own.split(in_dims[1:])
        carry, xs, held = (
            [
                value if dim is None else value.movedim(dim, to)
                for value, dim in zip(part, own_dims, strict=True)
            ]
            for part, own_dims, to in zip(own.split(flat), dims, (0, 1, 0), strict=True)
        )
        carry = [
            value.expand(info.batch_size, *value.shape) if dim is None else value
            for value, dim in zip(carry, dims[0], strict=True)
        ]
        batched = [[0 if dim is not None else None for dim in part] for part in dims]
        body = torch.func.vmap(
            own.body, ([0] * own.carried, batched[1], batched[2]), randomness="error"
        )
        out = _Scan.apply(_Counted(body, own.carried, own.slices, own.sums), *carry, *xs, *held)
        stacked = len(out) - 2 * own.carried - own.sums
        return out, (*[0] * own.carried, *[1] * stacked, *[0] * own.sums, *[1] * own.carried)
