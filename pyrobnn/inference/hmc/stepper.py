"""The step of the machine, compiled; on a GPU captured in a CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyrobnn.inference.hmc.machine import Machine, State
from pyrobnn.inference.hmc.run_state import Chains
from pyrobnn.model.compile import Compiled, CudaGraph, compiled, first_line
from pyrobnn.model.compile.forecast import Compile
from pyrobnn.model.compile.interrupts import TimeSpent, limited


@dataclass(frozen=True, eq=False)
class Stepper:
    """What takes the steps of a run.

    Attributes:
        advance: chains and a number of leapfrogs → the machine's state after them; written in place.
        seconds: that compiling took.
        mode: how the step was compiled, or what failed.
    """

    advance: Callable[[Chains, int], State]
    seconds: float
    mode: str


def prepared(
    machine: Machine,
    chains: Chains,
    keys: Tensor,
    *,
    compile: Compile = "auto",
    calls: int | None = None,
    within: float | None = None,
    say: Callable[[str], None] | None = None,
) -> Stepper:
    """The stepper of a run, its step compiled within so many seconds; given up, it is not compiled.

    ``calls``: about how many leapfrogs there will be; ``say`` is told of a compile before it.
    """
    # what a run that goes on has in them; none of a new run
    contents = [buffer.clone() for buffer in chains.buffers] if chains.total_steps else []
    step = _compiled_step(machine, chains, keys, compile, calls, within, say)
    for buffer, content in zip(chains.buffers, contents, strict=False):
        buffer.copy_(content)
    mode = step.mode
    if machine.device.type == "cuda" and mode == "inductor":
        try:
            return Stepper(replayed(step, chains, keys), step.seconds, mode)
        except RuntimeError as error:
            mode = f"captured in a CUDA graph ({first_line(error)})"
    return Stepper(_called(step, keys), step.seconds, mode)


def _compiled_step(
    machine: Machine,
    chains: Chains,
    keys: Tensor,
    compile: Compile,
    calls: int | None,
    within: float | None,
    say: Callable[[str], None] | None,
) -> Compiled:
    """The step compiled; uncompiled once its time is spent."""
    state = (tensor.clone() for tensor in chains.state)
    example = (*state, *chains.buffers, chains.scale, keys)
    if not machine.traceable:
        step = Compiled(machine.step, "eager", 0.0)
        step.calls = calls or 0
        return _around_gradient(machine, example, step)
    begun = time.perf_counter()
    try:
        with limited(within):
            step = compiled(
                machine.step,
                *example,
                enabled=compile,
                calls=calls,
                name="the model",
                clone=False,
                say=say,
            )
            return step if step.mode != "eager" else _around_gradient(machine, example, step)
    except TimeSpent:
        step = compiled(
            machine.step,
            *example,
            enabled=False,
            calls=calls,
            clone=False,
        )
        step.seconds = time.perf_counter() - begun
        return step


def _around_gradient(
    machine: Machine,
    example: tuple[Tensor, ...],
    step: Compiled,
) -> Compiled:
    """The step of a density that cannot be traced, whose Python looks at values: what is around its gradient is traced.

    That is nine tenths of the operations of a step. Where so few calls do not repay a trace it stays as it is.
    """

    def position(*arguments: Tensor) -> Tensor:
        return machine.next_position(*arguments)

    def rest(gradient: Tensor, value: Tensor, *arguments: Tensor) -> tuple[()]:
        return replace(machine, gradient=lambda _: (gradient, value)).step(*arguments)

    with torch.no_grad():
        gradient, value = machine.gradient(position(*example))
    before = compiled(
        position,
        *example,
        enabled=False,
        calls=step.calls,
    )
    after = compiled(
        rest,
        gradient,
        value,
        *example,
        enabled=False,
        calls=step.calls,
    )

    def whole(*arguments: Tensor) -> tuple[()]:
        gradient, value = machine.gradient(before.unchecked(*arguments))
        after.unchecked(gradient, value, *arguments)
        return ()

    seconds = step.seconds + before.seconds + after.seconds
    around = Compiled(whole, "eager", seconds)
    around.calls = step.calls
    return around


def _called(step: Compiled, keys: Tensor) -> Callable[[Chains, int], State]:
    """To advance by calls."""

    def advance(chains: Chains, num: int) -> State:
        state = State(*(tensor.contiguous() for tensor in chains.state))  # written into
        arguments = (*state, *chains.buffers, chains.scale, keys)
        step(*arguments)
        with torch.no_grad():
            for _ in range(num - 1):
                step.unchecked(*arguments)
        return state

    return advance


def replayed(
    step: Callable[..., tuple[()]],
    chains: Chains,
    keys: Tensor,
) -> Callable[[Chains, int], State]:
    """To advance by replays of a CUDA graph; RuntimeError where the step cannot be captured."""
    num = len(chains.state)
    contents = [buffer.clone() for buffer in chains.buffers]
    static = tuple(tensor.clone() for tensor in (*chains.state, chains.scale, keys))
    try:
        graph = CudaGraph(step, *static[:num], *chains.buffers, *static[num:])
    finally:  # the calls before the capture never happened
        for buffer, content in zip(chains.buffers, contents, strict=True):
            buffer.copy_(content)

    def advance(chains: Chains, count: int) -> State:
        for place, value in zip(
            static,
            (*chains.state, chains.scale, keys),
            strict=True,
        ):
            if place is not value:
                place.copy_(value)
        for _ in range(count):
            graph.replay()
        return State(*static[:num])

    return advance
