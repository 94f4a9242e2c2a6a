"""CPU seconds over those of a fixed computation, timed in turn, so that they depend little on the machine's load."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import TypeVar

Result = TypeVar("Result")
#: timings of one repeat, each in turn with the reference
TURNS = 4


def in_turn(seconds: Callable[[], float]) -> float:
    """Median of what is timed over the reference before and after it; the first turn, a warm-up, is dropped."""
    seconds_of_reference = reference()
    ratios = []
    before = seconds_of_reference()
    for _ in range(TURNS + 1):
        between = seconds()
        after = seconds_of_reference()
        ratios.append(2 * between / (before + after))
        before = after
    return median(ratios[1:])


def reference() -> Callable[[], float]:
    """CPU seconds of the fixed computation: gradients of the squared error of four 1-50-1 nets, by hand in NumPy."""
    import numpy as np

    generator = np.random.default_rng(0)
    x = generator.standard_normal((400, 1))
    y = generator.standard_normal((400, 1))
    weight_in = generator.standard_normal((4, 1, 50))
    weight_out = generator.standard_normal((4, 50, 1))

    def gradients() -> None:
        for _ in range(200):
            hidden = np.tanh(x @ weight_in)
            error = hidden @ weight_out - y
            back = error @ weight_out.swapaxes(1, 2) * (1 - hidden**2)
            hidden.swapaxes(1, 2) @ error, x.T @ back

    return clocked(gradients)


def clocked(work: Callable[[], Result]) -> Callable[[], float]:
    """CPU seconds of a call."""

    def run() -> float:
        started = time.process_time()
        work()
        return time.process_time() - started

    return run


def difference(short: Callable[[], Result], long: Callable[[], Result]) -> Callable[[], float]:
    """CPU seconds by which one call takes longer than another: what both share cancels."""
    seconds_of_short = clocked(short)
    seconds_of_long = clocked(long)
    return lambda: max(seconds_of_long() - seconds_of_short(), 1e-9)
