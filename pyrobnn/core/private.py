"""Names of torch's tracer and compiler that torch does not promise to keep: what is gone costs speed, no fit.

They are looked up when they are used. No file but this one, :mod:`pyrobnn.core.private_torch` and
:mod:`pyrobnn.core.private_pyro` uses such a name (a test searches the source), and the same test takes each of them
away: what inductor lacks, :mod:`pyrobnn.model.compile` leaves to the public ``torch.compile``.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import inspect
import logging
import operator
import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument, map_aggregate
from torch.nn import Parameter

if TYPE_CHECKING:
    from torch._ops import OpOverload

    #: what a traced function returns: tensors, or trees of them
    _Outputs = Tensor | float | Mapping | Sequence | None
    #: what an operator takes
    _Argument = Tensor | complex | str | torch.dtype | torch.device | Sequence | None


class Gone(ImportError):
    """A name that this torch does not have."""


#: errors of a name that has moved, or has another signature
MOVED = (ImportError, AttributeError, KeyError, TypeError, AssertionError)
_Context = contextlib.AbstractContextManager[Any]


def find(name: str) -> Any:
    """What a dotted name stands for; None where this release does not have it."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return None


def _required(name: str) -> Any:
    value = find(name)
    if value is None:
        raise Gone(f"torch {torch.__version__} has no {name}")
    return value


@functools.cache  # a look-up takes longer than what is done with it, and there are dozens in one density
def looked_up(find: Callable[[str], Any], *names: str) -> tuple[Any, ...]:
    """What ``find`` says of each name."""
    return tuple(map(find, names))


def origin(error: BaseException) -> BaseException:
    """What went wrong inside of a compiler, which wraps errors in its own."""
    inner = getattr(error, "inner_exception", None)
    while isinstance(inner, BaseException):
        error = inner
        inner = getattr(error, "inner_exception", None)
    return error


# -- tracing -----------------------------------------------------------------------------------------------------------


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
    make_fx = _required("torch.fx.experimental.proxy_tensor.make_fx")
    graph: GraphModule = make_fx(fn, decomposition_table=decompositions)(*inputs)
    return graph


def trace_rows(fn: Callable[[Tensor], _Outputs], x: Tensor) -> GraphModule:
    """As :func:`trace`, of a function of rows (N, …), for any N; tensors that ``fn`` closes over become constants."""
    make_fx = _required("torch.fx.experimental.proxy_tensor.make_fx")
    return make_fx(fn, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x)


def _tracing(**options: Any) -> _Context:
    fake_mode = _required("torch._subclasses.fake_tensor.FakeTensorMode")(**options)
    return _required("torch._guards.tracing")(_required("torch._guards.TracingContext")(fake_mode))


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute that has another value inside."""
    before = inspect.getattr_static(owner, name)  # of a class a static method as it is
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def untraced() -> _Context | None:
    """Inside, nothing is written down in the trace that is under way; None where this torch lacks a name for it."""
    recording = _Recording.active()
    if recording is not None:
        return recording.paused()
    (pause,) = looked_up(find, "torch.fx.experimental.proxy_tensor.disable_proxy_modes_tracing")
    return None if pause is None else pause()


def callable_in_a_trace() -> _Context:
    """Inside, what ``torch.compile`` has made runs also while something else is traced; torch would refuse it."""
    return _flagged(False) or contextlib.nullcontext()


def _flagged(is_traced: bool) -> _Context | None:
    """Inside, torch takes a trace to be under way, or none; None where this torch has no such flag."""
    flag = find("torch.fx._symbolic_trace._is_fx_tracing_context")
    if flag is not None:
        context: _Context = flag(is_traced)
        return context
    # WORKAROUND(torch<2.14): the flag is of the process, not of a thread
    tracing = find("torch.fx._symbolic_trace")
    if hasattr(tracing, "_is_fx_tracing_flag"):
        return replaced(tracing, "_is_fx_tracing_flag", is_traced)
    return None


class Tracer:
    """The trace that is under way, beside which others can be made."""

    def __init__(
        self,
        pause: Callable[[], _Context],
        is_wrapped: Callable[[Tensor], bool],
        unwrapped: Callable[[Tensor], Tensor],
    ) -> None:
        self._pause = pause
        self._is_wrapped = is_wrapped
        self._unwrapped = unwrapped

    @classmethod
    def active(cls) -> Tracer | None:
        """None where nothing is traced, or this torch does not say so."""
        wrappers = (
            find("torch._C._functorch.is_functorch_wrapped_tensor"),
            find("torch._C._functorch.get_unwrapped"),
        )
        if None in wrappers:
            return None
        recording = _Recording.active()
        if recording is not None:
            return cls(recording.paused, *wrappers)
        mode = find("torch.fx.experimental.proxy_tensor.get_proxy_mode")
        pause = find("torch.fx.experimental.proxy_tensor.disable_proxy_modes_tracing")
        if None in (mode, pause) or mode() is None:
            return None
        return cls(pause, *wrappers)

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Inside, another trace may be made, under no transform of ``torch.func``."""
        clear = _required("torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack")
        with self._pause(), clear(), callable_in_a_trace():
            yield

    def sample(self, value: Tensor) -> Tensor:
        """The first of the points that the transforms have put into one tensor."""
        axis = _required("torch._C._functorch.maybe_get_bdim")
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
    mode = _mode_class(_required("torch.utils._python_dispatch.TorchDispatchMode"))
    _required(_MODES)  # without it nobody would see that a trace is under way
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
        self._has_kernel = _required("torch._C._dispatch_has_kernel_for_dispatch_key")
        tensors = _required("torch.utils.weak.WeakIdKeyDictionary")
        self._traced: MutableMapping[Tensor, _Traced] = tensors()
        #: tensors that are no results, by their names in the graph; and these names
        self._constants: dict[str, Tensor] = {}
        self._names: MutableMapping[Tensor, str] = tensors()

    @classmethod
    def active(cls) -> _Recording | None:
        """The one under way in this thread, innermost; None where nothing is recorded."""
        (modes,) = looked_up(find, "torch.utils._python_dispatch._get_current_dispatch_mode_stack")
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
        kind = find("torch.fx._lazy_graph_module._LazyGraphModule") or GraphModule
        module: GraphModule = kind(self._constants, self._graph)
        return module

    def record(
        self,
        mode: _Context,
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


# -- inductor ----------------------------------------------------------------------------------------------------------


def in_this_order(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """Inductor's operator that stores a tensor as its strides say; the tensor itself where there is none."""
    operator = find("torch._inductor.inductor_prims.force_stride_order")
    return tensor if operator is None else getattr(operator, "default", operator)(tensor, strides)


def lacks_compiler() -> bool:
    """Whether machine code for the CPU cannot be made; False where torch does not say."""
    try:
        # bool: does nothing where torch has no such name
        (find("torch._inductor.cpp_builder.get_cpp_compiler") or bool)()
    except Exception as error:  # of a type of its own by platform
        return not isinstance(error, MOVED)
    return False


def compile_graph(
    graph: GraphModule,
    inputs: list[Tensor],
    settings: Mapping[str, bool | int | str | Callable],
    on_stack: bool,
    scalar: bool,
) -> Callable[..., Any]:
    """Inductor's machine code of a graph, without Dynamo; kept on disk.

    Args:
        graph: of ATen operators.
        inputs: of the shapes and strides that it is compiled for.
        settings: of inductor, by name; those that this torch does not have are left out.
        on_stack: whether the intermediate tensors of a small function lie on the stack; each would be an allocation,
            together half of a short step. For functions that return nothing (inductor would hand out one memory for the
            results of every call) and call no library; up to 0.8 MB, which the threads of Linux have.
        scalar: whether there is no vector code.

    Raises:
        ImportError, AttributeError, KeyError, TypeError, AssertionError: those of :data:`MOVED`, on another torch.
    """
    with contextlib.ExitStack() as stack:
        # how it compiles: the settings, and shapes that are fixed
        stack.enter_context(_old_objects_frozen())
        shapes = _required("torch.fx.experimental.symbolic_shapes.ShapeEnv")
        config = _required("torch._inductor.config")
        if on_stack:
            # before the settings, which a first registration would keep for every later compile
            _required("torch._inductor.codegen.common").init_backend_registration()
        stack.enter_context(_tracing(shape_env=shapes(), static_shapes=True))
        known = {name: settings[name] for name in settings if hasattr(config, name)}
        stack.enter_context(config.patch(known))
        # its warnings name operators that users have never heard of
        stack.enter_context(replaced(logging.getLogger("torch._inductor.ir"), "disabled", True))

        # a shorter compile
        stack.enter_context(_few_headers_precompiled())
        stack.enter_context(_quick_lookups())
        stack.enter_context(_known_instructions(scalar))
        # patterns of attention and the like, half a second to make: no operator of the library's steps is left to them
        patterns = _required("torch._inductor.fx_passes.joint_graph")
        stack.enter_context(replaced(patterns, "lazy_init", lambda *_: None))

        if on_stack:
            stack.enter_context(_intermediates_on_the_stack())
        call: Callable[..., Any] = _required("torch._inductor.compile")(graph, inputs)
        call(*inputs)

    code = getattr(call, "current_callable", None)
    if code is None or graph.graph.output_node().all_input_nodes:
        return call
    # nothing is returned: what torch puts around the code, for results, takes longer than a short step
    with contextlib.suppress(*MOVED):
        # code that extends its arguments, by constants of inductor's own, needs its wrapper
        if "extend" not in code.__code__.co_names:
            # the wrapper's closure holds the loaded module: its file is loaded again, without the wrapper
            return Library(code.__closure__[0].cell_contents.__self__.__file__, graph)
    constants = _constants(graph)
    return lambda *args: code([*constants, *args])


@contextlib.contextmanager
def _known_instructions(scalar: bool) -> Iterator[None]:
    """Inside, inductor takes the CPU's instruction sets without a trial; no vectors in ``scalar`` code."""
    vectors = _required("torch._inductor.cpu_vec_isa")
    sets = _instruction_sets_of_the_cpu()
    with contextlib.ExitStack() as stack:
        if sets:
            stack.enter_context(replaced(vectors, "valid_vec_isa_list", lambda: sets))
        if scalar:
            # of the code alone: the compiler is called with the same options, for the same headers
            stack.enter_context(replaced(vectors, "pick_vec_isa", lambda: vectors.invalid_vec_isa))
        yield


@contextlib.contextmanager
def _intermediates_on_the_stack() -> Iterator[None]:
    """Inside, inductor writes calls whose intermediate tensors lie on the stack."""
    common = _required("torch._inductor.codegen.common")
    calls = _required("torch._inductor.codegen.cpp_wrapper_cpu_array_ref.CppWrapperCpuArrayRef")
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(common.device_codegens["cpu"], "cpp_wrapper_codegen", calls))
        # WORKAROUND(torch<2.13): the second is the name that it had
        for name in ("get_device_include_path_jit", "get_device_include_path"):
            if name in vars(calls):
                method = staticmethod(getattr(calls.__base__, name))
                stack.enter_context(replaced(calls, name, method))
        yield


@contextlib.contextmanager
def _old_objects_frozen() -> Iterator[None]:
    """The garbage collector goes through new objects alone: through all of torch, it takes a sixth of a compile."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _constants(graph: GraphModule) -> list[Tensor]:
    """Parameters and buffers, in the order in which inductor passes them."""
    parameters = [value for _, value in graph.named_parameters()]
    buffers = [value for _, value in graph.named_buffers(remove_duplicate=False)]
    return parameters + buffers


class Library:
    """Machine code of a graph that returns nothing, from inductor's file; ImportError without it."""

    def __init__(self, path: str, graph: GraphModule) -> None:
        data = _required("torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr")
        # without it no such file can be loaded
        os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(data)
        loader = ExtensionFileLoader(f"{Path(path).stem}.inductor_entry_cpp", path)
        module = importlib.util.module_from_spec(ModuleSpec(loader.name, loader, origin=path))
        loader.exec_module(module)
        self.path = path
        self._constants = _constants(graph)
        self._enter = module.inductor_entry_cpp
        self._handles = _required("torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors")

    def __call__(self, *args: Tensor) -> None:
        self._enter(self._handles([*self._constants, *args]))


@functools.cache  # the same objects at every compile: inductor's own caches go by them
def _instruction_sets_of_the_cpu() -> list[Any]:
    """Those of an x86 CPU, AMX left out, without inductor's trial of each: a third of the first compile.

    A C++ compiler that reads torch's headers knows them; where one does not, ``torch.compile`` tries.
    """
    sets = _required("torch._inductor.cpu_vec_isa")
    names = {*sets.x86_isa_checker()} - {"amx_tile"}
    supported = [isa for isa in sets.supported_vec_isa_list if {*str(isa).split()} <= names]
    kinds = [type(isa) for isa in supported]
    # true without inductor's trial compile
    return [type(kind.__name__, (kind,), {"__bool__": lambda self: True})() for kind in kinds]


def _few_headers_precompiled() -> _Context:
    """Inside, one precompiled header holds those of calls, of the stack and of kernels, not those of torch's tensors.

    Otherwise each compile reads the headers of kernels and instantiates the templates of all, three quarters of its
    time. Inductor asks for the name of one header and writes ``#include <NAME>``. The text that it gets here ends the
    first bracket itself and leaves the last one open: so it includes several.
    """
    cache = _required("torch._inductor.codecache")
    of_kernels = cache._get_cpp_prefix_header
    folder = "torch/csrc/inductor"

    def headers_of_calls(device: str, *args: bool, **options: bool) -> str:
        headers = [
            f"{folder}/aoti_runtime/arrayref_tensor.h",
            f"{folder}/aoti_runtime/thread_local.h",
            f"{folder}/cpp_wrapper/{device}.h",
            of_kernels(device),
        ]
        included = ">\n#include <".join(header for header in headers if header)
        # a header that costs nothing, for the bracket that inductor has opened
        return f"cstdint>\n#undef TORCH_INDUCTOR_PRECOMPILE_HEADERS\n#include <{included}"

    return replaced(cache, "_get_cpp_wrapper_header", headers_of_calls)


@contextlib.contextmanager
def _quick_lookups() -> Iterator[None]:
    """Strides of affine indices by derivatives, and the table of types filled once: a third of inductor's own time."""
    kernels = _required("torch._inductor.codegen.cpp")
    common = _required("torch._inductor.codegen.common")
    of_any = kernels.stride_at_vec_range
    types = common.DtypePropagationOpsHandler

    @functools.cache
    def stride(index: Any, variable: Any, *length: int) -> Any:  # expressions of sympy
        is_polynomial = hasattr(index, "is_polynomial") and index.is_polynomial(variable)
        # where the index is not affine, this holds the variable, and torch's own answer is taken
        derivative = index.diff(variable) if is_polynomial else variable
        return of_any(index, variable, *length) if derivative.has(variable) else derivative

    with (
        replaced(kernels, "stride_at_vec_range", stride),
        replaced(common, types.__name__, functools.cache(types)),
    ):
        yield
