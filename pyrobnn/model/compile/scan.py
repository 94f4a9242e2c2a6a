"""Loops whose compiled code does not grow with their length: the body and its derivative once, whatever the number.

Words: a *step* is one call of the user's function. A *turn* is one call of compiled code: up to four steps. *Captures*
are the tensors from around the step that it uses: the same for all steps.

Forward: outside of a trace the loop is Python's (:func:`_unrolled`). Inside of one (:func:`_rolled`), one step is
traced by itself, with its captures as arguments. A few such steps are the body of a turn; the steps that do not fill a
turn follow beside the loop. The body is compiled once (:func:`_key_of_compiled_turn`), and the graph under way
holds one operator, ``pyrobnn::loop`` (:func:`_run`), which calls the compiled body again and again.

Backward (:class:`_Reverse`): the loop keeps the carry before each turn. The reverse pass goes from the last turn to the
first, computes each turn again from its carry and pulls the gradients back through it. It is such a loop itself: its
carry is the gradient by the carry, its outputs are the gradients by the slices, and it sums those by the captures. So
the same code compiles it, and second derivatives too.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from pyrobnn.core.checks import check_type
from pyrobnn.core.private import Gone
from pyrobnn.core.private_trace import Tracer, callable_in_a_trace, trace
from pyrobnn.model.compile import compiled, compiles_bodies
from pyrobnn.model.compile.graph_nodes import constant_of, is_random
from pyrobnn.model.compile.inductor import tolerable
from pyrobnn.model.compile.trees import Tree, leaves_of, mapped
from pyrobnn.model.torch_calls import Call, CallHandler

T = TypeVar("T")
Tensors = list[Tensor]
#: (carry, x) → (carry, y)
Step = Callable[..., tuple[Tree, Tree]]
# steps in one turn of the loop: up to so many operations, and so many steps
_OPERATIONS = 96
_STEPS = 4


# -- the public function, and the loop in Python -----------------------------------------------------------------------


def scan(
    step: Step,
    carry: Tree,
    xs: Tree = None,
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
    count = _number_of_steps(xs, length)
    tracer = Tracer.active() if count > _STEPS else None
    if tracer is not None:
        try:
            return _rolled(tracer, step, carry, xs, count)
        except (_NoBody, Gone):
            pass
    return _unrolled(step, carry, xs, range(count))


def _number_of_steps(xs: Tree, length: int | None) -> int:
    slices = [] if xs is None else leaves_of(xs)
    if not all(isinstance(leaf, Tensor) and leaf.ndim for leaf in slices):
        raise TypeError(f"'xs' must be tensors with a leading axis, got {xs!r}")
    lengths = {len(leaf) for leaf in slices}
    if length is not None:
        lengths.add(length)
    if len(lengths) != 1 or min(lengths) < 1:
        raise ValueError(
            f"'xs' and 'length' must say one number of steps above zero, got {sorted(lengths)}"
        )
    return lengths.pop()


def _unrolled(
    step: Step,
    carry: Tree,
    xs: Tree,
    steps: range,
) -> tuple[Any, Any]:
    """The loop in Python."""
    outputs = []
    for t in steps:
        new_carry, output = step(carry, _slice_of_step(xs, t))
        expected = _shapes_and_dtypes(carry)
        returned = _shapes_and_dtypes(new_carry)
        if expected != returned:
            raise TypeError(
                f"'step' must return a carry as it is given, {expected}, got {returned}"
            )
        carry = _in_order_of(carry, new_carry)
        outputs.append(output)
    return carry, mapped(_stacked, *outputs)


# -- trees of tensors --------------------------------------------------------------------------------------------------


def _slice_of_step(xs: Tree, t: int) -> Any:
    """The slice of each tensor that step t takes; None where there are no tensors."""
    return None if xs is None else mapped(lambda leaf: leaf[t], xs)


def _stacked(*outputs: Tensor | None) -> Tensor | None:
    """One output of all steps: (T, …)."""
    return None if outputs[0] is None else torch.stack(outputs)  # type: ignore[arg-type]


def _shapes_and_dtypes(tree: Tree) -> Any:
    """The shape and dtype of each tensor."""
    return mapped(lambda v: (tuple(v.shape), v.dtype) if isinstance(v, Tensor) else type(v), tree)


def _in_order_of(tree: Tree, same: Tree) -> Any:
    """An equal tree whose dicts have the order of the keys of ``tree``."""
    return mapped(lambda _, leaf: leaf, tree, same)


def _tensors(tree: Tree) -> Tensors:
    """The leaves that are not None."""
    return [leaf for leaf in leaves_of(tree) if leaf is not None]


def _filled(tree: Tree, tensors: Iterable[Tensor]) -> Any:
    """The tree with these tensors in place of its own: the inverse of :func:`_tensors`."""
    remaining = iter(tensors)
    return mapped(lambda leaf: None if leaf is None else next(remaining), tree)


def _split(values: Iterable[T], *lengths: int) -> list[list[T]]:
    """Lists of these lengths, and what is left."""
    remaining = iter(values)
    parts = [list(itertools.islice(remaining, length)) for length in lengths]
    return [*parts, list(remaining)]


# -- what a loop takes and gives ---------------------------------------------------------------------------------------


class _TurnResults(NamedTuple):
    """What one turn computes: the next carry, outputs, and terms of sums over the turns."""

    carry: Tensors
    outputs: Tensors
    sums: Tensors


#: (carry, slices, captures) → results of a turn
Body = Callable[[Tensors, Tensors, Tensors], _TurnResults]


class _Inputs(NamedTuple, Generic[T]):
    """Something for each input of a loop: the tensor, an axis, whether it needs a gradient."""

    #: what the first turn starts from
    carry: list[T]
    #: of which each turn takes its own: (turns, …)
    slices: list[T]
    #: the same for all turns
    captures: list[T]


class _LoopResults(NamedTuple, Generic[T]):
    """Something for each result of a loop: the tensor, or its gradient."""

    #: after the last turn
    carry: list[T]
    #: of all turns: (turns, …)
    outputs: list[T]
    sums: list[T]
    #: the carry before each turn: (turns, …)
    history: list[T]


@dataclass(frozen=True)
class _Loop:
    """A body, and how many tensors of each kind it takes, and sums."""

    body: Body
    num_carried: int
    num_slices: int
    num_sums: int

    def inputs(self, flat: Iterable[T]) -> _Inputs[T]:
        """Of one list, by their names."""
        return _Inputs(*_split(flat, self.num_carried, self.num_slices))

    def results(self, flat: Sequence[T]) -> _LoopResults[T]:
        """Of one list, by their names."""
        num_outputs = len(flat) - 2 * self.num_carried - self.num_sums
        return _LoopResults(*_split(flat, self.num_carried, num_outputs, self.num_sums))

    def results_of(self, inputs: _Inputs[Tensor]) -> _LoopResults[Tensor]:
        """Runs the loop, with derivatives."""
        return self.results(_Scan.apply(self, *itertools.chain(*inputs)))


# -- one step as a graph of its own ------------------------------------------------------------------------------------


class _NoBody(Exception):
    """The step cannot be a body of its own: the loop is unrolled."""


class _ForeignTensors(CallHandler):
    """Sees the tensors that a step uses and neither makes nor is given."""

    def __init__(self, arguments: Tensors) -> None:
        super().__init__()
        self._alive: list[Any] = list(arguments)  # an id belongs to what is alive
        self._known = {id(tensor) for tensor in arguments}

    def answer(self, call: Call) -> Any:
        args = mapped(self.resolved, call.args)
        options = mapped(self.resolved, call.options)
        result = call.function(*args, **options)
        self._alive.append(result)
        self._known.update(id(leaf) for leaf in leaves_of(result) if isinstance(leaf, Tensor))
        return result

    def resolved(self, value: T) -> T | Tensor:
        """What the step is to compute with in place of a value."""
        if not isinstance(value, Tensor) or id(value) in self._known:
            return value
        return self.of_foreign(value)

    def of_foreign(self, tensor: Tensor) -> Tensor:
        raise NotImplementedError


class _FindCaptures(_ForeignTensors):
    """Collects the captures of a step, in the order of their use."""

    def __init__(self, arguments: Tensors) -> None:
        super().__init__(arguments)
        self.captures: Tensors = []

    def of_foreign(self, tensor: Tensor) -> Tensor:
        self.captures.append(tensor)
        self._known.add(id(tensor))
        return tensor


class _ReplaceCaptures(_ForeignTensors):
    """Puts arguments of a function in the place of the captures of a step."""

    def __init__(
        self,
        arguments: Tensors,
        captures: Tensors,
        replacements: Tensors,
    ) -> None:
        super().__init__([*arguments, *replacements])
        self._alive.extend(captures)
        self._replacements = {
            id(capture): replacement
            for capture, replacement in zip(captures, replacements, strict=True)
        }

    def of_foreign(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._replacements:
            raise _NoBody
        return self._replacements[id(tensor)]


@dataclass(frozen=True)
class _TracedStep:
    """The graph (carry, slices, captures) → (carry, outputs) of one step, on flat lists."""

    graph: GraphModule
    captures: Tensors
    #: tensors in the carry
    num_carried: int
    #: tensors in the slices
    num_slices: int

    @classmethod
    def of(
        cls,
        tracer: Tracer,
        step: Step,
        carry: Tree,
        x: Tree,
    ) -> _TracedStep:
        """The step traced beside the trace under way; raises _NoBody where it cannot be."""
        arguments = [*_tensors(carry), *_tensors(x)]
        with _FindCaptures(arguments) as finder:
            step(carry, x)
        captures = finder.captures
        num_carried = len(_tensors(carry))

        def flat_step(*values: Tensor) -> Tensors:
            own_arguments, replacements = _split(values, len(arguments))
            own_carry, own_slices = _split(own_arguments, num_carried)
            with _ReplaceCaptures(own_arguments, captures, replacements) as mode:
                new_carry, output = step(_filled(carry, own_carry), _filled(x, own_slices))
            results = [*_tensors(_in_order_of(carry, new_carry)), *_tensors(output)]
            return [mode.resolved(leaf) for leaf in results]

        try:
            with tracer.outside():
                samples = [tracer.sample(value) for value in (*arguments, *captures)]
                graph = trace(flat_step, samples)
        except Exception as error:
            # whatever the step may raise: the loop itself says what is wrong
            raise _NoBody from tolerable(error)
        traced = cls(graph, captures, num_carried, len(arguments) - num_carried)
        traced.check()
        return traced

    def calls(self) -> list[torch.fx.Node]:
        """The operations of the step."""
        return [node for node in self.graph.graph.nodes if node.op == "call_function"]

    def check(self) -> None:
        """Raises _NoBody where the step draws random numbers or holds a loop, which has no derivative in a body."""
        for node in self.calls():
            is_loop = node.target is torch.ops.pyrobnn.loop.default
            if is_loop or is_random(node):
                raise _NoBody

    def steps_in_a_turn(self, count: int) -> int:
        """Many steps in a turn cost fewer calls; steps left over are compiled once more, beside the loop."""
        operations = len(self.calls())
        limit = max(1, min(_STEPS, _OPERATIONS // max(1, operations), count))

        def worth(steps: int) -> float:
            return steps - count % steps * operations * _STEPS / _OPERATIONS

        return max(range(1, limit + 1), key=worth)

    def repeated(
        self,
        steps: int,
        carry: Tensors,
        slices: Tensors,
        captures: Tensors,
    ) -> _TurnResults:
        """So many steps, one after the other, with outputs stacked: there are no sums."""
        outputs = []
        for t in range(steps):
            own_slices = (leaf[t] for leaf in slices[: self.num_slices])
            carry, step_outputs = _split(
                self.graph(*carry, *own_slices, *captures), self.num_carried
            )
            outputs.append(step_outputs)
        return _TurnResults(carry, [torch.stack(ys) for ys in zip(*outputs, strict=True)], [])


# -- the loop as one node of the graph ---------------------------------------------------------------------------------


def _rolled(
    tracer: Tracer,
    step: Step,
    carry: Tree,
    xs: Tree,
    count: int,
) -> tuple[Any, Any]:
    """The loop as one node of the graph that is being traced."""
    x = _slice_of_step(xs, 0)
    # what the step makes lazily at first use is there from now on
    _, output_tree = _unrolled(step, carry, xs, range(1))
    traced = _TracedStep.of(tracer, step, carry, x)
    steps = traced.steps_in_a_turn(count)
    steps_in_turns = count - count % steps
    slices = _tensors(xs)
    slices_by_turn = [leaf[:steps_in_turns].unflatten(0, (-1, steps)) for leaf in slices]
    last_carry, outputs = _results_of_turns(
        traced, steps, _tensors(carry), slices_by_turn, steps_in_turns // steps
    )
    if steps_in_turns < count:
        remaining_slices = [leaf[steps_in_turns:] for leaf in slices]
        last_carry, remaining_outputs, _ = traced.repeated(
            count - steps_in_turns, last_carry, remaining_slices, traced.captures
        )
        outputs = [torch.cat(parts) for parts in zip(outputs, remaining_outputs, strict=True)]
    return _filled(carry, last_carry), _filled(output_tree, outputs)


def _results_of_turns(
    traced: _TracedStep,
    steps: int,
    carry: Tensors,
    slices: Tensors,
    turns: int,
) -> tuple[Tensors, Tensors]:
    """The last carry and the outputs of so many turns of so many steps; ``slices`` are (turns, steps, …)."""

    def turn(carry: Tensors, slices: Tensors, captures: Tensors) -> _TurnResults:
        return traced.repeated(steps, carry, slices, captures)

    if not slices:  # a loop takes the number of its turns from its slices
        slices = [torch.zeros(turns, device=carry[0].device)]
    loop = _Loop(turn, len(carry), len(slices), num_sums=0)
    results = loop.results_of(_Inputs(carry, slices, traced.captures))
    return results.carry, [leaf.flatten(0, 1) for leaf in results.outputs]


# -- forward: a compiled turn in a loop --------------------------------------------------------------------------------


class _Likeness(NamedTuple):
    """What a tensor is like."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def all_of(cls, tensors: Tensors) -> list[_Likeness]:
        return [cls(tensor.shape, tensor.dtype) for tensor in tensors]

    def zeros(self, *leading: int, device: torch.device) -> Tensor:
        return torch.zeros(
            *leading,
            *self.shape,
            dtype=self.dtype,
            device=device,
        )


class _Memory(NamedTuple):
    """The tensors that the turns of a loop write."""

    #: the first carry and those after each turn: (turns + 1, …)
    states: Tensors
    #: (turns, …)
    outputs: Tensors
    #: to which each turn adds
    sums: Tensors


class _CompiledTurn(NamedTuple):
    """A compiled body, which writes into tensors it is given; what its results are like."""

    call: Callable[..., Any]
    carry: list[_Likeness]
    outputs: list[_Likeness]
    sums: list[_Likeness]

    def memory(self, turns: int, device: torch.device) -> _Memory:
        """Zeros for the results of so many turns."""
        return _Memory(
            states=[likeness.zeros(turns + 1, device=device) for likeness in self.carry],
            outputs=[likeness.zeros(turns, device=device) for likeness in self.outputs],
            sums=[likeness.zeros(device=device) for likeness in self.sums],
        )


_TURNS: dict[str, _CompiledTurn] = {}  # by the content of the body: compiled code on disk names it


@torch.library.custom_op("pyrobnn::loop", mutates_args=())
def _run(
    key: str,
    carry: list[Tensor],
    xs: list[Tensor],
    captures: list[Tensor],
) -> list[Tensor]:
    """All carries, outputs and sums, and an empty tensor."""
    # WORKAROUND(torch<=2.13): its C++ crashes on a list of one tensor, hence the empty one
    turn = _TURNS[key]
    memory = turn.memory(len(xs[0]), xs[0].device)
    for state, leaf in zip(memory.states, carry, strict=True):
        state[0].copy_(leaf)
    captures = [leaf.contiguous() for leaf in captures]
    carries = [leaf[:-1] for leaf in memory.states]
    next_carries = [leaf[1:] for leaf in memory.states]
    slices = [leaf.contiguous() for leaf in xs]
    arguments_by_turn = zip(*carries, *slices, strict=True)
    places_by_turn = zip(*next_carries, *memory.outputs, strict=True)
    with torch.no_grad(), callable_in_a_trace():
        for arguments, places in zip(
            arguments_by_turn,
            places_by_turn,
            strict=True,
        ):
            turn.call(*arguments, *captures, *places, *memory.sums)
    return [*itertools.chain(*memory), xs[0].new_empty(0)]


@_run.register_fake
def _(
    key: str,
    carry: list[Tensor],
    xs: list[Tensor],
    captures: list[Tensor],
) -> list[Tensor]:
    memory = _TURNS[key].memory(len(xs[0]), xs[0].device)
    return [*itertools.chain(*memory), xs[0].new_empty(0)]


def _run_loop(loop: _Loop, inputs: _Inputs[Tensor]) -> _LoopResults[Tensor]:
    """Runs the loop, without derivatives; the body is compiled here."""
    tracer = Tracer.active()
    with contextlib.nullcontext() if tracer is None else tracer.outside():
        key = _key_of_compiled_turn(loop.body, inputs)
    *results, _ = _run(key, *inputs)
    memory = _Memory(
        *_split(results, loop.num_carried, len(results) - loop.num_carried - loop.num_sums)
    )
    return _LoopResults(
        carry=[leaf[-1] for leaf in memory.states],
        outputs=memory.outputs,
        sums=memory.sums,
        history=[leaf[:-1] for leaf in memory.states],
    )


def _key_of_compiled_turn(body: Body, inputs: _Inputs[Tensor]) -> str:
    """The key in ``_TURNS`` of a body, which is compiled where none of the same content is."""
    first_turn = _Inputs(
        carry=_detached(inputs.carry),
        slices=_detached([leaf[0] for leaf in inputs.slices]),
        captures=_detached(inputs.captures),
    )
    likenesses = [_Likeness.all_of(tensors) for tensors in body(*first_turn)]
    arguments = list(itertools.chain(*first_turn))
    places = [
        arguments[0].new_zeros(likeness.shape, dtype=likeness.dtype)
        for likeness in itertools.chain(*likenesses)
    ]
    example = [*arguments, *places]
    graph = trace(_writing(body, *map(len, first_turn)), example)
    key = _key(graph, example)
    if not compiles_bodies():
        key += " interpreted"
    if key not in _TURNS:
        call = compiled(
            graph,
            *example,
            enabled=compiles_bodies() or "trace",
            name="the body of a loop",
        ).unchecked
        _TURNS[key] = _CompiledTurn(call, *likenesses)
    return key


def _detached(tensors: Tensors) -> Tensors:
    return [tensor.detach().contiguous() for tensor in tensors]


def _writing(
    body: Body,
    num_carried: int,
    num_slices: int,
    num_captures: int,
) -> Callable[..., None]:
    """The body as a function of one list: its arguments, then the places of its results."""

    def turn(*flat: Tensor) -> None:
        *arguments, places = _split(flat, num_carried, num_slices, num_captures)
        results = body(*arguments)
        copied = [*results.carry, *results.outputs]
        copy_places, sum_places = _split(places, len(copied))
        for value, place in zip(copied, copy_places, strict=True):
            place.copy_(value)
        for term, place in zip(results.sums, sum_places, strict=True):
            place.add_(term)

    return turn


def _key(graph: GraphModule, example: Tensors) -> str:
    """The content of a graph: its code, its constants and what its arguments are like."""
    constants: list[Any] = [
        constant_of(graph, node) for node in graph.graph.nodes if node.op == "get_attr"
    ]
    content = (
        [(leaf.shape, leaf.dtype, leaf.device) for leaf in example],
        [(constant.dtype, constant.tolist()) for constant in constants],
    )
    return hashlib.sha256(f"{graph.code}{content}".encode()).hexdigest()


# -- backward: the reverse pass ----------------------------------------------------------------------------------------


class _Context(Protocol):
    """What the forward pass hands to the backward pass."""

    loop: _Loop

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...

    @property
    def needs_input_grad(self) -> tuple[bool, ...]: ...

    def save_for_backward(self, *tensors: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


class _Points(Protocol):
    """What ``vmap`` says of the points at which the loop is run together."""

    @property
    def batch_size(self) -> int: ...


class _Scan(torch.autograd.Function):
    """The loop as one function for autograd and ``torch.func``; its derivatives are such loops again."""

    @staticmethod
    def forward(loop: _Loop, *flat: Tensor) -> tuple[Tensor, ...]:
        results = _run_loop(loop, loop.inputs(flat))
        # the last carry and the history are views of one tensor: as clones, each result has memory of its own
        return tuple(leaf.clone() for leaf in itertools.chain(*results))

    @staticmethod
    def setup_context(
        ctx: _Context,
        inputs: tuple[_Loop, *tuple[Tensor, ...]],
        output: tuple[Tensor, ...],
    ) -> None:
        loop, *flat = inputs
        _, slices, captures = loop.inputs(flat)
        ctx.loop = loop
        ctx.save_for_backward(*loop.results(output).history, *slices, *captures)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: _Context, *flat_gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        loop = ctx.loop
        turns = loop.inputs(ctx.saved_tensors)
        needed = loop.inputs(ctx.needs_input_grad[1:])
        gradients = loop.results(flat_gradients)
        differentiated = _Inputs(
            # in place of the first carry, the history: the carry before each turn
            carry=_differentiable(turns.carry, [True] * loop.num_carried),
            slices=_differentiable(turns.slices, needed.slices),
            captures=_differentiable(turns.captures, needed.captures),
        )
        reached = _LoopResults(*map(_positions_with_gradient, gradients))
        reverse = _Reverse(loop, differentiated, reached)
        return None, *itertools.chain(*reverse.gradients(turns, gradients))

    @staticmethod
    def vmap(
        info: _Points,
        in_dims: tuple[int | None, ...],
        loop: _Loop,
        *flat: Tensor,
    ) -> Any:
        axes: _Inputs[int | None] = loop.inputs(in_dims[1:])
        inputs = loop.inputs(flat)
        carry = _moved(inputs.carry, axes.carry, 0)
        slices = _moved(inputs.slices, axes.slices, 1)  # behind the axis of turns
        captures = _moved(inputs.captures, axes.captures, 0)
        # the body gives each next carry an axis of points: so the first must have one
        carry = _expanded(carry, axes.carry, info.batch_size)
        body_axes = (
            [0] * loop.num_carried,
            _axes_in_a_turn(axes.slices),
            _axes_in_a_turn(axes.captures),
        )
        body = torch.func.vmap(
            loop.body,
            body_axes,
            randomness="error",
        )
        points = _Loop(body, loop.num_carried, loop.num_slices, loop.num_sums)
        results = points.results_of(_Inputs(carry, slices, captures))
        result_axes = _LoopResults(
            carry=[0] * loop.num_carried,
            outputs=[1] * len(results.outputs),
            sums=[0] * loop.num_sums,
            history=[1] * loop.num_carried,
        )
        return tuple(itertools.chain(*results)), tuple(itertools.chain(*result_axes))


def _moved(tensors: Tensors, axes: list[int | None], destination: int) -> Tensors:
    """The axis of points at another place, where there is one."""
    moved = []
    for tensor, axis in zip(tensors, axes, strict=True):
        moved.append(tensor if axis is None else tensor.movedim(axis, destination))
    return moved


def _expanded(tensors: Tensors, axes: list[int | None], points: int) -> Tensors:
    """An axis of points at the beginning, also where there was none."""
    expanded = []
    for tensor, axis in zip(tensors, axes, strict=True):
        expanded.append(tensor.expand(points, *tensor.shape) if axis is None else tensor)
    return expanded


def _axes_in_a_turn(axes: list[int | None]) -> list[int | None]:
    """The axis of points comes first in what one turn takes, where there is one."""
    axes_in_a_turn = []
    for axis in axes:
        axes_in_a_turn.append(None if axis is None else 0)
    return axes_in_a_turn


@dataclass(frozen=True)
class _Reverse:
    """The loop that takes the turns of another from the last to the first, and pulls gradients back through each.

    What a turn of the loop takes and gives, and where a turn of the reverse loop has it:

    =========================  =========================================  ===================================
    of the loop                in the reverse loop                        its gradient there
    =========================  =========================================  ===================================
    carry before a turn        a slice, from the loop's history           the next carry
    slices                     slices                                     outputs
    captures                   captures                                   terms of sums
    next carry                 computed again                             the carry
    outputs of a turn          computed again                             slices
    history                    the carry before a turn, as above          slices, added to the next carry
    sums                       the turn's terms, computed again           captures, the same for all terms
    =========================  =========================================  ===================================
    """

    loop: _Loop
    #: positions of the inputs by which gradients are asked for
    differentiated: _Inputs[int]
    #: positions of the results that the loss depends on
    reached: _LoopResults[int]

    def gradients(
        self, turns: _Inputs[Tensor], gradients: _LoopResults[Tensor | None]
    ) -> _Inputs[Tensor | None]:
        """Gradients by the inputs, from those by the results; ``turns`` has the carry before each turn as carry."""
        carry_gradients: list[Any] = []
        for position in self.differentiated.carry:
            gradient = gradients.carry[position]
            if gradient is None:
                gradient = torch.zeros_like(turns.carry[position][0])
            carry_gradients.append(gradient)
        by_outputs = _at_positions(gradients.outputs, self.reached.outputs)
        by_history = _at_positions(gradients.history, self.reached.history)
        by_sums = _at_positions(gradients.sums, self.reached.sums)
        reverse_slices: list[Any] = [*turns.carry, *turns.slices, *by_outputs, *by_history]
        reverse_captures: list[Any] = [*turns.captures, *by_sums]

        num_sums = len(self.differentiated.captures)
        reverse_loop = _Loop(self.turn, len(carry_gradients), len(reverse_slices), num_sums)
        flipped_slices = [leaf.flip(0) for leaf in reverse_slices]
        results = reverse_loop.results_of(
            _Inputs(carry_gradients, flipped_slices, reverse_captures)
        )

        by_slices = [leaf.flip(0) for leaf in results.outputs]
        return _Inputs(
            carry=_scattered(self.loop.num_carried, self.differentiated.carry, results.carry),
            slices=_scattered(self.loop.num_slices, self.differentiated.slices, by_slices),
            captures=_scattered(len(turns.captures), self.differentiated.captures, results.sums),
        )

    def turn(
        self,
        carry: Tensors,
        slices: Tensors,
        captures: Tensors,
    ) -> _TurnResults:
        """The body: from the gradients by the carry after a turn of the loop to those by what the turn took."""
        carry_and_slices, by_outputs, by_history = _split(
            slices, self.loop.num_carried + self.loop.num_slices, len(self.reached.outputs)
        )
        turn_captures, by_sums = _split(captures, len(captures) - len(self.reached.sums))
        inputs = self.loop.inputs([*carry_and_slices, *turn_captures])

        def results(*values: Tensor) -> tuple[Tensor, ...]:
            return self.turn_results(inputs, values)

        pulled_back = torch.func.vjp(results, *self.differentiated_tensors(inputs))[1]
        by_inputs = pulled_back((*carry, *by_outputs, *by_sums))
        by_carry, by_slices, by_captures = _split(
            by_inputs, len(self.differentiated.carry), len(self.differentiated.slices)
        )
        # the carry before this turn is a result of the loop too
        for position, gradient in zip(
            self.reached.history,
            by_history,
            strict=True,
        ):
            place = self.differentiated.carry.index(position)
            by_carry[place] = by_carry[place] + gradient
        return _TurnResults(by_carry, by_slices, by_captures)

    def differentiated_tensors(self, inputs: _Inputs[Tensor]) -> Tensors:
        """The tensors of a turn by which gradients are asked for."""
        return [
            *_at_positions(inputs.carry, self.differentiated.carry),
            *_at_positions(inputs.slices, self.differentiated.slices),
            *_at_positions(inputs.captures, self.differentiated.captures),
        ]

    def turn_results(
        self, inputs: _Inputs[Tensor], values: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """The results of a turn that the loss depends on, with other values for the differentiated tensors."""
        positions = self.differentiated
        carry, slices, captures = _split(values, len(positions.carry), len(positions.slices))
        results = self.loop.body(
            _replaced(inputs.carry, positions.carry, carry),
            _replaced(inputs.slices, positions.slices, slices),
            _replaced(inputs.captures, positions.captures, captures),
        )
        return (
            *_at_positions(results.carry, positions.carry),
            *_at_positions(results.outputs, self.reached.outputs),
            *_at_positions(results.sums, self.reached.sums),
        )


# -- lists by position -------------------------------------------------------------------------------------------------


def _differentiable(tensors: Tensors, needed: list[bool]) -> list[int]:
    """The positions of the tensors by which gradients are needed and exist."""
    return [
        position
        for position, tensor in enumerate(tensors)
        if needed[position] and tensor.is_floating_point()
    ]


def _positions_with_gradient(gradients: list[Tensor | None]) -> list[int]:
    return [position for position, gradient in enumerate(gradients) if gradient is not None]


def _at_positions(values: list[T], positions: list[int]) -> list[T]:
    """The values at these positions."""
    return [values[position] for position in positions]


def _replaced(values: list[T], positions: list[int], replacements: list[T]) -> list[T]:
    """The list with other values at these positions."""
    changed = list(values)
    for position, replacement in zip(positions, replacements, strict=True):
        changed[position] = replacement
    return changed


def _scattered(length: int, positions: list[int], gradients: Tensors) -> list[Tensor | None]:
    """A list with gradients at these positions and None elsewhere."""
    scattered: list[Tensor | None] = [None] * length
    for position, gradient in zip(positions, gradients, strict=True):
        scattered[position] = gradient
    return scattered
