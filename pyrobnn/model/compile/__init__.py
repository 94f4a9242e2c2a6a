"""From a pure tensor function to machine code: traced once, fused by inductor, called without guards.

Every hot loop of the library (a leapfrog for all chains, an SVI update, a batched gradient) is a pure function of a
few tensors of fixed shape. :func:`compiled` runs its Python once under ``make_fx`` and hands the flat ATen graph to
inductor *directly*: Dynamo would check its guards at every call, and cannot trace some of the graphs at all.

In the order of reading: ``trees`` and ``graph_nodes`` (what a graph says), ``forecast`` (what a tier costs),
``interpreted`` (the graph without a compiler), ``inductor`` (the hand-over; ``products`` and ``indices`` prepare the
graph), ``agreement`` (the check), ``right_code`` and ``code_folder`` (what is kept), ``interrupts``; ``scan`` and
``repeats`` stand on all of it. A *mode* is this package's word for how a function runs, a *tier* the user's, see
:data:`_TIERS`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pyrobnn.core.private import Gone
from pyrobnn.core.private_trace import trace
from pyrobnn.core.seeding import kept
from pyrobnn.core.threads import (
    enter_large_step,
    enter_small_step,
    process_state,
    threads_outside,
)
from pyrobnn.model.compile.agreement import disagreement, snapshot
from pyrobnn.model.compile.code_folder import provide_folder
from pyrobnn.model.compile.forecast import Forecast, Work, is_looped, is_small
from pyrobnn.model.compile.graph_nodes import library_calls, size
from pyrobnn.model.compile.inductor import (
    Untraceable,
    first_line,
    machine_code,
    public_code,
    tolerable,
    traced,
)
from pyrobnn.model.compile.interpreted import interpreted
from pyrobnn.model.compile.interrupts import raised_by_handlers
from pyrobnn.model.compile.products import DECOMPOSITIONS, materialize
from pyrobnn.model.compile.right_code import RIGHT, Code, keep
from pyrobnn.model.compile.trees import TensorFunction, Tree, leaves_of, mapped

__all__ = [
    "Compiled",
    "CudaGraph",
    "compiled",
    "first_line",
    "library_elements",
    "materialize",
    "recorded",
]
#: calls that repay a trace: it costs as much as ten calls of the function itself, and each of its own a fifth of one
_REPAYS_TRACE = 15
_log = logging.getLogger(__name__)
provide_folder()  # before anything imports torch's compiler
#: what the user reads of each mode
_TIERS = {"inductor": "compiled", "graph": "trace", "eager": "eager"}
#: all that `compiled` returns inside of `recorded`; None outside
_made: ContextVar[list[Compiled] | None] = ContextVar("_made", default=None)
#: whether the bodies of loops are compiled in the trace under way
_compiles_bodies: ContextVar[bool] = ContextVar("_compiles_bodies", default=True)


class Compiled:
    """A compiled function of tensors, as returned by :func:`compiled`.

    Attributes:
        seconds: Wall-clock seconds that tracing and compiling took.
        mode: ``"inductor"`` (machine code), ``"graph"`` (traced and interpreted: it was not to be compiled, or could
            not be) or ``"eager"`` (the function itself).
        calls: How often it will be called; 0 where that is not known.
        forecast: What either tier will cost, forecast from the graph; None where none was traced for it.
        unchecked: The same function for a loop: call it inside ``torch.no_grad()`` and after :meth:`check`, because
            machine code reads whatever lies at the addresses it is given.
    """

    def __init__(
        self,
        call: TensorFunction,
        mode: str,
        seconds: float,
        example: tuple[Tree, ...] = (),
    ) -> None:
        self.unchecked: Callable[..., Any] = call
        self.mode = mode
        self.seconds = seconds
        self.forecast: Forecast | None = None
        self.calls = 0
        self._layouts = [_layout(leaf) for leaf in leaves_of(example)] if mode != "eager" else None

    @property
    def tier(self) -> str:
        """``"compiled"``, ``"trace"`` or ``"eager"``."""
        return _TIERS[self.mode]

    def __call__(self, *args: Tree) -> Any:
        self.check(*args)
        with torch.no_grad():
            return self.unchecked(*args)

    def check(self, *args: Tree) -> None:
        """Raise a ValueError unless the arguments are laid out in memory as the example was."""
        if self._layouts is None:
            return
        layouts = [_layout(leaf) for leaf in leaves_of(args)]
        if layouts != self._layouts:
            raise ValueError(
                f"compiled for other tensors: expected {self._layouts}, got {layouts} (shape, strides, dtype, device)"
            )


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """Shape, strides, dtype and device."""
    # the stride along a dimension of length one is never used
    strides = [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return tuple(tensor.shape), tuple(strides), tensor.dtype, tensor.device


def _copied(tensor: Tensor) -> Tensor:
    """A copy with the strides of the tensor, which ``clone`` gives up where there are gaps in memory.

    Of any size, and with the tensor's memory between its elements, for a trace may write there; one of
    :func:`agreement.snapshot` is made to compare results, and leaves the largest as they are.
    """
    copy = tensor.clone()
    if copy.stride() == tensor.stride() or not tensor.numel():
        return copy
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.as_strided((1 + reach,), (1,)).clone()
    return memory.as_strided(tensor.shape, tensor.stride())


def compiled(
    fn: TensorFunction,
    *example: Tree,
    enabled: bool | str = True,
    calls: int | None = None,
    name: str = "the function",
    clone: bool = True,
    say: Callable[[str], None] | None = None,
) -> Compiled:
    """Compile a pure function of tensors for the shapes, strides, dtypes and device of the example.

    The function may use ``torch.func`` transforms, draw from torch's generator and write into its arguments in place.
    Its Python runs once, here: what is not a tensor argument is a constant of the result. No gradients flow through it.

    Args:
        fn: A function of tensors, or of (nested) dicts, lists and tuples of tensors, returning the same.
        *example: Arguments of the shapes the result will be called with.
        enabled: ``True`` compiles; ``False`` does not: it returns the traced graph, interpreted, or ``fn`` itself
            behind the same interface where so few ``calls`` do not repay a trace, or none can be made. ``"auto"`` is
            what the forecast says costs less. ``"trace"`` is the interpreted graph, ``"eager"`` the function itself.
        calls: How often the result will be called; None where that is not known: ``"auto"`` compiles then.
        name: What to call the function in a warning.
        clone: Trace on copies of the example. ``False`` saves the copy where ``fn`` may write into the example.
        say: Called with a sentence before a compile, which takes its time.

    Raises:
        TypeError: If an example argument holds something that is not a tensor.

    Warns:
        UserWarning: Once, if the function cannot be traced (its control flow depends on the values of tensors) or
            inductor cannot compile it (no C++ compiler). The result then runs slower and gives the same numbers.

    Example:
        >>> import torch
        >>> step = compiled(lambda z: (z - 0.1 * z, (z * z).sum()), torch.ones(3))
        >>> step(torch.ones(3))[1].item()
        3.0
    """
    leaves = leaves_of(example)
    _check_tensors(leaves)
    if enabled == "eager" or not _repays_trace(enabled, calls, leaves):
        return _recorded(Compiled(fn, "eager", 0.0), calls)
    start = time.perf_counter()

    def flat_fn(*flat: Tensor) -> Any:
        tensors = iter(flat)
        return fn(*mapped(lambda _: next(tensors), example))

    inputs = [leaf.detach() for leaf in leaves]
    if clone:
        inputs = [_copied(leaf) for leaf in inputs]
    with threads_outside(), tracing(inputs), bodies_compiled(enabled not in (False, "trace")):
        try:
            execution = _execution(flat_fn, inputs, enabled, calls, name, say)
        except (Untraceable, Gone) as error:
            if enabled:
                _warn(name, f"could not be traced ({error})", "it runs eagerly, much slower")
            return _recorded(Compiled(fn, "eager", time.perf_counter() - start), calls)
    call = execution.call
    if any(not isinstance(argument, Tensor) for argument in example):
        call = _of_trees(call)
    result = Compiled(call, execution.mode, time.perf_counter() - start, example)
    result.forecast = execution.forecast
    return _recorded(result, calls)


@contextlib.contextmanager
def recorded() -> Iterator[list[Compiled]]:
    """A list of all that :func:`compiled` returns inside, in this thread; one around it has them too."""
    made: list[Compiled] = []
    around = _made.get()
    token = _made.set(made)
    try:
        yield made
    finally:
        _made.reset(token)
        if around is not None:
            around += made


def _recorded(result: Compiled, calls: int | None) -> Compiled:
    result.calls = calls or 0
    made = _made.get()
    if made is not None:
        made.append(result)
    return result


@contextlib.contextmanager
def bodies_compiled(compiles: bool) -> Iterator[None]:
    """Inside, the body of a loop becomes machine code, or is interpreted."""
    token = _compiles_bodies.set(compiles)
    try:
        yield
    finally:
        _compiles_bodies.reset(token)


def compiles_bodies() -> bool:
    """Whether the body of a loop is to become machine code."""
    return _compiles_bodies.get()


def _repays_trace(
    enabled: bool | str,
    calls: int | None,
    leaves: Sequence[Tensor],
) -> bool:
    """Whether so many calls repay a trace, where it is not asked for whatever it costs."""
    if enabled == "auto":
        return calls is None or calls >= _REPAYS_TRACE or not all(map(_is_on_cpu, leaves))
    return bool(enabled) or (calls is not None and calls >= _REPAYS_TRACE)


class _Execution(NamedTuple):
    """How a function is called, in which mode, and what was forecast."""

    call: Callable[..., Any]
    mode: str
    forecast: Forecast | None = None


def _execution(
    fn: TensorFunction,
    inputs: list[Tensor],
    enabled: bool | str,
    calls: int | None,
    name: str,
    say: Callable[[str], None] | None,
) -> _Execution:
    """Machine code or the interpreted graph, as was asked for or as the forecast says."""
    _check_classes(inputs)
    forecast = None
    # the costs are those of a CPU, and a step of unknown number of calls may run for hours
    foresees = enabled == "auto" and calls is not None and all(map(_is_on_cpu, inputs))
    if foresees or enabled in (False, "trace"):
        example = snapshot(inputs)
        graph = traced(fn, inputs)
        forecast = Forecast(Work.of(graph), calls or 0, is_looped(graph))
        if enabled != "auto" or (forecast.tier == "trace" and not forecast.looped):
            is_short = is_small(graph)
            return _Execution(_on_threads(interpreted(graph, example), is_short), "graph", forecast)
        inputs = example
    if say is not None:
        say(_compiling(forecast))
    return _Execution(*_checked(fn, inputs, name), forecast)


def _on_threads(call: TensorFunction, is_small: bool) -> TensorFunction:
    """A function that computes in this thread alone in a loop whose steps are all small."""
    enter = enter_small_step if is_small else enter_large_step

    @functools.wraps(call)
    def on_its_threads(*args: Tensor) -> Any:
        enter()
        return call(*args)

    return on_its_threads


def _on_fitting_threads(code: Code) -> TensorFunction:
    """Machine code whose products, if any, are computed on the threads that they are worth."""
    graph = code.graph()
    # its own loops have their number of threads
    return _on_threads(code.call, is_small(graph)) if library_calls(graph) else code.call


def _check_classes(inputs: Sequence[Tensor]) -> None:
    """Untraceable where an argument is of a class derived from Tensor: it may be taken for a constant."""
    derived = sorted({type(tensor).__name__ for tensor in inputs} - {"Tensor", "Parameter"})
    if derived:
        raise Untraceable(f"tensors of the class {derived[0]} cannot be followed")


def _is_on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _compiling(forecast: Forecast | None) -> str:
    """What is said of a compile before it."""
    if forecast is None:
        return "compiling"
    return f"compiling, about {forecast.seconds_to_compile():.0f} s"


def _check_tensors(leaves: Sequence[Tree]) -> None:
    """Refuse an example that holds anything but tensors."""
    foreign = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)]
    if foreign:
        raise TypeError(
            f"the example holds a {foreign[0]} but only tensors are arguments: close over the rest"
        )


@contextlib.contextmanager
def tracing(inputs: Sequence[Tensor]) -> Iterator[None]:
    """The context in which a user's Python is traced: one thread, no gradients, random states as before."""
    devices = [tensor.device for tensor in inputs]
    with process_state(), raised_by_handlers(), torch.no_grad(), kept(*devices):
        yield


def _of_trees(flat_call: TensorFunction) -> Callable[..., Any]:
    """A function of flat tensors as one of trees of tensors."""

    def call(*args: Tree) -> Any:
        return flat_call(*leaves_of(args))

    return call


class _Failure(NamedTuple):
    """Why a way to compile a function gives no code: it ``"failed"`` or gave ``"wrong numbers"``, and the details."""

    kind: Literal["failed", "wrong numbers"]
    details: str


def _checked(fn: TensorFunction, inputs: list[Tensor], name: str) -> tuple[Callable[..., Any], str]:
    """Machine code whose results on the inputs are those of ``fn``, or else the traced graph; and which of the two."""
    unwritten_inputs = snapshot(inputs)
    code = _attempt(machine_code, fn, inputs, unwritten_inputs)
    if isinstance(code, Code):
        keep(code)
        return _on_fitting_threads(code), "inductor"
    slower = _attempt(public_code, fn, inputs, unwritten_inputs)
    if isinstance(slower, Code):
        verb = "gave wrong numbers" if code.kind == "wrong numbers" else "failed"
        message = (
            "%s is slower than it might be: torch.compile has compiled it, since pyrobnn's own "
            "compilation %s (%s)"
        )
        _log.warning(message, name, verb, code.details)
        return slower.call, "inductor"
    verb = "could not be compiled"
    if code.kind == "wrong numbers":
        verb = "gives wrong numbers when compiled"
    details = code.details
    # the same failure is told once
    if slower != code:
        details += f"; by torch.compile alone: {slower.details}"
    consequence = "its traced graph is interpreted, several times slower"
    if "wrong numbers" in (code.kind, slower.kind):
        consequence += ". Please report this with the model"
    _warn(name, f"{verb} ({details})", consequence)
    return interpreted(traced(fn, inputs), unwritten_inputs), "graph"


def _attempt(
    compiler: Callable[..., Code],
    fn: TensorFunction,
    inputs: list[Tensor],
    unwritten_inputs: list[Tensor],
) -> Code | _Failure:
    """Code whose results on the inputs, as they were at first, are those of ``fn``; or what is wrong with it."""
    try:
        code = compiler(fn, inputs)
    except Untraceable:
        raise
    except Exception as error:  # inductor wraps compiler failures in many types
        return _Failure("failed", first_line(tolerable(error)))
    if code.identity in RIGHT:
        return code
    difference = disagreement(code.origin, code.call, unwritten_inputs, code.graph)
    return code if difference is None else _Failure("wrong numbers", difference)


def library_elements(fn: TensorFunction, *example: Tensor) -> int:
    """Elements of the largest tensor that a matrix product or convolution of ``fn`` touches; 0 if untraceable."""
    try:
        with tracing(example):
            graph = trace(fn, list(example), DECOMPOSITIONS)
    except Exception as error:  # whatever a user's program may raise under tracing
        tolerable(error)
        return 0
    largest = 0
    for call in library_calls(graph):
        largest = max(largest, *map(size, (call, *call.all_input_nodes)))
    return largest


def _warn(name: str, failure: str, consequence: str) -> None:
    warnings.warn(
        f"{name} {failure}: {consequence}",
        UserWarning,
        stacklevel=4,
    )


@contextlib.contextmanager
def _without_synchronizing() -> Iterator[None]:
    """A RuntimeError for what waits for the device: a capture that fails half-way leaves torch's generator in it."""
    earlier_mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(earlier_mode)


class CudaGraph:
    """A function on static CUDA buffers, captured once and replayed with one launch.

    The function must read and write only the tensors it closes over or is given here, and never synchronise. It runs
    three times on a side stream before the capture, as CUDA graphs require: the buffers must tolerate that.

    Args:
        fn: The function, compiled or not. Its returned tensors are static too: each replay overwrites ``outputs``.
        *buffers: Its arguments: CUDA tensors whose storage stays where it is.

    Raises:
        ValueError: If a buffer is not on a CUDA device.
        RuntimeError: The function synchronises, or cannot be captured for another reason.
    """

    def __init__(self, fn: TensorFunction, *buffers: Tensor) -> None:
        wrong = [str(buffer.device) for buffer in buffers if not buffer.is_cuda]
        if wrong or not buffers:
            raise ValueError(
                f"CUDA graphs need every buffer on CUDA, got {wrong or 'no buffer'}: use device='cuda'"
            )
        self._buffers = buffers  # keeps the captured addresses alive
        device = buffers[0].device
        with torch.cuda.device(device), torch.no_grad():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    fn(*buffers)
                with _without_synchronizing():
                    fn(*buffers)
            torch.cuda.current_stream().wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self.outputs = fn(*buffers)

    def replay(self) -> None:
        """Run the captured work once, asynchronously."""
        self._graph.replay()
