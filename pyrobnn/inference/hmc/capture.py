"""The HMC step as a CUDA graph: one launch for a leapfrog of all chains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pyrobnn.compile import CudaGraph
from pyrobnn.inference.hmc.machine import Buffers, State


class Replayed:
    """The compiled step captured with copies of its arguments, which stay where they are.

    Args:
        step: compiled for all chains.
        state, metric, keys: arguments that the caller replaces between calls, each of one shape.
        buffers: written in place; they are as they were once the step is captured.

    Raises:
        RuntimeError: the step cannot be captured: it waits for the device, say.
    """

    def __init__(
        self, step: Callable[..., Any], state: State, metric: Tensor, keys: Tensor, buffers: Buffers
    ) -> None:
        self._static = tuple(tensor.clone() for tensor in (*state, metric, keys))
        num, kept = len(state), [buffer.clone() for buffer in buffers]
        try:
            self._graph = CudaGraph(step, *self._static[:num], *buffers, *self._static[num:])
        finally:  # the calls before the capture never happened
            for mine, old in zip(buffers, kept, strict=True):
                mine.copy_(old)

    def __call__(self, count: int, state: State, metric: Tensor, keys: Tensor) -> State:
        """The state after so many steps, in memory that the next call writes into."""
        for mine, value in zip(self._static, (*state, metric, keys), strict=True):
            if mine is not value:
                mine.copy_(value)
        for _ in range(count):
            self._graph.replay()
        return State(*self._static[: len(state)])
