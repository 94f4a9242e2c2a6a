"""The hand-over of a function to inductor: the one place that uses what torch does not promise to keep.

Every private name is looked up when a function is compiled, and may be gone: a setting that this torch does not have is
left out, a class that it does not have costs what it saved. Our own graph passes and the allocation on the stack rest
on unwritten laws of inductor, and run only on the versions of torch that they were tested on.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pyro
import torch
from torch import Tensor
from torch.fx import GraphModule

from pyrobnn.compile.folding import fold_constants, hoist_invariants, materialize_broadcasts
from pyrobnn.compile.products import (
    DECOMPOSITIONS,
    Overload,
    lay_out_data_innermost,
    library_calls,
    returns_nothing,
    size,
)

#: versions of torch on which the tests of our own graph passes and of the allocation on the stack have passed
TESTED = ("2.13",)
_log = logging.getLogger(__name__)
#: what a name or a law of torch that has moved raises; a compiler that fails is told in types of inductor
_MOVED = (ImportError, AttributeError, KeyError, TypeError, AssertionError)
#: what keeps a function from being traced, in a user's words
_LOOKS = (
    "its Python looks at the values of a tensor, of a site or of the data: if, while, assert, float() or .item(). "
    "Write it with torch.where, and check data before the fit"
)
# Inductor settings for our graphs only. The decomposed tanh costs half of the exact one (and is exact to one unit of
# float32 around 1); fallback_random makes compiled and eager draws agree; one compile thread starts no worker pool.
_INDUCTOR = {
    "fallback_random": True,
    "compile_threads": 1,
    "cpp.use_decompose_tanh": True,
    # shared scalars get a buffer sooner than by default: less is computed twice, and the code is a third shorter
    "realize_opcount_threshold": 12,
    # a tenth of a short step; Compiled checks its arguments itself, loops do so once
    "size_asserts": False,
    "alignment_asserts": False,
}
# Below this size of the largest tensor, threads cost more at their barriers than they save.
_PARALLEL_FROM = 2**16


class Untraceable(RuntimeError):
    """A function whose control flow depends on the values of tensors."""


class NoCompiler(RuntimeError):
    """A machine without a C++ compiler."""

    def __init__(self) -> None:
        remedies = {"darwin": "xcode-select --install", "win32": "Visual Studio's build tools for C++"}
        remedy = remedies.get(sys.platform, "apt install g++, or your system's counterpart")
        super().__init__(f"there is no C++ compiler: {remedy}")


def _private(module: str, name: str | None = None) -> Any:
    """A module that torch does not promise to keep, or something in it; ImportError or AttributeError if it is gone."""
    found = importlib.import_module(module)
    return found if name is None else getattr(found, name)


def tested() -> bool:
    """Whether our own graph passes were tested on this torch."""
    return ".".join(torch.__version__.split(".")[:2]) in TESTED


def is_loaded() -> bool:
    """Whether this process has loaded the compiler, which takes memory and two seconds."""
    return "torch._inductor.compile_fx" in sys.modules


def traced(
    fn: Callable[..., Any], inputs: list[Tensor], decompositions: dict[Any, Any] | None = None
) -> GraphModule:
    """The flat graph of ATen operators that ``fn`` comes to; ``fn`` runs once and may write into the inputs."""
    make_fx = _private("torch.fx.experimental.proxy_tensor", "make_fx")
    with _one_fake_mode(), _code_when_asked_for():
        return make_fx(fn, decomposition_table=decompositions)(*inputs)


class Code(NamedTuple):
    """A compiled flat function; what gives the graph that it was made from, as it was traced; what identifies that.

    The identity covers the operators with their arguments, and shapes, strides, types and devices of all tensors, but
    no data; None where it is not known.
    """

    call: Callable[..., Any]
    graph: Callable[[], GraphModule]
    identity: str | None = None


def machine_code(fn: Callable[..., Any], inputs: list[Tensor]) -> Code:
    """A flat function, compiled by inductor and called once, so that nothing is left to be set up lazily.

    First with our own graph passes, if they were tested on this torch; then without; then by ``torch.compile``, the
    public way, whose guards cost time at every call.

    Raises:
        Untraceable: if the function cannot be traced.
        NoCompiler: where there is none, before inductor spends seconds on a graph.
        Exception: of inductor, if there is no way.
    """
    failures: list[Exception] = []
    if _lacks_compiler(inputs):
        _graph(fn, inputs)
        raise NoCompiler
    if tested():
        try:
            return _with_passes(fn, inputs)
        except Exception as error:  # inductor wraps compiler failures in many types
            failures.append(error)
    else:
        _say_untested()
    for attempt in (_directly, functools.partial(_directly, on_disk=False), _publicly):
        graph = _graph(fn, inputs)
        try:
            call = attempt(graph, inputs)
        except _MOVED as error:
            failures.append(error)
            continue
        if failures:
            _log.warning("the compiled function is slower than it might be: %s", first_line(failures[0]))
        return Code(call, functools.partial(traced, fn, inputs))
    raise failures[-1]


def _graph(fn: Callable[..., Any], inputs: list[Tensor]) -> GraphModule:
    """The traced graph, or Untraceable."""
    try:
        return traced(fn, inputs)
    except Exception as error:  # whatever a user's program may raise under tracing
        looks = "aten._local_scalar_dense" in str(error)  # how torch names it
        raise Untraceable(_LOOKS if looks else first_line(error)) from error


def _lacks_compiler(inputs: list[Tensor]) -> bool:
    """Whether machine code for the CPU cannot be made; False where torch does not say."""
    if any(each.device.type != "cpu" for each in inputs):
        return False
    try:
        _private("torch._inductor.cpp_builder", "get_cpp_compiler")()
    except _MOVED:
        return False
    except Exception:  # of a type of its own by platform
        return True
    return False


def first_line(error: Exception) -> str:
    """An error in one line: its type and the beginning of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


@functools.cache
def _say_untested() -> None:
    _log.warning(
        "pyrobnn's own graph passes were tested on torch %s, not on %s: functions are compiled without them, "
        "right but slower",
        ", ".join(TESTED),
        torch.__version__,
    )


def _device(inputs: list[Tensor]) -> torch.device:
    return next((tensor.device for tensor in inputs if tensor.device.type != "cpu"), torch.device("cpu"))


def _with_passes(fn: Callable[..., Any], inputs: list[Tensor]) -> Code:
    """Compiled after our own graph passes."""
    graph, device = traced(fn, inputs, DECOMPOSITIONS), _device(inputs)
    untouched = GraphModule(graph, copy.deepcopy(graph.graph))
    on_stack = False
    if device.type == "cpu":
        hoist_invariants(graph)
    fold_constants(graph, device)
    if device.type == "cpu":
        lay_out_data_innermost(graph)
        materialize_broadcasts(graph)
        on_stack = sys.platform == "linux" and returns_nothing(graph) and not library_calls(graph)
    with _intermediates_on_stack() if on_stack else contextlib.nullcontext():
        return Code(_directly(graph, inputs), lambda: untouched, _identity(untouched, inputs))


def _identity(graph: GraphModule, inputs: list[Tensor]) -> str | None:
    """What two graphs that differ in nothing but data have in common, and no others."""
    held = [getattr(graph, str(node.target)) for node in graph.graph.nodes if node.op == "get_attr"]
    if not all(isinstance(value, Tensor) for value in held):  # a graph inside of the graph
        return None
    tensors = [(value.shape, value.stride(), value.dtype, value.device) for value in (*inputs, *held)]
    return hashlib.sha256(f"{graph.code}{tensors}{torch.get_num_threads()}".encode()).hexdigest()


def _directly(graph: GraphModule, inputs: list[Tensor], on_disk: bool = True) -> Callable[..., Any]:
    """Compiled as the graph stands, by inductor without Dynamo; ``on_disk`` keeps the result for the next process."""
    # imported late: 2 s that `import pyrobnn` need not pay
    compile, config = _private("torch._inductor", "compile"), _private("torch._inductor.config")
    settings: dict[str, Any] = dict(_INDUCTOR)
    if _device(inputs).type == "cpu":
        # calls and allocations in C++ instead of Python
        settings["cpp_wrapper"] = True
        if _largest(graph) < _PARALLEL_FROM:
            settings["cpp.threads"] = 1
    context = _cached_on_disk() if on_disk else contextlib.nullcontext()
    if isinstance(context, contextlib.nullcontext):
        for node in graph.graph.nodes:  # the shapes that the tracer noted belong to an environment of its own
            node.meta.pop("val", None)
    with (
        warnings.catch_warnings(),
        _quiet("torch._inductor.ir"),
        _all_headers_precompiled(),
        config.patch(_known(settings)),
        context,
    ):
        warnings.simplefilter("ignore")  # inductor's remarks on its own internals
        call = compile(graph, inputs)
        call(*inputs)
    return call


def _publicly(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """Compiled by ``torch.compile``."""
    before = pyro.settings.get()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call = torch.compile(graph, options={"fallback_random": True})
            call(*inputs)
    finally:
        pyro.settings.set(**before)  # Dynamo turns the validation of distributions off for good
    return call


def _known(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that this torch has."""
    config, known = _private("torch._inductor.config"), {}
    for key, value in settings.items():
        try:
            with config.patch({key: value}):
                known[key] = value
        except Exception as error:  # an unknown key raises by the version
            _log.info("this torch has no inductor setting %s (%s)", key, error)
    return known


def _one_fake_mode() -> contextlib.AbstractContextManager[Any]:
    """One mode for the shapes of all that is traced: torch would make one for every operation, half of the time."""
    try:
        tracing, context = _private("torch._guards", "tracing"), _private("torch._guards", "TracingContext")
        fake_mode = _private("torch._subclasses.fake_tensor", "FakeTensorMode")
        return tracing(context(fake_mode(allow_fallback_kernels=True)))
    except (ImportError, AttributeError, TypeError):  # a torch that is built otherwise: traced slower, then
        return contextlib.nullcontext()


def _code_when_asked_for() -> contextlib.AbstractContextManager[Any]:
    """Graphs whose passes write no Python code that nobody runs."""
    try:
        lazily: Any = _private("torch.fx._lazy_graph_module", "_use_lazy_graph_module")(True)
        return lazily
    except (
        ImportError,
        AttributeError,
        TypeError,
    ):  # a torch that is built otherwise: written each time, then
        return contextlib.nullcontext()


def _cached_on_disk() -> contextlib.AbstractContextManager[Any]:
    """A shape environment: only for graphs with one does inductor keep its results (``TORCHINDUCTOR_CACHE_DIR``).

    The second fit of the same model and shapes, in this process or another, then compiles several times faster.
    """
    try:
        tracing, context = _private("torch._guards", "tracing"), _private("torch._guards", "TracingContext")
        fake_mode = _private("torch._subclasses.fake_tensor", "FakeTensorMode")
        shapes = _private("torch.fx.experimental.symbolic_shapes", "ShapeEnv")()
        return tracing(context(fake_mode(shape_env=shapes, static_shapes=True)))
    except (ImportError, AttributeError, TypeError):  # a torch that is built otherwise: compiled anew, then
        return contextlib.nullcontext()


@contextlib.contextmanager
def _intermediates_on_stack() -> Iterator[None]:
    """Intermediate tensors of a small function on the stack, where each would be an allocation: half of a short step.

    For functions that return nothing and call no library: inductor would hand out one memory for the results of every
    call, and goes back to allocations beside a library. Up to 0.8 MB, which the threads of Linux have.
    """
    setting = _known({"aot_inductor.allow_stack_allocation": True})
    try:
        on_stack = _private("torch._inductor.codegen.cpp_wrapper_cpu_array_ref", "CppWrapperCpuArrayRef")
        common = _private("torch._inductor.codegen.common")
        common.init_backend_registration()
        backend = common.device_codegens["cpu"]
        before = backend.cpp_wrapper_codegen
    except (ImportError, AttributeError, KeyError):  # a torch that is built otherwise: allocations, then
        setting = {}
    if not setting:
        yield
        return
    backend.cpp_wrapper_codegen = on_stack
    try:
        with _private("torch._inductor.config").patch(setting):
            yield
    finally:
        backend.cpp_wrapper_codegen = before


@contextlib.contextmanager
def _all_headers_precompiled() -> Iterator[None]:
    """The headers of kernels precompiled with those of calls; inductor has each compile read the former, half its time.

    Inductor asks for the one header that a compile reads in a compiled form, and puts it between ``#include <`` and
    ``>``.
    """
    try:
        cache = _private("torch._inductor.codecache")
        of_calls, of_kernels = cache._get_cpp_wrapper_header, cache._get_cpp_prefix_header
    except (ImportError, AttributeError):  # a torch that is built otherwise: read each time, then
        yield
        return

    def both(device: str, *args: Any, **options: Any) -> str:
        header, second = of_calls(device, *args, **options), of_kernels(device)
        return f"{header}>\n#include <{second}" if second else header

    cache._get_cpp_wrapper_header = both
    try:
        yield
    finally:
        cache._get_cpp_wrapper_header = of_calls


@contextlib.contextmanager
def _quiet(logger: str) -> Iterator[None]:
    """Without a logger's remarks: inductor names every operator that has no C++ entry, which is no one's concern."""
    found = logging.getLogger(logger)
    before, found.disabled = found.disabled, True
    try:
        yield
    finally:
        found.disabled = before


def _largest(graph: GraphModule) -> int:
    """Elements of the largest tensor that the graph computes; one that it only writes into does not count."""
    operators = [node for node in graph.graph.nodes if isinstance(node.target, Overload)]
    return max((size(node) for node in operators if not _writes(node.target)), default=0)


def _writes(target: Any) -> bool:
    return getattr(getattr(target, "_schema", None), "is_mutable", False)
