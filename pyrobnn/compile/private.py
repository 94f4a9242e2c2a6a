"""Every name that torch and Pyro do not promise to keep, looked up when it is used: what is gone costs speed, no fit.

No other file uses such a name (a test searches the source), and the same test takes each of them away.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

_log = logging.getLogger(__name__)


class Gone(ImportError):
    """A name that this torch does not have."""

    def __init__(self, name: str) -> None:
        super().__init__(f"torch {torch.__version__} has no {name}")


#: what a name that has moved, or has another signature, raises
MOVED = (ImportError, AttributeError, KeyError, TypeError, AssertionError)
Context = contextlib.AbstractContextManager[Any]
_NOTHING: Context = contextlib.nullcontext()


def find(name: str) -> Any:
    """What a dotted name stands for; None where this release does not have it."""
    module, _, last = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), last)
    except (ImportError, AttributeError):
        try:
            return importlib.import_module(name)
        except ImportError:
            return None


def _required(name: str) -> Any:
    if (found := find(name)) is None:
        raise Gone(name)
    return found


def origin(error: BaseException) -> BaseException:
    """What went wrong inside of a compiler, which wraps errors in its own."""
    while isinstance(inner := getattr(error, "inner_exception", None), BaseException):
        error = inner
    return error


# -- tracing -----------------------------------------------------------------------------------------------------------


def trace(fn: Callable[..., Any], inputs: list[Tensor], decompositions: Any = None) -> GraphModule:
    """The flat graph of ATen operators of ``fn``, which runs once.

    Raises:
        Gone: this torch has no tracer.
    """
    make_fx = _required("torch.fx.experimental.proxy_tensor.make_fx")
    # one mode for the shapes of all that is traced: torch would make one for every operation, half of the time
    lazily = find("torch.fx._lazy_graph_module._use_lazy_graph_module")  # no Python code that nobody runs
    with _tracing(allow_fallback_kernels=True), lazily(True) if lazily else _NOTHING:
        graph: GraphModule = make_fx(fn, decomposition_table=decompositions)(*inputs)
    return graph


def shape_environment() -> Context | None:
    """What a graph needs for inductor to keep its code on disk (``TORCHINDUCTOR_CACHE_DIR``); None: it cannot."""
    shapes = find("torch.fx.experimental.symbolic_shapes.ShapeEnv")
    context = _tracing(shape_env=shapes(), static_shapes=True) if shapes else _NOTHING
    return None if context is _NOTHING else context


def _tracing(**options: Any) -> Context:
    tracing, context = find("torch._guards.tracing"), find("torch._guards.TracingContext")
    fake_mode = find("torch._subclasses.fake_tensor.FakeTensorMode")
    try:
        found: Context = tracing(context(fake_mode(**options)))
    except TypeError:  # one is None, or its options have moved: slower, then
        return _NOTHING
    return found


class Tracer:
    """The trace that is under way: what of it is a constant, and how to compute with constants beside it."""

    def __init__(self, mode: Any, found: list[Any]) -> None:
        self._tracer = mode.tracer
        self._pause, self._has_slot, self._plain, self._is_wrapped, self._unwrapped = found

    @classmethod
    def active(cls) -> Tracer | None:
        """None where nothing is traced, or this torch does not say so."""
        mode = find("torch.fx.experimental.proxy_tensor.get_proxy_mode")
        mode = None if mode is None else mode()
        if mode is None:
            return None
        names = (
            "torch.fx.experimental.proxy_tensor.disable_proxy_modes_tracing",
            "torch.fx.experimental.proxy_tensor.has_proxy_slot",
            "torch._C._DisableFuncTorch",
            "torch._C._functorch.is_functorch_wrapped_tensor",
            "torch._C._functorch.get_unwrapped",
        )
        found = [find(name) for name in names]
        return None if None in found else cls(mode, found)

    def innermost(self, value: Any) -> Any:
        """The tensor, or those of a list or tuple, that the transforms of ``torch.func`` have wrapped."""
        if type(value) in (tuple, list):
            return type(value)(map(self.innermost, value))
        while isinstance(value, Tensor) and self._is_wrapped(value):
            value = self._unwrapped(value)
        return value

    def depends(self, value: Any) -> bool:
        """Whether the innermost tensor, or one of them, depends on an argument of the trace."""
        if isinstance(value, tuple | list):
            return any(map(self.depends, value))
        return isinstance(value, Tensor) and bool(self._has_slot(value, self._tracer))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, constants are computed and not traced."""
        with self._pause(), self._plain():
            yield


# -- inductor ----------------------------------------------------------------------------------------------------------


def is_loaded() -> bool:
    """Whether this process has loaded the compiler, which takes memory and two seconds."""
    return "torch._inductor.compile_fx" in sys.modules


def in_this_order(tensor: Tensor, strides: Any) -> Tensor:
    """Inductor's operator that stores a tensor as its strides say; the tensor itself where there is none."""
    return tensor if (stored := order_operator()) is None else stored(tensor, strides)


def order_operator() -> Any:
    """The operator of :func:`in_this_order`, which is registered by its module; None where it is gone."""
    found = find("torch._inductor.inductor_prims.force_stride_order")
    return getattr(found, "default", found)


def lacks_compiler() -> bool:
    """Whether machine code for the CPU cannot be made; False where torch does not say."""
    search = find("torch._inductor.cpp_builder.get_cpp_compiler")
    try:
        if search is not None:
            search()
    except MOVED:
        return False
    except Exception:  # of a type of its own by platform
        return True
    return False


def compile_graph(graph: GraphModule, inputs: list[Tensor], settings: dict[str, Any]) -> Callable[..., Any]:
    """Inductor's machine code of a graph, without Dynamo.

    Raises:
        Gone: this torch has no such function.
    """
    compile = _required("torch._inductor.compile")
    with _quiet("torch._inductor.ir"), _all_headers_precompiled(), configured(settings):
        call: Callable[..., Any] = compile(graph, inputs)
        call(*inputs)
    return call


def configured(settings: dict[str, Any]) -> Context:
    """Inductor with those of the settings that this torch has."""
    config, known = find("torch._inductor.config"), {}
    for key, value in settings.items() if config is not None else ():
        try:
            with config.patch({key: value}):
                known[key] = value
        except Exception as error:  # an unknown key raises by the version
            _log.info("this torch has no inductor setting %s (%s)", key, error)
    return config.patch(known) if known else _NOTHING


@contextlib.contextmanager
def intermediates_on_stack() -> Iterator[None]:
    """Intermediate tensors of a small function on the stack, where each would be an allocation: half of a short step.

    For functions that return nothing and call no library: inductor would hand out one memory for the results of every
    call, and goes back to allocations beside a library. Up to 0.8 MB, which the threads of Linux have.
    """
    on_stack = find("torch._inductor.codegen.cpp_wrapper_cpu_array_ref.CppWrapperCpuArrayRef")
    common = find("torch._inductor.codegen.common")
    setting = configured({"aot_inductor.allow_stack_allocation": True})
    try:
        common.init_backend_registration()
        backend = common.device_codegens["cpu"]
        before = backend.cpp_wrapper_codegen
    except (AttributeError, KeyError):
        on_stack = None
    if on_stack is None or setting is _NOTHING:  # allocations, then
        yield
        return
    backend.cpp_wrapper_codegen = on_stack
    try:
        with setting:
            yield
    finally:
        backend.cpp_wrapper_codegen = before


@contextlib.contextmanager
def _all_headers_precompiled() -> Iterator[None]:
    """The headers of kernels precompiled with those of calls; inductor has each compile read the former, half its time.

    Inductor asks for the one header that a compile reads in a compiled form, and puts it between ``#include <`` and
    ``>``.
    """
    cache = find("torch._inductor.codecache")
    of_calls = getattr(cache, "_get_cpp_wrapper_header", None)
    of_kernels = getattr(cache, "_get_cpp_prefix_header", None)
    if of_calls is None or of_kernels is None:  # read each time, then
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


# -- Pyro --------------------------------------------------------------------------------------------------------------


def offered(message: Any, kinds: tuple[type, ...]) -> Any:
    """The value that Pyro's handlers of these kinds give a message, innermost first; None where none does."""
    for frame in reversed(find("pyro.poutine.runtime._PYRO_STACK") or ()):
        process = getattr(frame, "_process_message", None)
        if process is not None and isinstance(frame, kinds):
            process(message)
        if message["value"] is not None or message["stop"]:
            break
    return message["value"]


@contextlib.contextmanager
def values_unchecked() -> Iterator[None]:
    """Distributions take any value: those expanded while validation was on carry a flag of their own."""
    kind: Any = torch.distributions.Distribution
    before = getattr(kind, "_validate_sample", None)
    kind._validate_sample = lambda self, value: None
    try:
        yield
    finally:
        if before is None:
            del kind._validate_sample
        else:
            kind._validate_sample = before
