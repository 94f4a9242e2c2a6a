"""Names of torch's compiler that torch does not promise to keep: what is gone costs speed, no fit.

They are looked up when they are used. No file but this one and those called ``private_…`` beside it uses such a name (a
test searches the source), and the same test takes each of them away: what inductor lacks,
:mod:`pyrobnn.model.compile` leaves to the public ``torch.compile``.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import inspect
import logging
import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule


class Gone(ImportError):
    """A name that this torch does not have."""


#: errors of a name that has moved, or has another signature
MOVED = (ImportError, AttributeError, KeyError, TypeError, AssertionError)
Context = contextlib.AbstractContextManager[Any]


def find(name: str) -> Any:
    """What a dotted name stands for; None where this release does not have it."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return None


def required(name: str) -> Any:
    """What a dotted name stands for; Gone where this release does not have it."""
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


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute that has another value inside."""
    before = inspect.getattr_static(owner, name)  # of a class a static method as it is
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _tracing(**options: Any) -> Context:
    fake_mode = required("torch._subclasses.fake_tensor.FakeTensorMode")(**options)
    return required("torch._guards.tracing")(required("torch._guards.TracingContext")(fake_mode))


# -- inductor ----------------------------------------------------------------------------------------------------------


def order_operator() -> Any:
    """Inductor's operator (tensor, strides) that stores a tensor as the strides say; None where there is none."""
    operator = find("torch._inductor.inductor_prims.force_stride_order")
    return getattr(operator, "default", operator)


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
        shapes = required("torch.fx.experimental.symbolic_shapes.ShapeEnv")
        config = required("torch._inductor.config")
        if on_stack:
            # before the settings, which a first registration would keep for every later compile
            required("torch._inductor.codegen.common").init_backend_registration()
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
        patterns = required("torch._inductor.fx_passes.joint_graph")
        stack.enter_context(replaced(patterns, "lazy_init", lambda *_: None))

        if on_stack:
            stack.enter_context(_intermediates_on_the_stack())
        call: Callable[..., Any] = required("torch._inductor.compile")(graph, inputs)
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
    vectors = required("torch._inductor.cpu_vec_isa")
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
    common = required("torch._inductor.codegen.common")
    calls = required("torch._inductor.codegen.cpp_wrapper_cpu_array_ref.CppWrapperCpuArrayRef")
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
    """The garbage collector goes through new objects alone: through all of torch, it takes a sixth of a compile.

    Where the program has frozen objects itself they stay so, and no others are.
    """
    if gc.get_freeze_count():
        yield
        return
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
        data = required("torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr")
        # without it no such file can be loaded
        os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(data)
        loader = ExtensionFileLoader(f"{Path(path).stem}.inductor_entry_cpp", path)
        module = importlib.util.module_from_spec(ModuleSpec(loader.name, loader, origin=path))
        loader.exec_module(module)
        self.path = path
        self._constants = _constants(graph)
        self._enter = module.inductor_entry_cpp
        self._handles = required("torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors")

    def __call__(self, *args: Tensor) -> None:
        self._enter(self._handles([*self._constants, *args]))


@functools.cache  # the same objects at every compile: inductor's own caches go by them
def _instruction_sets_of_the_cpu() -> list[Any]:
    """Those of an x86 CPU, AMX left out, without inductor's trial of each: a third of the first compile.

    A C++ compiler that reads torch's headers knows them; where one does not, ``torch.compile`` tries.
    """
    sets = required("torch._inductor.cpu_vec_isa")
    names = {*sets.x86_isa_checker()} - {"amx_tile"}
    supported = [isa for isa in sets.supported_vec_isa_list if {*str(isa).split()} <= names]
    kinds = [type(isa) for isa in supported]
    # true without inductor's trial compile
    return [type(kind.__name__, (kind,), {"__bool__": lambda self: True})() for kind in kinds]


def _few_headers_precompiled() -> Context:
    """Inside, one precompiled header holds those of calls, of the stack and of kernels, not those of torch's tensors.

    Otherwise each compile reads the headers of kernels and instantiates the templates of all, three quarters of its
    time. Inductor asks for the name of one header and writes ``#include <NAME>``. The text that it gets here ends the
    first bracket itself and leaves the last one open: so it includes several.
    """
    cache = required("torch._inductor.codecache")
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
    kernels = required("torch._inductor.codegen.cpp")
    common = required("torch._inductor.codegen.common")
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
