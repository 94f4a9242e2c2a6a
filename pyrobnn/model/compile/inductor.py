"""The hand-over of a function to inductor.

Small products as arithmetic and the allocation on the stack rest on unwritten laws of inductor. They are tried on every
torch from :data:`OLDEST` on, and the check of the compiled function decides whether they are used: where it fails,
``torch.compile`` compiles the function.
"""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pyro
import torch
from torch import Tensor
from torch.fx import GraphModule

from pyrobnn.core import private, private_trace
from pyrobnn.model.compile.code_folder import remove_torn
from pyrobnn.model.compile.forecast import is_looped
from pyrobnn.model.compile.graph_nodes import (
    library_calls,
    schemas_of,
    shapes_depend_on_values,
    size,
)
from pyrobnn.model.compile.indices import compute_indices
from pyrobnn.model.compile.products import DECOMPOSITIONS
from pyrobnn.model.compile.right_code import RIGHT, Code, identity_of, recorded_library
from pyrobnn.model.compile.trees import TensorFunction

#: the value of an option of inductor
_Setting = str | bool | int | Callable[..., Any]

#: the lower bound of setup.cfg: no older torch has run the small products and the allocation on the stack
OLDEST = "2.11"
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
    "aot_inductor.enable_line_tables": False,  # a tenth of the C++ compiler's time
}
# Below this size of the largest tensor, threads cost more at their barriers than they save.
_PARALLEL_FROM = 2**16


class Untraceable(RuntimeError):
    """A function whose control flow depends on the values of tensors."""


class NoCompiler(RuntimeError):
    """A machine without a C++ compiler."""


class OldTorch(RuntimeError):
    """A torch below the lower bound of the package."""


def machine_code(fn: TensorFunction, inputs: list[Tensor]) -> Code:
    """A flat function, compiled by inductor with small products as arithmetic and intermediates on the stack.

    It is called once, so that nothing is left to be set up lazily. Raises OldTorch, NoCompiler, and what torch raises
    where a private name or an unwritten law of it has changed.
    """
    remove_torn()
    # a TorchVersion, which compares by number, not by letter
    if torch.__version__ < OLDEST:
        raise OldTorch(f"torch {torch.__version__} is older than {OLDEST}")
    return _fused(fn, inputs)


def public_code(fn: TensorFunction, inputs: list[Tensor]) -> Code:
    """A flat function, compiled by ``torch.compile`` and called once; each call costs several times as much.

    Raises Untraceable, NoCompiler, and what torch raises.
    """
    _need_compiler(inputs)
    graph = traced(fn, inputs)
    return Code(_publicly(graph, inputs), functools.partial(private_trace.trace, fn, inputs), fn)


def _need_compiler(inputs: list[Tensor]) -> None:
    if _on_cpu(inputs) and private.lacks_compiler():
        remedies = {
            "darwin": "xcode-select --install",
            "win32": "Visual Studio's build tools for C++",
        }
        remedy = remedies.get(sys.platform, "apt install g++, or your system's counterpart")
        raise NoCompiler(f"there is no C++ compiler: {remedy}")


def _on_cpu(inputs: list[Tensor]) -> bool:
    return all(tensor.device.type == "cpu" for tensor in inputs)


def traced(fn: TensorFunction, inputs: list[Tensor]) -> GraphModule:
    """The flat graph of ATen operators that ``fn`` comes to; ``fn`` runs once and may write into the inputs."""
    try:
        graph = private_trace.trace(fn, inputs)
    except private.Gone:
        raise
    except Exception as error:  # whatever a user's program may raise under tracing
        looks = "aten._local_scalar_dense" in str(error)  # how torch names it
        raise Untraceable(_LOOKS if looks else first_line(tolerable(error))) from error
    _check_shapes(graph)
    return graph


def _check_shapes(graph: GraphModule) -> None:
    """Untraceable where shapes depend on values: another call would be computed with the shapes of the first."""
    if shapes_depend_on_values(graph):
        raise Untraceable(
            "a mask that depends on the values of tensors picks elements: use torch.where"
        )


def tolerable(error: Exception) -> Exception:
    """An error that slower code answers; MemoryError and TimeoutError, which are none of the compiler's, are raised."""
    origin = private.origin(error)
    if isinstance(origin, (MemoryError, TimeoutError)):
        raise origin
    return error


def first_line(error: Exception) -> str:
    """An error in one line: its type and the beginning of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _fused(fn: TensorFunction, inputs: list[Tensor]) -> Code:
    """Compiled with small products as arithmetic, calls in C++ and intermediates on the stack, or loaded from disk."""
    graph = private_trace.trace(fn, inputs, DECOMPOSITIONS)
    _check_shapes(graph)
    compute_indices(graph)
    untouched = GraphModule(graph, copy.deepcopy(graph.graph))
    on_cpu = _on_cpu(inputs)
    only_writes = not graph.graph.output_node().all_input_nodes
    has_loop = is_looped(graph)
    # such code can be loaded from disk; if it also calls no library, its intermediates fit on the stack
    is_loadable = on_cpu and sys.platform == "linux" and only_writes and not has_loop
    # WORKAROUND(torch<=2.14): inductor hands an array on the stack to bernoulli_, which takes a handle of a tensor
    on_stack = is_loadable and not library_calls(graph) and not _draws_bernoulli(graph)
    identity = identity_of(untouched, inputs, _INDUCTOR)
    if identity and is_loadable:
        library = recorded_library(identity, graph)
        if library is not None:
            RIGHT.add(identity)
            return Code(library, lambda: untouched, fn, identity)
    _need_compiler(inputs)
    settings = _settings(graph, inputs)
    settings["cpp_wrapper"] = on_cpu
    settings["aot_inductor.allow_stack_allocation"] = on_stack
    # in so small a function vector code saves a fifth of a step at most, and takes a second longer to make
    scalar = _largest(graph) <= 512
    with warnings.catch_warnings(action="ignore"):  # inductor's remarks on its own internals
        call = private.compile_graph(graph, inputs, settings, on_stack, scalar)
    # a loop in Python takes its time at every step; its body was compared by itself
    return Code(call, lambda: untouched, untouched if has_loop else fn, identity)


def _draws_bernoulli(graph: GraphModule) -> bool:
    """Whether the graph draws zeros and ones, as dropout does."""
    operators = {torch.ops.aten.bernoulli, torch.ops.aten.bernoulli_}
    return any(
        getattr(node.target, "overloadpacket", None) in operators for node in graph.graph.nodes
    )


def _settings(graph: GraphModule, inputs: list[Tensor]) -> dict[str, _Setting]:
    """Inductor's settings for a graph: one thread where all of its tensors are small."""
    settings: dict[str, _Setting] = dict(_INDUCTOR)
    if _on_cpu(inputs) and _largest(graph) < _PARALLEL_FROM:
        settings["cpp.threads"] = 1
    return settings


def _largest(graph: GraphModule) -> int:
    """Elements of the largest tensor that a graph computes; what is only written into does not count."""
    schemas = schemas_of(graph)
    computed = [node for node, schema in schemas.items() if schema and not schema.is_mutable]
    return max(map(size, computed), default=0)


def _publicly(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """The graph, compiled by ``torch.compile``."""
    settings = _settings(graph, inputs)
    # Compiled checks its arguments itself, and every graph is a function of its own
    skip_guards = getattr(torch.compiler, "skip_all_guards_unsafe", None)
    if skip_guards is not None:
        settings["guard_filter_fn"] = skip_guards
    before = pyro.settings.get()
    try:
        with warnings.catch_warnings(action="ignore"):
            settings = {name: value for name, value in settings.items() if _is_option(name, value)}
            # not the module: the hooks of modules would be looked for at every call
            call: Callable[..., Any] = torch.compile(graph.forward, options=settings)
            call(*inputs)
    finally:
        # WORKAROUND(torch<=2.13): Dynamo turns the validation of distributions off for good
        pyro.settings.set(**before)
    return call


def _is_option(name: str, value: _Setting) -> bool:
    """Whether this release of ``torch.compile`` takes an option; nothing is compiled."""
    try:
        torch.compile(torch.sin, options={name: value})
    except (RuntimeError, AttributeError, TypeError):
        return False
    return True
