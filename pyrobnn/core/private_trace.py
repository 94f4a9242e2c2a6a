"""A function as a flat graph of torch's operators: written down as torch dispatches them, or by ``make_fx``.

As :mod:`pyrobnn.core.private`, with names that torch does not promise to keep.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument, map_aggregate
from torch.nn import Parameter

from pyrobnn.core import private
from pyrobnn.core.private import Context, Gone

if TYPE_CHECKING:
    from torch._ops import OpOverload

    #: what a traced function returns: tensors, or trees of them
    _Outputs = Tensor | float | Mapping | Sequence | None
    #: what an operator takes
    _Argument = Tensor | complex | str | torch.dtype | torch.device | Sequence | None

#: whether the trace under way is of :func:`trace_rows`
_ANY_ROWS: ContextVar[bool] = ContextVar("_ANY_ROWS", default=False)


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is the one that ``torch.compile`` has put around another."""
    return "_orig_mod" in module._modules


def trace(
    fn: Callable[..., _Outputs],
    inputs: list[Tensor],
    decompositions: Mapping | None = None,
) -> GraphModule:
    """The flat graph of ATen operators of ``fn``, which runs once; raises Gone where this torch has no tracer.

    Where an operator is not of ATen, or an argument is none that code can say, ``make_fx`` makes the graph, in three
    times the time: it follows operators of a higher order too. ``fn`` then runs twice.

    ``decompositions``: operator → a function that does the same by others, or returns NotImplemented.
    """
    with contextlib.suppress(Gone, NotImplementedError):
        return _recorded(fn, inputs, decompositions or {})
    make_fx = private.required("torch.fx.experimental.proxy_tensor.make_fx")
    graph: GraphModule = make_fx(fn, decomposition_table=decompositions)(*inputs)
    return graph


def trace_rows(fn: Callable[[Tensor], _Outputs], x: Tensor) -> GraphModule:
    """As :func:`trace`, of a function of rows (N, …), for any N; tensors that ``fn`` closes over become constants.

    The graph is to be kept in a file, so :class:`Tracer` sees no trace here that it could put an own operator into.
    """
    make_fx = private.required("torch.fx.experimental.proxy_tensor.make_fx")
    token = _ANY_ROWS.set(True)
    try:
        return make_fx(fn, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x)
    finally:
        _ANY_ROWS.reset(token)


def untraced() -> Context | None:
    """Inside, nothing is written down in the trace that is under way; None where this torch lacks a name for it."""
    recording = _Recording.active()
    if recording is not None:
        return recording.paused()
    (pause,) = private.looked_up(
        private.find, "torch.fx.experimental.proxy_tensor.disable_proxy_modes_tracing"
    )
    return None if pause is None else pause()


def callable_in_a_trace() -> Context:
    """Inside, what ``torch.compile`` has made runs also while something else is traced; torch would refuse it."""
    return _flagged(False) or contextlib.nullcontext()


def _flagged(is_traced: bool) -> Context | None:
    """Inside, torch takes a trace to be under way, or none; None where this torch has no such flag."""
    flag = private.find("torch.fx._symbolic_trace._is_fx_tracing_context")
    if flag is not None:
        context: Context = flag(is_traced)
        return context
    # WORKAROUND(torch<2.14): the flag is of the process, not of a thread
    tracing = private.find("torch.fx._symbolic_trace")
    if hasattr(tracing, "_is_fx_tracing_flag"):
        return private.replaced(tracing, "_is_fx_tracing_flag", is_traced)
    return None


class Tracer:
    """The trace that is under way, beside which others can be made."""

    def __init__(
        self,
        pause: Callable[[], Context],
        is_wrapped: Callable[[Tensor], bool],
        unwrapped: Callable[[Tensor], Tensor],
    ) -> None:
        self._pause = pause
        self._is_wrapped = is_wrapped
        self._unwrapped = unwrapped

    @classmethod
    def active(cls) -> Tracer | None:
        """None where nothing is traced, the graph is of any number of rows, or this torch does not say so."""
        if _ANY_ROWS.get():
            return None
        wrappers = private.looked_up(
            private.find,
            "torch._C._functorch.is_functorch_wrapped_tensor",
            "torch._C._functorch.get_unwrapped",
        )
        if None in wrappers:
            return None
        recording = _Recording.active()
        if recording is not None:
            return cls(recording.paused, *wrappers)
        mode, pause = private.looked_up(
            private.find,
            "torch.fx.experimental.proxy_tensor.get_proxy_mode",
            "torch.fx.experimental.proxy_tensor.disable_proxy_modes_tracing",
        )
        if None in (mode, pause) or mode() is None:
            return None
        return cls(pause, *wrappers)

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Inside, another trace may be made, under no transform of ``torch.func``."""
        clear = private.required("torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack")
        with self._pause(), clear(), callable_in_a_trace():
            yield

    def sample(self, value: Tensor) -> Tensor:
        """The first of the points that the transforms have put into one tensor."""
        axis = private.required("torch._C._functorch.maybe_get_bdim")
        while self._is_wrapped(value):
            at = axis(value)
            value = self._unwrapped(value)
            value = value if at < 0 else value.select(at, 0)
        return value.detach()


# -- a trace by torch's dispatch ---------------------------------------------------------------------------------------

_ATEN = torch.ops.aten
#: the function that says which modes are active in this thread
_MODES = "torch.utils._python_dispatch._get_current_dispatch_mode_stack"
#: arguments of operators that a graph's code can say
_LITERALS = (
    str,
    int,
    float,
    complex,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


class _Shape(NamedTuple):
    """What a graph says of the tensor that a node computes."""

    shape: torch.Size
    dtype: torch.dtype


class _Traced(NamedTuple):
    """The node of a tensor, and its value where that is one constant number."""

    node: Node
    constant: Tensor | None = None


def _recorded(
    fn: Callable[..., _Outputs],
    inputs: Sequence[Tensor],
    decompositions: Mapping,
) -> GraphModule:
    """The flat graph of ATen operators of ``fn``, which runs once.

    Args:
        fn: a function of tensors, which may write into them.
        inputs: its arguments.
        decompositions: operator → a function that does the same by others, or returns NotImplemented.

    Raises:
        Gone: this torch has no dispatch modes.
        NotImplementedError: an operation or an argument is of another kind than those of ATen.
        RuntimeError: the function looks at the value of a tensor.
    """
    mode = _mode_class(private.required("torch.utils._python_dispatch.TorchDispatchMode"))
    private.required(_MODES)  # without it nobody would see that a trace is under way
    recording = _Recording(decompositions)
    for number, tensor in enumerate(inputs):
        recording.begin(tensor, f"arg{number}_1")
    # code that torch.compile has made would do its work unseen: where the flag is set, it refuses
    flagged = _flagged(True)
    if flagged is None:
        raise Gone(f"torch {torch.__version__} has no flag of a trace")
    # what autocast has cast before would be a constant
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with flagged, mode(recording):
            results = fn(*inputs)
    finally:
        torch.set_autocast_cache_enabled(cached)
    return recording.ended(results)


class _Recording:
    """A graph that is being made."""

    def __init__(self, decompositions: Mapping) -> None:
        self.is_paused = False
        self._decompositions = decompositions
        self._graph = Graph()
        self._has_kernel = private.required("torch._C._dispatch_has_kernel_for_dispatch_key")
        tensors = private.required("torch.utils.weak.WeakIdKeyDictionary")
        self._traced: MutableMapping[Tensor, _Traced] = tensors()
        #: tensors that are no results, by their names in the graph; and these names
        self._constants: dict[str, Tensor] = {}
        self._names: MutableMapping[Tensor, str] = tensors()

    @classmethod
    def active(cls) -> _Recording | None:
        """The one under way in this thread, innermost; None where nothing is recorded."""
        (modes,) = private.looked_up(private.find, _MODES)
        for mode in reversed(modes() if modes else []):
            recording = getattr(mode, "recording", None)
            if isinstance(recording, cls) and not recording.is_paused:
                return recording
        return None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, operations are executed and not written down."""
        before = self.is_paused
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = before

    def begin(self, tensor: Tensor, name: str) -> None:
        """Take the tensor for an argument of the graph."""
        self._follow(tensor, self._graph.placeholder(name))

    def ended(self, results: _Outputs) -> GraphModule:
        """The graph of what has been recorded, with these results (a tree of tensors)."""
        self._graph.output(map_aggregate(cast(Argument, results), self._result))
        # its code is written where it is called
        kind = private.find("torch.fx._lazy_graph_module._LazyGraphModule") or GraphModule
        module: GraphModule = kind(self._constants, self._graph)
        return module

    def record(
        self,
        mode: Context,
        func: OpOverload,
        args: tuple[_Argument, ...],
        kwargs: Mapping[str, _Argument],
    ) -> Any:
        """Execute an operation and write it down, or those that it is made of."""
        parts = self._parts(func)
        if parts is not None:
            with mode:
                results = parts(*args, **kwargs)
            if results is not NotImplemented:
                return results
        if torch.Tag.data_dependent_output in func.tags:
            known = self._known_values(args, kwargs)
            if known is None:
                raise RuntimeError(f"the value of a traced tensor is asked for by {func}")
            return func(*known[0], **known[1])
        # the tensor of a number is fresh at every call
        if func is _ATEN.lift_fresh.default:
            func = _ATEN.lift_fresh_copy.default
        positional = tuple([self._argument(value) for value in args])
        options = {name: self._argument(value) for name, value in kwargs.items()}
        results = func(*args, **kwargs)
        name = func.overloadpacket.__name__.lstrip("_")
        node = self._graph.create_node("call_function", func, positional, options, name)
        constant = None
        if isinstance(results, Tensor) and results.numel() <= 1:
            constant = self._constant(func, args, kwargs)
        self._follow(results, node, constant)
        return results

    def _parts(self, func: OpOverload) -> Callable[..., Any] | None:
        """What does the same by other operations: a decomposition, or torch's own of an operator without a kernel."""
        decomposition: Callable[..., Any] | None = self._decompositions.get(func)
        if decomposition is None and self._has_kernel(func.name(), "CompositeImplicitAutograd"):
            return func.decompose
        return decomposition

    def _constant(
        self,
        func: OpOverload,
        args: tuple[_Argument, ...],
        kwargs: Mapping[str, _Argument],
    ) -> Tensor | None:
        """The one number that an operation has for result at every call: Python may look at it."""
        if func is _ATEN.lift_fresh_copy.default:
            return cast(Tensor, args[0]).clone()
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags
        if is_drawn or not any(self._is_constant(value) for value in args):
            return None
        known = self._known_values(args, kwargs)
        return None if known is None else func(*known[0], **known[1])

    def _is_constant(self, value: _Argument) -> bool:
        """Whether a value is a number that the trace has made, and knows."""
        traced = self._traced.get(value) if isinstance(value, Tensor) else None
        return traced is not None and traced.constant is not None

    def _known_values(
        self,
        args: tuple[_Argument, ...],
        kwargs: Mapping[str, _Argument],
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments with the values of constants; None where one of them is another tensor of the trace."""
        unknown: list[Tensor] = []

        def value(argument: Argument) -> Argument:
            if not isinstance(argument, Tensor) or argument not in self._traced:
                return argument
            constant = self._traced[argument].constant
            if constant is None:
                unknown.append(argument)
            return constant

        known: Any = map_aggregate((args, dict(kwargs)), value)
        return None if unknown else known

    def _follow(
        self,
        results: _Outputs,
        node: Node,
        constant: Tensor | None = None,
    ) -> None:
        """Take the node for what has computed these tensors."""
        if isinstance(results, Tensor):
            node.meta["tensor_meta"] = _Shape(results.shape, results.dtype)
            self._traced[results] = _Traced(node, constant)
        elif isinstance(results, (list, tuple)):
            for place, result in enumerate(results):
                if isinstance(result, Tensor):
                    item = self._graph.call_function(operator.getitem, (node, place))
                    self._follow(result, item)

    def _argument(self, value: _Argument) -> Any:
        """An argument of an operation as the graph's code says it."""
        if isinstance(value, Tensor):
            return self._node_of(value)
        if isinstance(value, (list, tuple)):
            return [self._argument(item) for item in value]
        if isinstance(value, _LITERALS):
            return value
        raise NotImplementedError(f"an argument of type {type(value).__name__}")

    def _result(self, value: Argument) -> Argument:
        return self._node_of(value) if isinstance(value, Tensor) else value

    def _node_of(self, tensor: Tensor) -> Node:
        """The node of a tensor, which is a constant where the trace has not made it."""
        traced = self._traced.get(tensor)
        if traced is not None:
            return traced.node
        name = self._names.get(tensor)
        if name is None:
            kind = "param" if isinstance(tensor, Parameter) else "tensor"
            name = f"_{kind}_constant{len(self._constants)}"
            self._constants[name] = tensor
            self._names[tensor] = name
        return self._graph.create_node("get_attr", name)


@functools.cache
def _mode_class(dispatch_mode: type) -> Any:
    """The dispatch mode that hands each operation to a recording."""

    class Mode(dispatch_mode):
        def __init__(self, recording: _Recording) -> None:
            super().__init__()
            self.recording = recording

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            """Dynamo makes what it makes without the mode: what it leaves out once it leaves out for good."""
            return True

        def __torch_dispatch__(
            self,
            func: OpOverload,
            types: Sequence[type],
            args: tuple[_Argument, ...] = (),
            kwargs: Mapping[str, _Argument] | None = None,
        ) -> Any:
            if self.recording.is_paused:
                return func(*args, **(kwargs or {}))
            if types:
                raise NotImplementedError(f"a tensor of the class {types[0].__name__}")
            return self.recording.record(self, func, args, kwargs or {})

    return Mode
