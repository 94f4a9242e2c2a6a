"""The hand-over of a traced graph to inductor: its settings, our own graph passes, and where intermediates lie."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pyrobnn.compile.folding import fold_constants, hoist_invariants, materialize_broadcasts
from pyrobnn.compile.products import lay_out_data_innermost, library_calls, returns_nothing, size

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


def machine_code(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """A flat graph compiled by inductor and called once, so that nothing is left to be set up lazily.

    Inductor keeps its results on disk (``TORCHINDUCTOR_CACHE_DIR``) only for graphs with a shape environment: with one,
    the second fit of the same model and shapes, in this process or another, compiles several times faster.
    """
    import torch._inductor as inductor  # imported late: 2 s that `import pyrobnn` need not pay
    import torch._inductor.config as config
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    settings: dict[str, Any] = dict(_INDUCTOR)
    device = next((tensor.device for tensor in inputs if tensor.device.type != "cpu"), torch.device("cpu"))
    on_cpu, on_stack = device.type == "cpu", False
    if on_cpu:
        hoist_invariants(graph)
    fold_constants(graph, device)
    if on_cpu:
        # calls and allocations in C++ instead of Python
        settings["cpp_wrapper"] = True
        lay_out_data_innermost(graph)
        materialize_broadcasts(graph)
        if _largest(graph) < _PARALLEL_FROM:
            settings["cpp.threads"] = 1
        on_stack = sys.platform == "linux" and returns_nothing(graph) and not library_calls(graph)
    shapes = tracing(TracingContext(FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)))
    memory = _intermediates_on_stack() if on_stack else contextlib.nullcontext()
    with warnings.catch_warnings(), _quiet("torch._inductor.ir"), config.patch(settings), shapes, memory:
        warnings.simplefilter("ignore")  # inductor's remarks on its own internals
        call = inductor.compile(graph, inputs)
        call(*inputs)
    return call


@contextlib.contextmanager
def _intermediates_on_stack() -> Iterator[None]:
    """Intermediate tensors of a small function on the stack, where each would be an allocation: half of a short step.

    For functions that return nothing and call no library: inductor would hand out one memory for the results of every
    call, and goes back to allocations beside a library. Up to 0.8 MB, which the threads of Linux have.
    """
    import torch._inductor.config as config

    try:
        from torch._inductor.codegen import common
        from torch._inductor.codegen.cpp_wrapper_cpu_array_ref import CppWrapperCpuArrayRef

        common.init_backend_registration()
        backend = common.device_codegens["cpu"]
    except (ImportError, AttributeError, KeyError):  # a torch that is built otherwise: allocations, then
        yield
        return
    before, backend.cpp_wrapper_codegen = backend.cpp_wrapper_codegen, CppWrapperCpuArrayRef
    try:
        with config.patch({"aot_inductor.allow_stack_allocation": True}):
            yield
    finally:
        backend.cpp_wrapper_codegen = before


@contextlib.contextmanager
def _quiet(logger: str) -> Iterator[None]:
    """Without a logger's remarks: inductor names every operator that has no C++ entry, which is no one's concern."""
    found = logging.getLogger(logger)
    before, found.disabled = found.disabled, True
    try:
        yield
    finally:
        found.disabled = before


def _largest(graph: torch.fx.GraphModule) -> int:
    """Elements of the largest tensor that the graph computes; one that it only writes into does not count."""
    operators = [node for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return max((size(node) for node in operators if not node.target._schema.is_mutable), default=0)
