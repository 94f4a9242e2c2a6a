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
    begun = time.perf_counter()
    if machine.traceable and compile not in (False, "trace"):
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
            if step.mode != "eager":
                return step
            machine = replace(machine, traceable=False)
        except TimeSpent:
            pass
    step = _uncompiled(machine, example, calls)
    step.seconds = time.perf_counter() - begun
    return step


def _uncompiled(
    machine: Machine,
    example: tuple[Tensor, ...],
    calls: int | None,
) -> Compiled:
    """The step in two halves, each a traced graph; the second, a third of it, is left out where no transition ends."""
    grow = Compiled(machine.grow, "eager", 0.0)
    if machine.traceable:
        grow = compiled(
            machine.grow,
            *example,
            enabled=False,
            calls=calls,
            clone=False,
        )
    if grow.mode == "eager":
        grow = _around_gradient(machine, example, calls)
    with torch.no_grad():
        ending = grow.unchecked(*example)
    finish = compiled(
        machine.finish,
        *ending,
        *example,
        enabled=False,
        calls=calls,
        clone=False,
    )

    def whole(*arguments: Tensor) -> tuple[()]:
        ending = grow.unchecked(*arguments)
        # a GPU would be waited for
        if ending[0].device.type != "cpu" or bool(ending[0].any()):
            finish.unchecked(*ending, *arguments)
        return ()

    step = Compiled(whole, grow.mode, 0.0, example)
    step.calls = grow.calls
    return step


def _around_gradient(
    machine: Machine,
    example: tuple[Tensor, ...],
    calls: int | None,
) -> Compiled:
    """The first half of a step of a density that cannot be traced, whose Python looks at values.

    What is around its gradient is traced, nine tenths of the operations. Where so few calls do not repay a trace it
    stays as it is.
    """

    def position(*arguments: Tensor) -> Tensor:
        return machine.next_position(*arguments)

    def rest(gradient: Tensor, value: Tensor, *arguments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return replace(machine, gradient=lambda _: (gradient, value)).grow(*arguments)

    with torch.no_grad():
        gradient, value = machine.gradient(position(*example))
    before = compiled(
        position,
        *example,
        enabled=False,
        calls=calls,
    )
    after = compiled(
        rest,
        gradient,
        value,
        *example,
        enabled=False,
        calls=calls,
    )

    def whole(*arguments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gradient, value = machine.gradient(before.unchecked(*arguments))
        ending: tuple[Tensor, Tensor, Tensor] = after.unchecked(gradient, value, *arguments)
        return ending

    around = Compiled(whole, "eager", 0.0)
    around.calls = calls or 0
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
